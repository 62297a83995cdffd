"""Specification of a run: what is trained, and how. It is written as TOML, signed by the run's owner, and
checked by every peer that joins.

A specification is declarative: it names a task that is installed on each machine and never contains code. The
run's id is a hash of its founder's key, its recovery key and its name, so a peer that knows the id can tell a
genuine specification from a forged one, no matter which peer sent it. Of several versions that the owner
signed, the highest counts. `swarm.run.recovery` gives a run a new owner.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity, verify
from swarm.core.ids import RUN_NAME, Key, PeerId
from swarm.dht.logic.blobs import (
    SIGNATURE_CONTEXT,
    VERSION_MAX,
    Handover,
    blob_key,
    is_version_of,
    is_within_step,
    ownership_of,
    run_id_of,
)
from swarm.run.choices import Mode, ModeChoice, Strategy

SPECIFICATION_BYTES_MAX = 60 << 10  # signed and packed; a DHT record takes 64 KiB with its envelope
TOML_BYTES_MAX = 256 << 10
BANNED_MAX = 500  # each takes 54 bytes of the specification
REVOKED_MAX = 300  # likewise
CONFIRMED_MAX = 100  # likewise
__all__ = [
    "VERSION_MAX",
    "RunSpecification",
    "SignedSpecification",
    "newest",
    "run_id_of",
    "sign",
    "specification_key",
    "verified",
]

_FORMAT = "swarm.run/1"
_DEPTH_MAX = 8
_COARSE = ("int2", "sign", "topk")
_FINE = ("float32", "float16", "bfloat16", "adaptive")
_Count = Annotated[int, Field(ge=1, le=1 << 40)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class _Table(BaseModel):
    # An unknown key is an error, because it is usually a misspelt one.
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskChoice(_Table):
    """Name of an installed task and its settings, which the task checks itself."""

    name: str = Field(min_length=1, max_length=64)
    settings: dict[str, Any] = Field(default_factory=dict)


class Schedule(_Table):
    """Learning rate over epochs: linear warm-up, then constant or a cosine down to `final` times the rate."""

    name: Literal["constant", "cosine"] = "constant"
    warmup_epochs: int = Field(default=0, ge=0, le=1 << 32)
    # the epoch at which the cosine ends; required for "cosine", ignored for "constant"
    total_epochs: int | None = Field(default=None, ge=1, le=1 << 32)
    final: float = Field(default=0.1, ge=0, le=1)


class OptimizerChoice(_Table):
    """The inner optimizer, which every member builds alike."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: _Positive = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.95)  # of adam and adamw
    momentum: _Fraction = 0.9  # of sgd
    # the swarm's averaged gradient is scaled down to this norm before the step; None: no clipping
    clip_norm: _Positive | None = None
    schedule: Schedule = Schedule()


class End(_Table):
    """End of the run, at the first condition that is met. Without conditions it ends with its last member."""

    epochs: _Count | None = None
    loss: _Positive | None = None  # validation loss, as each member measures it on its held-out part
    seconds: _Positive | None = None  # since the run was created, in swarm time


class Requirements(_Table):
    """Requirements on a machine, in addition to the memory that the task computes."""

    memory_mb: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    device: Literal["any", "cuda"] = "any"


