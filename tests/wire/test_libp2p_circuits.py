"""A relay, a peer that nobody can call, and a caller, on loopback: reservations, circuits, the relay's limits
and death, and strangers who break the rules.
"""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from swarm.core.clock import SystemClock
from swarm.core.errors import NetworkError, PeerError
from swarm.core.identity import Identity
from swarm.core.ids import Contact
from swarm.libp2p import relay as relay_module
from swarm.libp2p.basics import identify, ping
from swarm.libp2p.circuits import RELAY_PING_S, RELAY_SILENT_S, Circuits, granted
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.host import Host
from swarm.libp2p.logic.messages import (
    HOP_PROTOCOL,
    IDENTIFY_PROTOCOL,
    STOP_PROTOCOL,
    Hop,
    HopKind,
    Status,
    Stop,
    StopKind,
    decode_hop,
    encode_hop,
    encode_stop,
)
from swarm.libp2p.logic.negotiation import MULTISTREAM, encode_line
from swarm.libp2p.logic.relaying import Circuit
from swarm.libp2p.pipes import TcpPipe
from tests.wire.libp2p_hosts import HERE, Hidden, Scene, echoed, frozen_on, run, until


def test_a_hidden_peer_is_called_through_its_relay_and_calls_back() -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        hidden, caller = await scene.hidden(relay), await scene.caller()
        connection = await caller.connect(hidden.peer_id, [relay])
        assert (connection.peer_id, connection.relay) == (hidden.peer_id, relay.peer_id)
        data = random.Random(1).randbytes(3_000_000)
        assert await echoed(connection, data) == data
        back = hidden.host.connections[-1]
        assert back.relay == relay.peer_id
        assert await echoed(back, b"and back") == b"and back"
        assert service.relay.carried_bytes > 2 * len(data)
        assert await caller.connect(hidden.peer_id, [relay]) is connection

    run(test)


def test_closing_one_circuit_of_a_peer_leaves_its_others() -> None:
    async def test(scene: Scene) -> None:  # trap 10
        relay, service = await scene.relay()
        one, two = await scene.hidden(relay), await scene.hidden(relay)
        caller = await scene.caller()
        first = await caller.connect(one.peer_id, [relay])
        second = await caller.connect(two.peer_id, [relay])
        assert service.relay.circuits == 2
        first.close()
        assert await echoed(second, b"lives") == b"lives"
        await until_ended(one.host)
        assert service.relay.circuits == 1
        assert await echoed(second, b"still") == b"still"

    run(test)


async def until_ended(host: Host) -> None:
    """Wait until the connections of a host through relays have ended."""
    for connection in host.connections:
        if connection.relay is not None:
            await connection.wait_ended()


def test_callers_of_one_hidden_peer_that_begin_at_once_share_a_connection() -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        hidden, caller = await scene.hidden(relay), await scene.caller()
        made = await asyncio.gather(*[caller.connect(hidden.peer_id, [relay]) for _ in range(8)])
        assert len(set(made)) == 1
        assert service.relay.circuits == 1
        assert await echoed(made[0], b"shared") == b"shared"

    run(test)


def test_two_peers_that_call_each_other_at_once_both_get_through() -> None:
    async def test(scene: Scene) -> None:  # trap 16
        relay, _ = await scene.relay()
        one, two = await scene.hidden(relay), await scene.hidden(relay)
        async with asyncio.TaskGroup() as group:
            there = group.create_task(one.circuits.connect(two.peer_id, [relay]))
            back = group.create_task(two.circuits.connect(one.peer_id, [relay]))
        assert await echoed(there.result(), b"there") == b"there"
        assert await echoed(back.result(), b"back") == b"back"

    run(test)


