"""State of the demo's peers, computed from their events. No I/O, so that tests need no processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from swarm.run.events import Event


@dataclass(slots=True)
class DemoPeer:
    """State of one volunteer, according to its events."""

    name: str
    status: Literal["starting", "preparing", "downloaded", "training", "finished", "failed"] = "starting"
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
    """Summary of the demo."""

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
    """State of all peers. `apply` updates it with an event of a child."""

    def __init__(self, volunteers: list[str], seconds: float = 60.0) -> None:
        self.peers = {name: DemoPeer(name) for name in volunteers}
        self.losses: dict[int, list[float]] = {}  # epoch -> losses that its members reported
        self.validation: dict[int, float] = {}
        self.swarm_samples_per_s = 0.0
        self.target = 0
        self.filled = 0
        self.trained_s = 0.0  # since all volunteers train
        self.planned_s = seconds  # planned duration of the training
        self.join_line = ""
        self.invite = ""  # the invite with which the others enter the founder's run
        self.page = ""  # address of the monitor's page
        self.problems: list[str] = []

    @property
    def epoch(self) -> int:
        return max((peer.epoch for peer in self.peers.values()), default=0)

    @property
    def sent_bytes(self) -> int:
        return sum(peer.sent_bytes for peer in self.peers.values())

    def loss_history(self) -> list[float]:
        """Return the mean loss of each epoch over the peers that reported it, in the order of epochs."""
        return [sum(values) / len(values) for _, values in sorted(self.losses.items())]

    def apply(self, name: str, event: Mapping[str, Any]) -> None:
        """Update the state with an event of a child. Unknown kinds are ignored."""
        peer = self.peers.get(name)
        kind = event.get("event")
        if kind == "error":
            self.problems.append(f"{name}: {event.get('text', '')}")
        if peer is None:
            return
        if kind == "listening":
            peer.peer_id, peer.status = event["peer_id"], "preparing"
            self.invite = self.invite or event["invite"]
        elif kind == "run":
            self.target = event["target_batch_size"]
        elif kind == "state":
            peer.status, peer.epoch = "downloaded", event["epoch"]
        elif kind == "joined":
            peer.status = "training"
            self.join_line = self.join_line or event["join_line"]
        elif kind == "contributing":
            peer.contributing_s = event["start_s"]
        elif kind == "progress":
            peer.samples_per_s, peer.status = event["samples_per_s"], "training"
            self.swarm_samples_per_s, self.filled = event["swarm_samples_per_s"], event["swarm_samples"]
        elif kind == "epoch":
            self._epoch(peer, event)
        elif kind == "round_failed":
            peer.failed_rounds += 1
        elif kind == "finished":
            peer.status, peer.reason = "finished", event["reason"]
            peer.samples, peer.rounds, peer.sent_bytes = (
                event["samples"],
                event["rounds"],
                event["sent_bytes"],
            )
        elif kind == "error":
            peer.status = "failed"

    def ended(self, name: str, error: str | None) -> None:
        """Record that the process of a child has ended, with its last error or None if it ended normally."""
        if error is not None:
            if name in self.peers:
                self.peers[name].status = "failed"
            if not any(problem.startswith(f"{name}: ") for problem in self.problems):
                self.problems.append(f"{name}: {error}")

    def _epoch(self, peer: DemoPeer, event: Mapping[str, Any]) -> None:
        peer.epoch, peer.status = event["epoch"], "training"
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
        """Return the summary of the demo after `seconds`."""
        digests: dict[int, list[str]] = {}
        for peer in self.peers.values():
            for epoch, digest in peer.digests.items():
                digests.setdefault(epoch, []).append(digest)
        shared = [values for values in digests.values() if len(values) > 1]
        losses = self.loss_history()
        shown = ("name", "peer_id", "samples", "rounds", "failed_rounds", "sent_bytes", "contributing_s")
        return DemoFinished(
            seconds=seconds,
            epochs=self.epoch,
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
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
