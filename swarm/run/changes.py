"""Change a running run: the owner signs the next version of its specification, and the members gossip it.

A member that receives a newer version forwards it once to some other members, so that it reaches the swarm
within seconds. A version is accepted only if the owner signed it and it is higher than the current one, so
the gossip ends. Members that it does not reach find the version in the DHT within minutes
(`RunDirectory.renew`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.blobs import version_text
from swarm.membership.invite import Invite, is_invite
from swarm.net.rpc import Caller, Method
from swarm.run.directory import RunDirectory
from swarm.run.signed import AnySpecification, SignedSpecification, newest, sign, verified
from swarm.run.specification import PlannedPause, RunSpecification
from swarm.wire import run_pb2

_log = logging.getLogger(__name__)

CHANGE = Method(
    name="/swarm.Run/Change",
    request=run_pb2.ChangeRequest,
    reply=run_pb2.ChangeReply,
    request_bytes_max=64 << 10,
    reply_bytes_max=256,
)
# Each member forwards a new version to this many others. It is expected to reach all N members after log8(N)
# hops.
FANOUT = 8
_CALL_TIMEOUT_S = 3.0
_PAUSE_EXAMPLE = "2026-12-24T18:00/2026-12-26T09:00"


class RunFollower:
    """Follows the versions of one run's specification, on the network loop. One per node."""

    def __init__(
        self,
        signed: SignedSpecification,
        *,
        caller: Caller,
        directory: RunDirectory,
        members: Callable[[], Sequence[Contact]],
        on_newer: Callable[[SignedSpecification], None],
        rng: random.Random | None = None,
    ) -> None:
        """`members` returns the known members of the run. `on_newer` is called with each newer version."""
        self.signed = signed
        self._caller, self._directory, self._rng = caller, directory, rng or random.Random()
        self._members, self._on_newer = members, on_newer

    async def run(self) -> None:
        """Renew the specification in the DHT and look there for newer versions, until cancelled."""
        await self._directory.renew(self.signed, self.accept, lambda: self.signed)

    async def accept(self, signed: SignedSpecification) -> None:
        """Follow, save and forward a valid version if it is newer than the current one."""
        if (
            signed.run_id != self.signed.run_id
            or newest([signed], held=self.signed) == self.signed
            or signed.version == self.signed.version
        ):
            return
        self.signed = signed
        self._on_newer(signed)
        await self._directory.save(signed)
        members = list(self._members())
        await send_version(self._caller, signed, self._rng.sample(members, min(FANOUT, len(members))))

    async def on_change(self, peer: PeerId, request: run_pb2.ChangeRequest) -> run_pb2.ChangeReply:
        """Handle a version that another member sends (`CHANGE`). Raise PeerError when it belongs to another
        run, or is not the owner's.
        """
        if request.run != self.signed.run_id:
            raise PeerError(f"this peer does not take part in run {request.run[:64]!r}")
        if request.specification != self.signed.blob:
            await self.accept(verified(request.specification, self.signed.run_id))
        return run_pb2.ChangeReply(version=self.signed.version)


