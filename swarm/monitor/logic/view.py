"""View of a run at one moment, as plain values that every output shows: terminal, page, Prometheus, JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

# "late": no answer for longer than usual; "lost": no peer answers
LinkStatus: TypeAlias = Literal["joining", "live", "late", "lost"]
# "idle": alive but not training; "quiet": published nothing for too long
PeerActivity: TypeAlias = Literal["training", "behind", "idle", "quiet", "lost", "left"]
RunStanding: TypeAlias = Literal["live", "paused", "ended", "empty"]
EventLevel: TypeAlias = Literal["info", "good", "warning", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Description of the run. All fields but the id are empty for a run without an owner's specification."""

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
    created_s: float | None = None
    paused: bool = False  # its owner has paused it
    pauses: tuple[tuple[float, float], ...] = ()  # pauses that the owner has planned: start and end
    ended: bool = False
    message: str = ""  # the owner's message to volunteers

    def differences(self, newer: RunView) -> str:
        """Return what the owner changed, as far as this view shows it; "" where it shows nothing of it."""
        found = []
        if newer.ended != self.ended:
            found.append("ended" if newer.ended else "open again")
        if newer.paused != self.paused:
            found.append("paused" if newer.paused else "training continues")
        if newer.target != self.target:
            found.append(f"an epoch is {newer.target or 0:,} samples")
        if newer.pauses != self.pauses:
            found.append("other planned pauses" if newer.pauses else "no planned pause")
        if newer.message != self.message:
            found.append(f"a message: {newer.message}" if newer.message else "no message")
        return ", ".join(found)

    def at(self, now_s: float) -> RunView:
        """Return the run as it is at this moment: during a planned pause it is paused."""
        is_planned = any(starts_s <= now_s < ends_s for starts_s, ends_s in self.pauses)
        return replace(self, paused=self.paused or is_planned)

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.run_id}" if self.name else self.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """Quality of the monitor's connection to the swarm, which limits the freshness of all other values."""

    status: LinkStatus = "joining"
    age_s: float | None = None  # time since the last answered poll
    entry: str = ""  # address by which this monitor joined
    entry_answers: bool | None = None  # None: not asked yet
    known: int = 0  # peers that this monitor could ask
    text: str = ""  # a sentence about the link, if there is a problem


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer, as it describes itself."""

    peer_id: str
    short: str
    state: PeerActivity
    age_s: float  # age of its newest record
    fresh: bool  # its values are included in sums
    idle_s: float | None = None
    since_s: float | None = None
    name: str = ""
    device: str = ""
    reach: str = ""
    reached: bool | None = None  # whether this monitor reached it; None: not tried
    agent: str = ""
    samples_per_s: float = 0.0
    capped: bool = False  # it claims too high a rate, of which three times the median is counted
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
    head: str = ""  # first bytes in hex; "": its mode has no common state
    line: str = ""  # line of its history, see `HistoryView`
    epochs_given_up: int = 0
    rounds_done: int = 0
    rounds_failed: int = 0
    accused_by: int = 0  # number of peers that caught it lying as a reducer
    stranger: bool = False  # no certificate names it; its values are shown, but not counted
    own: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """One round, as medians over the members that reported it."""

    kind: str
    epoch: int
    at_s: float
    members: int
    reported_by: int
    seconds: float
    bytes: float  # bytes of all members, both ways
    failed: bool
    failed_for: int  # members that report a failure
    reason: str = ""
    detail: str = ""
    left: dict[str, str] = field(default_factory=dict)  # PeerID -> reason why it dropped out
    accused: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    digests: int = 0  # number of different digests: more than one means that members hold different averages


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorEvent:
    """An event, described in one sentence."""

    number: int  # increasing; never used twice by one monitor
    at_s: float
    kind: str
    level: EventLevel
    text: str
    peer_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnView:
    """A metric defined by users, over the peers that report it."""

    median: float
    minimum: float
    maximum: float
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """The state that most donors declare, and how many of them hold it."""

    epoch: int
    digest: str
    donors: int  # donors that hold this state
    others: int  # donors that declare the same epoch and hold another state


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """One history of the run. Peers in different histories train different models."""

    head: str  # first bytes in hex, as most of its peers report it
    line: str  # first bytes of the head after its last break, in hex; "": there was no break
    epoch: int  # epoch of `head`
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderView:
    """One peer that has given to the run, with its totals, as members have signed them."""

    peer_id: str
    short: str
    name: str  # the name that this monitor saw last; "": it gives none, or was not seen
    samples: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertView:
    """One expert and the peers that serve it."""

    uid: str
    servers: int
    load: float | None = None  # seconds of wait, as its servers declare it
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayReport:
    """One relay, as it describes itself: a peer that carries the calls of others to peers that nobody can
    call.
    """

    peer_id: str
    short: str
    age_s: float  # age of its report
    reservations: int = 0  # reservations that peers hold now
    circuits: int = 0  # open circuits
    carried_bytes: int = 0  # bytes since its start, in both directions
    refused: int = 0  # refused requests since its start


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorView:
    """A run at one moment. Sums contain only fresh values."""

    at_s: float  # swarm time
    run: RunView
    link: LinkView
    epoch: int = 0
    samples: float = 0.0
    fraction: float | None = None
    eta_s: float | None = None  # time to the end of this epoch
    samples_per_s: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None
    drift: float | None = None
    bytes_per_s: float = 0.0  # sent by all peers together
    peers_live: int = 0
    peers_quiet: int = 0
    strangers: int = 0  # strangers, which are shown but not counted
    refused: int = 0  # malformed records in the last poll
    own: dict[str, OwnView] = field(default_factory=dict)
    state: StateSummary | None = None
    histories: tuple[HistoryView, ...] = ()  # the one with the most peers first
    peers: tuple[PeerView, ...] = ()
    rounds: tuple[RoundView, ...] = ()  # the newest first
    events: tuple[MonitorEvent, ...] = ()  # the newest last
    experts: tuple[ExpertView, ...] = ()
    relays: tuple[RelayReport, ...] = ()  # known relays, the one with the most bytes first
    leaders: tuple[LeaderView, ...] = ()  # those that have given most, the first one before the others
    contributors: int = 0  # number of all contributors, of which the listed ones are the first
    samples_given: int = 0  # samples given by all of them
    checkpoint: str = ""  # last checkpoint of `--save`, as a sentence

    @property
    def live(self) -> bool:
        return self.link.status == "live"

    @property
    def standing(self) -> RunStanding:
        """Return whether the run is trained, given its owner's decisions and the present peers."""
        if self.run.ended or self.run.paused:
            return "ended" if self.run.ended else "paused"
        return "live" if self.peers_live else "empty"

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, in which NaN and infinities are null."""
        return {"event": "view", **plain(dataclasses.asdict(self))}


def plain(value: Any) -> Any:
    """Round floats to six decimals (six significant digits below 1) and replace NaN and infinities by None,
    recursively.
    """
    if isinstance(value, float):
        return (
            (round(value, 6) if abs(value) >= 1 else float(f"{value:.6g}")) if math.isfinite(value) else None
        )
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
