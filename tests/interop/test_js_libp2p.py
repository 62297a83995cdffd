"""js-libp2p and this host, on loopback: they identify and ping each other, and relay for each other."""

from __future__ import annotations

import pytest

from swarm.core.ids import Contact
from swarm.libp2p.basics import identify, ping
from swarm.libp2p.logic.messages import HOP_PROTOCOL, IDENTIFY_PROTOCOL, PING_PROTOCOL
from tests.interop.js_peers import JsPeer, js_peer, missing, multiaddr
from tests.wire.libp2p_hosts import Scene, echoed, run, until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    if reason := missing():
        pytest.skip(reason)


HERE = "/ip4/127.0.0.1/tcp/0"
SIZE = 300_000


def circuit(relay: Contact, target: object) -> str:
    return f"{multiaddr(relay)}/p2p-circuit/p2p/{target}"


async def until_reserved(peer: JsPeer) -> None:
    """Wait until a peer of js-libp2p has a reservation."""
    while not any("p2p-circuit" in one for one in await peer.ask("addresses")):
        pass


def test_js_identifies_and_pings_this_host() -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        async with js_peer() as js:
            said = await js.ask("identify", to=multiaddr(relay))
            assert (said["peer"], said["agent"]) == (str(relay.peer_id), "test/1")
            assert {HOP_PROTOCOL, IDENTIFY_PROTOCOL, PING_PROTOCOL, "/echo"} <= set(said["protocols"])
            assert said["addresses"] == [multiaddr(relay).partition("/p2p/")[0]]
            assert said["observed"].startswith("/ip4/127.0.0.1/tcp/")
            assert 0 <= await js.ask("ping", to=multiaddr(relay)) < 10_000
            assert await js.ask("echo", to=multiaddr(relay), size=SIZE) == {"size": SIZE, "same": True}

    run(test)


def test_this_host_identifies_and_pings_js() -> None:
    async def test(scene: Scene) -> None:
        host = await scene.host(listens=False)
        async with js_peer(HERE) as js:
            contact = await js.contact()
            connection = await host.connect(js.peer_id, contact.addresses)
            assert "/echo" in (await identify(connection)).protocols
            assert await ping(connection) < 10.0
            assert await echoed(connection, bytes(SIZE)) == bytes(SIZE)

    run(test)


def test_js_reserves_at_this_relay_and_is_called_through_it() -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        caller = await scene.caller()
        async with js_peer(f"{multiaddr(relay)}/p2p-circuit") as js, js_peer() as other:
            await until_reserved(js)
            connection = await caller.connect(js.peer_id, [relay])
            assert connection.relay == relay.peer_id
            assert await echoed(connection, bytes(SIZE)) == bytes(SIZE)
            to = circuit(relay, js.peer_id)
            assert await other.ask("echo", to=to, size=SIZE) == {"size": SIZE, "same": True}
            assert service.relay.carried_bytes > 4 * SIZE
            assert list(service.host.faults) == []

    run(test)


def test_js_calls_a_hidden_peer_through_this_relay() -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        hidden = await scene.hidden(relay)
        async with js_peer() as js:
            to = circuit(relay, hidden.peer_id)
            assert await js.ask("echo", to=to, size=SIZE) == {"size": SIZE, "same": True}
            said = await js.ask("identify", to=to)
            assert said["peer"] == str(hidden.peer_id)
            assert 0 <= await js.ask("ping", to=to) < 10_000
            assert list(hidden.host.faults) == []

    run(test)


def test_a_hidden_peer_reserves_at_a_js_relay_and_is_called_through_it() -> None:
    async def test(scene: Scene) -> None:
        async with js_peer(HERE, relay=True) as js, js_peer() as other:
            relay = await js.contact()
            hidden, caller = await scene.hidden(relay), await scene.caller()
            assert hidden.circuits.held == [relay]
            connection = await caller.connect(hidden.peer_id, [relay])
            assert await ping(connection) < 10.0
            small = bytes(10_000)  # such a relay carries 128 KiB
            assert await echoed(connection, small) == small
            to = circuit(relay, hidden.peer_id)
            assert await other.ask("echo", to=to, size=10_000) == {"size": 10_000, "same": True}

    run(test)


def test_a_js_relay_that_stops_is_noticed() -> None:
    async def test(scene: Scene) -> None:
        async with js_peer(HERE, relay=True) as js:
            hidden = await scene.hidden(await js.contact())
        await until(lambda: hidden.circuits.held == [])

    run(test)
