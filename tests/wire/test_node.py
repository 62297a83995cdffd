"""Tests of a node's life on real sockets: start, join, rejoin, close."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import swarm
from swarm.core.errors import DeadlineExceeded, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact
from swarm.net.hello import HELLO
from swarm.net.rpc import Stream, StreamMethod
from swarm.node import Node, NodeConfig
from swarm.wire import peer_pb2

HERE = "127.0.0.1:0"
QUICK = NodeConfig(preset="local")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_two_nodes_in_one_process_find_each_other() -> None:
    with Node(listen=HERE) as one, Node(one.addresses, listen=HERE) as two:
        assert two.wait_joined(15)
        assert [known.peer_id for known in two.peers()] == [one.peer_id]
        assert [known.contact for known in one.peers()] == [two.contact]
        known = two.peers()[0]
        assert known.round_trip_s is not None
        assert 0 < known.round_trip_s < 1
        assert known.agent.startswith(f"swarm/{swarm.__version__}")
        assert abs(known.last_seen_s - time.time()) < 60
        assert one.dht.store("key", "value", ttl_s=60).ok
        entry = two.dht.get("key")
        assert entry is not None
        assert not isinstance(entry, dict)
        assert (entry.value, entry.writer) == ("value", one.peer_id)


def test_a_node_that_is_given_its_own_address_says_that_its_identity_may_have_been_copied(
    tmp_path: Path,
) -> None:
    """Regression test: with a copied identity the second process continued alone and said "no answer"."""
    with swarm.Node(listen=HERE, identity=tmp_path / "first", config=QUICK) as first:
        shutil.copy(tmp_path / "first", tmp_path / "copy")
        with swarm.Node(first.addresses, listen=None, identity=tmp_path / "copy", config=QUICK) as copy:
            (why,) = copy.join_failures
            assert f"names this peer itself ({first.peer_id})" in why
            assert "one of the two needs an identity file of its own" in why
        with swarm.Node(first.addresses, listen=None, config=QUICK) as other:
            assert other.wait_joined(10)
            assert other.join_failures == []


@pytest.mark.timing
def test_starting_and_closing_a_node_is_fast() -> None:
    with Node(listen=HERE) as bootstrap:
        took_s = []
        for _ in range(3):  # on a loaded machine any single one may take long
            started_s = time.monotonic()
            node = Node(bootstrap.addresses, listen=HERE)
            took_s.append(time.monotonic() - started_s)
            node.wait_joined(15)
            started_s = time.monotonic()
            node.close()
            assert time.monotonic() - started_s < 2
            node.close()
        assert min(took_s) < 0.5, "0.05 s on a quiet machine"
    with pytest.raises(UsageError, match="this node is closed"):
        node.dht.get("key")
    assert "closed" in repr(node)


def wait_refused(node: Node) -> None:
    """Wait until the node's first attempt to join has failed, which takes a while on a busy machine."""
    deadline_s = time.monotonic() + 15.0
    while not node.join_failures and time.monotonic() < deadline_s:
        assert not node.wait_joined(0.05)


def test_a_bootstrap_peer_that_is_down_is_joined_when_it_comes_up() -> None:
    identity, port = Identity.generate(), free_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/tls/http/p2p/{identity.peer_id}"
    with Node([address], listen=HERE, config=QUICK) as node:
        wait_refused(node)
        assert f"cannot reach peer {identity.peer_id}" in node.join_failures[0]
        assert "connection refused" in node.join_failures[0]
        with Node(listen=f"127.0.0.1:{port}", identity=identity):
            assert node.wait_joined(10)
            assert node.peers()[0].peer_id == identity.peer_id


@pytest.mark.timing
def test_an_unresponsive_bootstrap_address_delays_neither_start_nor_close() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        address = f"/ip4/127.0.0.1/tcp/{hole.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        took_s = []
        for _ in range(3):  # on a loaded machine any single one may take long
            started_s = time.monotonic()
            node = Node(address, listen=HERE)
            took_s.append(time.monotonic() - started_s)
            started_s = time.monotonic()
            node.close()
            assert time.monotonic() - started_s < 2
        assert min(took_s) < 1


