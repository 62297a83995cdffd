"""go-libp2p and this host, on loopback: they connect to each other, identify and ping."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.libp2p.basics import identify, ping
from swarm.libp2p.logic.messages import PING_PROTOCOL
from tests.interop.go_peers import go_peer, missing
from tests.wire.libp2p_hosts import Scene, contact_of, run

pytestmark = pytest.mark.slow
SIZE = 100_000


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    if reason := missing():
        pytest.skip(reason)


def test_go_connects_and_pings_this_host(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        here = contact_of(await scene.host())
        async with go_peer(tmp_path) as go:
            await go.connect(here.peer_id, here.addresses[0])
            reader, writer = await go.open(here.peer_id, PING_PROTOCOL)
            for number in range(3):
                writer.write(bytes([number]) * 32)
                assert await reader.readexactly(32) == bytes([number]) * 32
            reader, writer = await go.open(here.peer_id, "/echo")
            writer.write(bytes(SIZE))
            assert await reader.readexactly(SIZE) == bytes(SIZE)

    run(test)


def test_this_host_connects_to_go_and_pings_it(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        host = await scene.host(listens=False)
        async with go_peer(tmp_path) as go:
            connection = await host.connect(go.contact.peer_id, go.contact.addresses)
            assert PING_PROTOCOL in (await identify(connection)).protocols
            assert await ping(connection) < 10.0
            assert list(host.faults) == []

    run(test)
