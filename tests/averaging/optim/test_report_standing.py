"""The reports that close an epoch: those of electors, of newcomers from their first certified round on."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from averaging.optim.progress.logic.punctuality import longest_step, longest_wait_s
from averaging.optim.progress.logic.reports import (
    PEERS_MAX,
    SAMPLES_MAX,
    SLACK_S,
    EpochProgress,
    ProgressReport,
)
from averaging.optim.progress.logic.standing import RATE_RATIO_MAX, ReportStanding
from swarm.core.ids import PeerId

NOW_S = 100.0
OWN = 0


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def machine(
    electors: Collection[int], proven: Collection[int] = (), *, samples: int = 100, rate: float = 1.0
) -> EpochProgress:
    one = EpochProgress(peer(OWN), 1000, 0.0)
    one.begin_epoch(0, 0.0)
    one.update_own(samples, rate, NOW_S)
    standing = {peer(number) for number in proven}
    one.standing = ReportStanding(
        peer(OWN), tuple(peer(number) for number in electors), standing.__contains__
    )
    return one


def hear(one: EpochProgress, number: int, samples: int, rate: float = 1.0) -> None:
    report = ProgressReport(epoch=0, samples=samples, rate=rate, at_s=NOW_S, since_s=0.0)
    assert one.on_report(peer(number), report, NOW_S)


@pytest.mark.parametrize("strangers", [1, 16, 200])
def test_strangers_close_no_epoch_whatever_they_claim(strangers: int) -> None:
    one = machine((OWN, 1))
    hear(one, 1, 100)
    for number in range(10, 10 + strangers):
        hear(one, number, SAMPLES_MAX, 1e6)
    assert one.samples_counted(NOW_S) == pytest.approx(200.0)
    assert not one.is_full(NOW_S)
    view = one.view(NOW_S)
    assert view.peers[peer(10)].samples == SAMPLES_MAX, "it is displayed"
    assert not view.peers[peer(10)].has_standing
    assert view.samples_per_s == pytest.approx(2.0)


def test_strangers_do_not_make_a_peer_wait_or_take_smaller_steps() -> None:
    one, alone = machine((OWN, 1)), machine((OWN, 1))
    for each in (one, alone):
        hear(each, 1, 100)
    for number in range(10, 26):
        hear(one, number, SAMPLES_MAX, 1e6)
    views = one.view(NOW_S), alone.view(NOW_S)
    assert longest_step(views[0], peer(OWN)) == longest_step(views[1], peer(OWN))
    waits = [longest_wait_s(view, peer(OWN), 50, has_late_samples=False) for view in views]
    assert waits[0] == waits[1]


@pytest.mark.parametrize("electors", [(OWN,), (OWN, 1), (OWN, 1, 2)])
def test_a_newcomer_with_a_certified_round_counts_with_three_times_the_electors_median(
    electors: tuple[int, ...],
) -> None:
    one = machine(electors, proven=(9,))
    for number in electors[1:]:
        hear(one, number, 100)
    hear(one, 9, 5000, 50.0)
    expected = RATE_RATIO_MAX * (NOW_S + SLACK_S)
    assert one.counted(NOW_S)[peer(9)] == pytest.approx(expected)


def test_an_elector_may_be_faster_than_another_one() -> None:
    one = machine((OWN, 1))
    hear(one, 1, 900, 9.0)
    assert one.is_full(NOW_S)


def test_strangers_do_not_make_a_peer_read_the_reports_of_members_less_often() -> None:
    """Regression: among 200 strangers the members learned a second late that their epoch was full."""
    one, alone = machine((OWN, 1), samples=499), machine((OWN, 1), samples=499)
    for each in (one, alone):
        hear(each, 1, 499)
    for number in range(10, 210):
        hear(one, number, 1)
    assert one.refresh_s(NOW_S) == alone.refresh_s(NOW_S)


def test_a_newcomer_does_not_count_itself_and_sees_what_the_electors_see() -> None:
    one, elector = machine((1, 2), samples=900, rate=9.0), machine((OWN, 2))
    hear(one, 1, 100)
    hear(one, 2, 100)
    hear(elector, 2, 100)
    assert one.samples_counted(NOW_S) == pytest.approx(200.0) == elector.samples_counted(NOW_S)


@pytest.mark.parametrize("electors", [(), (1, 2)])
def test_everybody_counts_where_no_elector_is_there(electors: tuple[int, ...]) -> None:
    """Before the first certificate, and after all electors have died."""
    one = machine(electors, samples=500)
    hear(one, 9, 500)
    assert one.is_full(NOW_S)


def test_strangers_make_the_swarm_at_most_twice_as_large() -> None:
    one = machine((OWN, 1), proven=(2,))
    for number in (1, 2, *range(10, 100)):
        hear(one, number, 1)
    peers, there = one.standing.peers(one.others(NOW_S))
    assert peers == 6
    assert there == [peer(1), peer(2)]


def test_reports_of_strangers_that_are_dated_ahead_displace_no_elector_before_the_first_round() -> None:
    """Regression: a peer that had been in no round yet lost the reports of all electors, and counted those of
    strangers.
    """
    one = machine((1, 2))
    hear(one, 1, 100)
    hear(one, 2, 100)
    for number in range(10, 10 + 2 * PEERS_MAX):
        report = ProgressReport(epoch=0, samples=SAMPLES_MAX, rate=1e6, at_s=NOW_S + 9.0, since_s=0.0)
        assert one.on_report(peer(number), report, NOW_S)
    assert one.samples_counted(NOW_S) == pytest.approx(200.0)
