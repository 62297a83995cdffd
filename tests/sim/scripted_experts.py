"""Servers of experts and a directory that do as a test says, under the calls of one node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from moe.client.logic.replica_stats import ReplicaStats
from moe.client.replicas.calling import ForwardResult, ReplicaCalls
from moe.client.replicas.directory_cache import ExpertDirectoryCache
from moe.protocol.calls import (
    BackwardReply,
    BackwardRequest,
    ExpertClient,
    ForwardReply,
    ForwardRequest,
    OnBackward,
    OnForward,
)
from moe.protocol.declarations import ExpertReplica, GridBranch
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, Leaf
from swarm.core.errors import DeadlineExceeded, SwarmError
from swarm.core.ids import Address, Contact, PeerId
from swarm.runtime.supervise import Supervisor
from swarm.testing.identities import SeededIdentity
from swarm.testing.virtual_loop import EPOCH_UNIX_S, VirtualClock

UID, ROOT = ExpertUid.parse("ffn.0"), ExpertUid.parse_prefix("ffn")
PEERS = [SeededIdentity(f"replica/{number}").peer_id for number in range(3)]
REPLICAS = [
    ExpertReplica(Contact(peer, (Address("10.0.0.1", 4000),)), b"", expiration=EPOCH_UNIX_S + 1e6)
    for peer in PEERS
]
SCHEMA = ExpertSchema((Leaf(torch.float32, (2,)),), Leaf(torch.float32, (2,)))
INPUTS = [torch.ones(1, 2)]


class Table:
    """A stand-in for the DHT's directory."""

    def __init__(self, replicas: Sequence[ExpertReplica] = ()) -> None:
        self.branches_of: dict[ExpertUid, GridBranch] = (
            {ROOT: GridBranch({0: tuple(replicas)})} if replicas else {}
        )
        self.reads: list[Sequence[ExpertUid]] = []
        self.delay_s, self.down = 0.1, False

    async def branches(self, prefixes: Sequence[ExpertUid], **_: Any) -> dict[ExpertUid, GridBranch]:
        self.reads.append(prefixes)
        await asyncio.sleep(self.delay_s)
        if self.down:
            raise DeadlineExceeded("the DHT is silent")
        return {prefix: self.branches_of.get(prefix, GridBranch()) for prefix in prefixes}


class Scripted:
    """A stand-in for `ExpertCalls`: each call waits, then raises or answers, as scripted per peer."""

    def __init__(
        self,
        forward: dict[PeerId, Any] | None = None,
        backward: Sequence[Any] = (),
        schema: dict[PeerId, Any] | None = None,
    ) -> None:
        self.forward_outcomes = forward or {}
        self._backward, self._schema = list(backward), schema or {}
        self.asked: list[tuple[float, PeerId]] = []
        self.together: list[tuple[PeerId, int]] = []  # how many requests were made together, each time
        self.described: list[tuple[int, PeerId]] = []  # number of requests before, and who was asked
        self.request_ids: list[bytes] = []

    async def schema_of(self, replica: ExpertReplica, uid: ExpertUid, *, timeout_s: float) -> ExpertSchema:
        self.described.append((len(self.asked), replica.peer_id))
        await self._play(self._schema.get(replica.peer_id, 0.0))
        return SCHEMA

    async def forward_all(
        self,
        replica: ExpertReplica,
        requests: Mapping[int, ForwardRequest],
        on_replies: OnForward,
        **settings: Any,
    ) -> None:
        self.asked.append((asyncio.get_running_loop().time(), replica.peer_id))
        self.together.append((replica.peer_id, len(requests)))
        error = await self._error_within(
            settings["timeout_s"], self.forward_outcomes.get(replica.peer_id, 0.1)
        )
        for number, one in requests.items():
            reply = ForwardReply(outputs=[one.inputs[0]], version=1, request_id=b"one", wait_s=0.0)
            on_replies({number: error or reply})

    async def backward_all(
        self,
        replica: ExpertReplica,
        requests: Mapping[int, BackwardRequest],
        on_replies: OnBackward,
        **settings: Any,
    ) -> None:
        self.asked.append((asyncio.get_running_loop().time(), replica.peer_id))
        self.together.append((replica.peer_id, len(requests)))
        self.request_ids += [one.forward_reply.request_id for one in requests.values()]
        found: dict[int, BackwardReply | SwarmError] = {}
        for number, one in requests.items():
            what = self._backward.pop(0) if self._backward else 0.1
            error = await self._error_within(settings["timeout_s"], what)
            reply = BackwardReply(gradients=[one.tensors.inputs[0]], version=1, wait_s=0.0)
            found[number] = error or reply
        on_replies(found)

    async def _error_within(self, timeout_s: float, what: Any) -> SwarmError | None:
        try:
            await self._play_within(timeout_s, what)
        except SwarmError as error:
            return error
        return None

    async def _play_within(self, timeout_s: float, what: Any) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._play(what)
        except TimeoutError:
            raise DeadlineExceeded("silent") from None

    async def _play(self, what: Any) -> None:
        if isinstance(what, BaseException):
            raise what
        await asyncio.sleep(what)


def calls_of(scripted: Scripted, table: Table | None = None) -> ReplicaCalls:
    clock = VirtualClock()
    return ReplicaCalls(
        cast(ExpertClient, scripted),
        ReplicaStats(random.Random(0)),
        ExpertDirectoryCache(table or Table(), clock, Supervisor()),
        clock,
    )


def forward_result() -> ForwardResult:
    return ForwardResult(
        UID, REPLICAS[0], ForwardReply(outputs=[INPUTS[0]], version=1, request_id=b"one", wait_s=0.0)
    )
