"""Alerts: problems in a run that need its owner, each reported once. Pure: times are seconds of swarm time.

Loss: the median loss of the last minute is far above the lowest one of the last hours, or most peers report
one that is not finite. Stall: no epoch has ended for a long time. Members: half of them have left. Lineage:
peers continued without a majority, or are in several histories.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from swarm.core.wording import duration
from swarm.monitor.logic.view import MonitorView

AlertKind: TypeAlias = Literal["loss", "stall", "members", "lineage"]

REPEAT_S: Final = 3600.0  # minimum time between two alerts of one kind
DAY_MAX: Final = 48  # alerts in 24 hours, of all kinds
_DAY_S: Final = 86400.0
_MINUTE_S: Final = 60.0  # losses are summarized over this time
_LOSS_MINUTES: Final = 360
_LOSS_MINUTES_MIN: Final = 3  # minutes with losses that are needed before a comparison
# rise above the lowest loss of the last hours that causes an alert. Too small: noise causes alerts; too
# large: a slow divergence is seen late
_LOSS_RISE: Final = 0.3
_LOSS_RISE_MIN: Final = 0.1  # minimum rise, for losses near zero
_STALL_EPOCHS: Final = 5.0  # an epoch that takes this many times the usual length is a stall
_STALL_S_MIN: Final = 600.0
_EPOCHS_KEPT: Final = 20
_MEMBERS_S: Final = 900.0  # time within which half of the members must have left
_MEMBERS_MIN: Final = 2
_EVENTS: Final = ("break", "reunion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert, in a sentence."""

    kind: AlertKind
    run: str
    at_s: float
    text: str
    withheld: int = 0  # alerts of this kind since the last one that was sent


class Alerts:
    """Watches the views of one run."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_LOSS_MINUTES)  # the median of each minute
        self._minute: list[float] = []
        self._minute_s: float | None = None
        self._epoch: int | None = None
        self._epoch_s = 0.0  # when the present epoch began
        self._lengths: deque[float] = deque(maxlen=_EPOCHS_KEPT)
        self._members: deque[tuple[float, int]] = deque()  # (time, number), one for each minute
        self._event: int | None = None  # number of the newest event that was processed
        self._was_divided = False
        self._sent_s: dict[AlertKind, float] = {}
        self._withheld: dict[AlertKind, int] = {}
        self._day: deque[float] = deque()

    def step(self, view: MonitorView) -> list[Alert]:
        """Process a view, and return the alerts to send now."""
        if view.link.status == "lost":
            text = f"no peer answers the monitor. {view.link.text}".strip()
            return [one for one in [self._limited(self._alert(view, "members", text))] if one is not None]
        if not view.live:
            return []
        found = [*self._loss(view), *self._stall(view), *self._dropped(view), *self._lineage(view)]
        return [one for one in map(self._limited, found) if one is not None]

    def _limited(self, alert: Alert) -> Alert | None:
        """Return the alert with the number of those withheld before it, or None if it is withheld, too."""
        while self._day and alert.at_s - self._day[0] >= _DAY_S:
            self._day.popleft()
        last_s = self._sent_s.get(alert.kind)
        if (last_s is not None and alert.at_s - last_s < REPEAT_S) or len(self._day) >= DAY_MAX:
            self._withheld[alert.kind] = self._withheld.get(alert.kind, 0) + 1
            return None
        self._sent_s[alert.kind] = alert.at_s
        self._day.append(alert.at_s)
        return replace(alert, withheld=self._withheld.pop(alert.kind, 0))

    def _alert(self, view: MonitorView, kind: AlertKind, text: str) -> Alert:
        return Alert(kind=kind, run=view.run.full_name, at_s=view.at_s, text=text)

    def _loss(self, view: MonitorView) -> Iterator[Alert]:
        live = [peer for peer in view.peers if peer.fresh and not peer.stranger]
        broken = sum(any(name in ("loss", "validation_loss") for name in peer.broken) for peer in live)
        if broken and 2 * broken >= len(live):
            yield self._alert(
                view, "loss", f"the loss of {broken} of {len(live)} peers is not a finite number"
            )
            return
        value = view.validation_loss if view.validation_loss is not None else view.loss
        if value is None or not view.peers_live:
            return
        self._minute.append(value)
        if self._minute_s is None:
            self._minute_s = view.at_s
        if view.at_s - self._minute_s < _MINUTE_S:
            return
        now = statistics.median(self._minute)
        self._minute, self._minute_s = [], None
        if len(self._losses) >= _LOSS_MINUTES_MIN:
            lowest = min(self._losses)
            if now > lowest + max(_LOSS_RISE * abs(lowest), _LOSS_RISE_MIN):
                yield self._alert(view, "loss", f"the loss is {now:.4g}, and was {lowest:.4g} before")
        self._losses.append(now)

    def _stall(self, view: MonitorView) -> Iterator[Alert]:
        if view.run.paused or view.run.ended:
            self._epoch = None  # the epoch's time starts again when the run continues
            return
        if self._epoch != view.epoch:
            if self._epoch is not None and view.epoch > self._epoch:
                self._lengths.append((view.at_s - self._epoch_s) / (view.epoch - self._epoch))
            self._epoch, self._epoch_s = view.epoch, view.at_s
            return
        usual_s = statistics.median(self._lengths) if self._lengths else 0.0
        since_s = view.at_s - self._epoch_s
        if since_s <= max(_STALL_EPOCHS * usual_s, _STALL_S_MIN):
            return
        who = f"{view.peers_live} peers train" if view.peers_live else "nobody trains"
        usually = f"; epochs usually take {duration(usual_s)}" if usual_s else ""
        yield self._alert(
            view, "stall", f"epoch {view.epoch:,} has not ended for {duration(since_s)}, and {who}{usually}"
        )

    def _dropped(self, view: MonitorView) -> Iterator[Alert]:
        if view.run.paused or view.run.ended:
            self._members.clear()
            return
        while self._members and view.at_s - self._members[0][0] > _MEMBERS_S:
            self._members.popleft()
        most = max((count for _, count in self._members), default=0)
        if not self._members or view.at_s - self._members[-1][0] >= _MINUTE_S:
            self._members.append((view.at_s, view.peers_live))
        if most >= _MEMBERS_MIN and 2 * view.peers_live <= most:
            self._members.clear()  # the next alert needs a new decline
            self._members.append((view.at_s, view.peers_live))
            text = f"{view.peers_live} of {most} peers are left of those that took part a few minutes ago"
            yield self._alert(view, "members", text)

    def _lineage(self, view: MonitorView) -> Iterator[Alert]:
        last = max((event.number for event in view.events), default=0)
        if self._event is not None:
            texts = [one.text for one in view.events if one.number > self._event and one.kind in _EVENTS]
            if texts:
                yield self._alert(view, "lineage", "; ".join(texts[:3]))
        self._event = max(last, self._event or 0)
        is_divided = len(view.histories) > 1
        if is_divided and not self._was_divided and view.peers_live > 1:
            parts = ", ".join(f"{one.peers} in {one.head[:8]}" for one in view.histories[:4])
            yield self._alert(view, "lineage", f"peers are in {len(view.histories)} histories: {parts}")
        self._was_divided = is_divided
