"""The state machine of an epoch's progress: counting of reports, limits on false ones, and checks of their
encoding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from averaging.optim.progress.logic.reports import (
    EXTRAPOLATION_S_MAX,
    PEERS_MAX,
    REFRESH_S_MIN,
    REPORT_TTL_S,
    SLACK_S,
    STALLED_S_MAX,
    EpochProgress,
    ProgressReport,
)
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.core.presets import LOCAL, WAN


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def report(
    samples: int,
    *,
    epoch: int = 0,
    rate: float = 10.0,
    at_s: float = 100.0,
    since_s: float = 0.0,
    joining: bool = False,
) -> ProgressReport:
    return ProgressReport(
        epoch=epoch, samples=samples, rate=rate, at_s=at_s, since_s=since_s, joining=joining
    )


def machine(target: int = 1000) -> EpochProgress:
    return EpochProgress(peer(0), target, 0.0)


def test_a_lone_peers_epoch_is_full_exactly_at_the_target() -> None:
    progress = machine(100)
    progress.update_own(99, 10.0, 50.0)
    assert not progress.is_full(1e6), "this peer's own number is never carried on"
    progress.update_own(100, 10.0, 50.0)
    assert progress.is_full(50.0)
    progress.begin_epoch(1, 50.0)
    assert not progress.is_full(50.0)
    assert progress.epoch == 1


def test_reports_add_up_and_are_extrapolated_for_a_while() -> None:
    progress = machine(1000)
    progress.update_own(300, 10.0, 100.0)
    progress.on_report(peer(1), report(300), 100.0)
    progress.on_report(peer(2), report(390), 100.0)
    assert not progress.is_full(100.0)
    assert progress.is_full(101.0), "two others at 10 samples/s for a second"
    assert sum(progress.counted(110.0).values()) == 990 + 2 * 10 * EXTRAPOLATION_S_MAX


def test_entries_of_another_epoch_are_live_but_do_not_count() -> None:
    progress = machine(1000)
    progress.on_report(peer(1), report(5000, epoch=1), 100.0)
    assert not progress.is_full(100.0)
    assert set(progress.others(100.0)) == {peer(1)}


def test_expired_withdrawn_and_unreachable_peers_do_not_count() -> None:
    progress = machine(1000)
    progress.on_report(peer(1), report(600), 100.0)
    progress.on_report(peer(2), report(600), 100.0, expires_s=101.0)
    progress.on_report(peer(3), report(600), 100.0)
    progress.on_goodbye(peer(3))
    assert set(progress.others(100.5)) == {peer(1), peer(2)}
    assert set(progress.others(101.0)) == {peer(1)}
    progress.on_unreachable(peer(1), refused=False)
    assert not progress.others(101.0)
    assert not progress.on_report(peer(1), report(600), 101.0), "the old claim is no sign of life"
    assert progress.on_report(peer(1), report(610, at_s=101.0), 101.5)
    assert set(progress.others(101.5)) == {peer(1)}
    assert not progress.others(101.0 + REPORT_TTL_S)
    assert not progress.on_report(peer(4), report(1, at_s=10.0), 100.0), "long expired"


def test_a_record_read_after_a_goodbye_does_not_bring_its_writer_back() -> None:
    """Regression test: a peer that had left was counted for 15 s more when its record was read meanwhile."""
    progress = machine(1000)
    progress.on_report(peer(1), report(600), 100.0)
    progress.on_goodbye(peer(1))
    assert not progress.on_report(peer(1), report(600), 100.1)
    progress.on_round([peer(1)], 1, 100.2)
    assert not progress.others(100.2)
    assert progress.is_alone(100.2)
    assert progress.on_report(peer(1), report(0, epoch=1, at_s=101.0), 101.0), "it has been started again"
    assert set(progress.others(101.0)) == {peer(1)}


def test_older_reports_and_the_own_record_are_ignored() -> None:
    progress = machine()
    assert progress.on_report(peer(1), report(50, at_s=100.0), 100.0)
    assert not progress.on_report(peer(1), report(999, at_s=99.0), 100.0)
    assert not progress.on_report(peer(0), report(999), 100.0)
    assert progress.counted(100.0)[peer(1)] == 50


def test_a_liar_cannot_fill_the_epoch() -> None:
    progress = machine(10_000)
    progress.update_own(100, 10.0, 10.0)
    progress.on_report(peer(1), report(100, at_s=10.0), 10.0)
    progress.on_report(peer(2), report(1 << 40, rate=1e12, at_s=10.0), 10.0)
    counted = progress.counted(10.0)
    assert counted[peer(2)] == pytest.approx(3 * 10.0 * (10.0 + SLACK_S))
    assert not progress.is_full(10.0)
    assert not progress.is_plausibly_full(0, 10.0)
    assert counted[peer(1)] == 100


def test_a_late_joiner_counts_samples_from_before_it_came() -> None:
    progress = machine(1000)
    for number in (1, 2):
        progress.on_report(peer(number), report(480, epoch=3, rate=5.0, at_s=100.0, since_s=4.0), 100.0)
    progress.begin_epoch(3, 100.0, late=True)
    progress.update_own(8, 5.0, 101.0)
    assert progress.counted(101.0)[peer(1)] == 485
    assert progress.is_plausibly_full(3, 101.0)
    assert not progress.is_plausibly_full(2, 101.0)
    assert not progress.is_plausibly_full(4, 101.0)


def test_one_of_several_peers_cannot_move_the_swarm_epoch() -> None:
    progress = machine()
    progress.begin_epoch(5, 100.0)
    assert progress.swarm_epoch(100.0) == 5
    progress.on_report(peer(1), report(0, epoch=6), 100.0)
    assert progress.swarm_epoch(100.0) == 6, "of one other peer there is no second opinion"
    progress.on_report(peer(2), report(0, epoch=5), 100.0)
    progress.on_report(peer(3), report(0, epoch=10**9), 100.0)
    assert progress.swarm_epoch(100.0) == 6
    progress.on_report(peer(4), report(0, epoch=3), 100.0)
    assert progress.swarm_epoch(100.0) == 6
    progress.begin_epoch(7, 100.0)
    assert progress.swarm_epoch(100.0) == 7


@pytest.mark.parametrize(("trainers", "newcomers"), [(1, 3), (2, 6), (1, 31)])
def test_peers_that_are_joining_do_not_vote_on_the_swarm_epoch(trainers: int, newcomers: int) -> None:
    """Newcomers once outvoted the peers that they had come to: all saw epoch 0, and none loaded a state."""
    progress = machine()
    for number in range(1, trainers + 1):
        progress.on_report(peer(number), report(10, epoch=8), 100.0)
    for number in range(trainers + 1, trainers + newcomers):
        progress.on_report(peer(number), report(0, joining=True), 100.0)
    assert progress.swarm_epoch(100.0) == 8
    progress.begin_epoch(8, 101.0, late=True, joining=True)
    for number in range(trainers + 1, trainers + newcomers):
        progress.on_report(peer(number), report(0, epoch=8, joining=True, at_s=101.0), 101.0)
    for number in range(1, trainers + 1):
        progress.on_report(peer(number), report(0, epoch=9, at_s=101.0), 101.0)
    assert progress.swarm_epoch(101.0) == 9, "and those that still wait do not hold it back"


def test_a_peer_that_is_busy_still_takes_part_in_the_run() -> None:
    """Regression test: a newcomer whose only trainer did not answer within 2 s founded the run once more."""
    progress = machine()
    assert progress.is_alone(100.0)
    progress.on_report(peer(1), report(10, epoch=8), 100.0)
    progress.on_unreachable(peer(1), refused=False)
    for number in range(2, 9):
        progress.on_report(peer(number), report(0, joining=True), 100.0)
    assert not progress.is_alone(100.0)
    assert progress.has_begun(100.0)
    assert progress.swarm_epoch(100.0) == 0, "its report does not count while it does not answer"
    progress.on_unreachable(peer(1), refused=True)
    assert not progress.has_begun(100.0)
    for number in range(2, 9):
        progress.on_goodbye(peer(number))
    assert progress.is_alone(100.0)


def test_one_peer_that_reports_an_epoch_or_a_head_shows_that_the_run_has_begun() -> None:
    """Newcomers that had trained a step outvoted the one peer that was left of the run."""
    for of_the_run in (report(10, epoch=8), replace(report(10), head=b"h" * 32)):
        progress = machine()
        progress.head, progress.certified_epoch = b"g" * 32, 0
        for number in range(2, 9):
            progress.on_report(peer(number), replace(report(10), head=progress.head), 100.0)
        assert not progress.has_begun(100.0)
        progress.on_report(peer(1), of_the_run, 100.0)
        assert progress.has_begun(100.0)
        progress.on_goodbye(peer(1))
        assert not progress.has_begun(100.0)


def test_a_peer_joins_until_it_has_a_state_or_trains() -> None:
    progress = machine()
    assert progress.own_report.joining
    progress.update_own(0, 0.0, 1.0)
    assert progress.own_report.joining
    progress.update_own(4, 1.0, 2.0)
    assert not progress.own_report.joining
    progress.begin_epoch(8, 3.0, late=True, joining=True)
    assert progress.own_report.joining
    progress.begin_epoch(8, 4.0, late=True)
    assert not progress.own_report.joining


def test_reports_are_bounded_in_number() -> None:
    progress = machine()
    for number in range(1, PEERS_MAX + 6):
        progress.on_report(peer(number), report(1, at_s=100.0 + number / 100), 110.0)
    assert set(progress.others(110.0)) == {peer(number) for number in range(6, PEERS_MAX + 6)}


def test_the_view_shows_totals_and_the_refresh_interval_follows_the_eta() -> None:
    progress = machine(1000)
    assert progress.view(0.0).eta_s == math.inf
    assert progress.refresh_s(0.0) == WAN.progress_refresh_s_max
    progress.update_own(500, 100.0, 100.0)
    progress.on_report(peer(1), report(400, rate=50.0), 100.0)
    view = progress.view(100.0)
    assert (view.samples, view.samples_per_s, view.fraction) == (900.0, 150.0, 0.9)
    assert view.eta_s == pytest.approx(100 / 150)
    assert view.peers[peer(1)].samples == 400
    assert set(view.peers) == {peer(0), peer(1)}
    assert progress.refresh_s(100.0) == REFRESH_S_MIN


def test_a_preset_with_short_intervals_reads_as_rarely_as_others_when_many_peers_train() -> None:
    progress = EpochProgress(peer(0), 1000, 0.0, LOCAL.progress_refresh_s_max)
    progress.update_own(500, 1.0, 100.0)
    assert progress.refresh_s(100.0) == LOCAL.progress_refresh_s_max
    for number in range(1, 24):
        progress.on_report(peer(number), report(1, rate=1.0), 100.0)
    assert progress.refresh_s(100.0) == 3 * REFRESH_S_MIN > LOCAL.progress_refresh_s_max


GOOD = {"epoch": 1, "samples": 2, "rate": 3.0, "at": 99.0, "since": 90.0}


def test_an_encoded_report_decodes_to_the_same() -> None:
    decoded = ProgressReport.decode(GOOD, 100.0)
    assert decoded == ProgressReport(epoch=1, samples=2, rate=3.0, at_s=99.0, since_s=90.0)
    assert decoded.encode() == GOOD
    joining = ProgressReport.decode({**GOOD, "joining": True}, 100.0)
    assert joining.encode() == {**GOOD, "joining": True}


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": 1 << 50},
        {"epoch": 1.5},
        {"epoch": True},
        {"samples": -1},
        {"samples": 1 << 60},
        {"samples": "9"},
        {"rate": math.nan},
        {"rate": -1.0},
        {"rate": math.inf},
        {"at": 1e9},
        {"at": None},
        {"since": 99.5},
        {"since": math.nan},
        {"joining": "yes"},
    ],
)
def test_malformed_reports_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PeerError):
        ProgressReport.decode({**GOOD, **change}, 100.0)
    with pytest.raises(PeerError):
        ProgressReport.decode([1, 2], 100.0)


def test_a_target_of_no_samples_is_refused() -> None:
    with pytest.raises(UsageError):
        machine(0)


def test_a_peer_that_reports_without_progress_stops_counting() -> None:
    progress = machine(1000)
    end_s = 100.0 + STALLED_S_MAX
    for at_s in range(100, int(end_s) + 1, 5):
        progress.on_report(peer(1), report(10, at_s=float(at_s)), float(at_s))
        progress.on_report(peer(2), report(at_s, at_s=float(at_s)), float(at_s))
    assert set(progress.others(end_s)) == {peer(2)}
    progress.on_report(peer(1), report(11, at_s=end_s + 1.0), end_s + 1.0)
    assert set(progress.others(end_s + 1.0)) == {peer(1), peer(2)}


def test_a_peer_that_completed_a_round_is_in_the_next_epoch_before_it_reports_so() -> None:
    progress = machine(1000)
    progress.on_report(peer(1), report(400, epoch=2), 100.0)
    progress.begin_epoch(3, 101.0)
    progress.on_round([peer(1), peer(9)], 3, 101.0)
    assert progress.others(101.0)[peer(1)].epoch == 3
    assert sum(progress.counted(101.0).values()) == 0
    progress.on_report(peer(1), report(410, epoch=2, at_s=101.5), 101.6)
    late = progress.others(101.6)[peer(1)]
    assert (late.epoch, late.samples) == (3, 0), "said before it noticed that the round was over"
    progress.on_report(peer(1), report(20, epoch=3, at_s=102.0), 102.0)
    assert progress.counted(102.0)[peer(1)] == 20
    assert peer(9) not in progress.others(102.0)


def test_peers_that_return_to_a_shorter_history_count_there() -> None:
    """Regression test: two peers that had continued without the others, and gave that up, took each other's
    reports for those of the epoch that they had reached by themselves, and did not count them.
    """
    progress = machine(1000)
    progress.begin_epoch(8, 101.0)
    progress.on_report(peer(1), report(5, epoch=8, at_s=101.0), 101.0)
    progress.on_round([peer(1)], 8, 101.0)
    progress.begin_epoch(6, 103.0)
    progress.on_report(peer(1), report(40, epoch=6, at_s=104.0), 104.0)
    assert progress.others(104.0)[peer(1)].epoch == 6
    assert progress.counted(104.0)[peer(1)] == 40