class RunSpecification(_Table):
    """All settings of a run, as in the TOML file. docs/decisions/0006 explains the names of the fields."""

    name: str
    description: str = Field(default="", max_length=500)
    # "invited": peers of the run answer only peers that show a capability of its owner; "open": they answer
    # anybody
    members: Literal["invited", "open"] = "invited"
    mode: Mode = ModeChoice()
    codec: Literal["float32", "float16", "bfloat16", "int8", "int4", "int2", "sign", "topk", "adaptive"] = (
        "float16"
    )
    # add the quantization error of a round to the next round; the three coarsest codecs require it
    error_feedback: bool = False
    # powersgd: matrices are sent as low-rank factors, encoded with the codec; it has its own error feedback
    strategy: Strategy | None = None
    target_batch_size: _Count  # samples of the whole swarm in one epoch
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)]  # samples of one step of one volunteer
    target_group_size: Annotated[int, Field(ge=2, le=256)] = 64
    state_sync_epochs: Annotated[int, Field(ge=1, le=1 << 20)] | None = None  # None: the mode's default
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0  # of the initial parameters
    task: TaskChoice
    optimizer: OptimizerChoice = OptimizerChoice()
    end: End = End()
    requirements: Requirements = Requirements()
    # PeerID of the identity, kept offline, that can give the run a new owner. The run's id depends on it.
    recovery_key: str | None = None
    # The owner sets these with `swarm change` while the run is going on.
    paused: bool = False  # no peer trains; members stay and keep the state
    ended: bool = False  # the run is over, regardless of `end`
    banned: tuple[str, ...] = Field(default=(), max_length=BANNED_MAX)  # PeerIDs that every member avoids
    # holders, issuers and invites (by the PeerID of their key) whose capabilities are valid no more
    revoked: tuple[str, ...] = Field(default=(), max_length=REVOKED_MAX)
    # set by `swarm recover`: peers and invites of the founder whose capabilities stay valid
    confirmed: tuple[str, ...] = Field(default=(), max_length=CONFIRMED_MAX)

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value):
            raise ValueError("1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit")
        return value

    @model_validator(mode="after")
    def _codec_fits(self) -> RunSpecification:
        if self.codec in _COARSE and not self.error_feedback:
            raise ValueError(f"codec {self.codec} needs error_feedback = true")
        if self.mode.role == "parameter" and self.codec not in _FINE:
            raise ValueError(
                f"mode {self.mode.name} averages parameters themselves: "
                f"its codec is one of {', '.join(_FINE)}"
            )
        return self

    @model_validator(mode="after")
    def _strategy_fits(self) -> RunSpecification:
        if self.strategy is None:
            return self
        if self.mode.role == "parameter":
            raise ValueError(
                f"mode {self.mode.name} averages parameters themselves: "
                "strategy powersgd is for gradients and differences"
            )
        if (self.mode.streaming or 1) > 1:
            raise ValueError(
                "a mode with streaming averages parts of the model, not matrices: "
                "strategy powersgd is not for it"
            )
        if self.codec not in _FINE:
            raise ValueError(
                "the factors of strategy powersgd are small, and all else hangs on them: "
                f"its codec is one of {', '.join(_FINE)}"
            )
        return self

    @field_validator("banned", "revoked", "confirmed")
    @classmethod
    def _are_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                PeerId.parse(text)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return tuple(sorted(set(value)))

    @field_validator("recovery_key")
    @classmethod
    def _recovery_key_is_a_peer(cls, value: str | None) -> str | None:
        try:
            return str(PeerId.parse(value)) if value is not None else None
        except UsageError as error:
            raise ValueError(str(error)) from error

    @field_validator("optimizer")
    @classmethod
    def _cosine_knows_its_end(cls, value: OptimizerChoice) -> OptimizerChoice:
        schedule = value.schedule
        if schedule.name == "cosine" and (
            schedule.total_epochs is None or schedule.total_epochs <= schedule.warmup_epochs
        ):
            raise ValueError(
                "schedule.total_epochs must be given for a cosine, and be more than warmup_epochs"
            )
        return value

    @property
    def wire_format(self) -> str:
        """Return the encoding of averaged values, as a text for users."""
        return (
            self.codec
            if self.strategy is None
            else f"{self.strategy.name} of rank {self.strategy.rank} in {self.codec}"
        )

    @property
    def recovery_peer(self) -> PeerId | None:
        """Return the identity that can give the run a new owner, or None."""
        return PeerId.parse(self.recovery_key) if self.recovery_key is not None else None

    @property
    def banned_peers(self) -> frozenset[PeerId]:
        """Return the peers that the owner has banned."""
        return frozenset(PeerId.parse(text) for text in self.banned)

    @property
    def revoked_peers(self) -> frozenset[PeerId]:
        """Return the holders, issuers and keys of invites that the owner has revoked."""
        return frozenset(PeerId.parse(text) for text in self.revoked)

    @property
    def confirmed_peers(self) -> frozenset[PeerId]:
        """Return the peers and invites of the founder whose capabilities the present owner has confirmed."""
        return frozenset(PeerId.parse(text) for text in self.confirmed)

    @classmethod
    def from_toml(cls, text: str, where: str) -> RunSpecification:
        """Parse and check a TOML text. `where` names the source in error messages (a path).

        Raises UsageError with one line per problem, each with its key.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{where} is not valid TOML: {error}") from error
        return cls.from_table(table, where)

    @classmethod
    def from_file(cls, path: Path) -> RunSpecification:
        """Read and check a TOML file. Raise UsageError if it cannot be read or is not valid."""
        try:
            with path.open("rb") as stream:
                raw = stream.read(TOML_BYTES_MAX + 1)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
        if len(raw) > TOML_BYTES_MAX:
            raise UsageError(
                f"{path} is larger than {TOML_BYTES_MAX >> 10} KiB: that is no run specification"
            )
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})"
            ) from error
        return cls.from_toml(text, str(path))

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> RunSpecification:
        """Check a parsed table. Raise UsageError with one line per problem, each with its key."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise UsageError("\n".join(f"{where}: {line}" for line in explain(error))) from error

    def table(self) -> dict[str, Any]:
        """Return the settings as plain values for signing: scalars, lists, and tables with text keys."""
        return self.model_dump(mode="json")


