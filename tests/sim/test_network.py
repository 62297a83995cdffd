"""The simulated network itself: what it delivers, what it loses, and that a seed repeats."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.ids import PeerId
from swarm.net.rpc import Method, Stream, StreamMethod
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.virtual_loop import Deadlock, run_virtual
from swarm.wire.peer_pb2 import Contact as WireContact

ECHO = Method(name="/test/Echo", request=WireContact, reply=WireContact, request_bytes_max=1000)
STREAM = StreamMethod(name="/test/Stream", message_bytes_max=100)


async def echo(caller: PeerId, request: WireContact) -> WireContact:
    if request.peer_id == b"refuse":
        raise PeerError("not you")
    if request.peer_id == b"break":
        raise ZeroDivisionError("a bug")
    return WireContact(peer_id=caller.to_bytes(), addresses=request.addresses)


def test_calls_travel_and_errors_are_those_of_the_transport() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=1, config=LinkConfig(delay_s=0.05, jitter=0.0))
        one, two = network.peer(), network.peer()
        two.handlers.unary(ECHO, echo)
        loop = asyncio.get_running_loop()
        reply = await one.caller.call(two.contact, ECHO, WireContact(addresses=["here"]), timeout_s=3)
        assert reply.peer_id == one.peer_id.to_bytes()
        assert list(reply.addresses) == ["here"]
        assert loop.time() == pytest.approx(0.1)
        with pytest.raises(PeerError, match="not you"):
            await one.caller.call(two.contact, ECHO, WireContact(peer_id=b"refuse"), timeout_s=3)
        with pytest.raises(PeerError, match="internal error"):
            await one.caller.call(two.contact, ECHO, WireContact(peer_id=b"break"), timeout_s=3)
        assert [type(error) for error in network.errors] == [ZeroDivisionError]
        with pytest.raises(UsageError, match="bytes"):
            await one.caller.call(two.contact, ECHO, WireContact(peer_id=bytes(2000)), timeout_s=3)
        with pytest.raises(PeerError, match="does not serve"):
            await two.caller.call(one.contact, ECHO, WireContact(), timeout_s=3)
        two.frozen = True
        with pytest.raises(DeadlineExceeded):
            await one.caller.call(two.contact, ECHO, WireContact(), timeout_s=3)
        two.frozen = False
        network.partition([one], [two])
        with pytest.raises(DeadlineExceeded):
            await one.caller.call(two.contact, ECHO, WireContact(), timeout_s=3)
        network.heal()
        await one.caller.call(two.contact, ECHO, WireContact(), timeout_s=3)
        await network.crash(two)
        with pytest.raises(NetworkError, match="cannot be reached"):
            await one.caller.call(two.contact, ECHO, WireContact(), timeout_s=3)
        await network.close()

    run_virtual(scenario())


def test_streams_keep_order_end_and_break() -> None:
    async def double(stream: Stream) -> None:
        while (message := await stream.receive()) is not None:
            if message == b"refuse":
                raise PeerError("enough")
            await stream.send(2 * message)

    async def scenario() -> None:
        network = SimulatedNetwork(seed=2)
        one, two = network.peer(), network.peer()
        two.handlers.stream(STREAM, double)
        async with one.caller.open_stream(two.contact, STREAM, timeout_s=60) as stream:
            async with asyncio.TaskGroup() as group:

                async def send() -> None:
                    for number in range(1, 50):
                        await stream.send(bytes([number]))
                    await stream.finish()

                group.create_task(send())
                got = []
                while (message := await stream.receive()) is not None:
                    got.append(message)
            assert got == [bytes([number, number]) for number in range(1, 50)]
        async with one.caller.open_stream(two.contact, STREAM, timeout_s=60) as stream:
            await stream.send(b"refuse")
            with pytest.raises(PeerError, match="enough"):
                await stream.receive()
        async with one.caller.open_stream(two.contact, STREAM, timeout_s=60) as stream:
            await network.crash(two)
            with pytest.raises(NetworkError):
                await stream.receive()
        network.restart(two)
        two.handlers.stream(STREAM, double)
        two.frozen = True
        with pytest.raises(DeadlineExceeded):
            async with one.caller.open_stream(two.contact, STREAM, timeout_s=5) as stream:
                await stream.receive()
        assert not network.errors
        await network.close()

    run_virtual(scenario())


def test_a_seed_repeats_and_another_differs() -> None:
    async def scenario(seed: int) -> str:
        network = SimulatedNetwork(seed=seed, config=LinkConfig(loss=0.2))
        peers = [network.peer() for _ in range(5)]
        for peer in peers:
            peer.handlers.unary(ECHO, echo)
        lost = 0
        for number in range(60):
            try:
                await peers[number % 5].caller.call(peers[(number + 1 + number % 4) % 5].contact, ECHO, WireContact(), timeout_s=1)
            except DeadlineExceeded:
                lost += 1
        assert 5 < lost < 40
        await network.close()
        return network.digest

    assert run_virtual(scenario(3)) == run_virtual(scenario(3))
    assert run_virtual(scenario(3)) != run_virtual(scenario(4))


def test_virtual_time_ends_what_would_hang() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def spin() -> None:
        for _ in range(10**9):
            await asyncio.sleep(60)

    with pytest.raises(Deadlock):
        run_virtual(hang())
    with pytest.raises(DeadlineExceeded):
        run_virtual(spin(), limit_s=3600)


def test_executors_run_on_the_loop() -> None:
    async def scenario() -> None:
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 // 0)
        assert asyncio.get_running_loop().time() == 0.0

    run_virtual(scenario())
