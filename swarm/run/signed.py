"""Signed specifications of runs and grids: how an owner signs one, and how every peer checks it.

The id of a run is a hash of its founder's key, its recovery key and its name, so a peer that knows the id can
tell a genuine specification from a forged one, no matter which peer sent it. Of several versions that the
owner signed, the highest counts. `swarm.run.recovery` gives a run a new owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgpack

from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity, verify
from swarm.core.ids import Key, PeerId
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
from swarm.run.grid import GridSpecification
from swarm.run.owned import GRID_PREFIX
from swarm.run.specification import RunSpecification

SPECIFICATION_BYTES_MAX = 60 << 10  # signed and packed; a DHT record takes 64 KiB with its envelope
__all__ = [
    "VERSION_MAX",
    "AnySpecification",
    "SignedSpecification",
    "newest",
    "run_id_of",
    "sign",
    "specification_key",
    "verified",
]

AnySpecification: TypeAlias = RunSpecification | GridSpecification
_FORMAT = "swarm.run/1"
_DEPTH_MAX = 8


def specification_key(run_id: str) -> Key:
    """Return the DHT key of a run's signed specification. It holds one entry, which every member renews."""
    return blob_key(run_id)


@dataclass(frozen=True, slots=True)
class SignedSpecification:
    """A specification with its owner and version. The signature of every instance has been checked."""

    specification: AnySpecification
    owner: PeerId
    version: int
    created_s: float  # swarm time at which version 1 was signed: `end.seconds` counts from here
    blob: bytes  # the encoded, signed specification
    handover: Handover | None = None  # the handover by which the owner got the run; None for its founder

    @property
    def founder(self) -> PeerId:
        """Return the owner that signed version 1."""
        return self.handover.founder if self.handover is not None else self.owner

    @property
    def name(self) -> str:
        return self.specification.name

    @property
    def training(self) -> RunSpecification:
        """Return the specification of a run that trains. Raise UsageError for a grid of experts."""
        if not isinstance(self.specification, RunSpecification):
            raise UsageError(
                f"{self.full_name} is a grid of experts, not a run that trains: host some with `swarm serve`"
            )
        return self.specification

    @property
    def is_grid(self) -> bool:
        """Return whether this is the specification of a grid of experts."""
        return isinstance(self.specification, GridSpecification)

    @property
    def grid(self) -> GridSpecification:
        """Return the specification of a grid of experts. Raise UsageError for a run that trains."""
        if not isinstance(self.specification, GridSpecification):
            raise UsageError(
                f"{self.full_name} is a run that trains, not a grid of experts: take part with `swarm join`"
            )
        return self.specification

    @property
    def run_id(self) -> str:
        return run_id_of(self.founder, self.specification.name, self.specification.recovery_peer)

    @property
    def full_name(self) -> str:
        """`name@id`, which is unambiguous even if another owner uses the same name."""
        return f"{self.name}@{self.run_id}"


def sign(
    specification: AnySpecification,
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
            f"the run's specification has the format {format_!r:.40}, this version of swarm reads "
            f"{_FORMAT!r}: "
            "update swarm"
        )
    if not is_version_of(version, handover):
        raise PeerError("a specification was refused: its version is not a number from 1 up")
    if not isinstance(created_s, float) or not 0 <= created_s < 1e12:
        raise PeerError("a specification was refused: its creation time is not a time")
    if not isinstance(contents, dict):
        raise PeerError("a specification was refused: it holds no table")
    try:
        name = contents.get("name")
        kind = (
            GridSpecification if isinstance(name, str) and name.startswith(GRID_PREFIX) else RunSpecification
        )
        specification = kind.from_table(contents, "the run's specification")
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
    """Return the specification with the highest version that is within reach of `held` or, without one, of
    the lowest version. None if there is no specification.

    A specification of a later owner is always within reach. One of the same owner is within reach if it is at
    most VERSION_STEP_MAX versions above another one that is. Of two with the same version, the one with the
    lower bytes counts, so that all peers choose the same.
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
