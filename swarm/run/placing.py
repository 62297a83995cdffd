"""Choose the experts of a grid that this machine hosts: all that match some patterns, or a number of experts
that the grid needs most. The choice is repeated while the server runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe.protocol.declarations import RENEW_S, Directory
from moe.server.checkpoints import saved_names
from moe.server.expert_server import EXPERTS_MAX
from moe.server.logic.placement import GridLoad, Move, Placement
from moe.server.places import first_places, read_load
from swarm.core.errors import NetworkError, UsageError

if TYPE_CHECKING:
    from moe.protocol.names import ExpertGrid, ExpertUid
    from swarm.node import Node

_READ_TIMEOUT_S = 10.0


class Placing:
    """The experts that one server hosts. Methods block, and must not be called on the network thread."""

    def __init__(
        self, node: Node, patterns: Sequence[ExpertGrid], count: int | None, checkpoints: Path | None
    ) -> None:
        """`count`: how many experts of these patterns to host; None: all of them, permanently. `checkpoints`:
        the folder of the server's checkpoints.
        """
        self._node, self._patterns, self.count, self._checkpoints = node, patterns, count, checkpoints
        self._placement = Placement(node.peer_id)
        self._looked_s = time.monotonic()

    def first(self) -> list[ExpertUid]:
        """Return the experts to host first. With a count, experts that nobody hosts and that have a
        checkpoint here are preferred. Raises UsageError if the grid has fewer, and NetworkError if nobody
        answers who hosts which expert.
        """
        if self.count is None:
            names = sorted({uid for pattern in self._patterns for uid in pattern.names()})
            if len(names) > EXPERTS_MAX:
                raise UsageError(
                    f"{len(names)} experts are too many for one server (at most {EXPERTS_MAX}): "
                    "choose some with --num-experts"
                )
            return names
        load = self._load()
        saved = saved_names(self._checkpoints) if self._checkpoints is not None else []
        own, rng = self._node.peer_id, random.SystemRandom()
        return first_places(self._patterns, load, own, self.count, saved, rng)

    def next_move(self) -> Move | None:
        """Return the move that this server should make now. Reads the declarations as often as servers renew
        them. A server that hosts whole patterns never moves.
        """
        now_s = time.monotonic()
        if self.count is None or now_s - self._looked_s < RENEW_S:
            return None
        self._looked_s = now_s
        try:
            return self._placement.step(self._load(), now_s)
        except NetworkError:
            return None  # no peer answers at the moment, so a move would not help

    def _load(self) -> GridLoad:
        directory = Directory(self._node.dht.service)

        async def read() -> GridLoad:
            return await read_load(directory, self._patterns, timeout_s=_READ_TIMEOUT_S)

        return self._node.network.run(read(), 2 * _READ_TIMEOUT_S)
