"""The DHT of libp2p with servers of js-libp2p and go-libp2p, on loopback: this client provides keys and finds
providers, also where several servers must be asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from swarm.core.ids import Address, Contact
from swarm.libp2p.kad import KadClient
from swarm.libp2p.logic.kad import run_key
from tests.chaos.namespaces import Process
from tests.interop import go_peers, js_peers
from tests.wire.libp2p_hosts import Scene, run
from tests.wire.small_run import write_small_run

pytestmark = pytest.mark.slow
KEY = run_key("bytelm")


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    if reason := js_peers.missing() or go_peers.missing():
        pytest.skip(reason)


@asynccontextmanager
async def servers(folder: Path, *kinds: str) -> AsyncIterator[list[Contact]]:
    """Run servers of a DHT, each of which is told the one before."""
    found: list[Contact] = []
    async with AsyncExitStack() as stack:
        for number, kind in enumerate(kinds):
            before = [js_peers.multiaddr(one) for one in found[-1:]]
            if kind == "js":
                js = js_peers.js_peer("/ip4/127.0.0.1/tcp/0", dht=True)
                peer = await stack.enter_async_context(js)
                found.append(await peer.contact())
                for one in before:
                    await peer.ask("ping", to=one)
            else:
                (folder / str(number)).mkdir()
                options = ("-dhtServer", "-b", f"-bootstrapPeers={before[0]}") if before else ("-dhtServer",)
                go = await stack.enter_async_context(go_peers.go_peer(folder / str(number), *options))
                found.append(go.contact)
        yield found


async def client(scene: Scene) -> tuple[KadClient, Contact]:
    """Return a client, and what it provides."""
    host = await scene.host(listens=False)
    return KadClient(host, list), Contact(host.peer_id, (Address("203.0.113.7", 4000),))


@pytest.mark.parametrize("kind", ["go", "js"])
def test_a_provider_is_found_at_a_server(kind: str, tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        async with servers(tmp_path, kind) as (server,):
            (giving, own), (taking, _) = await client(scene), await client(scene)
            assert await giving.provide(KEY, own, [server]) == 1
            assert await taking.providers(KEY, [server]) == [own]
            assert await taking.providers(run_key("other"), [server]) == []

    run(test)


@pytest.mark.parametrize("kinds", [("go", "go", "go"), ("js", "go", "go")], ids="-".join)
def test_a_provider_is_found_through_other_servers(kinds: tuple[str, ...], tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        async with servers(tmp_path, *kinds) as found:
            (giving, own), (taking, _) = await client(scene), await client(scene)
            while await giving.provide(KEY, own, [found[0]]) < len(found):
                pass  # until the servers know each other
            for server in found:
                assert await taking.providers(KEY, [server]) == [own]

    run(test)


def test_a_run_is_joined_by_its_name_and_a_server_of_the_dht_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = write_small_run(tmp_path, 'members = "open"\n')

    def command(name: str, *arguments: str) -> Process:
        monkeypatch.setenv("SWARM_HOME", str(tmp_path / f"home of {name}"))
        options = ("--device", "cpu", "--listen", "127.0.0.1:0", "--json", "--exit-with-parent")
        return Process([sys.executable, "-P", "-m", "swarm.cli", *arguments, *options])

    async def test() -> None:
        async with servers(tmp_path, "go") as (server,):
            servers_named = ("--libp2p-bootstrap", js_peers.multiaddr(server))
            founder = command("founder", "start", str(run_file), *servers_named)
            try:
                await asyncio.to_thread(
                    founder.wait,
                    "provider",
                    lambda event: "by its name at 1 server " in event.get("text", ""),
                )
                joined = command("volunteer", "join", "small", "--yes", *servers_named)
                try:
                    await asyncio.to_thread(
                        joined.wait, "contribution", lambda event: event["event"] == "contributing"
                    )
                finally:
                    joined.kill()
            finally:
                founder.kill()

    asyncio.run(test())
