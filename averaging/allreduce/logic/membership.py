"""Which members of a running round are alive: heartbeats, probes of suspects, and the reasons of failures.
Pure.

Heartbeats travel on the control connections, apart from the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from averaging.allreduce.logic.effects import Effect, Ping
from averaging.allreduce.logic.failure_detector import FailureDetector
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.values import CallFailure, RoundState

JOIN_S = 5.0  # time for a live member to begin the round


@dataclass(frozen=True, slots=True)
class Failure:
    """A member failed, or (`gave_up`) is alive and has left the round."""

    place: int
    why: str
    gave_up: bool = False


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The reason for which a member is being probed, and what to do with its streams if it is alive."""

    why: str
    lost_reducer: str = ""  # why a live member is lost as a reducer; "": it is not
    lost_sender: str = ""  # why the values of a live member do not count; "": they count


@dataclass(frozen=True, slots=True)
class Alive:
    """A suspect answered, or cannot be asked: it counts as alive."""

    place: int
    suspicion: Suspicion


class Membership:
    """The members of one round, by place. Every method returns the changes that follow from the call."""

    def __init__(self, setup: RoundSetup) -> None:
        self._setup = setup
        own, reducers = setup.own, setup.plan.reducers
        self.detector = FailureDetector(
            [place for place in setup.members if setup.calls(own, place)],
            [place for place in setup.members if setup.calls(place, own)],
            setup.begun_s,
            distant=() if own in reducers else set(setup.members).difference(reducers),
            dialable=setup.can_dial(own),
        )
        self.failed: dict[int, str] = {}  # member -> reason, as a sentence
        self.live = set(setup.members)  # the members that have not failed, this one included
        self._running: set[int] = set()  # members that have said that they run the round
        self._suspects: dict[int, list[Suspicion]] = {}
        self._probed_again: set[int] = set()

    def heard(self, place: int) -> list[Effect]:
        """Record that a message arrived from a member."""
        self.detector.heard(place)
        return []

    def sent(self, place: int) -> list[Effect]:
        """Record that a message was sent to a member."""
        self.detector.sent(place)
        return []

    def tick(self, now_s: float) -> list[Ping | Failure]:
        """Advance the clock; call it every `HEARTBEAT_INTERVAL_S`."""
        due, silent = self.detector.tick(now_s)
        found: list[Ping | Failure] = [
            Failure(place, f"it was silent for {silent_s:.1f} s") for place, silent_s in silent
        ]
        for place in due:
            if self._setup.can_dial(place):
                found.append(Ping(place, self.detector.timeout_s(place)))
        return found

    def suspect(self, place: int, suspicion: Suspicion) -> list[Ping | Alive]:
        """Probe a member now because a connection broke. Without an answer it is marked failed."""
        if place in self.failed:
            return []
        if not self._setup.can_dial(place):  # it cannot be probed; its silence decides
            return [Alive(place, suspicion)]
        probing = place in self._suspects
        self._suspects.setdefault(place, []).append(suspicion)
        return [] if probing else [Ping(place, self.detector.probe_s(place), probe=True)]

    def on_answer(
        self, place: int, state: RoundState, reason: str, round_trip_s: float, now_s: float
    ) -> list[Alive | Failure]:
        """Process the answer to a heartbeat or a probe."""
        self.detector.answered(place, round_trip_s)
        self._probed_again.discard(place)
        suspicions = self._suspects.pop(place, [])
        if place in self.failed:
            return []
        if state is RoundState.RUNNING:
            self._running.add(place)
        elif state is RoundState.FAILED:
            return [Failure(place, reason, gave_up=True)]
        elif state is RoundState.UNKNOWN:
            if place in self._running:
                return [Failure(place, "it has restarted and knows nothing of this round")]
            if now_s - self._setup.begun_s > JOIN_S:
                why = f"it lives, but has not begun this round within {JOIN_S:g} s"
                return [Failure(place, why, gave_up=True)]
        return [Alive(place, suspicion) for suspicion in suspicions]

    def on_no_answer(self, ping: Ping, failure: CallFailure, why: str) -> list[Ping | Failure]:
        """Process a heartbeat or a probe that was not answered."""
        place = ping.place
        self.detector.unanswered(place)
        if place in self.failed:
            return []
        if failure is CallFailure.REFUSED:
            return [Failure(place, f"it has left the round: {why}", gave_up=True)]
        if not ping.probe:
            if failure is CallFailure.SILENT:
                return []  # its silence decides
            return [
                found
                for found in self.suspect(place, Suspicion(f"its connection broke ({why})"))
                if isinstance(found, Ping)
            ]
        if place not in self._probed_again:  # the first call may have used the old, broken connection
            self._probed_again.add(place)
            return [ping]
        suspicions = self._suspects.pop(place, [])
        self._probed_again.discard(place)
        return [Failure(place, suspicions[0].why if suspicions else why)]

    def mark_failed(self, failure: Failure, doing: str) -> str:
        """Record a failure. `doing`: what the member was doing. Return the sentence about it, "" if it is
        known.
        """
        place = failure.place
        if place in self.failed:
            return ""
        how = "gave up" if failure.gave_up else "died"
        self.failed[place] = f"{self._setup.name(place)} {how} while {doing}: {failure.why}"
        self.live.discard(place)
        self.detector.forget(place)
        self._suspects.pop(place, None)
        return self.failed[place]
