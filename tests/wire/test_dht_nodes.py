"""Tests of the DHT between real nodes on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from swarm.core.errors import UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Key
from swarm.dht.service.dht_service import StoreItem
from swarm.node import Node

LISTEN = "127.0.0.1:0"


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with ExitStack() as stack:
        found = [stack.enter_context(Node(listen=LISTEN))]
        for _ in range(3):
            found.append(stack.enter_context(Node(listen=LISTEN, bootstrap=found[0].addresses)))
        yield found


def value_at(node: Node, key: str) -> object:
    entry = node.dht.get(key)
    assert not isinstance(entry, dict)
    return entry.value if entry else None


def test_four_nodes_store_read_merge_and_delete(nodes: list[Node]) -> None:
    result = nodes[1].dht.store("key", {"x": [1, b"2", None]}, ttl_s=60)
    assert (result.ok, result.replicas) == (True, 4)
    for node in nodes:
        entry = node.dht.get("key")
        assert not isinstance(entry, dict)
        assert entry is not None
        assert (entry.value, entry.writer, entry.subkey) == ({"x": [1, b"2", None]}, nodes[1].peer_id, None)
        assert entry.expiration - entry.issued_at == pytest.approx(60)
    for number, node in enumerate(nodes):
        assert node.dht.store(Key("run.abc", "presence"), number, ttl_s=60).replicas == 4
    entries = nodes[3].dht.get("run.abc/presence")
    assert isinstance(entries, dict)
    assert {subkey: entry.value for subkey, entry in entries.items()} == {
        str(node.peer_id): number for number, node in enumerate(nodes)
    }
    one = nodes[0].dht.get("run.abc/presence", writer=nodes[2].peer_id)
    assert not isinstance(one, dict)
    assert one is not None
    assert one.value == 2
    assert nodes[2].dht.delete("run.abc/presence").replicas == 4
    assert nodes[0].dht.get("run.abc/presence", writer=str(nodes[2].peer_id), latest=True) is None
    assert len(nodes[1].dht.get_all("run.abc/presence")) == 3
    assert nodes[0].dht.get("nothing") is None


def test_writers_cannot_change_each_others_entries(nodes: list[Node]) -> None:
    nodes[0].dht.store("shared", "first", ttl_s=60)
    nodes[1].dht.store("shared", "second", ttl_s=60)
    assert value_at(nodes[2], "shared") == "second"
    nodes[1].dht.delete("shared")
    assert value_at(nodes[2], "shared") == "first"
    with pytest.raises(UsageError, match="its writer's PeerID"):
        nodes[1].dht.store("run.abc/presence", 1, ttl_s=60, subkey=str(nodes[0].peer_id))


def test_the_swarm_survives_its_first_peer(nodes: list[Node]) -> None:
    for number in range(10):
        nodes[1].dht.store(f"key{number}", number, ttl_s=60)
    nodes[0].close()
    for number in range(10):
        assert value_at(nodes[2], f"key{number}") == number
    started_s = time.monotonic()
    result = nodes[3].dht.store("after", 1, ttl_s=60)
    assert result.replicas == 3
    assert value_at(nodes[1], "after") == 1
    assert time.monotonic() - started_s < 5


def test_a_newcomer_receives_records() -> None:
    with Node(listen=LISTEN) as founder:
        for number in range(20):
            assert founder.dht.store(f"run.abc/thing{number}", bytes(50_000), ttl_s=60).replicas == 1
        with Node(listen=LISTEN, bootstrap=founder.addresses) as newcomer:
            storage = newcomer.dht.service.storage
            deadline_s = time.monotonic() + 10
            while len(storage.keys()) < 20 and time.monotonic() < deadline_s:
                time.sleep(0.01)
            founder.close()
            assert all(
                newcomer.dht.get(f"run.abc/thing{number}", writer=founder.peer_id) for number in range(20)
            )


def test_a_client_reads_and_writes_but_holds_nothing() -> None:
    with Node(listen=LISTEN) as server, Node(listen=None, bootstrap=server.addresses) as client:
        assert client.dht.store("key", 1, ttl_s=60).replicas == 1
        assert value_at(server, "key") == 1
        assert value_at(client, "key") == 1
        assert client.peer_id not in server.dht.service.overlay.table
        assert client.dht.service.storage.entry_count == 0


def test_many_threads_can_use_the_dht_concurrently(nodes: list[Node]) -> None:
    failures: list[str] = []

    def work(worker: int) -> None:
        for number in range(20):
            key = f"thread{worker}/{number}".replace("/", "-")
            if (
                not nodes[worker].dht.store(key, number, ttl_s=60).ok
                or value_at(nodes[(worker + 1) % 4], key) != number
            ):
                failures.append(key)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_restarted_peer_owns_its_records_again() -> None:
    identity = Identity.generate()
    with Node(listen=LISTEN) as server:
        with Node(listen=LISTEN, bootstrap=server.addresses, identity=identity) as before:
            before.dht.store("mine", "before", ttl_s=3600)
        with Node(listen=LISTEN, bootstrap=server.addresses, identity=identity) as after:
            assert after.dht.delete("mine").replicas >= 1
            assert server.dht.get("mine") is None
            assert after.dht.store("mine", "after", ttl_s=60).ok
            assert value_at(server, "mine") == "after"


def test_operations_on_a_closed_node_are_usage_errors() -> None:
    node = Node(listen=LISTEN)
    node.close()
    with pytest.raises(UsageError, match="closed"):
        node.dht.get("key")


def test_keys_and_subkeys_that_are_not_text_are_usage_errors() -> None:
    uses: list[Callable[[Any], object]] = [
        lambda dht: dht.store(0, "x", ttl_s=10),
        lambda dht: dht.store("a", "x", ttl_s=10, subkey=0),
        lambda dht: dht.store_many({0: "x"}, ttl_s=10),
        lambda dht: dht.store_many([StoreItem(key="a", value="x", subkey=b"b")], ttl_s=10),
        lambda dht: dht.get(0),
        lambda dht: dht.get_all(b"a"),
        lambda dht: dht.get_many([0]),
        lambda dht: dht.delete(0),
        lambda dht: dht.delete("a", subkey=0),
        lambda dht: dht.store(Key("public", 0), "x", ttl_s=10),  # type: ignore[arg-type]
    ]
    with Node(listen=LISTEN) as node:
        for use in uses:
            with pytest.raises(UsageError, match="is text"):
                use(node.dht)
