"""Tests in virtual time, over links with a delay: how many round trips connections and calls take, and which
waits there are none of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarm.core.errors import NetworkError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import PeerStanding
from swarm.libp2p.basics import serve_basics
from swarm.libp2p.circuits import RELAY_PING_S, RELAY_SILENT_S, Circuits
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.host import Host
from swarm.libp2p.logic.messages import MESSAGE_BYTES_MAX, PUNCH_PROTOCOL, PunchKind, decode_punch
from swarm.libp2p.logic.relaying import RelayLimits
from swarm.libp2p.punching import Punching
from swarm.libp2p.racing import Races
from swarm.libp2p.relay import RelayService
from swarm.testing.virtual_loop import VirtualClock, run_virtual
from tests.libp2p.memory_pipes import MemoryPipe, memory_pipes

DELAY_S = 0.025  # of each link, one way
LINK_S = 2 * DELAY_S  # a round trip
RELAYED_S = 2 * LINK_S
PAUSE_S = 60.0  # py-libp2p's yamux gives up after 5 s


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def echo(stream: MuxedStream) -> None:
    while data := await stream.read():
        await stream.write(data)


class Scene:
    """Hosts that are connected over memory."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self.pipes: dict[Host, MemoryPipe] = {}  # last end of each host that has connected

    def host(self) -> Host:
        """Return a host that echoes `/echo`."""
        host = Host(Identity.generate())
        serve_basics(host, "test/1")
        host.handle("/echo", echo)
        self.hosts.append(host)
        return host

    async def link(self, one: Host, other: Host) -> PeerConnection:
        """Let a host connect to another one, and return its end."""
        here, there = memory_pipes(DELAY_S)
        self.pipes[one] = here
        remote = Address("198.51.100.1", 4001)
        made, _ = await asyncio.gather(
            one.secure(here, is_client=True, expected=other.peer_id, remote=remote),
            other.secure(there, is_client=False, expected=None, remote=remote),
        )
        return made

    async def relayed(self) -> tuple[Circuits, PeerId, Contact]:
        """Return the circuits of a caller, a hidden peer, and the relay to which both are connected."""
        relay, hidden, caller = self.host(), self.host(), self.host()
        RelayService(relay, RelayLimits(), PeerStanding(), VirtualClock())
        contact = Contact(relay.peer_id, (Address("198.51.100.1", 4001),))
        await self.link(hidden, relay)
        await self.link(caller, relay)
        reserving = Circuits(hidden, VirtualClock())
        reserving.offer([contact])
        await reserving.reserve(contact)
        return Circuits(caller, VirtualClock()), hidden.peer_id, contact


def run(test: Callable[[Scene], Awaitable[None]]) -> None:
    async def closed() -> None:
        scene = Scene()
        try:
            await test(scene)
        finally:
            for host in scene.hosts:
                await host.close()

    run_virtual(closed(), limit_s=600.0)


async def echoed(connection: PeerConnection, data: bytes) -> bytes:
    stream = await connection.open("/echo")
    await stream.write(data)
    return await stream.read_exactly(len(data))


def test_a_connection_takes_one_round_trip_and_a_first_answer_a_second_one() -> None:
    async def test(scene: Scene) -> None:
        one, other = scene.host(), scene.host()
        begun_s = now_s()
        here, there = memory_pipes(DELAY_S)
        accepting = asyncio.create_task(other.secure(there, is_client=False, expected=None))
        connection = await one.secure(here, is_client=True, expected=other.peer_id)
        assert now_s() - begun_s == pytest.approx(LINK_S)
        assert await echoed(connection, b"hello") == b"hello"
        assert now_s() - begun_s == pytest.approx(2 * LINK_S)
        assert (await accepting).peer_id == one.peer_id

    run(test)


def test_a_circuit_takes_one_round_trip_with_its_handshake_and_a_first_answer_a_second_one() -> None:
    async def test(scene: Scene) -> None:
        caller, hidden, relay = await scene.relayed()
        begun_s = now_s()
        connection = await caller.connect(hidden, [relay])
        assert now_s() - begun_s == pytest.approx(RELAYED_S)
        assert not connection.is_confirmed
        assert await echoed(connection, b"hello") == b"hello"
        assert now_s() - begun_s == pytest.approx(2 * RELAYED_S)
        assert connection.is_confirmed

    run(test)


def test_hole_punching_begins_as_soon_as_the_relayed_connection_stands() -> None:
    async def test(scene: Scene) -> None:  # trap 13: py-libp2p waits for 2 s
        caller, hidden, relay = await scene.relayed()
        host = next(one for one in scene.hosts if one.peer_id == hidden)
        Punching(host, VirtualClock(), lambda peer_id, address: False, lambda peer_id: None)
        begun_s, asked = now_s(), asyncio.get_running_loop().create_future()

        async def answer(stream: MuxedStream) -> None:
            asked.set_result(decode_punch(await stream.read_message(MESSAGE_BYTES_MAX)).kind)

        scene.hosts[-1].handle(PUNCH_PROTOCOL, answer)
        await caller.connect(hidden, [relay])
        assert await asked is PunchKind.CONNECT
        assert now_s() - begun_s == pytest.approx(2 * RELAYED_S)

    run(test)


def test_a_relay_that_grants_no_circuit_is_named_with_its_reason() -> None:
    async def test(scene: Scene) -> None:
        caller, _, relay = await scene.relayed()
        nobody = Identity.generate().peer_id
        with pytest.raises(NetworkError, match=r"NO_RESERVATION \(204\)"):
            await caller.connect(nobody, [relay])

    run(test)


def test_a_caller_notices_within_four_seconds_that_its_relay_is_frozen() -> None:
    async def test(scene: Scene) -> None:  # trap 6
        caller, hidden, relay = await scene.relayed()
        connection = await caller.connect(hidden, [relay])
        assert await echoed(connection, b"hello") == b"hello"
        begun_s = now_s()
        scene.pipes[scene.hosts[-1]].frozen = True  # nothing comes from the relay any more
        await connection.wait_ended()
        assert now_s() - begun_s <= RELAY_PING_S + RELAY_SILENT_S

    run(test)


def test_a_stream_whose_reader_pauses_for_a_minute_carries_all_bytes_afterwards() -> None:
    async def test(scene: Scene) -> None:  # trap 11
        one, other = scene.host(), scene.host()
        size, read = 1_000_000, asyncio.get_running_loop().create_future()

        async def pause(stream: MuxedStream) -> None:
            await asyncio.sleep(PAUSE_S)
            read.set_result(len(await stream.read_exactly(size)))

        other.handle("/pause", pause)
        stream = await (await scene.link(one, other)).open("/pause")
        await stream.write(b"x" * size)  # four windows
        assert now_s() > PAUSE_S
        assert await read == size

    run(test)


def test_attempts_that_fail_at_once_do_not_delay_the_one_that_succeeds() -> None:
    async def test() -> None:  # trap 5
        async def refused() -> int:
            raise NetworkError("refused")

        async def answered() -> int:
            return 1

        attempts = [*[(str(number), refused) for number in range(8)], ("last", answered)]
        assert await Races[int]().run(PeerId(bytes(32)), lambda: None, attempts, 10.0) == 1
        assert now_s() == 0.0

    run_virtual(test(), limit_s=600.0)
