"""Events of a volunteer, as frozen values. The command line shows them, `--json` prints one per line, and
tests and the demo read them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from swarm.net.logic.reachability import NodeReach
from swarm.run.contributions import Given


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class of all events. `kind` is the value of `event` in the JSON line and never changes."""

    kind: ClassVar[str] = ""

    def json_line(self) -> str:
        """Return one line of JSON: `event`, then the fields. NaN and infinities become null."""
        return json.dumps({"event": self.kind, **_plain(dataclasses.asdict(self))}, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Event):
    """The node has started."""

    kind: ClassVar[str] = "listening"
    peer_id: str
    addresses: list[str]  # addresses by which other peers can join
    invite: str = ""  # the invite with which they join an invited run instead
    reach: NodeReach  # see `Node.reach`


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFound(Event):
    """The run was found and its specification is valid. The volunteer sees this before it agrees to train."""

    kind: ClassVar[str] = "run"
    name: str
    run_id: str
    version: int
    members: str  # "invited" or "open"
    created: bool  # True: this process created the run; False: it joins it
    summary: str
    sample: str
    parameters: int
    memory_bytes: int  # host memory of the process, without device_memory_bytes
    memory_free_bytes: int
    device_memory_bytes: int | None  # on the CUDA device; None: no CUDA device was named
    target_batch_size: int
    batch_size: int
    round_bytes: int  # sent by one volunteer in one epoch; as much is received
    # in each direction, from the measured pace of the swarm; None: nothing was measured yet
    traffic_bytes_per_hour: float | None
    peers: int  # volunteers that train already
    downloads: list[str]  # downloads of the task from outside the swarm
    message: str = ""  # the owner's message to volunteers
    pauses: list[str] = field(default_factory=list)  # pauses that the owner has planned, in local time


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
    """This volunteer begins to train."""

    kind: ClassVar[str] = "joined"
    peer_id: str
    run_id: str
    join_line: str  # the command that joins through this peer
    device: str
    data: str
    start_s: float  # since the process started


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDownloaded(Event):
    """The parameters and the optimizer state were downloaded from peers."""

    kind: ClassVar[str] = "state"
    epoch: int
    seconds: float
    received_bytes: int
    donors: int
    digest: str | None
    avoided: dict[str, str] = field(default_factory=dict)  # PeerID of a donor that failed -> reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """A checkpoint was written to the disk."""

    kind: ClassVar[str] = "checkpoint"
    epoch: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Event):
    """This volunteer stops training for a while."""

    kind: ClassVar[str] = "paused"
    reason: str
    member: bool  # True: it stays a member and serves the state; False: it has left the run's rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """This volunteer trains again after a pause."""

    kind: ClassVar[str] = "resumed"
    seconds: float  # length of the pause


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanged(Event):
    """The owner published a newer version of the run's specification."""

    kind: ClassVar[str] = "changed"
    version: int
    changes: list[str]
    restart: bool  # some changes take effect only after a restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed(Event):
    """The first samples of this process went into a step of the swarm."""

    kind: ClassVar[str] = "contributing"
    epoch: int
    start_s: float  # since the process started, including the import of torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress(Event):
    """Progress within an epoch, about once a second."""

    kind: ClassVar[str] = "progress"
    epoch: int
    loss: float
    samples_per_s: float
    swarm_samples: int
    swarm_samples_per_s: float
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone(Event):
    """An epoch is complete: the gradients were averaged and the optimizer made a step."""

    kind: ClassVar[str] = "epoch"
    epoch: int  # number of complete epochs
    loss: float  # mean over this peer's samples of the epoch
    validation_loss: float | None  # only in some epochs
    samples: int  # samples of this peer in this epoch
    samples_per_s: float
    swarm_samples_per_s: float
    peers: int  # members of the round
    sent_bytes: int  # bytes that this peer sent in this epoch's rounds
    round_s: float
    digest: str | None  # digest of the averaged vector; equal on every member
    state_digest: str | None  # digest of the canonical state; only in epochs that averaged it
    drift: float | None  # relative norm of parameters minus average; only in epochs that averaged the state
    metrics: dict[str, float] = field(default_factory=dict)  # what the task measured with the validation


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample(Event):
    """A sample of the model's output, written by the task."""

    kind: ClassVar[str] = "sample"
    epoch: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed(Event):
    """A round failed. It changed nothing."""

    kind: ClassVar[str] = "round_failed"
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resynchronised(Event):
    """This peer was behind the swarm and downloaded the state, or tried to."""

    kind: ClassVar[str] = "resynchronised"
    epoch: int
    loaded: bool
    reason: str
    seconds: float
    epochs_given_up: int = 0  # made by this peer while it was cut off from the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """A sentence for the user."""

    kind: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionSums(Event):
    """Sums of this user's contributions so far, about every ten seconds."""

    kind: ClassVar[str] = "contribution"
    today: Given  # to all runs, on this machine
    altogether: Given  # to this run, on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """Summary of a volunteer at its end."""

    kind: ClassVar[str] = "finished"
    reason: str
    epoch: int = 0
    samples: int = 0
    rounds: int = 0
    failed_rounds: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    validation_first: float | None = None  # the first held-out loss, and the last one
    validation_loss: float | None = None
    seconds: float = 0.0
    sent_bytes: int = 0
    digest: str | None = None  # digest of the last averaged vector
    digest_epoch: int | None = None
    # Estimates from before joining and measured peaks. Those of the device are 0 without a CUDA device.
    memory_bytes: int = 0  # estimated host memory of the process
    memory_peak_bytes: int = 0
    device_memory_bytes: int = 0  # estimated
    device_memory_peak_bytes: int = 0  # memory of tensors
    device_memory_reserved_bytes: int = 0  # peak that torch's allocator reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The command failed. The same text is printed on standard error."""

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
