"""How an owner's change reaches the members of a running run within seconds: whoever learns of a newer
version tells some others, once.

A version is believed because its owner signed it, whoever brings it, and only if it is higher than the one
that is followed: so it travels through the swarm like a rumour and then stops. Members that it does not reach
find it in the DHT within minutes (`RunDirectory.keep`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import Caller, Handlers, Method
from swarm.run.directory import RunDirectory
from swarm.run.specification import RunSpecification, SignedSpecification, newest, sign, verified
from swarm.wire import run_pb2

_log = logging.getLogger(__name__)

CHANGE = Method(
    name="/swarm.Run/Change",
    request=run_pb2.ChangeRequest,
    reply=run_pb2.ChangeReply,
    request_bytes_max=64 << 10,
    reply_bytes_max=256,
)
# members told by each who learns of a version: in expectation all of them hear of it, in log8(N) times a call
FANOUT = 8
_CALL_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerServices:
    """What following needs of a node."""

    handlers: Handlers
    caller: Caller
    directory: RunDirectory
    rng: random.Random


class RunFollower:
    """A member's part, on the network loop. One per node."""

    def __init__(
        self,
        services: FollowerServices,
        signed: SignedSpecification,
        members: Callable[[], Sequence[Contact]],
        on_newer: Callable[[SignedSpecification], None],
    ) -> None:
        """`members`: of the run, as far as they are known here. `on_newer` is told every version that is
        higher than the last.
        """
        self.signed = signed
        self._services, self._members, self._on_newer = services, members, on_newer
        services.handlers.unary(CHANGE, self._on_change)

    async def run(self) -> None:
        """Keep the specification where others find it, and look there for newer ones, until cancelled."""
        await self._services.directory.keep(self.signed, self.take, lambda: self.signed)

    async def take(self, signed: SignedSpecification) -> None:
        """A genuine version: followed, kept and told on if it is newer."""
        if (
            signed.run_id != self.signed.run_id
            or newest([self.signed, signed]) == self.signed
            or signed.version == self.signed.version
        ):
            return
        self.signed = signed
        self._on_newer(signed)
        await self._services.directory.save(signed)
        members = list(self._members())
        await tell(
            self._services.caller, signed, self._services.rng.sample(members, min(FANOUT, len(members)))
        )

    async def _on_change(self, peer: PeerId, request: run_pb2.ChangeRequest) -> run_pb2.ChangeReply:
        if request.run != self.signed.run_id:
            raise PeerError(f"this peer does not take part in run {request.run[:64]!r}")
        if request.specification != self.signed.blob:
            await self.take(verified(request.specification, self.signed.run_id))
        return run_pb2.ChangeReply(version=self.signed.version)


async def tell(caller: Caller, signed: SignedSpecification, members: Iterable[Contact]) -> dict[PeerId, int]:
    """Tell members of a version; who follows which one afterwards. Those who do not answer are missing."""
    request = run_pb2.ChangeRequest(run=signed.run_id, specification=signed.blob)
    following: dict[PeerId, int] = {}

    async def one(contact: Contact) -> None:
        try:
            reply = await caller.call(contact, CHANGE, request, timeout_s=_CALL_TIMEOUT_S)
            following[contact.peer_id] = reply.version
        except SwarmError as error:
            _log.info(
                "peer %s was not told of version %d of %s: %s",
                contact.peer_id,
                signed.version,
                signed.full_name,
                error,
            )

    async with asyncio.TaskGroup() as group:
        for contact in members:
            group.create_task(one(contact))
    return following


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an owner wants to be different; None: as it is."""

    target_batch_size: int | None = None
    paused: bool | None = None
    ended: bool | None = None
    ban: tuple[str, ...] = ()
    pardon: tuple[str, ...] = ()

    def apply(self, specification: RunSpecification) -> RunSpecification:
        """The specification with the change, checked. UsageError says what cannot be."""
        table = specification.table()
        table["banned"] = sorted({*table["banned"], *self.ban} - set(self.pardon))
        for key in ("target_batch_size", "paused", "ended"):
            if getattr(self, key) is not None:
                table[key] = getattr(self, key)
        return RunSpecification.from_table(table, "the change")


def changed(signed: SignedSpecification, change: Change, owner: Identity) -> SignedSpecification:
    """The next version. UsageError when somebody else owns the run, or nothing would change."""
    if signed.owner != owner.peer_id:
        raise UsageError(
            f"{signed.full_name} belongs to {signed.owner}, and this identity is {owner.peer_id}: only its owner can change a run"
        )
    specification = change.apply(signed.specification)
    if specification == signed.specification:
        raise UsageError(f"{signed.full_name} is like that already (version {signed.version})")
    return sign(specification, owner, version=signed.version + 1, founded_s=signed.founded_s)


def differences(old: RunSpecification, new: RunSpecification) -> list[str]:
    """What a newer version changes, a sentence each, where live peers follow it."""
    told = []
    if old.target_batch_size != new.target_batch_size:
        told.append(f"an epoch is {new.target_batch_size:,} samples now, not {old.target_batch_size:,}")
    if old.paused != new.paused:
        told.append("training is paused" if new.paused else "training goes on")
    if old.ended != new.ended:
        told.append("the run is over" if new.ended else "the run is not over")
    if old.end != new.end:
        told.append("it ends at another point")
    banned, pardoned = len(set(new.banned) - set(old.banned)), len(set(old.banned) - set(new.banned))
    if banned:
        told.append(f"{banned} peer{'s are' if banned > 1 else ' is'} banned")
    if pardoned:
        told.append(f"{pardoned} peer{'s are' if pardoned > 1 else ' is'} let in again")
    return told


def restart_needed(old: RunSpecification, new: RunSpecification) -> bool:
    """Whether something else is different, which peers take up only when they start again."""
    followed = ("target_batch_size", "paused", "ended", "end", "banned", "description")
    return new.model_copy(update={key: getattr(old, key) for key in followed}) != old
