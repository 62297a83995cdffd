"""What there is to see of a run at one moment, as values that every face shows: terminal, page, Prometheus,
JSON.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What is trained. All but the id is empty for a run without an owner's specification."""

    run_id: str
    name: str = ""
    description: str = ""
    task: str = ""
    mode: str = ""
    codec: str = ""
    optimizer: str = ""
    version: int = 0
    target: int | None = None  # samples of an epoch
    parameters: int | None = None
    end_epochs: int | None = None
    created_s: float | None = None

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.run_id}" if self.name else self.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """How well the monitor sees: numbers are only as fresh as this."""

    # "joining", "live", "late" (no answer for longer than usual), "lost" (nobody answers)
    status: str = "joining"
    age_s: float | None = None  # since the last look that was answered
    entry: str = ""  # where this monitor came in
    entry_answers: bool | None = None  # None: not asked yet
    known: int = 0  # peers that it could ask
    text: str = ""  # in words, when there is something to say


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer, by its own word."""

    peer_id: str
    short: str
    # "training", "behind", "idle" (lives and does not train), "quiet" (told nothing for too long), "lost",
    # "left"
    state: str
    age_s: float  # of what is shown
    fresh: bool  # whether it counts
    idle_s: float | None = None
    since_s: float | None = None
    name: str = ""
    device: str = ""
    reach: str = ""
    reached: bool | None = None  # by this monitor; None: not tried
    agent: str = ""
    samples_per_s: float = 0.0
    capped: bool = False  # it claims a pace that is not believed: three times the median counts
    epoch: int = 0
    samples: int = 0  # in this epoch
    samples_given: int = 0  # in all rounds
    loss: float | None = None
    validation_loss: float | None = None
    contributed_epoch: int | None = None
    contributed_ago_s: float | None = None
    up_bytes: int = 0
    down_bytes: int = 0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    drift: float | None = None
    rounds_done: int = 0
    rounds_failed: int = 0
    accused_by: int = 0  # how many peers caught it lying as a reducer
    own: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """One round, by the word of those members that told of it: medians."""

    kind: str
    epoch: int
    at_s: float
    members: int
    told_by: int
    seconds: float
    bytes: float  # of all members, both ways
    failed: bool
    failed_for: int  # of those that told
    reason: str = ""
    detail: str = ""
    left: dict[str, str] = field(default_factory=dict)  # PeerID -> why it dropped out
    accused: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    digests: int = 0  # different ones that members told: more than one means that they do not hold the same


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorEvent:
    """Something that happened, in a sentence."""

    number: int  # rising; never used twice by one monitor
    at_s: float
    kind: str
    level: str  # "info", "good", "warning", "bad"
    text: str
    peer_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnView:
    """A metric of the users' own, over the peers that report it."""

    median: float
    least: float
    most: float
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """The state that donors declare: how many of them hold the same."""

    epoch: int
    digest: str
    donors: int  # that hold this one
    others: int  # that declare the same epoch and hold another


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertView:
    """One expert and the peers that serve it."""

    uid: str
    servers: int
    load: float | None = None  # as its servers declare it
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorView:
    """A run at one moment. What is not fresh is not in any sum."""

    at_s: float  # swarm time
    run: RunView
    link: LinkView
    epoch: int = 0
    samples: float = 0.0
    fraction: float | None = None
    eta_s: float | None = None  # to the end of this epoch
    samples_per_s: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None
    drift: float | None = None
    bytes_per_s: float = 0.0  # sent by all peers together
    peers_live: int = 0
    peers_quiet: int = 0
    refused: int = 0  # records that broke the rules, in the last look
    own: dict[str, OwnView] = field(default_factory=dict)
    state: StateSummary | None = None
    peers: tuple[PeerView, ...] = ()
    rounds: tuple[RoundView, ...] = ()  # the newest first
    events: tuple[MonitorEvent, ...] = ()  # the newest last
    experts: tuple[ExpertView, ...] = ()
    checkpoint: str = ""  # what `--save` did last

    @property
    def live(self) -> bool:
        return self.link.status == "live"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers that JSON lacks become null."""
        return {"event": "view", **plain(dataclasses.asdict(self))}


def plain(value: Any) -> Any:
    """Rounded to six digits after the point, or to six in all, and finite."""
    if isinstance(value, float):
        return (
            (round(value, 6) if abs(value) >= 1 else float(f"{value:.6g}")) if math.isfinite(value) else None
        )
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
