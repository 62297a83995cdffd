"""Tests of forked children of a process with a live node: DataLoader workers run, the node's handles refuse
to, and no socket of the node stays open in them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from swarm.core.ids import Address, Contact
from swarm.net.rpc import Stream, StreamMethod
from swarm.node import Node, NodeConfig

HERE = "127.0.0.1:0"


def in_child(body: object) -> str:
    """Run `body()` in a forked child. Returns its result, or the error it raised."""
    assert callable(body)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def ports_of(process: psutil.Process) -> set[int]:
    return {
        end.port
        for connection in process.net_connections("tcp")
        for end in (connection.laddr, connection.raddr)
        if end
    }


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_keeps_its_own_sockets_and_none_of_the_nodes() -> None:
    before = ports_of(psutil.Process())
    with (
        Node(listen=HERE) as one,
        Node(one.addresses, listen=HERE) as two,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        assert two.wait_joined(5)
        two.throughput(one.contact)
        mine = ports_of(psutil.Process()) - before - {other.getsockname()[1]}
        assert len(mine) >= 4, "two ports of each node"
        assert in_child(lambda: mine & ports_of(psutil.Process())) == "set()"
        assert in_child(lambda: other.getsockname()[1] in ports_of(psutil.Process())) == "True"
        assert mine <= ports_of(psutil.Process()), "the parent's sockets are its own"
        assert two.dht.store("key", 1, ttl_s=60).ok, "and so are its connections"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_keeps_no_socket_of_libp2p() -> None:
    config = NodeConfig(announce=("relay.invalid",), relay_mbit=10.0)  # a machine that others can call relays
    with Node(listen=HERE, config=config) as relay:
        address = Address("127.0.0.1", relay.contact.addresses[0].port)
        for _ in range(50):  # it loads libp2p first
            with Node(Contact(relay.peer_id, (address,)), listen=HERE) as other:
                assert other.wait_joined(5)
                found = other.relays()
                if not found:
                    time.sleep(0.1)
                    continue
                assert [one.peer_id for one in found] == [relay.peer_id]
                assert found[0].round_trip_s is not None, "it answers a ping"
                ports = {found[0].address.port}
                assert ports <= ports_of(psutil.Process())
                assert in_child(lambda used=ports: used & ports_of(psutil.Process())) == "set()"
                return
        pytest.fail("the relay was not found")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_handle_used_in_a_child_fails_at_once_and_says_why() -> None:
    with Node(listen=HERE) as node:
        for use in (
            lambda: node.dht.get("key"),
            lambda: node.wait_joined(1),
            lambda: node.network.submit(asyncio.sleep(0.0)),
        ):
            text = in_child(use)
            assert text.startswith(
                f"UsageError: this node belongs to process {os.getpid()} and was inherited by a fork"
            ), text
        assert in_child(node.close) == "None", "closing in a child touches nothing"
        assert node.dht.store("key", 1, ttl_s=5) is not None


def test_a_data_loader_with_workers_runs_beside_a_node() -> None:
    program = textwrap.dedent("""
        import torch, swarm
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self): return 64
            def __getitem__(self, index): return torch.tensor(float(index))

        with swarm.Node(listen="127.0.0.1:0") as one:
            loader = DataLoader(Numbers(), batch_size=8, num_workers=2, persistent_workers=True)
            assert sum(float(batch.sum()) for batch in loader) == 2016.0
            with swarm.Node(one.addresses, listen="127.0.0.1:0") as two:   # made after the workers
                assert two.wait_joined(5)
                assert sum(float(batch.sum()) for batch in loader) == 2016.0
                second = DataLoader(Numbers(), batch_size=8, num_workers=2)
                assert sum(float(batch.sum()) for batch in second) == 2016.0
                assert two.dht.store("key", 1, ttl_s=5).ok
        print("done")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "fork" not in done.stderr.lower()


def test_a_killed_parents_connections_close_while_its_worker_lives(tmp_path: Path) -> None:
    """The peers of a killed trainer must notice its death at once, even while its orphaned workers live."""
    method = StreamMethod(name="/swarm.Test/Watch")
    with Node(listen=HERE) as watcher:
        broke, opened = watcher.network.run(_events(), 5)

        async def watch(stream: Stream) -> None:
            opened.set()
            try:
                await stream.receive()
            finally:
                broke.set()

        watcher.handlers.stream(method, watch)
        program = textwrap.dedent(f"""
            import os, sys, time, swarm
            from swarm.core.ids import Contact
            from swarm.net.rpc import StreamMethod
            node = swarm.Node({watcher.addresses!r}, listen="127.0.0.1:0")
            async def hold():
                watcher = Contact.parse({watcher.addresses[0]!r})
                method = StreamMethod(name="/swarm.Test/Watch")
                async with node.channels.open_stream(watcher, method, timeout_s=None) as stream:
                    await stream.receive()
            node.network.submit(hold())
            node.wait_joined(5)
            child = os.fork()
            if child == 0:
                time.sleep(60); os._exit(0)
            print(child, flush=True)
            time.sleep(60)
        """)
        trainer = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        child = psutil.Process(int(trainer.stdout.readline()))
        try:
            watcher.network.run(opened.wait(), 10)
            assert not broke.is_set()
            trainer.kill()
            trainer.wait()
            watcher.network.run(broke.wait(), 5)
            assert child.is_running()
        finally:
            child.kill()
            trainer.stdout.close()


async def _events() -> tuple[asyncio.Event, asyncio.Event]:
    return asyncio.Event(), asyncio.Event()
