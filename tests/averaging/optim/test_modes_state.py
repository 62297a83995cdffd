"""Tensors that modes keep in addition to the model: their dtype and device, how they are saved and served,
and that they stay finite.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from averaging.optim.modes import ModeSettings
from averaging.optim.modes.outer import OuterSGD
from averaging.optim.modes.settings import MODES, Diloco, Gossip, Gradients, Local, settings_of
from swarm.core.errors import UsageError
from tests.averaging.optim.seats import Seat, average, hold, model, prepare, seat


def strided(net: torch.nn.Sequential) -> torch.nn.Sequential:
    net[0].weight = torch.nn.Parameter(torch.randn(5, 7).t())
    return net


ODD: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda net: net.to(torch.bfloat16),
    "frozen": lambda net: net[0].requires_grad_(False) and net,
    "strided": strided,
}


@pytest.mark.parametrize(
    "settings", [Local(), Diloco(), Diloco(streaming=3), Gossip()], ids=lambda one: f"{one.name}-{one!r:.40}"
)
@pytest.mark.parametrize("odd", ODD)
def test_unusual_parameters_and_offloading_change_nothing(settings: ModeSettings, odd: str) -> None:
    def made(offload: bool) -> Seat:
        net: Any = ODD[odd](model())
        return seat(settings, net, inner=torch.optim.AdamW(net.parameters(), lr=0.02), offload=offload)

    def train(one: Seat, seed: int) -> None:
        one.net.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(
            next(one.net.parameters()).dtype
        )
        one.net(x).square().mean().backward()
        assert one.mode.learner.accumulate(4) is None

    seats = [made(False), made(True)]
    frozen = [p.clone() for p in seats[0].net.parameters() if not p.requires_grad]
    for epoch in range(4):
        start = [one.theta for one in seats]
        for one in seats:
            train(one, epoch)
        hold(seats)
        assert all(not torch.equal(one.theta, before) for one, before in zip(seats, start, strict=True))
    assert torch.equal(seats[0].theta, seats[1].theta)
    assert all(
        torch.equal(a, b)
        for a, b in zip(frozen, [p for p in seats[0].net.parameters() if not p.requires_grad], strict=True)
    )
    assert all(base.dtype == torch.float32 and base.is_contiguous() for base in seats[0].mode.learner.base)


def test_rounding_of_the_base_is_no_progress_in_low_precision() -> None:
    net = model().to(torch.bfloat16)
    one = seat(Diloco(), net)
    for base in one.mode.learner.base:
        base.data.mul_(1.0001)  # between two bfloat16 numbers
    one.mode.prepare(0)
    assert not any(tensor.any() for tensor in one.mode.tensors())


@pytest.mark.parametrize(
    "settings", [Diloco(), Diloco(streaming=2), Gossip()], ids=lambda one: f"{one!r:.40}"
)
def test_steps_that_result_in_nan_are_dropped_and_never_sent(settings: ModeSettings) -> None:
    one = seat(settings)
    before = one.theta
    one.step(1, 4)
    with torch.no_grad():
        for p in one.net.parameters():
            p.fill_(float("inf"))
    weight, _ = one.mode.prepare(0)
    assert weight == 0.0 or settings.name == "gossip"
    assert all(bool(tensor.isfinite().all()) for tensor in one.mode.tensors())
    one.mode.failed("round")
    assert torch.equal(one.theta, before)
    assert one.mode.learner.samples == 0
    one.step(2, 4)
    assert prepare([one])[0][0] in (4.0, 1.0)


@pytest.mark.parametrize(
    "settings",
    [*(mode() for mode in MODES.values()), Gradients(delayed=True), Diloco(streaming=3)],
    ids=lambda one: f"{one!r:.40}",
)
def test_resuming_continues_bit_for_bit(settings: ModeSettings) -> None:
    one, resumed = seat(settings), seat(settings, model(9))
    rng = random.Random(0)

    def go(table: Seat, spans: range) -> None:
        for span in spans:
            for nth in range(rng.randint(1, 3)):
                table.step(10 * span + nth, 4)
            if span % 3 == 2:
                table.mode.prepare(table.mode.state.epoch)
                table.mode.failed("round")
            else:
                hold([table])

    go(one, range(5))
    one.step(77, 4)
    saved = copy.deepcopy((one.net.state_dict(), one.mode.state_dict()))
    resumed.net.load_state_dict(saved[0])
    inner_of(resumed).load_state_dict(copy.deepcopy(inner_of(one).state_dict()))
    resumed.mode.load_state_dict(saved[1])
    resumed.mode.state.mark_changed(one.mode.state.epoch)
    for table in (one, resumed):
        rng = random.Random(1)
        go(table, range(5, 9))
    assert torch.equal(one.theta, resumed.theta)
    assert one.mode.learner.samples == resumed.mode.learner.samples


def inner_of(one: Seat) -> torch.optim.Optimizer:
    return getattr(one.mode.learner, "inner", None) or one.mode.state.inner


def test_training_begins_with_parameters_set_before_the_first_step() -> None:
    one, other = seat(Diloco()), seat(Diloco(), model(3))
    other.net.load_state_dict(one.net.state_dict())  # a checkpoint, loaded after the optimizer was made
    for table in (one, other):
        table.step(1, 4)
        hold([table])
    assert torch.equal(one.theta, other.theta)


def test_the_state_that_is_served_has_base_and_momentum_and_no_statistics_of_the_donor() -> None:
    one = seat(Diloco())
    one.step(1, 4)
    hold([one])
    served = one.mode.state.snapshot()
    one.step(2, 4)
    assert one.mode.state.snapshot().digest == served.digest, "local steps do not show"
    other = seat(Diloco(), model(4))
    other.mode.state.load(served.blob)
    assert isinstance(other.mode.state.inner, OuterSGD)
    assert not other.mode.learner.inner.state
    assert other.mode.state.snapshot().digest == served.digest


@pytest.mark.parametrize(
    "settings", [Gradients(), Diloco(), Diloco(streaming=2)], ids=lambda one: f"{one!r:.40}"
)
def test_training_continues_from_a_checkpoint_of_the_state(settings: ModeSettings) -> None:
    donor, restored = seat(settings), seat(settings, model(8))
    for seed in range(2):
        donor.step(seed, 4)
        hold([donor])
    restored.step(7, 4)
    restored.mode.state.load(donor.mode.state.snapshot().blob)
    restored.mode.learner.loaded()
    assert restored.mode.learner.samples == 0
    if settings.name == "gradients" or settings == Diloco():
        assert torch.equal(restored.theta, donor.theta)
    restored.step(9, 5)
    assert prepare([restored])[0][0] == 5.0, "no newcomer: it is the run itself that continues"


def test_invalid_mode_settings_are_refused() -> None:
    assert settings_of("diloco") == Diloco()
    assert settings_of(Diloco(streaming=4)).build is not None
    for wrong, said in [
        (lambda: settings_of("hogwild"), "gradients, local, diloco, gossip"),
        (lambda: settings_of(7), "mode is a name"),  # type: ignore[arg-type]
        (lambda: Diloco(outer_lr=0.0), "outer_lr above 0"),
        (lambda: Diloco(streaming=0), "at least 1"),
        (lambda: Diloco(delay_steps=2), "for streaming or delayed only"),
        (lambda: Gossip(consensus=2.0), "consensus"),
        (lambda: seat(Diloco(), torch.nn.Linear(1, 1).requires_grad_(False)), "nothing to train"),
    ]:
        with pytest.raises(UsageError, match=said):
            wrong()
    with pytest.raises(UsageError, match="other shapes"):
        seat(Diloco()).mode.load_state_dict(
            seat(Diloco(), torch.nn.Sequential(torch.nn.Linear(2, 2))).mode.state_dict()
        )
    with pytest.raises(UsageError, match="local steps"):
        seat(Diloco()).mode.load_state_dict(seat(Gradients()).mode.state_dict())


ALIEN: list[tuple[ModeSettings, ModeSettings]] = [
    (Diloco(), Gradients()),
    (Gradients(), Diloco()),
    (Diloco(), Local()),  # which has no momentum
    (Gossip(), Diloco()),
    (Diloco(), Diloco(streaming=2)),
]


@pytest.mark.parametrize(("saved_in", "loaded_in"), ALIEN, ids=lambda one: f"{one!r:.12}")
def test_state_of_another_mode_is_refused_with_nothing_changed(
    saved_in: ModeSettings, loaded_in: ModeSettings
) -> None:
    """Regression test: a bare KeyError, some with the base changed, or an IndexError in a later round."""
    saved, one = seat(saved_in), seat(loaded_in, model(3))
    for table in (saved, one):
        table.step(1, 4)
        hold([table])
        table.step(2, 5)
    before = copy.deepcopy(one.mode.state_dict())
    with pytest.raises(UsageError):
        one.mode.load_state_dict(saved.mode.state_dict())
    after = one.mode.state_dict()
    tensors = "sums" if loaded_in.name == "gradients" else "base"
    assert all(map(torch.equal, before.pop(tensors), after.pop(tensors)))
    assert {key: before[key] for key in before if key != "outer"} == {
        key: after[key] for key in after if key != "outer"
    }


@pytest.mark.parametrize("number", [1, 99])
def test_state_whose_momentum_fits_no_parameter_is_refused_with_nothing_changed(number: int) -> None:
    """Regression test: an IndexError, or an error of torch with half of the state loaded."""
    one = seat(Diloco())
    one.step(1, 4)
    hold([one])
    saved = copy.deepcopy(one.mode.state_dict())
    statistics = saved["outer"]["state"]
    statistics[number] = statistics.pop(0)
    saved["base"] = [torch.zeros_like(base) for base in saved["base"]]
    with pytest.raises(UsageError, match=f"'momentum_buffer' of parameter {number}"):
        one.mode.load_state_dict(saved)
    assert one.mode.state_dict()["base"][0].any()


@pytest.mark.parametrize("delayed", [False, True])
def test_samples_are_kept_when_the_inner_optimizer_raises_an_error(delayed: bool) -> None:
    """Regression test: with delayed rounds they were lost, and no report said so."""
    one, other = (seat(Gradients(delayed=delayed)) for _ in range(2))
    for table in (one, other):
        table.step(1, 4)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = inner_of(one).register_step_pre_hook(fail)
    one.mode.prepare(0)
    with pytest.raises(RuntimeError, match="out of memory"):
        one.mode.apply([])
    one.mode.failed("cancelled")
    hook.remove()
    assert one.mode.learner.samples == 4
    for table in (one, other):
        hold([table])
    torch.testing.assert_close(one.theta, other.theta)


@pytest.mark.parametrize(
    "settings", [Gradients(), Gradients(delayed=True), Diloco(), Local()], ids=lambda one: f"{one!r:.40}"
)
def test_samples_of_a_round_that_only_the_others_applied_are_not_counted_twice(
    settings: ModeSettings,
) -> None:
    """Regression test: after an error in its step of a committed round, a peer sent the round's average once
    more as its own late gradients; with local steps, its progress was added twice.
    """
    interrupted, other = seats = [seat(settings) for _ in range(2)]
    for span in range(2):
        for worker, one in enumerate(seats):
            one.step(10 * span + worker, 4)
        if span == 0:
            hold(seats)
    weights = [weight for weight, _ in prepare(seats)]
    average([one.mode for one in seats], weights)
    interrupted.mode.failed("cancelled")
    other.advance([b"\xff"])
    learner = interrupted.mode.learner
    learner.suspend()
    interrupted.mode.state.load(other.mode.state.snapshot().blob)
    assert learner.resume(counted=True) == 4
    assert learner.samples == 0
    assert torch.equal(interrupted.theta, other.theta)
    for worker, one in enumerate(seats):
        one.step(20 + worker, 4)
    assert hold(seats) == [4.0, 4.0], "it is no newcomer, whose progress would not count yet"
