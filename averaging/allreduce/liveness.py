"""Who is alive during a round: beats for the silent, suspicion when they go unanswered, and a probe before
anybody is given up.

A pure machine, told of everything that was heard and asked what to do. Three things keep it from accusing the
innocent where machines have too much work: anything that a peer sends counts as a beat; the clock of silence
only runs while this process itself got to run; and patience grows with what was lately seen: pauses of this
peer, its round trips, and how late this process itself was. Who answers promptly is beaten less often, so
that a round that takes long costs few bytes; its death is seen later by as much as it rests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarm.core.errors import UsageError

_FADING = 0.9  # of what was seen of late, per sign of life or tick
_SIGNS_MIN = 3
_LATE_BEATS = 2  # its beat may be on its way
_ROUNDING_S = 1e-6  # sums of beats are not exact


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """When a silent member counts as dead."""

    # between beats; too small: beats cost more than the tensors, too large: deaths are seen late
    beat_s: float = 0.1
    # between those of a member that answers promptly; too small: in a long round beats cost more than small
    # tensors, too large: deaths are seen late
    rest_s: float = 0.3
    missed_max: int = 3  # beats without an answer until a member is suspected, and probed
    # how long a suspect has to answer; too small: busy peers are given up, too large: the round stalls for
    # long
    probe_s: float = 0.6
    # how long a member that was never heard has: a connection must be made, and it may still have to begin;
    # and one whose first tensors are on their way, which show how long its pauses are
    first_s: float = 3.0
    # it has this many of its longest recent pauses and round trips instead, if that is longer
    slack: float = 3.0
    # or this many of our own longest recent delay: a process that is late has little to say about others
    own_slack: float = 8.0
    # but never more than this after being suspected; a peer that is slower holds everybody up
    patience_s_max: float = 10.0

    def __post_init__(self) -> None:
        if not (
            0 < self.beat_s <= self.rest_s <= self.missed_max * self.beat_s
            and self.missed_max >= 1
            and 0 < self.probe_s <= self.patience_s_max
            and self.first_s <= self.patience_s_max
            and self.slack >= 0
        ):
            raise UsageError("beats need positive intervals, and patience_s_max at least probe_s and first_s")


@dataclass(slots=True)
class _Peer:
    heard_s: float  # on the clock of silence
    calls: bool  # we beat, it answers; otherwise it beats
    outstanding: bool = False
    known: bool = False  # it was heard
    told_s: float = 0.0  # when we last sent it something
    # its first tensors are on their way: they fill a slow link's queues, and its answers wait behind them
    starting: bool = False
    signs: int = 0  # how often it answered us, or was heard where it calls
    # the longest of late, fading: between two signs of life, or from a beat to its answer
    pause_s: float = 0.0


class FailureDetector:
    """Members are places in the group. `ours`: whom we beat. `theirs`: who beats us; we only probe them, when
    they are silent.
    """

    def __init__(
        self, ours: Iterable[int], theirs: Iterable[int], config: LivenessConfig, now_s: float
    ) -> None:
        self._config = config
        self._peers = {place: _Peer(0.0, True) for place in ours} | {
            place: _Peer(0.0, False) for place in theirs
        }
        self._ticked_s = now_s
        self._awake_s = 0.0  # seconds during which this process ran, as far as ticks show
        self._late_s = 0.0  # how late ticks were of late, fading

    def heard(self, place: int) -> None:
        """Something came from it."""
        peer = self._peers.get(place)
        if peer is not None:
            silent_s = self._awake_s - peer.heard_s
            if silent_s <= self._config.rest_s + _LATE_BEATS * self._config.beat_s:
                silent_s -= self._rest_s(peer)
            peer.pause_s = max(_FADING * peer.pause_s, silent_s if peer.known else 0.0)
            peer.signs += not peer.calls
            peer.heard_s = self._awake_s
            peer.known = True

    def answered(self, place: int, round_trip_s: float) -> None:
        """It answered a beat or a probe."""
        self.heard(place)
        peer = self._peers.get(place)
        if peer is not None:
            peer.outstanding = False
            peer.pause_s = max(peer.pause_s, round_trip_s)
            peer.signs += peer.calls

    def told(self, place: int) -> None:
        """It was sent something, which shows it that we live."""
        peer = self._peers.get(place)
        if peer is not None:
            peer.told_s = self._awake_s

    def starting(self, place: int, starting: bool) -> None:
        """Its first tensors are under way, or have begun to arrive."""
        peer = self._peers.get(place)
        if peer is not None:
            peer.starting = starting

    def unanswered(self, place: int) -> None:
        """A beat or a probe got no answer; another may be sent."""
        peer = self._peers.get(place)
        if peer is not None:
            peer.outstanding = False

    def forget(self, place: int) -> None:
        """It is known to be dead, or it is of no interest any more."""
        self._peers.pop(place, None)

    def tick(self, now_s: float) -> tuple[list[int], list[tuple[int, float]]]:
        """Call this every `beat_s`: (whom to beat or probe now, who is dead after how long a silence). The
        dead are forgotten.
        """
        elapsed_s = now_s - self._ticked_s
        self._late_s = max(_FADING * self._late_s, elapsed_s - self._config.beat_s)
        self._awake_s += min(elapsed_s, self._config.beat_s)
        self._ticked_s = now_s
        beats: list[int] = []
        dead: list[tuple[int, float]] = []
        for place, peer in list(self._peers.items()):
            silent_s = self._awake_s - peer.heard_s
            if silent_s > self.patience_s(place) - _ROUNDING_S:
                dead.append((place, silent_s))
                del self._peers[place]
            elif not peer.outstanding and self._quiet_s(peer) > self._silence_s(peer) - _ROUNDING_S:
                peer.outstanding, peer.told_s = True, self._awake_s
                beats.append(place)
        return beats, dead

    def _rests(self, peer: _Peer) -> bool:
        """Has it shown that it answers, or beats us, promptly?"""
        return peer.signs >= _SIGNS_MIN and self._config.slack * peer.pause_s <= self._config.probe_s

    def _quiet_s(self, peer: _Peer) -> float:
        """How long one of us has said nothing. Whom we beat may hear nothing else from us, while it sends and
        we only take.
        """
        since_s = min(peer.heard_s, peer.told_s) if peer.calls else peer.heard_s
        return self._awake_s - since_s

    def _rest_s(self, peer: _Peer) -> float:
        """How much longer than a beat nobody asks it to say anything."""
        return self._config.rest_s - self._config.beat_s if self._rests(peer) else 0.0

    def _silence_s(self, peer: _Peer) -> float:
        """After how long a silence it is beaten, or probed when it is its turn to beat."""
        config = self._config
        return (config.beat_s if peer.calls else config.missed_max * config.beat_s) + self._rest_s(peer)

    def patience_s(self, place: int) -> float:
        """After how long a silence this member is given up."""
        peer = self._peers.get(place)
        config = self._config
        slack_s = max(
            config.slack * (peer.pause_s if peer is not None else 0.0), config.own_slack * self._late_s
        )
        if peer is not None and (peer.starting or not peer.known):
            slack_s = max(slack_s, config.first_s)
        rest_s = self._rest_s(peer) if peer is not None else 0.0
        return (
            config.missed_max * config.beat_s
            + rest_s
            + min(max(config.probe_s, slack_s), config.patience_s_max)
        )
