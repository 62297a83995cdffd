"""A peer of a small part of the others' speed: it costs them little, and what it computes counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.slow_peers import MODES, Plan, Work, measure
from swarm.core.presets import WAN
from tests.wire.trainers import BATCH, swarm_of, together

QUICK = Plan(
    speeds=(1.0, 1.0),
    epoch_s=0.6,
    epochs_before=4,
    epochs=8,
)


@pytest.fixture(autouse=True)
def short_first_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """In these short epochs five seconds would be most of the time."""
    monkeypatch.setattr("averaging.matchmaking.logic.grace_period.UNKNOWN_PEER_SHARE", 1 / 30)


def check_accounts(work: Work) -> None:
    assert work.trained == work.contributed + work.dropped, "what is not accumulated any more"


def test_a_peer_of_a_twentieth_of_the_speed_hardly_slows_the_others_down() -> None:
    fast, other, slow = measure(MODES["gradients"], replace(QUICK, speeds=(1.0, 1.0, 1 / 20)))
    # the advance of its account, then the budget, and the rounds themselves
    allowed_s = WAN.unknown_peer_s + (0.1 + 0.15) * fast.seconds
    assert fast.in_step_s <= allowed_s, "with every step of it waited for: half of the time"
    assert slow.contributed >= slow.trained / 2 > 0, "all of it on a quiet machine"
    for work in (fast, other, slow):
        check_accounts(work)


def test_one_fast_peer_closes_its_epochs_beside_a_busy_one_which_still_counts() -> None:
    """Two peers in all: no group of two comes about while the slow one computes, which decides as well."""
    fast, slow = measure(MODES["gradients"], replace(QUICK, speeds=(1.0, 1 / 20)))
    assert slow.contributed >= slow.trained / 2 > 0, "all of it on a quiet machine"
    for work in (fast, slow):
        check_accounts(work)
    plan = replace(QUICK, speeds=(1.0, 1 / 50), adapts=False)
    fast, slow = measure(MODES["gradients"], plan)
    allowed_s = WAN.unknown_peer_s + (0.1 + 0.15) * fast.seconds
    assert fast.in_step_s <= allowed_s, "with every step of it waited for: two thirds of the time"
    check_accounts(slow)


def test_slow_peers_with_local_steps_lose_nothing() -> None:
    fast, other, slow = measure(MODES["diloco"], replace(QUICK, speeds=(1.0, 1.0, 1 / 20)))
    assert slow.contributed >= slow.trained / 2 > 0
    for work in (fast, other, slow):
        check_accounts(work)


def test_steps_of_many_epochs_are_dropped_with_a_report_and_stop_nobody() -> None:
    plan = replace(QUICK, speeds=(1.0, 1.0, 1 / 50), adapts=False)
    fast, _, slow = measure(MODES["gradients"], plan)
    assert fast.epochs / fast.seconds >= 0.4 / plan.epoch_s, "with all steps waited for it would be 0.24"
    check_accounts(slow)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_step_that_ends_one_epoch_late_counts_and_two_epochs_late_is_dropped(lag: int) -> None:
    with swarm_of(3, f"late by {lag}") as peers:
        late, others = peers[2], peers[:2]
        together([lambda peer=peer: peer.train_to(1) for peer in peers])  # type: ignore[misc]
        steps_before = late.steps
        accumulated = late.reports[-1].accumulated
        together([lambda peer=peer: peer.train_to(1 + lag) for peer in others])  # type: ignore[misc]
        report = late.train_once()
        assert report.resynchronised is not None
        assert report.resynchronised.loaded, report
        assert report.epoch == 1 + lag
        everything = accumulated + BATCH
        if lag == 1:
            assert (report.samples, report.dropped, report.accumulated) == (BATCH, 0, everything)
        else:
            assert (report.samples, report.dropped, report.accumulated) == (0, everything, 0)
            assert "too long ago" in report.reason
        together([lambda peer=peer: peer.train_to(3 + lag) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        later = late.reports[steps_before:]
        trained = accumulated + BATCH * len(later)
        gone = sum(one.contributed + one.dropped for one in later)
        assert trained == gone + later[-1].accumulated
