"""Reports of liars about their epochs: only certificates say which epoch a swarm has reached."""

from __future__ import annotations

import pytest

from averaging.optim.progress.logic.reports import CLOCK_AHEAD_S_MAX, EPOCH_MAX, EpochProgress, ProgressReport
from tests.averaging.history.peers import PEERS, identity

OWN, HONEST = PEERS[:2]
NOW_S = 1000.0


def report(epoch: int, at_s: float = NOW_S) -> ProgressReport:
    return ProgressReport(epoch=epoch, samples=10, rate=1.0, at_s=at_s, since_s=NOW_S)


def trainer() -> EpochProgress:
    progress = EpochProgress(OWN, 100, NOW_S)
    progress.certified_epoch = 3
    progress.begin_epoch(3, NOW_S)
    progress.on_report(HONEST, report(3), NOW_S)
    progress.on_round([HONEST], 3, NOW_S)
    return progress


@pytest.mark.parametrize("epoch", [4, 5, EPOCH_MAX])
@pytest.mark.parametrize("liars", [1, 2, 30])
def test_reports_of_a_later_epoch_move_nobody_without_a_certificate(epoch: int, liars: int) -> None:
    progress = trainer()
    for number in range(liars):
        progress.on_report(identity(100 + number).peer_id, report(epoch), NOW_S)
    assert progress.swarm_epoch(NOW_S) == 3
    assert progress.view(NOW_S).swarm_epoch == 3


def test_many_reports_that_are_dated_ahead_do_not_displace_the_members_of_the_last_round() -> None:
    progress = trainer()
    for number in range(300):
        dated_s = NOW_S + CLOCK_AHEAD_S_MAX - 1
        progress.on_report(identity(100 + number).peer_id, report(3, dated_s), NOW_S)
    assert HONEST in progress.others(NOW_S)
    assert HONEST in progress.others_at_head(NOW_S)
