"""`swarm.find_experts`: the experts that exist, the servers that host them, and their condition."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe.client.replicas.together import run_together
from moe.protocol.calls import Description, ExpertCalls
from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.finding import ExpertPattern, hosted_experts
from moe.protocol.methods import UIDS_PER_DESCRIBE_MAX
from moe.protocol.names import ExpertUid
from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["FoundExpert", "FoundReplica", "find_experts"]

EXPERTS_MAX = 65536
_SERVERS_AT_ONCE = 16
_GRIDS_MAX = 64  # announced grids that are read; each costs a read
_MARGIN_S = 10.0  # for a busy network thread


@dataclass(frozen=True, slots=True)
class FoundReplica:
    """An expert on one server, as the server describes it."""

    peer_id: PeerId
    version: int | None  # optimizer steps and averages so far; None: the server did not say
    schema: str  # schema of its inputs and outputs; "" when the server gave none
    frozen: bool  # it does not learn
    batch_size_max: int  # samples of one request; 0 when the server did not say
    wait_s: float  # how long a request would wait now
    samples_per_s: float  # recent throughput of the server while it computes; 0: unknown
    busy: float  # fraction of the last half minute in which the server computed, as it declared
    failure: str = ""  # why the server did not say


@dataclass(frozen=True, slots=True)
class FoundExpert:
    """An expert that servers have declared, with its replicas, the one with the shortest wait first."""

    name: str
    replicas: tuple[FoundReplica, ...]

    @property
    def version(self) -> int | None:
        """Return the highest version among the replicas; None when no server has said one."""
        return max((one.version for one in self.replicas if one.version is not None), default=None)


def find_experts(node: Node, pattern: str = "*", *, timeout_s: float = 10.0) -> list[FoundExpert]:
    """Return the existing experts that match a pattern, ordered by name.

    The names come from the DHT, everything else from the servers, which are asked directly. A server that
    does not answer is listed with `failure`; its declaration expires after 45 s.

    Args:
        node: This process as a peer.
        pattern: "ffn.*" means all experts of the grid ffn, "ffn.[0:4].*" those of four rows, "*" all of all
            grids.
        timeout_s: Limit of reading the DHT and of asking the servers, in seconds.

    Raises:
        UsageError: For a wrong pattern.
        NetworkError: When the DHT cannot be read in time.
    """
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")
    patterns = None if pattern == "*" else [ExpertPattern.parse(pattern)]
    return node.network.run(_find(node, patterns, timeout_s), 3 * timeout_s + _MARGIN_S)


async def _find(node: Node, patterns: Sequence[ExpertPattern] | None, timeout_s: float) -> list[FoundExpert]:
    directory = Directory(node.dht.service)
    if patterns is None:
        grids = await directory.grids(timeout_s=timeout_s)
        patterns = [ExpertPattern.below(grid) for grid in grids[:_GRIDS_MAX]]
    hosted = await hosted_experts(directory, patterns, timeout_s=timeout_s, experts_max=EXPERTS_MAX)
    servers: dict[PeerId, ExpertReplica] = {}
    names: dict[PeerId, list[ExpertUid]] = {}
    for uid, replicas in hosted.items():
        for replica in replicas:
            servers.setdefault(replica.peer_id, replica)
            names.setdefault(replica.peer_id, []).append(uid)
    calls = node.service(ExpertCalls.from_node)
    answers = await run_together(
        [_described(calls, server, names[peer], timeout_s) for peer, server in servers.items()],
        _SERVERS_AT_ONCE,
    )
    by_peer = dict(zip(servers, answers, strict=True))
    return [
        FoundExpert(str(uid), tuple(_found(uid, replica, by_peer[replica.peer_id]) for replica in replicas))
        for uid, replicas in hosted.items()
    ]


async def _described(
    calls: ExpertCalls, server: ExpertReplica, uids: Sequence[ExpertUid], timeout_s: float
) -> Mapping[ExpertUid, Description | None] | str:
    """Return a server's descriptions of its experts, or the reason why there are none."""
    found: dict[ExpertUid, Description | None] = {}
    try:
        async with asyncio.timeout(timeout_s):
            for start in range(0, len(uids), UIDS_PER_DESCRIBE_MAX):
                part = uids[start : start + UIDS_PER_DESCRIBE_MAX]
                described = await calls.describe(server, part, timeout_s=timeout_s)
                found.update(zip(part, described, strict=True))
    except TimeoutError:
        return f"peer {server.peer_id} did not describe its experts within {timeout_s:g} s"
    except (NetworkError, PeerError) as error:
        return str(error)
    return found


def _found(
    uid: ExpertUid, replica: ExpertReplica, answer: Mapping[ExpertUid, Description | None] | str
) -> FoundReplica:
    failure = answer if isinstance(answer, str) else ""
    described = None if isinstance(answer, str) else answer.get(uid)
    if described is None:
        return FoundReplica(
            peer_id=replica.peer_id,
            version=None,
            schema="",
            frozen=False,
            batch_size_max=0,
            wait_s=replica.load.wait_s,
            samples_per_s=replica.load.samples_per_s,
            busy=replica.load.busy,
            failure=failure or f"peer {replica.peer_id} does not host {uid} any more",
        )
    return FoundReplica(
        peer_id=replica.peer_id,
        version=described.version,
        schema=str(described.schema),
        frozen=described.frozen,
        batch_size_max=described.batch_size_max,
        wait_s=described.load.wait_s,
        samples_per_s=described.load.samples_per_s,
        busy=replica.load.busy,
    )
