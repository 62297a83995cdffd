"""The system drops new connections from networks that made too many, before anybody answers them (Linux)."""

from __future__ import annotations

import itertools
import socket
import sys

import pytest

from swarm.core.standing import PeerStanding
from swarm.net.connections import AWAY_S, Connections
from swarm.testing.identities import SeededIdentity
from tests.wire.event_loop import run_on_loop

MEMBER, STRANGER = (SeededIdentity(name).peer_id for name in ("member", "stranger"))
NOW_S = 100.0
DROPPED_S = 0.4  # unanswered after this time, a packet was dropped: on loopback an answer comes at once


def _has_ipv6() -> bool:
    """Return whether this machine can listen on IPv6 and IPv4 with one socket."""
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True).close()
    except (OSError, ValueError):
        return False
    return True


def connects(host: str, port: int) -> bool:
    """Return whether a connection from this address of the machine is made at once."""
    try:
        socket.create_connection(("127.0.0.1", port), DROPPED_S, source_address=(host, 0)).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has packet filters for sockets")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(socket.AF_INET, id="ipv4"),
        pytest.param(
            socket.AF_INET6,
            id="dual-stack",
            marks=pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6"),
        ),
    ],
)
def test_a_network_with_too_many_connections_is_filtered_for_a_while_except_its_members(
    family: socket.AddressFamily,
) -> None:
    known = PeerStanding()
    known.add_members("run", [MEMBER])
    ports = itertools.count(1)

    async def scenario() -> None:
        own = ("127.0.0.1", 0) if family == socket.AF_INET else ("::", 0)
        with socket.create_server(
            own, family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=100
        ) as server:
            port = server.getsockname()[1]
            kept = Connections(known, lambda: port)
            assert kept.on_called(MEMBER, ("127.0.7.9", next(ports)), NOW_S)
            open_before = socket.create_connection(("127.0.0.1", port), source_address=("127.0.7.1", 0))
            accepted, _ = server.accept()
            while kept.on_called(STRANGER, ("127.0.7.1", next(ports)), NOW_S):
                pass
            assert connects("127.0.7.2", port), "a moment later"
            await kept.close_surplus(NOW_S + 1.0)
            assert not connects("127.0.7.2", port)
            assert connects("127.0.8.2", port), "another network"
            assert connects("127.0.7.9", port), "a member called from there"
            assert connects("127.0.0.1", port), "this machine"
            open_before.sendall(b"still open")
            assert accepted.recv(10) == b"still open"
            open_before.close()
            accepted.close()
            await kept.close_surplus(NOW_S + 1.0 + AWAY_S)
            assert connects("127.0.7.2", port), "it is let in again"

    run_on_loop(scenario(), 30)
