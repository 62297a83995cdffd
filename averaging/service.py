"""The service that the averagers of one node share: one exchange that answers searches for groups, and one
all-reduce that serves their rounds.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from averaging.allreduce.allreduce import AllReduce
from averaging.matchmaking.service.exchange import GroupExchange
from averaging.reduction.audit import Notary

if TYPE_CHECKING:
    from swarm.node import Node


class AveragingService:
    """Group exchange and all-reduce of one node, on its network loop; get it with
    `node.service(AveragingService)`.
    """

    def __init__(self, node: Node) -> None:
        self.exchange = GroupExchange(
            handlers=node.handlers,
            caller=node.channels,
            own=node.peer_id,
            clock=node.clock,
            standing=node.standing,
            ledger_path=functools.partial(_ledger_path, node),
        )
        self.all_reduce = AllReduce(
            handlers=node.handlers,
            channels=node.channels,
            pool=node.network.pool,
            clock=node.clock,
            notary=Notary(node.identity, node.rng),
        )
        self._averagers: list[Callable[[], Awaitable[None]]] = []
        node.at_close(self._close)

    def add(self, close: Callable[[], Awaitable[None]]) -> None:
        """Register the `close` of an averager, to be called when the node closes."""
        self._averagers.append(close)

    def remove(self, close: Callable[[], Awaitable[None]]) -> None:
        """Unregister the `close` of an averager that was closed before the node."""
        if close in self._averagers:
            self._averagers.remove(close)

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for close in list(self._averagers):
                tasks.create_task(_close_averager(close))
        self.all_reduce.close()


def _ledger_path(node: Node, run: str) -> Path | None:
    """Return where the ledger of a run is kept: beside the identity, if that is kept, as the peer book is."""
    path = node.identity.path
    return path.with_name(f"{path.name}.ledger.{run}") if path is not None else None


async def _close_averager(close: Callable[[], Awaitable[None]]) -> None:
    await close()
