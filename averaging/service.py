"""What the averagers of one node share: one exchange that answers searches for groups, one all-reduce that
serves their rounds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from averaging.allreduce.allreduce import AllReduce
from averaging.matchmaking.service.matchmaking_service import GroupExchange
from averaging.reduction.audit import Notary

if TYPE_CHECKING:
    from swarm.node import Node


class AveragingService:
    """What the averagers of one node share: `node.service(AveragingService)`, on its network loop."""

    def __init__(self, node: Node) -> None:
        self.exchange = GroupExchange(
            handlers=node.handlers, caller=node.channels, own=node.peer_id, clock=node.clock
        )
        self.all_reduce = AllReduce(
            handlers=node.handlers,
            channels=node.channels,
            own=node.peer_id,
            pool=node.network.pool,
            clock=node.clock,
            notary=Notary(node.identity, random.SystemRandom()),
        )
        self._averagers: list[Callable[[], Awaitable[None]]] = []
        node.at_close(self._close)

    def opened(self, close: Callable[[], Awaitable[None]]) -> None:
        """An averager that wants to be closed with the node."""
        self._averagers.append(close)

    def closed(self, close: Callable[[], Awaitable[None]]) -> None:
        """It was closed before."""
        if close in self._averagers:
            self._averagers.remove(close)

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for close in list(self._averagers):
                tasks.create_task(_awaited(close))
        self.all_reduce.close()


async def _awaited(close: Callable[[], Awaitable[None]]) -> None:
    await close()