def test_a_relay_calls_its_own_client_over_the_connection_that_is_open() -> None:
    async def test(scene: Scene) -> None:  # trap 17
        relay, service = await scene.relay()
        hidden = await scene.hidden(relay)
        circuits = Circuits(service.host, SystemClock())
        connection = await circuits.connect(hidden.peer_id, [relay])
        assert connection.relay is None
        assert await echoed(connection, b"hello") == b"hello"

    run(test)


def test_peers_that_never_answer_identify_are_called_all_the_same() -> None:
    async def silent(stream: MuxedStream) -> None:
        await stream.connection.wait_ended()

    async def test(scene: Scene) -> None:  # trap 19
        relay, _ = await scene.relay()
        scene.hosts[0].handle(IDENTIFY_PROTOCOL, silent)
        hidden, caller = await scene.hidden(relay), await scene.caller()
        hidden.host.handle(IDENTIFY_PROTOCOL, silent)
        connection = await caller.connect(hidden.peer_id, [relay])
        assert await echoed(connection, b"hello") == b"hello"

    run(test)


@pytest.mark.timing
def test_a_relay_that_dies_fails_calls_at_once_and_is_replaced() -> None:
    async def test(scene: Scene) -> None:
        (first, dying), (second, _), (third, _) = [await scene.relay() for _ in range(3)]
        hidden, caller = await scene.hidden(first, second), await scene.caller()
        connection = await caller.connect(hidden.peer_id, [first])
        stream = await connection.open("/echo")
        hidden.circuits.offer([third])
        begun_s = time.monotonic()
        await dying.host.close()
        with pytest.raises(NetworkError, match="has ended"):
            await stream.read()
        assert time.monotonic() - begun_s < 5.0
        await hidden.until_held(2)
        assert {one.peer_id for one in hidden.circuits.held} == {second.peer_id, third.peer_id}
        again = await caller.connect(hidden.peer_id, [first, second])
        assert await echoed(again, b"again") == b"again"

    run(test)


@pytest.mark.timing
def test_a_relay_that_freezes_is_noticed_within_five_seconds() -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        async with frozen_on(relay) as (behind, freeze):
            hidden, caller = await scene.hidden(behind), await scene.caller()
            connection = await caller.connect(hidden.peer_id, [behind])
            freeze.set()
            await noticed(connection, hidden)

    async def noticed(connection: PeerConnection, hidden: Hidden) -> None:
        begun_s = time.monotonic()
        await connection.wait_ended()
        assert time.monotonic() - begun_s < RELAY_PING_S + RELAY_SILENT_S + 3.0
        assert "sent nothing" in connection.ended
        await hidden.until_held(0)

    run(test)


def test_the_limits_of_a_relay_hold_and_are_said() -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay(circuits_max=2, circuits_per_peer_max=2, reservations_max=2)
        one, two = await scene.hidden(relay), await scene.hidden(relay)
        callers = [await scene.caller() for _ in range(3)]
        await callers[0].connect(one.peer_id, [relay])
        held = await callers[1].connect(two.peer_id, [relay])
        with pytest.raises(NetworkError, match=r"RESOURCE_LIMIT_EXCEEDED \(201\)"):
            await callers[2].connect(two.peer_id, [relay])
        refused = await scene.host(listens=False)
        with pytest.raises(PeerError, match=r"RESERVATION_REFUSED \(200\)"):
            await Circuits(refused, SystemClock()).reserve(relay)
        assert any("a reservation was refused: 2 peers" in one.what for one in service.host.faults)
        held.close()
        await until_ended(two.host)
        assert await echoed(await callers[2].connect(two.peer_id, [relay]), b"now") == b"now"

    run(test)


def test_a_relay_carries_no_more_bytes_per_second_than_it_gives() -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay(bytes_per_s=1e6, burst_s=0.05)
        hidden, caller = await scene.hidden(relay), await scene.caller()
        connection = await caller.connect(hidden.peer_id, [relay])
        begun_s = time.monotonic()
        assert len(await echoed(connection, b"x" * 600_000)) == 600_000
        assert time.monotonic() - begun_s > 1.0  # there and back

    run(test)


