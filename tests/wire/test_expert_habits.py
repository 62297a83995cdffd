"""Layers of remote experts under the habits of torch programs: autocast, torch.compile, changes in place,
empty batches, one element.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import swarm
from swarm.core.errors import UsageError
from tests.wire.expert_pair import Pair, expert, network, pair

LAYERS = ["expert", "mixture", "switch", "pipeline"]


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    experts = {"ffn.0": expert(), "one.0": swarm.Expert(nn.Linear(1, 1), (torch.zeros(1, 1),))}
    with pair(experts, max_batch_size=8192) as one:
        yield one


class FirstOutput(nn.Module):
    """A layer without the loss of a switch layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        found = output[0] if isinstance(output, tuple) else output
        assert isinstance(found, torch.Tensor)
        return found


def layer_of(two: Pair, kind: str) -> nn.Module:
    torch.manual_seed(1)
    made: dict[str, nn.Module] = {
        "expert": two.remote(),
        "mixture": swarm.RemoteMixtureOfExperts(two.guest, 16, grid="ffn.[0:1]", k_best=1),
        "switch": swarm.RemoteSwitchMixtureOfExperts(
            two.guest, 16, grid="ffn.[0:1]", config=swarm.SwitchConfig(jitter_eps=0.0)
        ),
        "pipeline": swarm.RemoteSequential(two.guest, "ffn.[0:1]"),
    }
    return FirstOutput(made[kind])


def values(samples: int = 3) -> torch.Tensor:
    return torch.randn(samples, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_computes_what_the_local_module_computes(two: Pair, kind: str) -> None:
    torch.manual_seed(3)
    before, layer, x = nn.Linear(16, 16), layer_of(two, kind), values()
    wanted = network()(before(x))
    wanted.sum().backward()
    assert x.grad is not None
    by_x, x.grad = x.grad, None
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(before(x))
    assert torch.allclose(found.float(), wanted, atol=0.05)
    found.float().sum().backward()
    assert torch.allclose(x.grad, by_x, atol=0.05)


# the compiler itself looks at the gradients of tensors that have none
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_compiled_model_equals_the_same_model_uncompiled(two: Pair, kind: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 16), layer_of(two, kind), nn.Linear(16, 2))
    found, wanted = values(), values()
    outputs = torch.compile(model, backend="eager")(found), model(wanted)
    assert torch.allclose(*outputs, atol=1e-6)
    for output in outputs:
        output.square().sum().backward()
    assert found.grad is not None
    assert wanted.grad is not None
    assert torch.allclose(found.grad, wanted.grad, atol=1e-6)


def test_importing_the_layers_does_not_import_the_compiler() -> None:
    code = (
        "import sys, swarm; swarm.RemoteExpert, swarm.RemoteSequential; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60.0)


@pytest.mark.parametrize("samples", [3, 5000], ids=["copied", "shared"])
@pytest.mark.parametrize("kind", LAYERS)
def test_an_output_may_be_changed_in_place(two: Pair, kind: str, samples: int) -> None:
    layer, x, mirror = layer_of(two, kind), values(samples), values(samples)
    y, wanted = layer(x), network()(mirror)
    y += x
    y.mul_(2.0)
    assert torch.allclose(y, (wanted + mirror) * 2.0, atol=1e-5)
    y.sum().backward()
    ((wanted + mirror) * 2.0).sum().backward()
    assert x.grad is not None
    assert mirror.grad is not None
    assert torch.allclose(x.grad, mirror.grad, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_an_empty_batch_gives_an_empty_output_and_calls_no_expert(two: Pair, kind: str) -> None:
    layer, x = layer_of(two, kind), values(0)
    layer(values())
    before = copy.deepcopy(two.server.statistics().experts["ffn.0"].counts)
    output = layer(x)
    assert output.shape == (0, 16)
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 16)
    gate = [parameter.grad for parameter in layer.parameters()]
    assert all(one is not None and not one.any() for one in gate)
    assert two.server.statistics().experts["ffn.0"].counts == before


def test_the_loss_of_a_switch_layer_is_0_for_an_empty_batch(two: Pair) -> None:
    layer = swarm.RemoteSwitchMixtureOfExperts(two.guest, 16, grid="ffn.[0:1]")
    output, loss = layer(values(0))
    assert isinstance(output, torch.Tensor)
    assert loss.item() == 0.0
    (output.sum() + loss).backward()


@pytest.mark.parametrize("kind", ["expert", "pipeline"])
def test_the_gradient_of_the_sum_of_one_element_arrives(two: Pair, kind: str) -> None:
    layer = two.remote("one.0") if kind == "expert" else swarm.RemoteSequential(two.guest, "one.[0:1]")
    x = torch.ones(1, 1, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    weight = next(one for uid, one in two.server.experts.items() if str(uid) == "one.0").module.weight
    assert torch.equal(x.grad, weight.detach())  # type: ignore[arg-type,union-attr,operator]


def test_a_mixture_layer_does_not_keep_its_last_output(two: Pair) -> None:
    layer = swarm.RemoteMixtureOfExperts(two.guest, 16, grid="ffn.[0:1]", k_best=1)
    found = layer.session().forward(layer.gate(values()), (values(),))
    memory = weakref.ref(found.outputs[0].untyped_storage())
    del found
    assert memory() is None


class Masked(torch.nn.Module):
    """A module that takes its inputs by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, *, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * mask


def test_keyword_arguments_reach_the_module_by_name() -> None:
    module = Masked()
    sample = {"x": torch.zeros(1, 16), "mask": torch.zeros(1, 16)}
    x, mask = torch.randn(3, 16, requires_grad=True), torch.rand(3, 16)
    with pair({"ffn.0": swarm.Expert(module, sample)}) as one:
        remote = one.remote()
        y, wanted = remote(mask=mask, x=x), module(x=x, mask=mask)
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(
            *(torch.autograd.grad(output.square().sum(), x)[0] for output in (y, wanted))
        )
        for arguments, named in (
            ((x,), {"mask": mask}),
            ((), {"x": x, "other": mask}),
            ((x, mask), {}),
        ):
            with pytest.raises(UsageError):
                remote(*arguments, **named)
    with pytest.raises(UsageError, match="sample_inputs"):
        swarm.Expert(module, {})
