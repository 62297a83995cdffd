"""Calls that every member makes in every round are answered without a task: they never wait."""

from __future__ import annotations

import pytest

from averaging.matchmaking.service.exchange import GroupExchange
from averaging.matchmaking.service.wire import CELL_LOOKUP, LOOK_FOR_GROUP
from swarm.net.rpc import Handlers, UnaryHandler
from swarm.testing.network import SimulatedNetwork


@pytest.mark.parametrize("name", [LOOK_FOR_GROUP.name, CELL_LOOKUP.name])
def test_queries_of_searching_peers_need_no_task(name: str) -> None:
    peer = SimulatedNetwork(1).peer()
    handlers = Handlers()
    GroupExchange(handlers=handlers, caller=peer.caller, own=peer.peer_id, clock=peer.clock)
    found = handlers.find(name)
    assert isinstance(found, UnaryHandler)
    assert found.function_now is not None
