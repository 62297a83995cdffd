"""What the demo knows about its peers, gathered from their events; no I/O, so that its sums can be tested
without processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from swarm.run.events import Event


@dataclass(slots=True)
class DemoPeer:
    """One volunteer, as it described itself."""

    name: str
    doing: str = "starting"
    peer_id: str = ""
    epoch: int = 0
    samples: int = 0
    samples_per_s: float = 0.0
    rounds: int = 0
    failed_rounds: int = 0
    sent_bytes: int = 0
    contributing_s: float | None = None
    digests: dict[int, str] = field(default_factory=dict)  # epoch -> digest of the averaged vector
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFinished(Event):
    """The summary."""

    kind: ClassVar[str] = "summary"
    seconds: float
    epochs: int
    loss_first: float | None
    loss_last: float | None
    validation_loss: float | None
    sent_bytes: int
    digests_compared: int  # epochs that at least two peers completed
    digests_equal: bool
    peers: list[dict[str, Any]]
    join_line: str
    problems: list[str]


class DemoState:
    """Fed with (child, event); read by the view and the summary."""

    def __init__(self, volunteers: list[str], seconds: float = 60.0) -> None:
        self.peers = {name: DemoPeer(name) for name in volunteers}
        self.losses: dict[int, list[float]] = {}  # epoch -> what its members reported
        self.validation: dict[int, float] = {}
        self.swarm_samples_per_s = 0.0
        self.parameters = 0
        self.target = 0
        self.filled = 0
        self.trained_s = 0.0  # since everybody trains
        self.planned_s = seconds  # for how long they will
        self.join_line = ""
        self.page = ""  # where a monitor shows the run
        self.problems: list[str] = []

    @property
    def epoch(self) -> int:
        return max((peer.epoch for peer in self.peers.values()), default=0)

    @property
    def sent_bytes(self) -> int:
        return sum(peer.sent_bytes for peer in self.peers.values())

    def loss_course(self) -> list[float]:
        """Mean over the peers that reported an epoch, in the order of epochs."""
        return [sum(values) / len(values) for _, values in sorted(self.losses.items())]

    def apply(self, name: str, event: Mapping[str, Any]) -> None:
        """Take one event of one child; unknown kinds are ignored."""
        peer = self.peers.get(name)
        kind = event.get("event")
        if kind == "error":
            self.problems.append(f"{name}: {event.get('text', '')}")
        if peer is None:
            return
        if kind == "listening":
            peer.peer_id, peer.doing = event["peer_id"], "preparing"
        elif kind == "run":
            self.parameters, self.target = event["parameters"], event["target_batch_size"]
        elif kind == "state":
            peer.doing, peer.epoch = "downloaded", event["epoch"]
        elif kind == "joined":
            peer.doing = "training"
            self.join_line = self.join_line or event["join_line"]
        elif kind == "contributing":
            peer.contributing_s = event["start_s"]
        elif kind == "progress":
            peer.samples_per_s, peer.doing = event["samples_per_s"], "training"
            self.swarm_samples_per_s, self.filled = event["swarm_samples_per_s"], event["swarm_samples"]
        elif kind == "epoch":
            self._epoch(peer, event)
        elif kind == "round_failed":
            peer.failed_rounds += 1
        elif kind == "finished":
            peer.doing, peer.reason = "finished", event["reason"]
            peer.samples, peer.rounds, peer.sent_bytes = (
                event["samples"],
                event["rounds"],
                event["sent_bytes"],
            )
        elif kind == "error":
            peer.doing = "failed"

    def ended(self, name: str, complaint: str | None) -> None:
        """The child's process is gone; `complaint` is what it last said, None when it left as it should."""
        if complaint is not None:
            if name in self.peers:
                self.peers[name].doing = "failed"
            if not any(problem.startswith(f"{name}: ") for problem in self.problems):
                self.problems.append(f"{name}: {complaint}")

    def _epoch(self, peer: DemoPeer, event: Mapping[str, Any]) -> None:
        peer.epoch, peer.doing = event["epoch"], "training"
        peer.samples += event["samples"]
        peer.rounds += 1
        peer.samples_per_s = event["samples_per_s"]
        peer.sent_bytes += event["sent_bytes"]
        self.swarm_samples_per_s, self.filled = event["swarm_samples_per_s"], 0
        if event["samples"]:
            self.losses.setdefault(event["epoch"], []).append(event["loss"])
        if event["validation_loss"] is not None:
            self.validation[event["epoch"]] = event["validation_loss"]
        if event["digest"] is not None:
            peer.digests[event["epoch"]] = event["digest"]

    def summary(self, seconds: float) -> DemoFinished:
        """What to tell at the end."""
        digests: dict[int, list[str]] = {}
        for peer in self.peers.values():
            for epoch, digest in peer.digests.items():
                digests.setdefault(epoch, []).append(digest)
        shared = [values for values in digests.values() if len(values) > 1]
        course = self.loss_course()
        shown = ("name", "peer_id", "samples", "rounds", "failed_rounds", "sent_bytes", "contributing_s")
        return DemoFinished(
            seconds=seconds,
            epochs=self.epoch,
            loss_first=course[0] if course else None,
            loss_last=course[-1] if course else None,
            validation_loss=self.validation[max(self.validation)] if self.validation else None,
            sent_bytes=self.sent_bytes,
            digests_compared=len(shared),
            digests_equal=bool(shared) and all(len(set(values)) == 1 for values in shared),
            peers=[
                {key: value for key, value in dataclasses.asdict(peer).items() if key in shown}
                for peer in self.peers.values()
            ],
            join_line=self.join_line,
            problems=self.problems,
        )
