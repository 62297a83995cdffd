"""Calls that come through a tunnel: their address is this machine's, and says nothing about their caller."""

from __future__ import annotations

import asyncio

import pytest

from swarm.core.ids import Address
from swarm.net.callers import RemoteCaller, caller_host
from swarm.net.scope import Surroundings
from swarm.net.server import Server
from swarm.testing.identities import SeededIdentity

PEER = SeededIdentity(1).peer_id
NEAR = Address("127.0.0.1", 4000)
TUNNEL = ("127.0.0.1", 5001)


@pytest.mark.parametrize(
    ("port", "caller", "host"),
    [
        (5001, RemoteCaller(PEER, "relay X"), ""),
        (5002, RemoteCaller(PEER, "127.0.0.0/24"), "127.0.0.1"),
    ],
)
def test_a_call_counts_under_the_relay_that_it_comes_through(
    port: int, caller: RemoteCaller, host: str
) -> None:
    async def scenario() -> None:
        surroundings = Surroundings()
        surroundings.widen(["203.0.113.7"])  # this node is in the internet
        server = Server(surroundings=surroundings, tunnelled=lambda end: "relay X" if end == TUNNEL else "")
        assert server.called(PEER, f"ipv4:127.0.0.1:{port}") == caller
        assert caller_host() == host
        # a peer that called from this machine may be dialed there, but a tunnelled call does not count as one
        assert surroundings.dialable(PEER, NEAR, [NEAR.host]) == ([NEAR.host] if host else [])

    asyncio.run(scenario())
