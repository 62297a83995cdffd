"""Log of events as sentences. It is bounded. Neither a single peer nor all strangers together can fill it."""

from __future__ import annotations

from collections import deque

from swarm.monitor.logic.view import EventLevel, MonitorEvent

_PER_PEER_MAX = 6  # events about one peer within a minute
_PER_STRANGERS_MAX = 12  # events about all peers that are not members within a minute
_MINUTE_S = 60.0
_TEXT_CHARACTERS_MAX = 300
_STRANGERS = "strangers"  # cannot collide with a PeerID


class EventLog:
    """The latest events. `take` returns each new event once, for a caller that stores them."""

    def __init__(self, events_max: int = 300) -> None:
        self._events_max = events_max
        self._events: deque[MonitorEvent] = deque()
        self._of_strangers: deque[int] = deque()  # numbers of the events about strangers
        self._next = 1
        self._recent: deque[tuple[float, str]] = deque(maxlen=4096)
        self._new: list[MonitorEvent] = []

    def add(
        self,
        at_s: float,
        kind: str,
        level: EventLevel,
        text: str,
        peer_id: str = "",
        *,
        stranger: bool = False,
    ) -> None:
        """Add an event at swarm time `at_s`, unless its peer had too many within the last minute. With
        `stranger`, the limit is shared by all strangers.
        """
        while self._recent and self._recent[0][0] < at_s - _MINUTE_S:
            self._recent.popleft()
        if peer_id and sum(1 for _, peer in self._recent if peer == peer_id) >= _PER_PEER_MAX:
            return
        if stranger and sum(1 for _, peer in self._recent if peer == _STRANGERS) >= _PER_STRANGERS_MAX:
            return
        self._recent.append((at_s, peer_id))
        if stranger:
            self._recent.append((at_s, _STRANGERS))
            self._of_strangers.append(self._next)
        event = MonitorEvent(
            number=self._next,
            at_s=at_s,
            kind=kind,
            level=level,
            text=text[:_TEXT_CHARACTERS_MAX],
            peer_id=peer_id,
        )
        self._next += 1
        self._events.append(event)
        self._new.append(event)
        self._bound()

    def restore(self, events: list[MonitorEvent]) -> None:
        """Insert the events of an earlier process before the current ones."""
        self._events.extendleft(reversed(events))
        self._bound()
        self._next = max([self._next, *(event.number + 1 for event in events)])

    def _bound(self) -> None:
        """Drop the oldest events; first those of strangers, while these take more than half of the log."""
        while len(self._events) > self._events_max:
            if len(self._of_strangers) > self._events_max // 2:
                oldest = self._of_strangers.popleft()
                self._events.remove(next(one for one in self._events if one.number == oldest))
            else:
                number = self._events.popleft().number
                if self._of_strangers and self._of_strangers[0] == number:
                    self._of_strangers.popleft()

    @property
    def latest(self) -> tuple[MonitorEvent, ...]:
        return tuple(self._events)

    def take(self) -> list[MonitorEvent]:
        """Return the events since the last call."""
        new, self._new = self._new, []
        return new
