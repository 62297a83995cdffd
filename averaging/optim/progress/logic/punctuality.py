"""The timing of a slow peer's steps, so that it is punctual for rounds. Pure functions of the progress.

A round begins when the epoch is full, and the others wait for a peer that is in the middle of a step. For a
peer whose step is long compared with the epoch it is cheaper to wait for the round itself: its own pause
costs the swarm less than that of all others.
"""

from __future__ import annotations

import math
import statistics

from averaging.optim.progress.logic.view import ProgressView
from swarm.core.ids import PeerId

STEP_SHARE_MAX = 0.25  # largest share of the epoch that one step should take
# a step of at most this share of the epoch delays others only briefly
_STEP_SHARE_UNNOTICED = 0.1
SLOW = 0.5  # a peer is slow below this fraction of the others' median speed
# tolerance of the expected end of the epoch. Too small: late samples miss the round; too large: a slow peer
# is idle more often
_MARGIN = 1.25


def longest_step(view: ProgressView, own: PeerId) -> float:
    """Return the number of samples that this peer computes in `STEP_SHARE_MAX` of an epoch at the present
    speeds; infinity while its speed is not known or nobody else trains.
    """
    mine = view.peers.get(own)
    if mine is None or mine.samples_per_s <= 0.0 or view.samples_per_s <= mine.samples_per_s:
        return float("inf")
    return STEP_SHARE_MAX * view.target * mine.samples_per_s / view.samples_per_s


def longest_wait_s(
    view: ProgressView, own: PeerId, samples_per_step: int, *, has_late_samples: bool
) -> float:
    """Return how long this peer should wait for the round before it begins another step, in seconds. 0: it
    should begin the step.

    It waits when the others fill the epoch before its step would end, and either it has late samples, which
    are dropped if they miss the round, or it is slow and its step long.
    """
    mine = view.peers.get(own)
    if mine is None or mine.samples_per_s <= 0.0:
        return 0.0
    others_per_s = view.samples_per_s - mine.samples_per_s
    step_s = samples_per_step / mine.samples_per_s
    missing = max(view.target - _samples_by_now(view, own), 0.0)
    if others_per_s <= 0.0 or missing / others_per_s >= _MARGIN * step_s:
        return 0.0
    epoch_s = view.target / view.samples_per_s
    if has_late_samples or (_is_slow(view, own) and step_s > _STEP_SHARE_UNNOTICED * epoch_s):
        return _MARGIN * step_s
    return 0.0


def absence_s(view: ProgressView, own: PeerId, samples_per_step: int) -> float:
    """Return for how long this peer's next step keeps it from rounds, in seconds; 0 while its speed is not
    known. Infinity when it is slow and the others fill an epoch meanwhile: waiting for it would cost them
    more than its samples are worth.
    """
    mine = view.peers.get(own)
    if mine is None or mine.samples_per_s <= 0.0:
        return 0.0
    step_s = samples_per_step / mine.samples_per_s
    others_per_s = view.samples_per_s - mine.samples_per_s
    return math.inf if step_s * others_per_s > view.target and _is_slow(view, own) else step_s


def _is_slow(view: ProgressView, own: PeerId) -> bool:
    """Return whether this peer is slow compared with the others."""
    speeds = [
        peer.samples_per_s
        for peer_id, peer in view.peers.items()
        if peer_id != own and peer.samples_per_s > 0.0 and peer.has_standing
    ]
    return bool(speeds) and view.peers[own].samples_per_s < SLOW * statistics.median(speeds)


def _samples_by_now(view: ProgressView, own: PeerId) -> float:
    """Return how many samples the swarm has by now if all continued at their speed since their last report.
    Such an estimate must not close an epoch, but a slow peer needs it: its reports of the others are old.
    """
    there = {
        peer_id: peer
        for peer_id, peer in view.peers.items()
        if peer.epoch == view.epoch and peer.has_standing
    }
    expected = sum(
        peer.samples + (peer.samples_per_s * peer.age_s if peer_id != own else 0.0)
        for peer_id, peer in there.items()
    )
    return max(view.samples, expected)