def test_a_circuit_ends_at_its_time_limit_and_one_that_carries_nothing_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay(circuit_s=0.5)
        hidden, caller = await scene.hidden(relay), await scene.caller()
        connection = await caller.connect(hidden.peer_id, [relay])
        await connection.wait_ended()
        assert any("time limit" in one.what for one in service.host.faults)
        monkeypatch.setattr(relay_module, "CIRCUIT_IDLE_S", 0.3)
        relay, service = await scene.relay()
        hidden = await scene.hidden(relay)
        connection = await caller.connect(hidden.peer_id, [relay])
        await connection.wait_ended()
        assert any("carried nothing" in one.what for one in service.host.faults)

    run(test)


def test_a_peer_without_a_reservation_is_not_reached() -> None:
    async def test(scene: Scene) -> None:
        relay, _ = await scene.relay()
        somebody, caller = await scene.host(), await scene.caller()
        await somebody.connect(relay.peer_id, relay.addresses)
        with pytest.raises(NetworkError, match=r"NO_RESERVATION \(204\)"):
            await caller.connect(somebody.peer_id, [relay])
        with pytest.raises(NetworkError, match="no way"):
            await caller.connect(somebody.peer_id, [])

    run(test)


def test_a_reservation_is_that_of_the_peer_that_asks_whomever_it_names() -> None:
    async def test(scene: Scene) -> None:  # trap 14
        relay, service = await scene.relay()
        forger, victim = await scene.host(), await scene.host()
        connection = await forger.connect(relay.peer_id, relay.addresses)
        answer = await asked(connection, encode_hop(Hop(HopKind.RESERVE, peer=victim.peer_id)))
        assert answer.status == Status.OK
        assert service.relay.reservations(time.monotonic()) == [forger.peer_id]

    run(test)


def test_a_reservation_is_not_made_of_a_connection_that_has_ended_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        client = await scene.host(listens=False)
        ended = asyncio.Event()
        service.host.at_ended.append(lambda connection: ended.set())
        read_message = MuxedStream.read_message

        async def read_late(stream: MuxedStream, bytes_max: int) -> bytes:
            data = await read_message(stream, bytes_max)
            if stream.connection in service.host.connections:
                stream.connection.close()
                await ended.wait()
            return data

        monkeypatch.setattr(MuxedStream, "read_message", read_late)
        connection = await client.connect(relay.peer_id, relay.addresses)
        with pytest.raises(NetworkError):
            await asked(connection, encode_hop(Hop(HopKind.RESERVE)))
        await until(lambda: not any("stream" in name for name in service.host.supervisor.running))
        assert ended.is_set()
        assert service.relay.reservations(time.monotonic()) == []

    run(test)


async def asked(connection: PeerConnection, message: bytes) -> Hop:
    """Send a relay bytes, and return its answer."""
    stream = await connection.open(HOP_PROTOCOL)
    await stream.write_message(message)
    return decode_hop(await stream.read_message(4096))


def test_circuits_over_circuits_are_refused() -> None:
    async def test(scene: Scene) -> None:
        outer, _ = await scene.relay()
        inner, _ = await scene.relay()
        # the inner relay can be reached through the outer one, too
        keeping = Hidden(scene.hosts[-1])
        keeping.host.supervisor.spawn("reservations", keeping.circuits.run)
        keeping.circuits.offer([outer])
        await keeping.until_held(1)
        hidden, caller = await scene.hidden(inner), await scene.caller()
        connection = await caller.connect(inner.peer_id, [outer])
        assert connection.relay == outer.peer_id
        with pytest.raises(PeerError, match=f"does not speak {HOP_PROTOCOL}"):
            await granted(await caller.request(connection, Hop(HopKind.CONNECT, peer=hidden.peer_id)))
        with pytest.raises(PeerError, match=f"does not speak {STOP_PROTOCOL}"):
            await (await connection.open(STOP_PROTOCOL)).read()
        assert HOP_PROTOCOL not in (await identify(connection)).protocols

    run(test)


