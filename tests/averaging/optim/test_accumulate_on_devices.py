"""Accumulation of gradients whose check has not reached the host yet: sums on a device, and on the host
beside one.

There is no GPU here: `LateLink` treats the CPU as one, and its copies arrive as late as CUDA allows.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from averaging.optim.accumulate import GradientAccumulator
from averaging.optim.finite import DeviceCheck, all_finite
from averaging.optim.modes.settings import Diloco, Gossip, Gradients, Local
from averaging.optim.offload import OffloadLinks
from tests.averaging.optim.late import LateLink, no_host_reads
from tests.averaging.optim.seats import backward, batch, model, seat, vector

HOST = torch.device("cpu")
SHAPES = [(3, 4), (), (0,), (5,), (2, 3, 2, 2)]
LOCAL = [Local(), Diloco(), Diloco(streaming=3), Gossip()]


def parameters(seed: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    made[4] = torch.nn.Parameter(made[4].detach().to(memory_format=torch.channels_last))
    return [*made, torch.nn.Parameter(torch.randn(6, dtype=torch.bfloat16))]


def fill(ps: list[torch.nn.Parameter], seed: int, bad: float | None = None) -> None:
    chance = torch.Generator().manual_seed(seed)
    for place, p in enumerate(ps):
        p.grad = (
            torch.randn(p.shape, generator=chance).to(p.dtype) if (seed + place) % 3 or place == 1 else None
        )
    if bad is not None:
        ps[1].grad = torch.tensor(bad)


def accumulator(ps: list[torch.nn.Parameter], offload: bool) -> tuple[GradientAccumulator, LateLink]:
    link = LateLink(HOST)
    return GradientAccumulator(ps, storage=HOST if offload else None, make_link=lambda _: link), link


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_sums_counts_and_reports_are_those_of_the_host(offload: bool, seed: int) -> None:
    ps, rng = parameters(seed), random.Random(seed)
    late, link = accumulator(ps, offload)
    plain = GradientAccumulator(ps)
    for epoch in range(3):
        dropped, reasons = 0, set()
        for step in range(6):
            samples = rng.randint(1, 9)
            fill(ps, 100 * epoch + step, rng.choice([None, None, float("nan"), float("inf")]))
            refusal = plain.add(samples)
            assert late.add(samples) is None
            if refusal is not None:
                dropped += samples
                reasons.add(refusal)
            for p in ps:
                if p.grad is not None:
                    p.grad.fill_(1e9)  # the trainer may do so at once
            if rng.random() < 0.5:
                link.arrive()
                late.resolve_checks(wait=False)
        late.resolve_checks()
        refused = late.refused()
        assert (refused.samples, set(filter(None, refused.reason.split("; ")))) == (dropped, reasons)
        assert late.samples == plain.samples
        assert late.touched == plain.touched
        if epoch == 1:  # a round that failed: back to sums
            late.average_()
            plain.average_()
            continue
        assert all(
            torch.equal(one, other) for one, other in zip(late.average_(), plain.average_(), strict=True)
        )
        late.reset()
        plain.reset()


def test_nothing_is_read_on_the_host_while_gradients_are_added() -> None:
    ps = parameters(1)
    late, _ = accumulator(ps, offload=False)
    for step in range(4):
        fill(ps, step, float("nan") if step == 2 else None)
        with no_host_reads():
            assert late.add(5) is None
    assert late.samples == 20, "nobody knows yet"
    late.resolve_checks()
    assert late.samples == 15
    assert late.refused().reason == "non-finite gradients: parameter 1"
    assert late.refused().samples == 0, "told once"


def test_offloaded_gradients_are_added_at_the_next_step_and_not_waited_for_at_this_one() -> None:
    ps = parameters(1)
    late, link = accumulator(ps, offload=True)
    fill(ps, 1)
    with no_host_reads():
        late.add(5)
    assert not any(bool(buffer.any()) for buffer in late.buffers)
    fill(ps, 2)
    late.add(5)
    assert any(bool(buffer.any()) for buffer in late.buffers)
    assert link.fetched, "flags of the last step are still under way"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_check_on_the_device_does_not_mistake_large_values_for_infinity(dtype: torch.dtype) -> None:
    large = torch.full((300, 7), torch.finfo(dtype).max, dtype=dtype)
    links = OffloadLinks([large], LateLink)
    assert DeviceCheck({0: large, 3: torch.ones(2)}, links).bad_places() == []
    broken = {
        0: large,
        3: torch.ones(2),
        5: torch.tensor([1.0, -float("inf")]),
        7: torch.tensor(float("nan")),
    }
    check = DeviceCheck(broken, links)
    assert not check.ready()
    assert not bool(check.finite(HOST))
    assert check.bad_places() == [5, 7]


def test_large_gradients_are_masked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.optim.finite.MASKED_ELEMENTS", 5)
    ps = parameters(3)
    late, _ = accumulator(ps, offload=False)
    plain = GradientAccumulator(ps)
    for step in range(3):
        fill(ps, step)
        late.add(2)
        plain.add(2)
    assert all(torch.equal(one, other) for one, other in zip(late.average_(), plain.average_(), strict=True))


def test_a_device_without_a_link_is_waited_for() -> None:
    ps = parameters(3)
    plain = GradientAccumulator(ps, make_link=lambda _: None)
    fill(ps, 1, float("nan"))
    assert plain.add(3) == "non-finite gradients: parameter 1"


@pytest.mark.parametrize("settings", LOCAL, ids=lambda one: f"{one!r:.40}")
@pytest.mark.parametrize("fused", [False, True])
def test_a_local_step_with_bad_gradients_is_not_made(settings: Any, fused: bool) -> None:
    nets = [model(), model()]
    inner = [torch.optim.AdamW(net.parameters(), lr=0.02, fused=fused) for net in nets]
    plain = seat(settings, nets[0], inner=inner[0])
    late = seat(settings, nets[1], inner=inner[1], make_link=LateLink)
    for step in range(6):
        told = []
        for one in (plain, late):
            backward(one.net, step, 4)
            if step in (0, 3):
                next(iter(one.net.parameters())).grad[1, 1] = float("inf")  # type: ignore[index]
            told.append(one.mode.learner.accumulate(4))
        assert (told[0] is None) == (step not in (0, 3))
        assert told[1] == (None if fused and step == 3 else told[0]), (
            "only a fused optimizer leaves a step out by itself"
        )
        assert torch.equal(plain.theta, late.theta)
    assert late.mode.learner.samples == plain.mode.learner.samples + (4 if fused else 0)
    refused = late.mode.learner.refused(wait=True)
    assert (refused.samples, refused.reason) == (
        (4, "non-finite gradients: parameter 0") if fused else (0, "")
    )
    assert late.mode.prepare(0) == plain.mode.prepare(0)
    assert all_finite(late.mode.tensors())


def test_a_fused_local_step_reads_nothing_on_the_host() -> None:
    net = model()
    one = seat(Diloco(), net, inner=torch.optim.AdamW(net.parameters(), fused=True), make_link=LateLink)
    one.step(1, 4)
    backward(net, 2, 4)
    with no_host_reads():
        assert one.mode.learner.accumulate(4) is None
    assert one.mode.learner.samples == 8


def test_the_first_step_of_fused_sgd_is_waited_for() -> None:
    """When fused kernels skip a first step, they leave its momentum uninitialised."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    one = seat(Local(), net, inner=inner, make_link=LateLink)
    backward(net, 1, 4)
    next(iter(net.parameters())).grad[0, 0] = float("nan")  # type: ignore[index]
    assert one.mode.learner.accumulate(4) == "non-finite gradients: parameter 0"
    assert not inner.state