def test_a_node_rejoins_through_its_book_when_every_bootstrap_peer_is_dead(tmp_path: Path) -> None:
    with Node(listen=HERE) as friend:
        with (
            Node(listen=HERE) as bootstrap,
            Node(bootstrap.addresses, listen=HERE, identity=tmp_path / "key") as node,
        ):
            node.wait_joined(15)
            node.network.run(node.introductions.introduce(friend.contact, timeout_s=5))
            dead = bootstrap.addresses
        with Node(dead, listen=HERE, identity=tmp_path / "key", config=QUICK) as node:
            assert node.book.contact(friend.peer_id) == friend.contact
            assert node.wait_joined(15)
            assert node.channels.connected(friend.peer_id)


def test_a_second_node_with_the_same_identity_file_is_refused_until_the_first_is_closed(
    tmp_path: Path,
) -> None:
    with Node(listen=HERE, identity=tmp_path / "key") as first:
        program = f"import swarm; swarm.Node(listen='{HERE}', identity={str(tmp_path / 'key')!r})"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 1
        assert "is using the identity file" in done.stderr.splitlines()[-1]
    with Node(listen=HERE, identity=tmp_path / "key") as again:
        assert again.peer_id == first.peer_id


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bootstrap": ["/ip4/127.0.0.1/tcp/1"]}, "names no peer"),
        ({"bootstrap": "nonsense"}, "names no peer"),
        ({"listen": "everywhere"}, "is not host:port"),
        ({"listen": "192.0.2.1:0"}, "cannot listen on 192.0.2.1"),
    ],
)
def test_a_wrong_argument_leaves_no_thread_or_lock(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    threads = threading.active_count()
    with pytest.raises(UsageError, match=message):
        Node(**{"listen": HERE, "identity": tmp_path / "key", **arguments})  # type: ignore[arg-type]
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith("swarm")
    ] == [] or threading.active_count() == threads
    Identity.load(tmp_path / "key").close()


def test_a_port_that_is_taken_is_refused() -> None:
    with Node(listen=HERE) as node, pytest.raises(UsageError, match="another program has this port"):
        Node(listen=f"127.0.0.1:{node.contact.addresses[0].port}")


def test_announced_addresses_replace_the_detected_ones() -> None:
    with Node(listen=HERE, config=NodeConfig(announce=("203.0.113.7:4000",))) as node:
        assert node.addresses == [f"/ip4/203.0.113.7/tcp/4000/tls/http/p2p/{node.peer_id}"]


def test_a_node_that_does_not_listen_can_still_call() -> None:
    with Node(listen=HERE) as one, Node(one.addresses, listen=None) as client:
        assert client.wait_joined(15)
        assert client.addresses == []
        assert one.book.contact(client.peer_id) == Contact(client.peer_id)


def test_an_introduction_under_another_name_is_refused() -> None:
    with Node(listen=HERE) as one, Node(listen=HERE) as liar:
        message = peer_pb2.Hello(contact=peer_pb2.Contact(peer_id=Identity.generate().peer_id.to_bytes()))
        with pytest.raises(PeerError, match=liar.peer_id.short):
            liar.network.run(liar.channels.call(one.contact, HELLO, message, timeout_s=5))
        assert all(known.peer_id == liar.peer_id for known in one.peers())


@pytest.mark.timing
def test_services_close_in_reverse_order_and_cannot_delay_the_node() -> None:
    order: list[str] = []
    node, other = Node(listen=HERE), Node(listen=HERE)

    async def first() -> None:
        await node.introductions.introduce(other.contact, timeout_s=10)  # connections still work
        order.append("first")

    async def broken() -> None:
        raise RuntimeError("a service's bug")

    async def stuck() -> None:
        order.append("stuck")
        await asyncio.Event().wait()

    for callback in (first, broken, stuck):
        node.at_close(callback)
    started_s = time.monotonic()
    node.close()
    assert time.monotonic() - started_s < 2
    assert order == ["stuck", "first"]
    other.close()


