"""Memory of modes in addition to the model: the table compared with existing tensors, and the one large
computation that must not copy the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from averaging.optim.epoch_averager import relative_distance
from averaging.optim.memory_estimate import bytes_per_parameter
from averaging.optim.modes.settings import Diloco, Gossip, Gradients, Local
from averaging.reduction.feedback import Feedback, Shard
from swarm.compression import find
from swarm.core.errors import UsageError
from tests.averaging.optim.late import HOST_READS, LateLink
from tests.averaging.optim.seats import seat

SIDE = 512  # so that pinned blocks fit exactly
MODES = [
    Gradients(),
    Gradients(delayed=True),
    Local(),
    Diloco(),
    Diloco(momentum=0.0),
    Diloco(streaming=4),
    Diloco(delayed=True),
    Gossip(),
    Gossip(momentum=0.0),
]
WITHOUT: dict[str, Any] = {"error_feedback": False, "strategy": False, "offload": False}


def tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Return every tensor that can be reached from an object of this project, from containers and from
    optimizers.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        if value.grad is not None:
            yield value.grad
    elif isinstance(value, dict):
        for one in [*value, *value.values()]:
            yield from tensors_of(one, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from tensors_of(one, seen)
    elif type(value).__module__.startswith("averaging.") or isinstance(value, torch.optim.Optimizer):
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for one in (
            [*vars(value).values()]
            if hasattr(value, "__dict__")
            else [getattr(value, name) for name in names]
        ):
            yield from tensors_of(one, seen)


def taken_bytes(value: Any, besides: list[torch.Tensor]) -> int:
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(value, set())}
    for t in besides:
        sizes.pop(t.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


@pytest.mark.parametrize("settings", MODES, ids=lambda one: f"{one!r:.60}")
@pytest.mark.parametrize("inner", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_the_table_matches_the_existing_tensors(
    settings: Any, inner: str, dtype: torch.dtype, offload: bool
) -> None:
    net = torch.nn.Linear(SIDE, SIDE, bias=False, dtype=dtype)
    optimizer = (
        torch.optim.AdamW(net.parameters())
        if inner == "adamw"
        else torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    )
    one = seat(
        settings, net, inner=optimizer, **({"offload": True, "make_link": LateLink} if offload else {})
    )
    for epoch in range(5):
        net.weight.grad = torch.ones_like(net.weight)
        one.mode.learner.accumulate(4)
        one.mode.prepare(epoch)
        one.advance()
    statistics = 2 if inner == "adamw" else 1
    options = {**WITHOUT, "offload": offload}
    told = bytes_per_parameter(
        settings, optimizer_statistics=statistics, element_bytes=dtype.itemsize, **options
    )
    expected = told.device_kept + told.host_kept
    if dtype != torch.float32 and settings.name == "gradients":
        expected -= 4 * (1 + statistics)  # what rounds over the state keep is not the mode's
    found = taken_bytes(one.mode, [net.weight]) / net.weight.numel()
    assert found == pytest.approx(expected, rel=0.01)


def test_error_feedback_is_estimated_at_two_and_a_half_vectors() -> None:
    feedback = Feedback(SIDE * SIDE, find("int8"))
    span = Shard(start=0, stop=SIDE * SIDE // 2, members=b"two")
    for _ in range(2):
        feedback.begin(span).commit()
    plain, fed = (
        bytes_per_parameter(Diloco(), optimizer_statistics=2, **{**WITHOUT, "error_feedback": given})
        for given in (False, True)
    )
    assert (
        taken_bytes(feedback, []) / (SIDE * SIDE) == fed.device - plain.device + fed.host - plain.host == 12
    )
    assert fed.device - plain.device == 8


def test_figures_of_diloco_with_adamw_in_float32() -> None:
    told = bytes_per_parameter(Diloco(), optimizer_statistics=2, **WITHOUT)
    assert told.device == 28, "with the model itself 32"
    assert told.host == 0
    offloaded = bytes_per_parameter(Diloco(), optimizer_statistics=2, **{**WITHOUT, "offload": True})
    assert offloaded.device == 12
    with pytest.raises(UsageError, match="no estimate"):
        bytes_per_parameter(torch.nn.Linear, optimizer_statistics=2, **WITHOUT)  # type: ignore[arg-type]


class _Watch(TorchDispatchMode):
    """Counter of values read on the host; it also records the largest new tensor with memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.reads += func.overloadpacket.__name__ in HOST_READS
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, made.numel())
        return made


@pytest.mark.parametrize("seed", range(4))
def test_a_drift_is_found_piece_by_piece_without_copies_of_the_model(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("averaging.optim.epoch_averager.DISTANCE_ELEMENTS", 100)
    torch.manual_seed(seed)
    shapes = [(70, 30), (), (0,), (500,), (8, 3, 5, 5), (2, 0, 3)]
    kinds = [torch.float32, torch.bfloat16]
    one = [torch.randn(shape).to(kinds[(seed + nth) % 2]) for nth, shape in enumerate(shapes)]
    one[4] = one[4].to(memory_format=torch.channels_last)
    other = [tensor + torch.randn_like(tensor) * 0.01 for tensor in one]
    both = [torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (one, other)]
    with _Watch() as watch:
        found = relative_distance(one, other)
    assert found == pytest.approx(float((both[0] - both[1]).norm() / both[1].norm()), rel=1e-5)
    assert watch.reads == 0
    assert watch.largest <= 100
    assert relative_distance([], []) == relative_distance([torch.zeros(3)], [torch.zeros(3)]) == 0.0
    assert relative_distance([torch.ones(4)], [torch.zeros(4)]) == 2.0
    assert math.isnan(relative_distance([torch.full((2,), math.nan)], [torch.ones(2)]))


DOCUMENTED: dict[str, Any] = {
    "`gradients`": Gradients(),
    "`gradients`, delayed": Gradients(delayed=True),
    "`local`": Local(),
    "`diloco`": Diloco(),
    "`diloco`, `streaming=4`": Diloco(streaming=4),
    "`diloco`, delayed": Diloco(delayed=True),
    "`gossip`": Gossip(),
}


def test_the_documented_table_is_what_the_estimate_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    told = {row[0]: row[1:] for row in rows if row[0] in DOCUMENTED and len(row) == 4}
    columns: list[dict[str, Any]] = [{}, {"error_feedback": True}, {"offload": True}]
    for name, mode in DOCUMENTED.items():
        expected = [
            bytes_per_parameter(mode, optimizer_statistics=2, **{**WITHOUT, **column}) for column in columns
        ]
        assert told[name] == [f"{one.device:g} + {one.host:g}" for one in expected]
