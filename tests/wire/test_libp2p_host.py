"""Hosts of libp2p over sockets: what py-libp2p's own host got wrong (its traps, by number, are in
docs/decisions/0040), and that py-libp2p's host understands this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address
from swarm.libp2p.agreement import confirm, propose
from swarm.libp2p.basics import identify, ping
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.logic import yamux
from swarm.libp2p.logic.admission import CONNECTIONS_PER_PEER_MAX, HANDSHAKES_PER_PREFIX_MAX
from swarm.libp2p.noise import Noise
from swarm.libp2p.pipes import TcpPipe
from tests.wire.libp2p_hosts import HERE, Scene, contact_of, run, tcp_server


def test_two_hosts_identify_and_ping_each_other_and_carry_bytes() -> None:
    async def test(scene: Scene) -> None:
        one, two = await scene.host(), await scene.host()
        connection = await one.connect(two.peer_id, two.announced)
        stream = await connection.open("/echo")
        await stream.write(b"hello")
        assert await stream.read() == b"hello"
        said = await identify(connection)
        assert (said.agent, "/echo" in said.protocols) == ("test/1", True)
        assert 0.0 < await ping(connection) < 10.0
        back = two.connection(one.peer_id)
        assert (await identify(back)).agent == "test/1"
        assert await one.connect(two.peer_id, two.announced) is connection

    run(test)


def test_a_handler_that_fails_ends_its_stream_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Scene) -> None:  # trap 2
        one, two = await scene.host(), await scene.host()

        async def fail(stream: MuxedStream) -> None:
            raise ZeroDivisionError("a bug")

        two.handle("/bug", fail)
        connection = await one.connect(two.peer_id, two.announced)
        stream = await connection.open("/bug")
        with pytest.raises(NetworkError, match="reset"):
            await stream.read()
        assert await ping(connection) > 0.0

    with caplog.at_level(logging.ERROR):
        run(test)
    assert "ZeroDivisionError: a bug" in caplog.text


def test_a_black_hole_costs_no_more_than_the_time_limit() -> None:
    async def test(scene: Scene) -> None:  # trap 3
        one, two = await scene.host(), await scene.host()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with tcp_server(say_nothing) as port:
            with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
                await one.connect(two.peer_id, [Address(HERE, port)], timeout_s=0.3)
            # trap 4: the next address is tried while this one hangs, and nobody is refused afterwards
            connection = await one.connect(two.peer_id, [Address(HERE, port), *two.announced])
            assert connection.peer_id == two.peer_id

    run(test)


def test_a_failing_address_does_not_delay_the_next_and_a_corrected_one_works_at_once() -> None:
    async def test(scene: Scene) -> None:  # traps 4 and 5
        one, two, third = await scene.host(), await scene.host(), await scene.host()
        gone = await scene.host()
        nobody = gone.announced
        await gone.close()
        with pytest.raises(NetworkError, match=r"cannot reach .*does not answer"):
            await one.connect(two.peer_id, nobody)
        with pytest.raises(NetworkError, match="another peer is there"):
            await one.connect(two.peer_id, third.announced)
        begun_s = time.process_time()
        connection = await one.connect(two.peer_id, [*nobody * 8, *two.announced], timeout_s=30.0)
        assert connection.peer_id == two.peer_id
        assert time.process_time() - begun_s < 2.0
        with pytest.raises(UsageError, match="this peer itself"):
            await one.connect(one.peer_id, one.announced)

    run(test)


@pytest.mark.parametrize("protocol", ["/plaintext/2.0.0", "/tls/1.0.0", "/secio/1.0.0"])
def test_no_security_but_noise_is_agreed_on(protocol: str) -> None:
    async def test(scene: Scene) -> None:  # trap 1
        host = await scene.host()
        pipe = await TcpPipe.connect(HERE, host.listening.port)
        await propose(pipe, protocol)
        with pytest.raises(PeerError, match=f"does not speak {protocol}"):
            await confirm(pipe, protocol)
        pipe.close()

    run(test)


def test_a_host_dials_nobody_by_itself() -> None:
    async def test(scene: Scene) -> None:  # trap 7
        one, two, third = await scene.host(), await scene.host(), await scene.host()
        connection = await one.connect(two.peer_id, two.announced)
        await identify(connection)
        await third.connect(two.peer_id, two.announced)
        await asyncio.sleep(0.3)
        assert [len(host.connections) for host in (one, two, third)] == [1, 2, 1]

    run(test)


def test_places_of_connections_that_have_ended_are_free_again() -> None:
    async def test(scene: Scene) -> None:  # trap 20
        one, two = await scene.host(), await scene.host()
        ended: asyncio.Queue[object] = asyncio.Queue()
        for host in (one, two):
            host.at_ended.append(ended.put_nowait)
        for _ in range(3 * max(HANDSHAKES_PER_PREFIX_MAX, CONNECTIONS_PER_PEER_MAX)):
            connection = await one.connect(two.peer_id, two.announced)
            await ping(connection)
            connection.close()
            assert {await ended.get(), await ended.get()} > {connection}
            assert one.connections == two.connections == []

    run(test)


def test_streams_that_are_opened_and_left_are_freed() -> None:
    async def test(scene: Scene) -> None:
        one, two = await scene.host(), await scene.host()
        connection = await one.connect(two.peer_id, two.announced)
        for _ in range(3 * yamux.STREAMS_MAX):
            stream = await connection.open("/echo")
            stream.close()
        assert connection.streams == 0
        assert await ping(connection) > 0.0

    run(test)


def test_silent_connections_of_one_network_leave_room_for_others() -> None:
    async def test(scene: Scene) -> None:
        host, honest = await scene.host(), await scene.host()
        crowd = [
            await asyncio.open_connection(HERE, host.listening.port, local_addr=("127.1.0.1", 0))
            for _ in range(100)
        ]
        connection = await honest.connect(host.peer_id, host.announced)
        assert await ping(connection) > 0.0
        said = {one.what for one in host.faults if one.who == "127.1.0.1"}
        assert f"{HANDSHAKES_PER_PREFIX_MAX} handshakes of 127.1.0.0/24 are under way" in said
        for _, writer in crowd:
            writer.close()

    run(test)


def test_the_peer_that_makes_a_host_hold_most_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.libp2p.host.HELD_BYTES_MAX", 2_000_000)

    async def test(scene: Scene) -> None:
        host, greedy, honest = await scene.host(), await scene.host(), await scene.host()

        async def read_nothing(stream: MuxedStream) -> None:
            await stream.connection.wait_ended()

        host.handle("/slow", read_nothing)
        small = await honest.connect(host.peer_id, host.announced)
        await (await small.open("/slow")).write(b"x" * 100_000)
        connection = await greedy.connect(host.peer_id, host.announced)

        async def flood() -> None:
            for _ in range(yamux.STREAMS_MAX):
                await (await connection.open("/slow")).write(b"x" * 250_000)

        with pytest.raises(NetworkError, match="has ended"):
            await flood()
        assert host.faults[-1].who == str(greedy.peer_id)
        assert "made this peer hold" in host.faults[-1].what
        assert await ping(small) > 0.0

    run(test)


async def echoing(connection: PeerConnection) -> MuxedStream:
    """Return a stream that the peer serves."""
    stream = await connection.open("/echo")
    await stream.write(b"x")
    assert await stream.read_exactly(1) == b"x"
    return stream


def test_streams_that_are_served_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.libp2p.logic.admission.HANDLERS_MAX", 3)

    async def test(scene: Scene) -> None:
        one, two = await scene.host(), await scene.host()
        connection = await one.connect(two.peer_id, two.announced)
        held = [await echoing(connection) for _ in range(3)]  # as many as are served
        with pytest.raises(NetworkError, match="reset"):
            await echoing(connection)
        await held[0].write(b"lives")
        assert await held[0].read_exactly(5) == b"lives"

    run(test)


def test_streams_of_one_network_that_are_served_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.libp2p.logic.admission.HANDLERS_PER_PREFIX_MAX", 3)

    async def test(scene: Scene) -> None:
        host, honest = await scene.host(), await scene.host()
        crowd = [await scene.host(listens=False) for _ in range(2)]
        held = []
        for one in crowd:
            pipe = TcpPipe(
                *await asyncio.open_connection(HERE, host.listening.port, local_addr=("127.1.0.1", 0))
            )
            connection = await one.secure(pipe, is_client=True, expected=host.peer_id, remote=host.listening)
            for _ in range(2):
                with contextlib.suppress(NetworkError):
                    held.append(await echoing(connection))
        assert len(held) == 3
        assert host.faults[-1].what == "3 streams of 127.1.0.0/24 are being served"
        connection = await honest.connect(host.peer_id, host.announced)
        assert await ping(connection) > 0.0
        held[0].close()
        for _ in range(100):  # its place is free again
            with contextlib.suppress(NetworkError):
                held.append(await echoing(held[-1].connection))
                break
        assert len(held) == 4

    run(test)


def test_callers_of_one_peer_that_begin_at_once_share_a_connection() -> None:
    async def test(scene: Scene) -> None:
        one, two = await scene.host(), await scene.host()
        calls = [one.connect(two.peer_id, two.announced) for _ in range(2 * CONNECTIONS_PER_PEER_MAX)]
        made = await asyncio.gather(*calls)
        assert len(set(made)) == 1
        assert await ping(made[0]) > 0.0
        gone = await scene.host()
        nobody = gone.announced
        await gone.close()
        failing = asyncio.create_task(one.connect(gone.peer_id, nobody))
        await asyncio.sleep(0)
        with pytest.raises(NetworkError, match="another peer is there"):  # each tries its own addresses
            await one.connect(gone.peer_id, two.announced)
        with pytest.raises(NetworkError, match="does not answer"):
            await failing

    run(test)


def test_a_peer_that_opens_too_many_streams_loses_those_and_is_named() -> None:
    async def test(scene: Scene) -> None:
        host, honest = await scene.host(), await scene.host()
        stranger = Noise(Identity.generate())
        pipe = await TcpPipe.connect(HERE, host.listening.port)
        channel = await stranger.handshake(pipe, is_client=True, expected=None)
        assert channel.uses_yamux
        opening = [struct.pack("!BBHII", 0, 1, 1, 2 * number + 1, 0) for number in range(300)]
        await channel.write(b"".join(opening))
        answered = b""
        while len(answered) < 12 * 301:  # a ping, and an answer for each stream
            answered += await channel.read()
        flags = [struct.unpack_from("!BBH", answered, at)[2] for at in range(0, len(answered), 12)]
        assert flags.count(8) == 300 - yamux.STREAMS_MAX
        named = [one.what for one in host.faults if one.who == str(stranger.peer_id)]
        assert named == ["it opened more than 64 streams at a time"]
        connection = await honest.connect(host.peer_id, host.announced)
        assert await ping(connection) > 0.0
        pipe.close()

    run(test)


def test_an_identity_that_is_used_twice_is_refused() -> None:
    async def test(scene: Scene) -> None:
        one, two = await scene.host(), await scene.host()
        copy = type(one)(one.identity)
        scene.hosts.append(copy)
        await copy.start()
        connection = await copy.connect(two.peer_id, two.announced)
        assert connection.peer_id == two.peer_id
        pipe = await TcpPipe.connect(HERE, one.listening.port)
        with pytest.raises(PeerError, match="copy of its identity"):
            await copy.secure(pipe, is_client=True, expected=None)

    run(test)


def test_a_port_that_is_taken_is_said() -> None:
    async def test(scene: Scene) -> None:
        one, two = await scene.host(), await scene.host(listens=False)
        with pytest.raises(UsageError, match="cannot listen on"):
            await two.start(HERE, one.listening.port)

    run(test)


def test_py_libp2ps_own_host_dials_this_one_and_is_dialed() -> None:
    # its default host has other transports and muxers, too, and agrees on Noise and yamux
    import trio
    from libp2p import new_host
    from libp2p.custom_types import TProtocol
    from libp2p.host.ping import PingService
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo
    from multiaddr import Multiaddr

    there: dict[str, object] = {}
    ready, finished = threading.Event(), threading.Event()

    def their_thread(peer: str, address: str) -> None:
        async def main() -> None:
            host = new_host()

            async def echo(stream: Any) -> None:
                await stream.write(await stream.read(5))
                await stream.close()

            host.set_stream_handler(TProtocol("/echo"), echo)
            with trio.fail_after(50):
                async with host.run([Multiaddr(f"/ip4/{HERE}/tcp/0")]):
                    await host.connect(PeerInfo(ID.from_string(peer), [Multiaddr(address)]))
                    stream = await host.new_stream(ID.from_string(peer), [TProtocol("/echo")])
                    await stream.write(b"x" * 300_000)
                    echoed = b""
                    while len(echoed) < 300_000:
                        echoed += await stream.read(300_000)
                    there["echoed"] = echoed
                    there["pings"] = await PingService(host).ping(ID.from_string(peer), 2)
                    there["port"] = int(host.get_addrs()[0].value_for_protocol("tcp"))
                    there["peer"] = host.get_id().to_bytes()
                    ready.set()
                    await trio.to_thread.run_sync(finished.wait)
                    await host.close()

        try:
            trio.run(main)
        finally:
            ready.set()

    async def test(scene: Scene) -> None:
        from swarm.core.ids import PeerId

        host = await scene.host()
        address = f"/ip4/{HERE}/tcp/{host.listening.port}"
        thread = threading.Thread(target=their_thread, args=(str(host.peer_id), address))
        thread.start()
        try:
            await asyncio.to_thread(ready.wait, 50)
            assert there["echoed"] == b"x" * 300_000
            assert len(there["pings"]) == 2
            caller = await scene.host(listens=False)
            peer_id = PeerId.from_bytes(there["peer"])
            connection = await caller.connect(peer_id, [Address(HERE, there["port"])])
            stream = await connection.open("/echo")
            await stream.write(b"hello")
            assert await stream.read_exactly(5) == b"hello"
            assert "/echo" in (await identify(connection)).protocols
            assert await ping(connection) > 0.0
        finally:
            finished.set()
            await asyncio.to_thread(thread.join, 20)

    run(test)


def test_nothing_of_libp2p_is_loaded_before_a_peer_needs_it() -> None:
    program = (
        "import sys, swarm, swarm.cli\n"
        f"here = '{HERE}:0'\n"
        "with swarm.Node(listen=here) as one, swarm.Node(one.addresses[0], listen=here) as two:\n"
        "    two.dht.store('a', 1, ttl_s=5)\n"
        "    one.dht.get('a')\n"
        "sys.argv = ['swarm', '--help']\n"
        "swarm.cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "swarm.cli" in imported
    assert "Usage" in done.stdout
    unwanted = ("libp2p", "trio", "noise", "multiaddr", "zeroconf")
    assert not [one for one in imported if one.startswith("swarm.libp2p") or one.split(".")[0] in unwanted]


def test_a_host_that_is_made_but_not_started_closes() -> None:
    async def test(scene: Scene) -> None:
        host = type(await scene.host())(Identity.generate())
        await host.close()
        assert contact_of(scene.hosts[0]).addresses

    run(test)