def explain(error: ValidationError, table: str = "") -> list[str]:
    """Return one line per problem, without pydantic's types and links.

    `table` is the key of the table that was checked; empty for the whole file.
    """
    lines = []
    for problem in error.errors(include_url=False, include_context=True):
        key = ".".join(filter(None, (table, *(str(part) for part in problem["loc"])))) or "the file"
        context = problem.get("ctx", {})
        text = {
            "missing": "is missing",
            "extra_forbidden": "is not a known key (misspelt?)",
            "literal_error": f"must be one of {context.get('expected', '')}, not {problem['input']!r}",
            "value_error": f"{context.get('error', problem['msg'])}, not {problem['input']!r}"
            if key not in ("optimizer", "mode", "strategy", "the file")
            else str(context.get("error")),
        }.get(problem["type"])
        if text is None:
            sentence = problem["msg"].removeprefix("Input ").replace("should be", "must be")
            text = f"{sentence[:1].lower()}{sentence[1:]}, not {problem['input']!r:.60}"
        lines.append(f"{key} {text}" if text.startswith(("is ", "must ")) else f"{key}: {text}")
    return lines


def specification_key(run_id: str) -> Key:
    """Return the DHT key of a run's signed specification. It holds one entry, which every member renews."""
    return blob_key(run_id)


@dataclass(frozen=True, slots=True)
class SignedSpecification:
    """A specification with its owner and version. The signature of every instance has been checked."""

    specification: RunSpecification
    owner: PeerId
    version: int
    created_s: float  # swarm time at which version 1 was signed: `end.seconds` counts from here
    blob: bytes  # the encoded, signed specification
    handover: Handover | None = None  # by which the owner got the run; None for its founder

    @property
    def founder(self) -> PeerId:
        """Return the owner that signed version 1."""
        return self.handover.founder if self.handover is not None else self.owner

    @property
    def name(self) -> str:
        return self.specification.name

    @property
    def run_id(self) -> str:
        return run_id_of(self.founder, self.specification.name, self.specification.recovery_peer)

    @property
    def full_name(self) -> str:
        """`name@id`, which is unambiguous even if another owner uses the same name."""
        return f"{self.name}@{self.run_id}"