def test_a_circuit_that_nobody_reserved_is_refused_by_its_target() -> None:
    async def test(scene: Scene) -> None:
        stranger, hidden = await scene.host(), await scene.hidden((await scene.relay())[0])
        connection = await hidden.host.connect(stranger.peer_id, stranger.announced)
        await ping(connection)
        offered = await stranger.connection(hidden.peer_id).open(STOP_PROTOCOL)
        await offered.write_message(encode_stop(Stop(StopKind.CONNECT, peer=stranger.peer_id)))
        answer = await offered.read_message(4096)
        assert answer == encode_stop(Stop(StopKind.STATUS, status=Status.PERMISSION_DENIED))
        assert any("no reservation at it" in one.what for one in hidden.host.faults)

    run(test)


def test_a_relay_that_names_a_false_caller_is_detected() -> None:
    async def test(scene: Scene) -> None:
        (relay, service), (second, _) = await scene.relay(), await scene.relay()
        hidden = await scene.hidden(relay, second)
        caller, caller_host = await scene.caller(), scene.hosts[-1]
        liar = Identity.generate().peer_id
        honest = service.open_circuit

        async def lying(circuit: Circuit, early: bytes) -> MuxedStream:
            circuit.caller = liar
            return await honest(circuit, early)

        service.open_circuit = lying
        connection = await caller.connect(hidden.peer_id, [relay, second])
        with pytest.raises(NetworkError, match="has ended"):
            await (await connection.open("/echo")).read()
        await until(lambda: bool(caller_host.faults))
        assert any("another peer is there" in one.what for one in hidden.host.faults)
        assert [one.who for one in caller_host.faults] == [str(relay.peer_id)]
        assert "took no circuit through it" in caller_host.faults[0].what
        # from then on the other relay is asked first
        again = await caller.connect(hidden.peer_id, [relay, second])
        assert again.relay == second.peer_id
        assert await echoed(again, b"taken") == b"taken"

    run(test)


def test_a_relay_that_brings_another_target_or_changes_bytes_is_found_out() -> None:
    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        hidden, other = await scene.hidden(relay), await scene.hidden(relay)
        caller = await scene.caller()
        honest = service.open_circuit

        async def swapped(circuit: Circuit, early: bytes) -> MuxedStream:
            circuit.target = other.peer_id
            return await honest(circuit, early)

        service.open_circuit = swapped
        service.relay.end = lambda circuit: None
        with pytest.raises(NetworkError, match="another peer is there"):
            await caller.connect(hidden.peer_id, [relay])
        service.open_circuit = honest
        connection = await caller.connect(hidden.peer_id, [relay])
        stream = await connection.open("/echo")
        await stream.write(b"whole")
        assert await stream.read_exactly(5) == b"whole"
        writes = MuxedStream.write

        async def corrupt(self: MuxedStream, data: bytes) -> None:
            if self.protocol == STOP_PROTOCOL:
                data = data[:-1] + bytes([data[-1] ^ 1])
            await writes(self, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MuxedStream, "write", corrupt)
            await stream.write(b"secret")
            with pytest.raises(NetworkError):
                await stream.read()
        assert any("did not encrypt" in one.ended for one in [connection, *hidden.ended])

    run(test)


