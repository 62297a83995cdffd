"""What happens to a volunteer, as values: the command line shows them, `--json` prints them one a line, tests
and the demo read them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. `kind` is what the JSON line calls it, a literal that readers may rely on."""

    kind: ClassVar[str] = ""

    def json_line(self) -> str:
        """One line of JSON: `event`, then the fields. Numbers that JSON lacks become null."""
        return json.dumps({"event": self.kind, **_plain(dataclasses.asdict(self))}, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Event):
    """The node is up."""

    kind: ClassVar[str] = "listening"
    peer_id: str
    addresses: list[str]  # what other peers can join by


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFound(Event):
    """The run to take part in is known and its specification genuine; what a volunteer is told before being
    asked.
    """

    kind: ClassVar[str] = "run"
    name: str
    run_id: str
    version: int
    founded: bool  # by this process
    summary: str
    sample: str
    parameters: int
    memory_bytes: int  # of this machine; with device_memory_bytes beside it, what the process takes besides
    memory_free_bytes: int
    device_memory_bytes: int | None  # of the CUDA device; None: no CUDA device was asked for by name
    target_batch_size: int
    batch_size: int
    round_bytes: int  # sent by one volunteer in one epoch, and as much received
    # each way, from the swarm's measured pace; None: nothing measured yet
    traffic_bytes_per_hour: float | None
    peers: int  # volunteers that are there already


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
    """Training begins."""

    kind: ClassVar[str] = "joined"
    peer_id: str
    run_id: str
    join_line: str  # with which another terminal can join through this peer
    device: str
    data: str
    start_s: float  # since the process started


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDownloaded(Event):
    """The current parameters and optimizer state came from peers."""

    kind: ClassVar[str] = "state"
    epoch: int
    seconds: float
    received_bytes: int
    donors: int
    digest: str | None
    avoided: dict[str, str] = field(default_factory=dict)  # donors that lied or failed, by PeerID, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """A checkpoint lies on the disk."""

    kind: ClassVar[str] = "checkpoint"
    epoch: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Event):
    """This volunteer does not train for a while."""

    kind: ClassVar[str] = "paused"
    reason: str
    member: bool  # True: it stays in the run and gives the state; False: it has left the rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """It trains again."""

    kind: ClassVar[str] = "resumed"
    seconds: float  # of pause


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanged(Event):
    """The run's owner published a newer version of its specification."""

    kind: ClassVar[str] = "changed"
    version: int
    changes: list[str]
    restart: bool  # something else is different, too, which needs a new start


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed(Event):
    """The first samples of this process are in the swarm's accounts."""

    kind: ClassVar[str] = "contributing"
    epoch: int
    start_s: float  # since the process started, torch's import included


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress(Event):
    """About once a second while an epoch fills."""

    kind: ClassVar[str] = "progress"
    epoch: int
    loss: float
    samples_per_s: float
    swarm_samples: int
    swarm_samples_per_s: float
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone(Event):
    """The swarm's gradients were averaged and the optimizer stepped."""

    kind: ClassVar[str] = "epoch"
    epoch: int  # how many are complete now
    loss: float  # mean over this peer's samples of the epoch
    validation_loss: float | None  # only in some epochs
    samples: int  # of this peer in this epoch
    samples_per_s: float
    swarm_samples_per_s: float
    peers: int  # members of the round
    sent_bytes: int  # of this peer in this epoch's rounds
    round_s: float
    digest: str | None  # of the averaged vector, equal on every member
    state_digest: str | None  # of the canonical state, in epochs that averaged it
    drift: float | None  # in those: how far this peer's parameters were from the average, relative norm


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed(Event):
    """A round did not come about; nothing was changed by it."""

    kind: ClassVar[str] = "round_failed"
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resynchronised(Event):
    """This peer had fallen behind and fetched the state anew, or tried to."""

    kind: ClassVar[str] = "resynchronised"
    epoch: int
    loaded: bool
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """Something that a person should know, in a sentence."""

    kind: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """The last word of a volunteer."""

    kind: ClassVar[str] = "finished"
    reason: str
    epoch: int
    samples: int
    rounds: int
    failed_rounds: int
    loss_first: float | None
    loss_last: float | None
    validation_loss: float | None
    seconds: float
    sent_bytes: int
    digest: str | None  # the last one
    digest_epoch: int | None
    # estimated before joining, and what was really taken at the peak; the device's are 0 without a CUDA
    # device
    memory_bytes: int = 0  # of this machine, by the whole process
    memory_peak_bytes: int = 0
    device_memory_bytes: int = 0
    device_memory_peak_bytes: int = 0  # by tensors
    device_memory_reserved_bytes: int = 0  # by torch, at the peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The command ended with an error; also printed as a sentence on standard error."""

    kind: ClassVar[str] = "error"
    text: str


Emit = Callable[[Event], None]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
