"""Hole punching on loopback: who dials, the fate of the relayed connection, and peers that break the rules.
tests/chaos/test_holes.py has routers.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from swarm.core.clock import SystemClock
from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact, PeerId
from swarm.libp2p import host as host_module
from swarm.libp2p import punching as punching_module
from swarm.libp2p.connection import PeerConnection
from swarm.libp2p.logic.messages import (
    PUNCH_PROTOCOL,
    HolePunch,
    PunchKind,
    decode_punch,
    encode_address,
    encode_punch,
)
from swarm.libp2p.punching import Punching
from tests.wire.libp2p_hosts import HERE, Hidden, Scene, run, until


class Puncher(Hidden):
    """A peer that listens and punches holes. `direct`: peers for which it has succeeded."""

    def __init__(self, scene: Scene, hidden: Hidden, may_dial: bool = True) -> None:
        self.host, self.circuits, self.changed = hidden.host, hidden.circuits, hidden.changed
        self.peer_id, self.ended = hidden.peer_id, hidden.ended
        self.direct: list[PeerId] = []
        self.asked: list[Address] = []

        def allowed(peer_id: PeerId, address: Address) -> bool:
            self.asked.append(address)
            return may_dial

        Punching(self.host, SystemClock(), allowed, self.direct.append)


async def puncher(scene: Scene, *relays: Contact, may_dial: bool = True) -> Puncher:
    """Return a peer that punches holes, with a reservation at each of these relays."""
    made = Puncher(scene, Hidden(await scene.host()), may_dial)
    made.host.supervisor.spawn("reservations", made.circuits.run)
    made.circuits.offer(relays)
    await made.until_held(len(relays))
    return made


async def talks(connection: PeerConnection, data: bytes) -> None:
    """Check that the peer echoes bytes on a new stream."""
    stream = await connection.open("/echo")
    await stream.write(data)
    assert await stream.read_exactly(len(data)) == data
    stream.finish()


async def asked_to_punch(connection: PeerConnection) -> None:
    """Begin an attempt, and wait for the peer's answer."""
    stream = await connection.open(PUNCH_PROTOCOL)
    await stream.write_message(encode_punch(HolePunch(PunchKind.CONNECT)))
    await stream.read_message(4096)


def test_a_relayed_connection_is_replaced_and_ends_with_its_last_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_module, "HOUSEKEEPING_S", 0.1)
    monkeypatch.setattr(host_module, "REPLACED_S", 0.2)

    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        callee, caller = await puncher(scene, relay), await puncher(scene)
        relayed = await caller.circuits.connect(callee.peer_id, [relay])
        running = await relayed.open("/echo")
        await until(lambda: bool(caller.direct and callee.direct))
        assert (caller.direct, callee.direct) == ([callee.peer_id], [caller.peer_id])
        direct = await caller.circuits.connect(callee.peer_id, [relay])
        assert direct.relay is None
        # from and to the ports at which both listen
        assert direct.remote == callee.host.listening
        back = callee.host.direct(caller.peer_id)
        assert back is not None
        assert back.remote == caller.host.listening
        assert (direct.is_client, back.is_client) == (True, False)
        before = service.relay.carried_bytes
        data = random.Random(1).randbytes(200_000)
        await talks(direct, data)
        await talks(back, data)
        assert service.relay.carried_bytes - before < 10_000  # pings
        # what was under way on the relay continues there
        await asyncio.sleep(0.5)
        await running.write(data)
        assert await running.read_exactly(len(data)) == data
        assert service.relay.carried_bytes - before > 2 * len(data)
        running.finish()
        await until(lambda: bool(relayed.ended))
        await until(lambda: service.relay.circuits == 0)
        assert not direct.ended

    run(test)


@pytest.mark.parametrize("seed", range(4))
def test_two_peers_that_call_each_other_at_once_agree_on_one_attempt(seed: int) -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        one, other = await puncher(scene, relay), await puncher(scene, relay)
        first, second = (one, other) if seed % 2 else (other, one)
        await asyncio.gather(
            first.circuits.connect(second.peer_id, [relay]), second.circuits.connect(first.peer_id, [relay])
        )
        await until(lambda: bool(one.direct and other.direct))
        for peer, there in ((one, other), (other, one)):
            connection = peer.host.direct(there.peer_id)
            assert connection is not None
            await talks(connection, b"directly")

    run(test)