@pytest.mark.parametrize(
    "settings", [*LOCAL, Gradients(), Gradients(delayed=True)], ids=lambda one: f"{one!r:.40}"
)
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "strided"])
def test_offloading_beside_a_device_changes_no_bit(settings: Any, kind: str) -> None:
    def made(offload: bool) -> Any:
        net: Any = model().to(torch.bfloat16) if kind == "bfloat16" else model()
        if kind == "strided":
            net[0].weight = torch.nn.Parameter(
                torch.randn(5, 7, generator=torch.Generator().manual_seed(3)).t()
            )
        parts = {"offload": True, "make_link": LateLink} if offload else {}
        return seat(settings, net, inner=torch.optim.AdamW(net.parameters(), lr=0.02), **parts)

    seats = [made(False), made(True)]
    for epoch in range(5):
        for one in seats:
            for nth in range(2):
                one.net.zero_grad()
                one.net(batch(10 * epoch + nth, 3).to(one.net[0].weight.dtype)).square().mean().backward()
                assert one.mode.learner.accumulate(3 + nth) is None
            prepared = one.mode.prepare(one.mode.state.epoch)
            if settings != Gradients() and epoch % 2:  # a step during the round
                one.mode.learner.accumulate(2)
            if epoch == 3:
                one.mode.failed("round")
                before = [p.detach().clone() for p in one.mode.state.parameters if p.requires_grad]
                one.mode.on_state_averaged(before)
            else:
                one.advance([prepared[1]] if isinstance(prepared[1], bytes) else [])
        assert torch.equal(seats[0].theta, seats[1].theta)
    if settings.name != "gradients":
        assert torch.equal(*(vector(one.mode.learner.base) for one in seats))
        aside = [one.mode.learner for one in seats]
        for learner in aside:
            learner.suspend()
            learner.state.mark_changed(learner.state.epoch)
            learner.resume()
        assert torch.equal(seats[0].theta, seats[1].theta)
