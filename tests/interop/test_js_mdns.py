"""js-libp2p sees on a local network the peers that announce a run there, in network namespaces."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from swarm.core.ids import PeerId
from tests.chaos.namespaces import Internet
from tests.chaos.namespaces import missing as no_namespaces
from tests.interop.js_peers import js_peer, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces()),
]

ANNOUNCER = """
import asyncio, sys
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.lan import LanPresence
from swarm.net.logic.lan import NearbyPeer
peer = NearbyPeer(contact=Contact(PeerId.parse(sys.argv[1])), run_id="a" * 20, run_name="r", is_invited=False)
asyncio.run(LanPresence(peer, Address("0.0.0.0", 4000)).run())
"""


def test_js_finds_the_address_of_a_volunteer() -> None:
    if reason := missing():
        pytest.skip(reason)
    peer_id = str(PeerId(bytes([7]) * 32))

    async def look(inside: list[str]) -> list[str]:
        async with asyncio.timeout(30.0), js_peer(inside=inside, mdns=True) as js:
            while True:
                for one in await js.ask("found"):
                    if one["peer"] == peer_id:
                        return list(one["addresses"])

    with Internet() as internet:
        here, _ = internet.lan("a", "b")
        inside = internet.inside("b")
        subprocess.run(
            [*inside, "ip", "route", "add", "224.0.0.0/4", "dev", "lan"], check=True
        )  # js needs one
        internet.start("a", "-c", ANNOUNCER, peer_id)
        (address,) = asyncio.run(look(inside))
    assert address.partition("/p2p/")[0] == f"/ip4/{here}/tcp/4000/tls/http"