def test_when_a_punched_connection_is_lost_calls_go_through_the_relay_and_it_is_punched_again() -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        callee, caller = await puncher(scene, relay), await puncher(scene)
        await caller.circuits.connect(callee.peer_id, [relay])
        await until(lambda: bool(caller.direct and callee.direct))
        for one in caller.host.connections:
            if one.peer_id == callee.peer_id:
                one.close("the test cuts it")
        await until(lambda: callee.host.connection(caller.peer_id) is None)
        again = await caller.circuits.connect(callee.peer_id, [relay])
        await talks(again, b"here")
        await until(lambda: len(caller.direct) == 2 and len(callee.direct) == 2)

    run(test)


def test_addresses_that_a_peer_may_not_name_are_not_dialed_and_the_relay_carries_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(punching_module, "DIAL_S", 0.3)

    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        callee = await puncher(scene, relay, may_dial=False)
        caller = await puncher(scene, may_dial=False)
        relayed = await caller.circuits.connect(callee.peer_id, [relay])
        await until(lambda: bool(caller.asked and callee.asked))
        await asyncio.sleep(0.6)
        assert not caller.direct
        assert not callee.direct
        await talks(relayed, b"through the relay")
        assert caller.asked == [callee.host.listening]  # no second attempt at once

    run(test)


def test_only_few_named_addresses_of_a_peer_are_dialed_and_no_service_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(punching_module, "DIAL_S", 0.3)

    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        victim, hidden = await puncher(scene), await scene.hidden(relay)
        named = [Address(HERE, port) for port in (22, 443, *range(40_000, 40_006))]
        sent = asyncio.Event()

        async def attack() -> None:
            await until(lambda: hidden.host.connection(victim.peer_id) is not None)
            connection = hidden.host.connection(victim.peer_id)
            assert connection is not None
            stream = await connection.open(PUNCH_PROTOCOL)
            raw = tuple(encode_address(one) for one in named)
            await stream.write_message(encode_punch(HolePunch(PunchKind.CONNECT, (b"garbage", *raw))))
            assert decode_punch(await stream.read_message(4096)).kind is PunchKind.CONNECT
            await stream.write_message(encode_punch(HolePunch(PunchKind.SYNC)))
            sent.set()
            with pytest.raises(NetworkError):
                await asked_to_punch(connection)  # while the first attempt runs

        async with asyncio.TaskGroup() as group:
            group.create_task(attack())
            await victim.circuits.connect(hidden.peer_id, [relay])
        await sent.wait()
        dialed = {port for host, port in victim.host.dialed}
        assert not dialed & {22, 443}
        assert len(dialed & {one.port for one in named}) <= 3

    run(test)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([b"\xff\xff"], "cut or too long"),
        ([encode_punch(HolePunch(PunchKind.SYNC))], "sent SYNC"),
        ([b"\x08\x07"], "unknown type 7"),
        ([encode_punch(HolePunch(PunchKind.CONNECT))] * 2, "sent CONNECT"),
    ],
    ids=["garbage", "sync-first", "unknown", "connect-twice"],
)
def test_a_peer_that_breaks_the_rules_is_named_and_costs_its_stream(messages: list[bytes], why: str) -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        victim, hidden = await puncher(scene), await scene.hidden(relay)
        await victim.circuits.connect(hidden.peer_id, [relay])
        await until(lambda: hidden.host.connection(victim.peer_id) is not None)
        connection = hidden.host.connection(victim.peer_id)
        assert connection is not None
        stream = await connection.open(PUNCH_PROTOCOL)
        for message in messages:
            await stream.write_message(message)
        await until(lambda: any(why in fault.what for fault in victim.host.faults))
        await talks(connection, b"still there")

    run(test)


def test_no_hole_is_punched_where_there_is_a_direct_connection() -> None:
    async def test(scene: Scene) -> None:
        victim, other = await puncher(scene), await scene.host()
        assert victim.host.listening is not None
        connection = await other.connect(victim.peer_id, [victim.host.listening])
        with pytest.raises(NetworkError):
            await asked_to_punch(connection)
        await until(lambda: any("not called through a relay" in fault.what for fault in victim.host.faults))

    run(test)
