"""The failure detector of a round: heartbeats for silent members, suspicion when they stay unanswered, and a
probe before a member is marked failed.

A pure state machine: events go in, and it says what to do. Three things prevent false accusations on
overloaded machines: every message from a peer counts as a heartbeat; the clock of silence runs only while
this process itself runs; and timeouts grow with recent observations: pauses of the peer, its round trips, the
delays of this process, and what is usual among the members: where half of them pause, one more that pauses is
not dead. Members that answer promptly get fewer heartbeats, which keeps long rounds cheap; a failure is then
noticed up to `REST_S` later, in groups of more than `_CROWD` members (of distant ones `_DISTANT_CROWD`) in
proportion, because the members of a large group take longer to answer, too, and later by this process's own
delay. A process that is late sends fewer, too: where many peers
share a processor, their heartbeats would otherwise be what makes them late. A peer that only receives must
still send heartbeats: otherwise the reducer that serves it, and cannot call back, would declare it failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

_FADING = 0.9  # decay of recent pauses of a member, per sign of life
_LATE_FADING = 0.97  # decay of the delay of this process, per tick: half in 2.3 s
_SIGNS_MIN = 3
_LATE_HEARTBEATS = 2  # heartbeats that may be in transit
_ROUNDING_S = 1e-6  # sums of heartbeats are not exact


HEARTBEAT_INTERVAL_S = (
    0.1  # shorter: heartbeats cost more than the tensors; longer: failures are noticed late
)
# The interval for a member that answers promptly. Shorter: in a long round heartbeats cost more than small
# tensors; longer: failures are noticed late.
REST_S = 0.3
# Up to this number of members get heartbeats at these intervals; of more each gets fewer: the heartbeats of
# one member cost as much in a group of any size. Smaller: failures in large groups are noticed later
_CROWD = 16
_DISTANT_CROWD = 8  # the same for members that exchange no values with this one
# Of more than this number of members, each that exchanges values with this one has this multiple of `PROBE_S`
# per member to answer, at most `_ANSWER_S_MAX`: a reducer answers between the streams of all others.
# Smaller: a busy reducer is marked failed, all others repair its shard, and that makes the next one late;
# larger: failures are noticed later
_ANSWER_CROWD = 8
_ANSWER_PROBES_PER_MEMBER = 1 / 4
_ANSWER_S_MAX = 6.0
_MISSED_MAX = 3  # heartbeats without an answer until a member is suspected, and probed
PROBE_S = 0.6  # time for a suspect to answer; shorter: busy peers are marked failed, longer: the round stalls
# time to answer for a member that was never heard, which may still have to connect and begin, and for one
# whose first tensors, which show its usual pauses, are in transit
FIRST_S = 3.0
_SLACK = 3.0  # or this many of its longest recent pauses and round trips, if that is longer
# or this many of this process's longest recent delay: a late process cannot judge others
_OWN_DELAY_FACTOR = 8.0
TIMEOUT_S_MAX = 10.0  # upper limit of the time to answer; a slower peer delays all others


@dataclass(slots=True)
class _Peer:
    heard_s: float  # on the clock of `_awake_s`
    calls: bool  # True: this member sends heartbeats and the other answers; False: the other sends them
    # the two members exchange no values, only votes
    distant: bool = False
    outstanding: bool = False
    known: bool = False  # the member was heard at least once
    sent_s: float = 0.0  # when this member last sent it something
    # its first tensors are in transit, and its answers queue behind them on a slow link
    starting: bool = False
    signs: int = 0  # number of its answers or, if it calls, of its messages
    # the longest recent pause (between two signs of life, or from a heartbeat to its answer), with decay
    pause_s: float = 0.0


class FailureDetector:
    """The state of all members, by place in the group. `ours`: members that get heartbeats from this one.
    `theirs`: members that send heartbeats to this one, and are only probed when they are silent. `distant`:
    those of both that exchange no values with this one; they get fewer heartbeats from the beginning, also
    when they are slow, because the members that need their values watch them. `dialable`: others can probe
    this member; if not, they know only its heartbeats, and it sends as many when it is late.
    """

    def __init__(
        self,
        ours: Iterable[int],
        theirs: Iterable[int],
        now_s: float,
        distant: Collection[int] = (),
        *,
        dialable: bool = True,
    ) -> None:
        self._dialable = dialable
        self._peers = {place: _Peer(0.0, True, place in distant) for place in ours} | {
            place: _Peer(0.0, False, place in distant) for place in theirs
        }
        size = len(self._peers)
        self._is_crowd = size > _CROWD
        answer_s = min(_ANSWER_PROBES_PER_MEMBER * size * PROBE_S, _ANSWER_S_MAX)
        self._crowd_answer_s = answer_s if size > _ANSWER_CROWD else 0.0
        self._near_rest_s, self._distant_rest_s = (
            REST_S * max(1.0, size / crowd) - HEARTBEAT_INTERVAL_S for crowd in (_CROWD, _DISTANT_CROWD)
        )
        self._ticked_s = now_s
        self._awake_s = 0.0  # seconds during which this process ran, as far as ticks show
        self._late_s = 0.0  # recent delay of ticks, decaying
        self._usual_pause_s = 0.0  # the median of the members' pauses (the lower one of two)

    def heard(self, place: int) -> None:
        """Record that a message came from this member."""
        peer = self._peers.get(place)
        if peer is not None:
            silent_s = self._awake_s - peer.heard_s
            # messages in a burst after a pause count as one sign of life
            fading = _FADING ** min(silent_s / HEARTBEAT_INTERVAL_S, 1.0)
            rest_s = self._rest_s(peer)
            is_late = silent_s > rest_s + (1 + _LATE_HEARTBEATS) * HEARTBEAT_INTERVAL_S
            # count only the rest interval of small groups, because the pause is multiplied by `_SLACK`
            silent_s -= max(0.0, rest_s - (REST_S - HEARTBEAT_INTERVAL_S)) if is_late else rest_s
            peer.pause_s = max(fading * peer.pause_s, silent_s if peer.known else 0.0)
            peer.signs += not peer.calls
            peer.heard_s = self._awake_s
            peer.known = True

    def answered(self, place: int, round_trip_s: float) -> None:
        """Record that this member answered a heartbeat or a probe."""
        self.heard(place)
        peer = self._peers.get(place)
        if peer is not None:
            peer.outstanding = False
            peer.pause_s = max(peer.pause_s, round_trip_s)
            peer.signs += peer.calls

    def sent(self, place: int) -> None:
        """Record that a message was sent to this member, which shows it that this one lives."""
        peer = self._peers.get(place)
        if peer is not None:
            peer.sent_s = self._awake_s

    def starting(self, place: int, starting: bool) -> None:
        """Set whether the member's first tensors are on their way."""
        peer = self._peers.get(place)
        if peer is not None:
            peer.starting = starting

    def unanswered(self, place: int) -> None:
        """Record that a heartbeat or a probe got no answer, so that another may be sent."""
        peer = self._peers.get(place)
        if peer is not None:
            peer.outstanding = False

    def forget(self, place: int) -> None:
        """Stop watching a member."""
        self._peers.pop(place, None)

    def tick(self, now_s: float) -> tuple[list[int], list[tuple[int, float]]]:
        """Advance the clock; call it every `HEARTBEAT_INTERVAL_S`. Returns the members to send a heartbeat or
        a probe to, and the failed members with their silence in seconds, which are forgotten.
        """
        elapsed_s = now_s - self._ticked_s
        self._late_s = max(_LATE_FADING * self._late_s, elapsed_s - HEARTBEAT_INTERVAL_S)
        self._awake_s += min(elapsed_s, HEARTBEAT_INTERVAL_S)
        self._ticked_s = now_s
        pauses_s = sorted(peer.pause_s for peer in self._peers.values())
        self._usual_pause_s = pauses_s[(len(pauses_s) - 1) // 2] if pauses_s else 0.0
        heartbeats: list[int] = []
        dead: list[tuple[int, float]] = []
        for place, peer in list(self._peers.items()):
            silent_s = self._awake_s - peer.heard_s
            if silent_s > self.timeout_s(place) - _ROUNDING_S:
                dead.append((place, silent_s))
                del self._peers[place]
            elif not peer.outstanding and self._quiet_s(peer) > self._silence_s(peer) - _ROUNDING_S:
                peer.outstanding, peer.sent_s = True, self._awake_s
                heartbeats.append(place)
        return heartbeats, dead

    def _rests(self, peer: _Peer) -> bool:
        """Return whether the member gets fewer heartbeats: it exchanges no values with this one, is one of
        many, or has answered or sent heartbeats promptly.
        """
        is_prompt = peer.signs >= _SIGNS_MIN and _SLACK * peer.pause_s <= PROBE_S
        return peer.distant or self._is_crowd or is_prompt

    def _quiet_s(self, peer: _Peer) -> float:
        """Return how long this member or this process has been silent to the other. A member that only sends
        may get nothing else from here than heartbeats.
        """
        since_s = min(peer.heard_s, peer.sent_s) if peer.calls else peer.heard_s
        return self._awake_s - since_s

    def _rest_s(self, peer: _Peer) -> float:
        """Return by how much the interval between heartbeats is extended."""
        rest_s = self._distant_rest_s if peer.distant else self._near_rest_s if self._rests(peer) else 0.0
        if peer.calls and not self._dialable:
            return rest_s
        return max(rest_s, min(self._late_s, TIMEOUT_S_MAX))

    def _silence_s(self, peer: _Peer) -> float:
        """Return the silence after which a member gets a heartbeat, or a probe when it should
        have sent one.
        """
        return (HEARTBEAT_INTERVAL_S if peer.calls else _MISSED_MAX * HEARTBEAT_INTERVAL_S) + self._rest_s(
            peer
        )

    def probe_s(self, place: int) -> float:
        """Return how long this member has to answer a probe."""
        peer = self._peers.get(place)
        pause_s = max(peer.pause_s if peer is not None else 0.0, self._usual_pause_s)
        slack_s = max(_SLACK * pause_s, _OWN_DELAY_FACTOR * self._late_s)
        if peer is not None and not peer.distant:
            slack_s = max(slack_s, self._crowd_answer_s)
        return min(max(PROBE_S, slack_s), TIMEOUT_S_MAX)

    def timeout_s(self, place: int) -> float:
        """Return the silence after which this member is marked failed."""
        peer, answer_s = self._peers.get(place), self.probe_s(place)
        if peer is not None and (peer.starting or not peer.known):
            answer_s = max(answer_s, FIRST_S)
        rest_s = self._rest_s(peer) if peer is not None else 0.0
        return _MISSED_MAX * HEARTBEAT_INTERVAL_S + rest_s + answer_s