def sign(
    specification: RunSpecification,
    owner: Identity,
    *,
    version: int,
    created_s: float,
    handover: Handover | None = None,
) -> SignedSpecification:
    """Sign a specification with the owner's key. Raise UsageError if the result is too large to store.

    `handover`: by which this owner got the run; None for its founder.
    """
    table = {
        "specification": specification.table(),
        "version": version,
        "created_s": float(created_s),
        "owner": (handover.founder if handover is not None else owner.peer_id).to_bytes(),
        "format": _FORMAT,
    } | ({"handover": handover.encode()} if handover is not None else {})
    body = _canonical(table)
    blob: bytes = msgpack.packb([body, owner.sign(SIGNATURE_CONTEXT + body)])
    if len(blob) > SPECIFICATION_BYTES_MAX:
        raise UsageError(
            f"the specification takes {len(blob):,} bytes, {SPECIFICATION_BYTES_MAX:,} are allowed: "
            "shorten the task's settings"
        )
    return SignedSpecification(specification, owner.peer_id, version, float(created_s), blob, handover)


def verified(blob: bytes, run_id: str | None = None) -> SignedSpecification:
    """Decode and check a specification from another peer.

    Raises PeerError if it is too large, cannot be decoded, is not signed by its owner, or does not belong to
    `run_id`.
    """
    if len(blob) > SPECIFICATION_BYTES_MAX:
        raise PeerError(
            f"a specification of {len(blob):,} bytes was refused: {SPECIFICATION_BYTES_MAX:,} are allowed"
        )
    try:
        body, signature = msgpack.unpackb(blob, strict_map_key=True, max_map_len=0, max_array_len=2)
        table = msgpack.unpackb(body, strict_map_key=True)
        format_, version, created_s = table["format"], table["version"], table["created_s"]
        contents = table["specification"]
        _, owner, handover = ownership_of(table)
    except UsageError as error:
        raise PeerError(f"a specification was refused: {error}") from error
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise PeerError(
            f"a specification was refused: it cannot be decoded ({type(error).__name__})"
        ) from error
    if (
        not isinstance(signature, bytes)
        or not isinstance(body, bytes)
        or not verify(owner, SIGNATURE_CONTEXT + body, signature)
    ):
        raise PeerError("a specification was refused: its signature is not its owner's")
    if format_ != _FORMAT:
        raise PeerError(
            f"the run's specification has the format {format_!r:.40}, this swarm reads {_FORMAT!r}: "
            "update swarm"
        )
    if not is_version_of(version, handover):
        raise PeerError("a specification was refused: its version is not a number from 1 up")
    if not isinstance(created_s, float) or not 0 <= created_s < 1e12:
        raise PeerError("a specification was refused: its creation time is not a time")
    if not isinstance(contents, dict):
        raise PeerError("a specification was refused: it holds no table")
    try:
        specification = RunSpecification.from_table(contents, "the run's specification")
    except UsageError as error:
        raise PeerError(
            "the run's specification was signed by its owner but cannot be used here "
            f"(is this swarm too old?): {error}"
        ) from error
    signed = SignedSpecification(specification, owner, version, created_s, blob, handover)
    if run_id is not None and signed.run_id != run_id:
        raise PeerError(f"a specification was refused: it belongs to run {signed.run_id}, not to {run_id}")
    return signed


def newest(
    signed: list[SignedSpecification], held: SignedSpecification | None = None
) -> SignedSpecification | None:
    """Return the specification with the highest version that is within reach of the one that is `held`, or
    of the lowest one. None if there is none.

    A specification of a later owner is always within reach, one of the same owner if it is not more than
    VERSION_STEP_MAX versions above another one that is. Of two with the same version, the one with the lower
    bytes counts, so that all peers choose the same.
    """
    chosen = held
    for one in sorted(signed, key=lambda one: (one.version, one.blob)):
        if (
            chosen is None
            or (chosen.version < one.version and is_within_step(chosen.version, one.version))
            or (chosen.version == one.version and one.blob < chosen.blob)
        ):
            chosen = one
    return chosen


def _canonical(value: object) -> bytes:
    """Encode as msgpack with sorted keys, so that the same table always gives the same bytes."""
    packed: bytes = msgpack.packb(_sorted(value, 0))
    return packed


def _sorted(value: object, depth: int) -> object:
    if depth > _DEPTH_MAX:
        raise UsageError(f"task.settings nests deeper than {_DEPTH_MAX} levels")
    if isinstance(value, dict):
        return {key: _sorted(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item, depth + 1) for item in value]
    return value
