"""A run with simulated peers for tests of the monitor, and the records that they publish."""

from __future__ import annotations

from typing import Any

from averaging.optim.progress.logic.reports import ProgressReport
from swarm.core.ids import PeerId
from swarm.metrics.record import Metrics, RoundReport
from swarm.monitor.logic.model import Model
from swarm.monitor.logic.tracked import PeerRecords, Poll
from swarm.monitor.logic.view import LinkView, MonitorEvent, RunView

RUN = RunView(run_id="a" * 20, name="tiny", version=1, target=1000)
LIVE = LinkView(status="", entry="198.51.100.1:4000", entry_answers=True, known=5)


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def metrics(at_s: float, **fields: Any) -> Metrics:
    known: dict[str, Any] = {
        "since_s": at_s - 100.0,
        "every_s": 2.0,
        "epoch": 7,
        "samples_per_s": 100.0,
        "device": "cpu",
        "loss": 2.0,
    }
    return Metrics(at_s=at_s, **{**known, **fields})


def round_report(at_s: float, **fields: Any) -> RoundReport:
    known: dict[str, Any] = {
        "kind": "epoch",
        "epoch": 7,
        "seconds": 1.0,
        "bytes": 1000,
        "members": 4,
        "group": "ab",
        "digest": "cd",
    }
    return RoundReport(at_s=at_s, **{**known, **fields})


def report(at_s: float, **fields: Any) -> ProgressReport:
    known: dict[str, Any] = {"epoch": 7, "samples": 100, "rate": 100.0, "since_s": at_s - 5.0}
    return ProgressReport(at_s=at_s, **{**known, **fields})


def peer_records(at_s: float, **fields: Any) -> PeerRecords:
    return PeerRecords(metrics=metrics(at_s, **fields), expires_s=at_s + 8.0)


def poll(peers: dict[PeerId, PeerRecords], **fields: Any) -> Poll:
    return Poll(peers=peers, **fields)


class WatchedRun:
    """A model, and a clock that the test moves."""

    def __init__(self, peers: int = 4, **fields: Any) -> None:
        self.now_s = 1_000_000.0
        self.model = Model(RUN)
        self.model.on_link(LIVE, self.now_s)
        self.present = {peer(number): dict(fields) for number in range(1, peers + 1)}
        self.poll()

    def poll(self, after_s: float = 0.0, **others: Any) -> None:
        """Advance the clock and feed the model with new records of all present peers; `others` are fields of
        the poll.
        """
        self.now_s += after_s
        peers = {who: peer_records(self.now_s, **fields) for who, fields in self.present.items()}
        self.model.on_poll(poll(peers, **others), self.now_s)

    def events(self, kind: str = "") -> list[MonitorEvent]:
        return [event for event in self.model.events.latest if kind in ("", event.kind)]

    def view(self) -> Any:
        return self.model.view(self.now_s)
