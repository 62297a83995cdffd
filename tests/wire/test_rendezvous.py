"""A run is found by its name in libp2p's DHT: a server of the DHT in this process, and nodes on loopback."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterator

import pytest

from swarm.cli.finding import given_entry, remembered_entry
from swarm.core.errors import NetworkError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact
from swarm.libp2p.connection import MuxedStream
from swarm.libp2p.host import Host
from swarm.libp2p.kad import KadClient
from swarm.libp2p.logic.kad import KAD_PROTOCOL, MESSAGE_BYTES_MAX, KadKind, encode_question, run_key
from swarm.libp2p.logic.messages import fields
from swarm.node import Node
from swarm.runtime.thread import NetworkThread
from tests.wire.libp2p_hosts import contact_of

HERE = "127.0.0.1"


class DhtServer:
    """A server that knows no other one, and holds what it is told."""

    def __init__(self) -> None:
        self.network = NetworkThread()
        self.records: dict[bytes, list[bytes]] = {}
        self.contact = self.network.run(self._start(), 10.0)

    async def _start(self) -> Contact:
        self._host = Host(Identity.generate())
        self._host.handle(KAD_PROTOCOL, self._answer)
        await self._host.start(HERE)
        return contact_of(self._host)

    async def _answer(self, stream: MuxedStream) -> None:
        message = dict(fields(await stream.read_message(MESSAGE_BYTES_MAX)))
        key = bytes(message[2])
        if message[1] == KadKind.ADD_PROVIDER:
            self.records.setdefault(key, []).append(bytes(message[9]))
            return
        held = self.records.get(key, []) if message[1] == KadKind.GET_PROVIDERS else []
        await stream.write_message(b"".join(bytes([9 << 3 | 2, len(one)]) + one for one in held))

    def close(self) -> None:
        self.network.run(self._host.close(), 10.0)
        self.network.stop()


@pytest.fixture
def server() -> Iterator[DhtServer]:
    made = DhtServer()
    yield made
    made.close()


pytestmark = pytest.mark.usefixtures("home")


def test_a_node_is_found_by_the_name_and_the_id_of_its_run(server: DhtServer) -> None:
    told: concurrent.futures.Future[str] = concurrent.futures.Future()
    with Node(listen=f"{HERE}:0") as node:
        providing = node.rendezvous.run(["bytelm", "a" * 20], [server.contact], told.set_result)
        node.network.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(providing))
        assert told.result(20.0) == "others can find bytelm by its name at 1 server of the libp2p DHT"
        for name in ("bytelm", "a" * 20, f"bytelm@{'a' * 20}"):
            entry = given_entry([name], None, None, [server.contact], role="train")
            assert entry is not None
            assert (list(entry.bootstrap), entry.run) == (node.addresses, name)
        entry = given_entry(["/ip4/x"], "bytelm", None, [server.contact], role="train")
        assert entry is not None
        assert entry.bootstrap == ("/ip4/x", *node.addresses)


def test_each_search_asks_the_servers_and_returns_what_they_hold_then(server: DhtServer) -> None:
    key = run_key("bytelm")  # trap 9

    async def search() -> None:
        host = Host(Identity.generate())
        await host.start()
        client = KadClient(host, list)
        for port in (4000, 4001):
            provider = Contact(Identity.generate().peer_id, (Address("203.0.113.7", port),))
            message = dict(fields(encode_question(KadKind.ADD_PROVIDER, key, provider)))
            server.records[key] = [bytes(message[9])]
            assert await client.providers(key, [server.contact]) == [provider]
        await host.close()

    server.network.run(search(), 20.0)


def test_a_server_that_does_not_answer_is_named_in_a_sentence(server: DhtServer) -> None:
    nobody = Contact(Identity.generate().peer_id, (Address(HERE, 1),))
    began_s = time.monotonic()
    with pytest.raises(NetworkError, match=f"no peer of the libp2p DHT answers: {nobody.peer_id.short}"):
        given_entry(["bytelm"], None, None, [nobody], role="train")
    assert time.monotonic() - began_s < 10.0


def test_addresses_that_were_found_enter_a_run_that_this_machine_never_saw() -> None:
    assert remembered_entry("bytelm", None, None, ["/ip4/x"], role="train").bootstrap == ("/ip4/x",)
