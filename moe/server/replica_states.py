"""Calls between servers that host the same expert: its lineage, and its whole state, which a server takes
over before it declares a replica.

A state is one blob (`averaging.optim.state.snapshot`). It is not trusted: the receiver knows how large it can
be, and checks names, shapes, dtypes and that numbers are finite before anything changes. The donor copies the
state once, which takes memory, so it gives few at a time, and not for longer than a slow link needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from averaging.optim.state.snapshot import Blob
from moe.protocol import methods
from moe.protocol.declarations import ExpertReplica
from moe.protocol.names import ExpertUid
from moe.protocol.states import StateFetching, transfer_s_max
from moe.protocol.tensors import CHUNK_BYTES
from moe.server.devices import DeviceFailed
from moe.server.expert import Expert
from moe.server.logic.lineage import NAME_BYTES, PAST_MAX, VERSION_MAX, CommonVersion, ExpertLineage
from moe.server.requests import HostedExpert
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.net.rpc import Stream
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import (
    DescribeRequest,
    ExpertCommonVersion,
    ExpertDescription,
    ExpertStateReply,
    ExpertStateRequest,
)

if TYPE_CHECKING:
    from swarm.node import Node

_log = logging.getLogger(__name__)

_READ_TIMEOUT_S = 5.0
_CALLS_MAX = 16  # descriptions asked for at once
_GIVEN_MAX = 2  # states given at once: each is a copy in memory
_DONORS_MAX = 4  # asked for one state, one after the other
_TURNS_MAX = 64


@dataclass(frozen=True, slots=True)
class ReplicaLineage:
    """The description of a replica by its server."""

    lineage: ExpertLineage
    turns: int  # it averages the expert once in this many periods


def wire_past(lineage: ExpertLineage) -> list[ExpertCommonVersion]:
    """Return the common versions as they are sent."""
    return [ExpertCommonVersion(name=one.name, version=one.version) for one in lineage.past]


def read_lineage(version: int, past: Sequence[ExpertCommonVersion]) -> ExpertLineage:
    """Return a lineage that a peer sent. Raises PeerError when it is malformed."""
    if (
        len(past) > PAST_MAX
        or any(len(one.name) != NAME_BYTES for one in past)
        or not all(number < VERSION_MAX for number in (version, *(one.version for one in past)))
    ):
        raise PeerError("the lineage of an expert is malformed")
    return ExpertLineage(version, tuple(CommonVersion(one.name, one.version) for one in past))


class StateDonor:
    """Gives states of the `hosted` experts to servers that ask. The mapping is that of the hosting service,
    by name; experts that are not ready are not in it. A peer gets one state at a time, and all strangers
    together at most one.
    """

    def __init__(self, hosted: Mapping[str, HostedExpert], is_stranger: Callable[[PeerId], bool]) -> None:
        self._hosted, self._is_stranger = hosted, is_stranger
        self._receivers: set[PeerId] = set()

    async def give(self, stream: Stream) -> None:
        """Answer a request for a state. Raises PeerError for a malformed one."""
        raw = await stream.receive()
        try:
            request = ExpertStateRequest.FromString(raw or b"")
        except DecodeError:
            raise PeerError("the message is not a swarm.wire.ExpertStateRequest") from None
        hosted = self._hosted.get(request.uid)
        if hosted is None or request.schema_digest != hosted.expert.schema.digest:
            await _refuse(stream, expert_pb2.EXPERT_MISSING, "this expert is not hosted here")
        elif not self._has_place(stream.peer_id):
            await _refuse(stream, expert_pb2.EXPERT_OVERLOADED, "it is sending states to other peers")
        else:
            self._receivers.add(stream.peer_id)
            try:
                await self._give(stream, hosted.expert, parameters_only=request.parameters_only)
            finally:
                self._receivers.discard(stream.peer_id)

    def _has_place(self, peer_id: PeerId) -> bool:
        strangers = sum(map(self._is_stranger, self._receivers))
        return (
            peer_id not in self._receivers
            and len(self._receivers) < _GIVEN_MAX
            and not (strangers and self._is_stranger(peer_id))
        )

    async def _give(self, stream: Stream, expert: Expert, *, parameters_only: bool) -> None:
        try:
            blob, lineage = await asyncio.get_running_loop().run_in_executor(
                None, _copy_state, expert, parameters_only
            )
        except (PeerError, DeviceFailed) as error:
            await _refuse(stream, expert_pb2.EXPERT_FAILED, str(error))
            return
        expert.settled = expert.settled or not parameters_only
        reply = ExpertStateReply(payload_bytes=len(blob), version=lineage.version, past=wire_past(lineage))
        try:
            async with asyncio.timeout(transfer_s_max(len(blob))):
                await stream.send(reply.SerializeToString())
                view = memoryview(blob)
                for start in range(0, len(view), CHUNK_BYTES):
                    await stream.send(bytes(view[start : start + CHUNK_BYTES]))
        except TimeoutError:
            raise PeerError("the state was taken too slowly") from None


async def _refuse(stream: Stream, status: expert_pb2.ExpertStatus, reason: str) -> None:
    await stream.send(ExpertStateReply(status=status, reason=reason).SerializeToString())


def _copy_state(expert: Expert, parameters_only: bool) -> tuple[Blob, ExpertLineage]:
    with expert.lock:
        blob = expert.module_state() if parameters_only else expert.state().blob
        return blob, expert.lineage


class ReplicaStates:
    """Asks other servers about their replicas. Lives on the network loop."""

    def __init__(self, node: Node) -> None:
        self._channels, self._pool = node.channels, node.network.pool
        self._fetching = node.service(StateFetching.from_node)
        self._slots = asyncio.Semaphore(_CALLS_MAX)

    async def lineages(
        self, replicas: Mapping[ExpertUid, Iterable[ExpertReplica]]
    ) -> dict[ExpertUid, dict[PeerId, ReplicaLineage]]:
        """Return the lineages of replicas, without those of servers that do not answer or answer badly."""
        found: dict[ExpertUid, dict[PeerId, ReplicaLineage]] = {uid: {} for uid in replicas}
        asked: dict[PeerId, tuple[ExpertReplica, list[ExpertUid]]] = {}
        for uid, others in replicas.items():
            for replica in others:
                asked.setdefault(replica.peer_id, (replica, []))[1].append(uid)
        async with asyncio.TaskGroup() as tasks:
            for replica, uids in asked.values():
                for start in range(0, len(uids), methods.LINEAGES_PER_DESCRIBE_MAX):
                    part = uids[start : start + methods.LINEAGES_PER_DESCRIBE_MAX]
                    tasks.create_task(self._describe(replica, part, found))
        return found

    async def _describe(
        self,
        replica: ExpertReplica,
        uids: Sequence[ExpertUid],
        found: dict[ExpertUid, dict[PeerId, ReplicaLineage]],
    ) -> None:
        request = DescribeRequest(uids=map(str, uids), with_lineage=True)
        try:
            async with self._slots:
                reply = await self._channels.call(
                    replica.contact, methods.DESCRIBE, request, timeout_s=_READ_TIMEOUT_S
                )
            if len(reply.experts) != len(uids):
                raise PeerError("it described another number of experts than it was asked for")
            described = [_read_description(one) for one in reply.experts]
        except (PeerError, NetworkError) as error:
            _log.debug("peer %s did not describe its replicas: %s", replica.peer_id.short, error)
            return
        for uid, one in zip(uids, described, strict=True):
            if one is not None:
                found[uid][replica.peer_id] = one

    async def take_over(self, uid: ExpertUid, expert: Expert, donors: Sequence[ExpertReplica]) -> bool:
        """Replace the state of an expert by that of the first donor that sends one. Return False, with
        nothing changed, when none does.
        """
        for donor in donors[:_DONORS_MAX]:
            try:
                lineage = await self._fetch(uid, expert, donor)
            except (PeerError, NetworkError, TimeoutError) as error:
                _log.warning("the state of %s could not be taken over: %s", uid, error)
                continue
            _log.info("%s continues from the state of peer %s: %s", uid, donor.peer_id.short, lineage.version)
            return True
        return False

    async def _fetch(self, uid: ExpertUid, expert: Expert, donor: ExpertReplica) -> ExpertLineage:
        loop = asyncio.get_running_loop()
        bytes_max = await loop.run_in_executor(self._pool, lambda: expert.state_bytes_max)
        reply, blob = await self._fetching.fetch(donor, uid, bytes_max)
        lineage = read_lineage(reply.version, reply.past)
        await loop.run_in_executor(self._pool, _load_state, expert, blob, lineage)
        return lineage


def _load_state(expert: Expert, blob: Blob, lineage: ExpertLineage) -> None:
    with expert.lock:
        expert.load_state(blob, lineage)
        expert.settled = True


def _read_description(one: ExpertDescription) -> ReplicaLineage | None:
    if not one.schema:
        return None
    return ReplicaLineage(read_lineage(one.version, one.past), min(max(one.turns, 1), _TURNS_MAX))
