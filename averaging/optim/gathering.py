"""Waiting for a number of peers before the first epoch of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from averaging.optim.progress.tracker import Tracker

_log = logging.getLogger(__name__)

_POLL_S_MAX = 1.0  # longest interval of checks
_FIRST_LOOK_S_MAX = 5.0


def wait_for_peers(tracker: Tracker, count: int, is_over: Callable[[], bool]) -> None:
    """Wait in this thread until `count` peers, this one included, are ready to train, or training has begun,
    or `is_over()`. A peer is ready in its first step, and not while it loads the state. Each change of
    their number is logged.
    """
    tracker.begin_epoch(0)  # this peer is ready
    tracker.wait_refresh(_FIRST_LOOK_S_MAX, first=True)
    seen = 0
    while not is_over() and tracker.swarm_epoch() == 0 and (ready := _ready_peers(tracker)) < count:
        if ready != seen:
            _log.warning(
                "run %s: %d of %d peers are here; training begins when all of them are",
                tracker.run_id,
                ready,
                count,
            )
            seen = ready
        # while all wait nobody makes progress; this is not a hang, and this peer's report must not expire
        tracker.pause(0, paused=True)
        tracker.pause(0, paused=False)
        tracker.wait_refresh(_POLL_S_MAX)


def _ready_peers(tracker: Tracker) -> int:
    """Return the number of peers that are ready. Of a run of several shards only the number of all peers is
    known.
    """
    others, total = tracker.others(), tracker.view().peers_total
    if total > 1 + len(others):
        return total
    return 1 + sum(not report.joining for report in others.values())