async def send_version(
    caller: Caller, signed: SignedSpecification, members: Iterable[Contact]
) -> dict[PeerId, int]:
    """Send a version to members. Return the version that each follows afterwards.

    Members that do not answer are missing in the result.
    """
    request = run_pb2.ChangeRequest(run=signed.run_id, specification=signed.blob)
    following: dict[PeerId, int] = {}

    async def one(contact: Contact) -> None:
        try:
            reply = await caller.call(contact, CHANGE, request, timeout_s=_CALL_TIMEOUT_S)
            following[contact.peer_id] = reply.version
        except SwarmError as error:
            _log.info(
                "peer %s did not receive version %s of %s: %s",
                contact.peer_id,
                version_text(signed.version),
                signed.full_name,
                error,
            )

    async with asyncio.TaskGroup() as group:
        for contact in members:
            group.create_task(one(contact))
    return following


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Changes that an owner makes to a run. None leaves a setting as it is."""

    target_batch_size: int | None = None
    paused: bool | None = None
    ended: bool | None = None
    ban: tuple[str, ...] = ()
    unban: tuple[str, ...] = ()
    revoke: tuple[str, ...] = ()  # PeerIDs, or texts of invites
    message: str | None = None  # to volunteers; "": none
    # planned pauses as (start, end), Unix seconds, which replace the earlier ones; pauses that are over are
    # dropped
    pauses: tuple[tuple[float, float], ...] | None = None

    @property
    def revoked(self) -> list[PeerId]:
        """Return the peers and keys of invites to revoke. Raise UsageError when one is neither."""
        return [Invite.parse(one).subject if is_invite(one) else PeerId.parse(one) for one in self.revoke]

    def apply(self, specification: AnySpecification) -> AnySpecification:
        """Return the changed specification. Raise UsageError if it is not valid or a setting does not
        exist.
        """
        table = specification.table()
        banned, unbanned = ({str(PeerId.parse(one)) for one in peers} for peers in (self.ban, self.unban))
        table["banned"] = sorted({*table["banned"], *banned} - unbanned)
        table["revoked"] = sorted({*table["revoked"], *map(str, self.revoked)})
        for key in ("target_batch_size", "paused", "ended", "message"):
            if getattr(self, key) is not None:
                table[key] = getattr(self, key)
        if self.pauses is not None:
            table["pauses"] = [{"starts_s": starts_s, "ends_s": ends_s} for starts_s, ends_s in self.pauses]
        return specification.from_table(table, "the change")


def sign_change(signed: SignedSpecification, change: Change, owner: Identity) -> SignedSpecification:
    """Sign the next version. Raise UsageError if `owner` does not own the run or nothing would change."""
    if signed.owner != owner.peer_id:
        raise UsageError(
            f"{signed.full_name} belongs to {signed.owner}, and this identity is {owner.peer_id}: "
            "only its owner can change a run"
        )
    if owner.peer_id in change.revoked:
        raise UsageError(f"{owner.peer_id} is the owner of {signed.full_name}, and needs no invite to revoke")
    specification = change.apply(signed.specification)
    if specification == signed.specification:
        raise UsageError(
            f"{signed.full_name} has these settings already (version {version_text(signed.version)})"
        )
    return sign(
        specification,
        owner,
        version=signed.version + 1,
        created_s=signed.created_s,
        handover=signed.handover,
    )


def differences(before: SignedSpecification, after: SignedSpecification) -> list[str]:
    """Describe the changes that running peers follow, one sentence each."""
    old, new = before.specification, after.specification
    sentences: list[str] = []
    if before.owner != after.owner:
        sentences.append(f"the recovery key made {after.owner} its owner")
    if isinstance(old, RunSpecification) and isinstance(new, RunSpecification):
        sentences += _differences_of_training(old, new)
    if old.ended != new.ended:
        sentences.append("the run is over" if new.ended else "the run is not over")
    banned, unbanned = len(set(new.banned) - set(old.banned)), len(set(old.banned) - set(new.banned))
    if banned:
        sentences.append(f"{banned} peer{'s are' if banned > 1 else ' is'} banned")
    if unbanned:
        sentences.append(f"{unbanned} peer{'s are' if unbanned > 1 else ' is'} let in again")
    revoked = len(set(new.revoked) - set(old.revoked))
    if revoked:
        sentences.append(f"{revoked} invite{'s or peers are' if revoked > 1 else ' or peer is'} revoked")
    return sentences


def _differences_of_training(old: RunSpecification, new: RunSpecification) -> list[str]:
    sentences = []
    if old.target_batch_size != new.target_batch_size:
        sentences.append(f"an epoch is {new.target_batch_size:,} samples now, not {old.target_batch_size:,}")
    if old.paused != new.paused:
        sentences.append("training is paused" if new.paused else "training continues")
    if old.message != new.message:
        sentences.append(f"its owner says: {new.message}" if new.message else "its owner's message is gone")
    if old.pauses != new.pauses:
        times = ", ".join(map(pause_text, new.pauses))
        sentences.append(f"pauses are planned: {times}" if times else "no pause is planned")
    if old.end != new.end:
        sentences.append("it ends at another point")
    return sentences


def pause_text(pause: PlannedPause) -> str:
    """Return a planned pause in this machine's local time."""
    starts, ends = (time.localtime(at_s) for at_s in (pause.starts_s, pause.ends_s))
    until = "%H:%M" if starts[:3] == ends[:3] else "%Y-%m-%d %H:%M"
    return f"{time.strftime('%Y-%m-%d %H:%M', starts)} to {time.strftime(until, ends)}"


def read_pause(text: str) -> tuple[float, float]:
    """Parse a planned pause in local time, `2026-12-24T18:00/2026-12-26T09:00`, as (start, end) in Unix
    seconds. Raise UsageError when it is none.
    """
    try:
        starts_s, ends_s = (datetime.fromisoformat(part).timestamp() for part in text.split("/"))
    except ValueError:
        raise UsageError(f"a planned pause is FROM/UNTIL, like {_PAUSE_EXAMPLE}, not {text!r:.80}") from None
    return starts_s, ends_s


def restart_needed(old: AnySpecification, new: AnySpecification) -> bool:
    """Return whether a changed setting takes effect only after a restart of the peers."""
    followed = (
        "target_batch_size",
        "paused",
        "pauses",
        "message",
        "ended",
        "end",
        "banned",
        "revoked",
        "confirmed",
        "description",
    )
    same = {key: value for key, value in old.table().items() if key not in followed}
    return same != {key: value for key, value in new.table().items() if key not in followed}