def test_calls_from_the_users_thread_have_a_deadline_and_end_with_the_node() -> None:
    node = Node(listen=HERE)
    with pytest.raises(DeadlineExceeded, match=r"no result within 0\.1 s"):
        node.network.run(asyncio.Event().wait(), 0.1)

    async def inside() -> None:
        with pytest.raises(UsageError, match="would wait for itself"):
            node.network.run(asyncio.Event().wait(), 1)

    node.network.run(inside(), 5)
    outcome: list[BaseException] = []
    has_begun = threading.Event()

    async def forever() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            node.network.run(forever(), 30)
        except UsageError as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert has_begun.wait(5)
    node.close()
    waiting.join(5)
    assert "closed while this call was waiting" in str(outcome[0])


def test_a_program_that_does_not_close_its_node_ends_without_output(tmp_path: Path) -> None:
    program = (
        "import swarm, sys\n"
        f"one = swarm.Node(listen='{HERE}')\n"
        f"two = swarm.Node(one.addresses, listen='{HERE}', identity={str(tmp_path / 'key')!r})\n"
        "two.wait_joined(15)\n"
        "print(len(two.peers()))\n"
        "sys.exit(3)\n"
    )
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "")
    assert time.monotonic() - started_s < 15
    assert (tmp_path / "key.peers").exists(), "the exit hook closed it"


def test_a_program_that_raises_shows_only_its_own_error() -> None:
    program = f"import swarm\nnode = swarm.Node(listen='{HERE}')\nraise SystemError('mine')\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("SystemError: mine")


def test_a_call_that_is_still_ending_when_its_node_closes_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gRPC prints a traceback for each of its own tasks that is cancelled."""
    entered, left = threading.Event(), threading.Event()

    async def lingers(stream: Stream) -> None:
        entered.set()
        try:
            await asyncio.sleep(60)
        finally:
            left.set()
            await asyncio.sleep(0.3)

    method = StreamMethod(name="/swarm.Test/Linger")
    with Node(listen=HERE) as one, Node(one.addresses, listen=HERE) as two:
        one.handlers.stream(method, lingers)

        async def give_up() -> None:
            async with (
                asyncio.timeout(None) as limit,
                two.channels.open_stream(one.contact, method, timeout_s=None),
            ):
                await asyncio.to_thread(entered.wait, 15)
                limit.reschedule(asyncio.get_running_loop().time())
                await asyncio.sleep(60)

        two.network.submit(give_up())
        assert entered.wait(15)
        assert left.wait(15)
        one.close()
    assert capsys.readouterr().err == ""


def test_a_bootstrap_peer_needs_no_torch() -> None:
    program = (
        f"import sys, swarm\nwith swarm.Node(listen='{HERE}') as node: node.dht.store('a', 1, ttl_s=5)\n"
        "print(sorted({'torch', 'numpy', 'libp2p', 'trio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


def test_addresses_of_the_same_bootstrap_peer_are_merged() -> None:
    with Node(listen=HERE) as one:
        wrong = Contact(one.peer_id, (Address("127.0.0.1", 1),))
        with Node([wrong, *one.addresses, one.contact], listen=HERE) as two:
            assert two.wait_joined(15)
            assert len(two.peers()) == 1


def test_an_optimizer_without_peers_reports_that_its_node_has_reached_none() -> None:
    with Node([], listen=HERE) as gone:
        dead = gone.addresses
    with Node(dead, listen=HERE, config=QUICK) as node:
        wait_refused(node)
        inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
        with swarm.Optimizer(
            inner, node=node, run="lonely", target_batch_size=8, batch_size_per_step=4
        ) as optimizer:
            result = optimizer.load_state_from_peers(timeout_s=20.0)
    assert result.alone
    assert "reached nobody" in result.reason
    assert str(gone.peer_id) in result.reason
