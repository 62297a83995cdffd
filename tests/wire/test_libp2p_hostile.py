"""Relays that cut and delay circuits, hidden peers that announce what is not theirs, and streams without end:
what they cost, and who is named. Garbage, half-open streams, forged reservations, changed bytes and circuits
over circuits are in `test_libp2p_circuits.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from swarm.core.errors import NetworkError
from swarm.core.ids import Contact
from swarm.libp2p.connection import MuxedStream
from swarm.libp2p.logic.messages import HOP_PROTOCOL
from swarm.libp2p.logic.relaying import Circuit
from tests.wire.libp2p_hosts import Scene, contact_of, echoed, run, until


def test_a_relay_that_cuts_circuits_fails_one_call_and_the_next_uses_another_relay() -> None:
    async def test(scene: Scene) -> None:
        (cutting, service), (honest, _) = await scene.relay(), await scene.relay()
        opened: list[MuxedStream] = []
        open_circuit = service.open_circuit

        async def remembered(circuit: Circuit, early: bytes) -> MuxedStream:
            opened.append(await open_circuit(circuit, early))
            return opened[-1]

        service.open_circuit = remembered  # type: ignore[method-assign]
        hidden, caller = await scene.hidden(cutting, honest), await scene.caller()
        connection = await caller.connect(hidden.peer_id, [cutting])
        stream = await connection.open("/echo")
        await stream.write(b"half")
        assert await stream.read() == b"half"
        opened[0].close()
        with pytest.raises(NetworkError):
            await stream.read()
        await connection.wait_ended()
        again = await caller.connect(hidden.peer_id, [honest])
        assert again.relay == honest.peer_id
        assert await echoed(again, b"whole") == b"whole"
        assert service.relay.circuits == 0

    run(test)


@pytest.mark.timing
def test_a_relay_that_delays_circuits_does_not_delay_calls_if_there_is_another_relay() -> None:
    async def test(scene: Scene) -> None:
        (slow, service), (honest, _) = await scene.relay(), await scene.relay()
        never = asyncio.Event()

        async def held_back(circuit: Circuit, early: bytes) -> MuxedStream:
            await never.wait()
            raise AssertionError("nobody lets it continue")

        service.open_circuit = held_back  # type: ignore[method-assign]
        hidden, caller = await scene.hidden(slow, honest), await scene.caller()
        begun_s = time.monotonic()
        connection = await caller.connect(hidden.peer_id, [slow, honest])
        assert connection.relay == honest.peer_id
        assert time.monotonic() - begun_s < 3.0
        with pytest.raises(NetworkError, match=r"within 0\.3 s"):
            await (await scene.caller()).connect(hidden.peer_id, [slow], timeout_s=0.3)
        await until(lambda: service.relay.circuits == 0)

    run(test)


def test_bytes_that_a_relay_delays_arrive_whole_and_in_order() -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        hidden, caller = await scene.hidden(relay), await scene.caller()
        pass_s = service.relay.pass_s
        late = iter([0.05, 0.0, 0.2, 0.0, 0.1] * 1000)
        service.relay.pass_s = lambda *passed: pass_s(*passed) + next(late)  # type: ignore[method-assign]
        connection = await caller.connect(hidden.peer_id, [relay])
        data = bytes(range(256)) * 800
        assert await echoed(connection, data) == data

    run(test)


def test_a_hidden_peer_that_announces_somebody_elses_relay_is_not_reached_there() -> None:
    async def test(scene: Scene) -> None:
        (own, _), (other, service) = await scene.relay(), await scene.relay()
        hidden, caller = await scene.hidden(own), await scene.caller()
        with pytest.raises(NetworkError, match=rf"{other.peer_id.short}.*NO_RESERVATION \(204\)"):
            await caller.connect(hidden.peer_id, [other])
        (fault,) = service.host.faults
        assert f"{hidden.peer_id.short} has no reservation" in fault.what
        assert service.counts().refused == 1
        # other, wrong relays cost the right one nothing
        assert (await caller.connect(hidden.peer_id, [other, own])).relay == own.peer_id

    run(test)


def test_a_false_relay_address_of_a_hidden_peer_costs_others_one_failed_dial() -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        victim = await scene.host()
        hidden, caller = await scene.hidden(relay), await scene.caller()
        forged = Contact(relay.peer_id, contact_of(victim).addresses)
        with pytest.raises(NetworkError, match="another peer is there"):
            await caller.connect(hidden.peer_id, [forged])
        await until(lambda: victim.connections == [])
        assert await echoed(await caller.connect(hidden.peer_id, [relay]), b"on") == b"on"

    run(test)


@pytest.mark.parametrize("protocol", [HOP_PROTOCOL, "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"])
def test_streams_without_end_hold_bounded_memory_and_the_relay_serves_on(protocol: str) -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        hidden, caller = await scene.hidden(relay), await scene.caller()
        stranger = await scene.host()
        connection = await stranger.connect(relay.peer_id, relay.addresses)

        async def pour() -> None:
            with contextlib.suppress(NetworkError):
                stream = await connection.open(protocol)
                while True:  # it never reads
                    await stream.write(b"\xff" * 65_536)

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(pour())
            begun_s = time.monotonic()
            called = await caller.connect(hidden.peer_id, [relay])
            assert await echoed(called, b"x" * 300_000) == b"x" * 300_000
            assert time.monotonic() - begun_s < 10.0
            there = service.host.connection(stranger.peer_id)
            assert there is None or there.held < 8 << 20
            connection.close()

    run(test)