@pytest.mark.parametrize("seed", range(6))
def test_garbage_on_the_port_and_on_streams_is_refused_and_the_relay_keeps_serving(seed: int) -> None:
    async def test(scene: Scene) -> None:
        rng = random.Random(seed)
        relay, service = await scene.relay()
        hidden, caller = await scene.hidden(relay), await scene.caller()
        pipes = []
        for kind in range(12):
            pipe = await TcpPipe.connect(HERE, relay.addresses[0].port)
            greeting = encode_line(MULTISTREAM)
            begin = [b"", greeting, greeting + encode_line("/noise")][kind % 3]
            await pipe.write(begin + rng.randbytes(rng.choice([1, 40, 3000])))
            pipes.append(pipe)
            if kind % 2:
                pipe.close()
        stranger = await scene.host()
        connection = await stranger.connect(relay.peer_id, relay.addresses)
        for _ in range(20):
            stream = await connection.open(rng.choice([HOP_PROTOCOL, "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"]))
            data = rng.randbytes(rng.choice([1, 5, 300, 5000]))
            try:
                await stream.write_message(data) if rng.random() < 0.5 else await stream.write(data)
                if rng.random() < 0.5:
                    stream.finish()
            except NetworkError:
                pass
            stream.close()
        bad = await asked(connection, b"\x0b")
        assert bad.status == Status.MALFORMED_MESSAGE
        assert (await asked(connection, encode_hop(Hop(HopKind.STATUS)))).status == Status.UNEXPECTED_MESSAGE
        assert await echoed(await caller.connect(hidden.peer_id, [relay]), b"on") == b"on"
        for pipe in pipes:
            pipe.close()
        assert service.host.faults
        assert all(one.who and one.what for one in service.host.faults)

    run(test)


def test_half_open_streams_and_handshakes_end_at_their_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MESSAGE_S", 0.2)
    monkeypatch.setattr("swarm.libp2p.host.HANDSHAKE_S", 0.5)

    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        silent = await TcpPipe.connect(HERE, relay.addresses[0].port)
        stranger = await scene.host()
        connection = await stranger.connect(relay.peer_id, relay.addresses)
        stream = await connection.open(HOP_PROTOCOL)
        await stream.write(b"\x7f")  # the length of a message that never comes
        with pytest.raises(NetworkError, match="reset"):
            await stream.read()
        with pytest.raises(NetworkError):
            await silent.read_exactly(100)
        silent.close()
        said = {one.what for one in service.host.faults}
        assert f"{HOP_PROTOCOL}: it asked for nothing on a stream to the relay" in said
        assert "it did not finish its handshake within 0 s" in said

    run(test)


def test_a_target_that_takes_circuits_and_says_nothing_costs_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "OPEN_S", 0.2)

    async def test(scene: Scene) -> None:
        relay, service = await scene.relay()
        hidden, caller = await scene.hidden(relay), await scene.caller()

        async def say_nothing(stream: MuxedStream) -> None:
            await stream.connection.wait_ended()

        hidden.host.handle(STOP_PROTOCOL, say_nothing)
        with pytest.raises(NetworkError, match=r"CONNECTION_FAILED \(203\)"):
            await caller.connect(hidden.peer_id, [relay])
        assert service.relay.circuits == 0

    run(test)


def test_a_peer_keeps_no_reservation_at_itself() -> None:
    async def test(scene: Scene) -> None:
        contact, service = await scene.relay()
        own = Hidden(service.host)
        own.host.supervisor.spawn("reservations", own.circuits.run)
        other, _ = await scene.relay()
        own.circuits.offer([contact, other])
        await own.until_held(1)
        assert [one.peer_id for one in own.circuits.held] == [other.peer_id]
        assert not own.host.faults

    run(test)


def test_a_dead_address_of_a_relay_is_asked_again_after_pauses_only() -> None:
    async def test(scene: Scene) -> None:
        gone = await scene.host()
        dead = Contact(gone.peer_id, (gone.listening,))
        await gone.close()
        hidden = await scene.hidden()
        begun_s = time.monotonic()
        hidden.circuits.offer([dead])
        for _ in range(2):  # each try ends with a change
            await hidden.changed.wait()
            hidden.changed.clear()
        assert time.monotonic() - begun_s > 0.9
        assert hidden.circuits.held == []

    run(test)
