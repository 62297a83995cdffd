"""Experts by name: built in, and of a user's own file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe.classes import ExpertSettings, available_classes, expert_class, make
from moe.server.expert import Expert
from swarm.core.errors import UsageError


@pytest.mark.parametrize("name", ["ffn", "transformer", "causal_transformer", "nop"])
def test_every_built_in_expert_class_with_parameters_learns(name: str) -> None:
    assert name in available_classes()
    settings = ExpertSettings(hidden_dim=8, sequence_length=5)
    module, sample = make(name, expert_class(name), settings)
    learning = Expert(module, sample, torch.optim.Adam)
    x = torch.randn(3, *learning.schema.input_leaves[0].shape)
    assert learning.schema.output_leaves == learning.schema.input_leaves
    (y,) = learning.forward([x])
    assert y.shape == x.shape
    ((gradient,),) = learning.backward([(None, [x], [torch.ones_like(y)])])
    assert gradient is not None
    assert learning.version == (0 if name == "nop" else 1)
    assert not torch.equal(learning.forward([x])[0], y) or name == "nop"


def test_positions_of_a_causal_layer_do_not_depend_on_later_ones() -> None:
    module, _ = make(
        "causal_transformer",
        expert_class("causal_transformer"),
        ExpertSettings(hidden_dim=8, sequence_length=6),
    )
    x = torch.randn(1, 6, 8)
    changed = x.clone()
    changed[:, 3:] = 0
    with torch.no_grad():
        assert torch.allclose(module(x)[:, :3], module(changed)[:, :3], atol=1e-6)
        assert not torch.allclose(module(x)[:, 3:], module(changed)[:, 3:], atol=1e-6)


def test_a_class_is_loaded_from_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def mine(settings):\n"
        "    return torch.nn.Linear(settings.hidden_dim, 2), (torch.zeros(1, settings.hidden_dim),)\n"
    )
    module, sample = make("mine", expert_class("mine", file), ExpertSettings(hidden_dim=3))
    assert module(*sample).shape == (1, 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("def other(): pass", "has no function 'mine'"),
        ("mine = 3", "is no function"),
        ("def mine(settings): return 3", "should return a module"),
    ],
)
def test_a_broken_file_raises_an_error_that_names_the_defect(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(content)
    with pytest.raises(UsageError, match=said):
        make("mine", expert_class("mine", file), ExpertSettings())


def test_an_unknown_class_name_lists_the_available_ones() -> None:
    with pytest.raises(UsageError, match="there are causal_transformer, ffn, nop, transformer"):
        expert_class("fnn")
    with pytest.raises(UsageError, match="no such Python file"):
        expert_class("mine", Path("/nowhere/mine.py"))
    with pytest.raises(UsageError):
        ExpertSettings(hidden_dim=0)


@pytest.mark.parametrize("name", ["ffn", "transformer", "causal_transformer", "nop"])
def test_torchs_default_dtype_does_not_change_built_in_classes(name: str) -> None:
    settings = ExpertSettings(hidden_dim=8, sequence_length=5)
    expected = Expert(*make(name, expert_class(name), settings)).schema
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert Expert(*make(name, expert_class(name), settings)).schema == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("def mine(): pass", "TypeError: .*takes 0 positional arguments"),
        ("def mine(hidden, heads): pass", "TypeError: .*missing 1 required positional argument"),
        ("def mine(settings): raise SystemExit(3)", "SystemExit: 3"),
        ("def mine(settings): return 7", "should return a module and a tuple of sample inputs, not 7"),
    ],
    ids=["no-argument", "two-arguments", "exits", "returns-a-number"],
)
def test_a_function_of_another_kind_is_told_how_it_is_called(tmp_path: Path, content: str, said: str) -> None:
    """Regression: a function of another signature gave a traceback of 30 lines."""
    file = tmp_path / "mine.py"
    file.write_text(content)
    with pytest.raises(UsageError, match=rf"'mine'.* {said}.*def make\(settings\): return"):
        make("mine", expert_class("mine", file), ExpertSettings())


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (torch.nn.Linear(3, 3), r"RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (torch.nn.BatchNorm1d(4), r"of the shapes \(1, 4\): ValueError: Expected more than 1 value"),
    ],
    ids=["other-width", "batch-of-one"],
)
def test_a_module_that_fails_for_its_own_samples_raises_an_error_that_says_so(
    module: torch.nn.Module, said: str
) -> None:
    """Regression: the most common mistake in a user's own file ended `swarm serve` with a traceback."""
    with pytest.raises(UsageError, match=rf"the module fails for its sample inputs, .*{said}"):
        Expert(module, (torch.zeros(1, 4),))
