"""Tests of yamux: data arrives for any splitting of the bytes, and the memory that a peer can occupy is
bounded. py-libp2p's own yamux is the oracle of the wire format.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
import trio
from libp2p.stream_muxer.yamux.yamux import Yamux

from swarm.core.errors import NetworkError, PeerError
from swarm.libp2p.logic import yamux
from swarm.libp2p.logic.yamux import Ended, Opened, Received, WasReset, Writable, YamuxSession
from swarm.libp2p.noise import PLAINTEXT_BYTES_MAX

SYN, ACK, FIN, RST = 1, 2, 4, 8
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)


def frame(kind: int, flags: int, stream: int, length: int, data: bytes = b"", version: int = 0) -> bytes:
    return struct.pack("!BBHII", version, kind, flags, stream, length) + data


def everything(session: YamuxSession) -> bytes:
    out = b""
    while data := session.output(1 << 20):
        out += data
    return out


def carry(source: YamuxSession, sink: YamuxSession) -> list[yamux.Event]:
    return sink.receive(everything(source))


def pair() -> tuple[YamuxSession, YamuxSession, int]:
    """Return two ends of a connection, and a stream that the first has opened."""
    client, server = YamuxSession(is_client=True), YamuxSession(is_client=False)
    stream = client.open()
    assert carry(client, server) == [Opened(stream)]
    carry(server, client)
    return client, server, stream


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_arrives_in_order_however_the_connection_cuts(seed: int) -> None:
    rng = random.Random(seed)
    ends = [YamuxSession(is_client=True), YamuxSession(is_client=False)]
    wires = [bytearray(), bytearray()]
    sent: dict[tuple[int, int], bytes] = {}  # by end and stream
    arrived: dict[tuple[int, int], bytes] = {}
    unread: dict[tuple[int, int], int] = {}
    streams: set[int] = set()

    def deliver(to: int) -> None:
        wires[to] += everything(ends[1 - to])
        size = rng.randint(0, min(len(wires[to]), rng.choice([1, 13, 5000, 1 << 20])))
        part = bytes(wires[to][:size])
        del wires[to][:size]
        for event in ends[to].receive(part):
            if isinstance(event, Opened):
                streams.add(event.stream)
            elif isinstance(event, Received):
                arrived[to, event.stream] = arrived.get((to, event.stream), b"") + event.data
                unread[to, event.stream] = unread.get((to, event.stream), 0) + len(event.data)

    for _ in range(400):
        end = rng.randrange(2)
        action = rng.randrange(5)
        if action == 0 and len(streams) < 6:
            streams.add(ends[end].open())
        elif action == 1 and streams:
            stream = rng.choice(sorted(streams))
            data = rng.randbytes(rng.choice([1, 100, 70_000, 300_000]))
            took = ends[end].send(stream, data)
            sent[end, stream] = sent.get((end, stream), b"") + data[:took]
        elif action == 2 and unread:
            key = rng.choice(sorted(unread))
            size = rng.randint(0, unread[key])
            ends[key[0]].consumed(key[1], size)
            unread[key] -= size
        else:
            deliver(end)
    for _ in range(3):
        for to in (0, 1):
            wires[to] += everything(ends[1 - to])
            ends_before = bytes(wires[to])
            wires[to].clear()
            for event in ends[to].receive(ends_before):
                if isinstance(event, Received):
                    arrived[to, event.stream] = arrived.get((to, event.stream), b"") + event.data
    assert arrived == {(1 - end, stream): data for (end, stream), data in sent.items() if data}


def test_a_sender_stops_at_the_window_and_continues_when_the_reader_has_read() -> None:
    client, server, stream = pair()
    sent = 0
    while took := client.send(stream, b"x" * 100_000):
        sent += took
    assert sent == yamux.WINDOW_BYTES
    carry(client, server)
    assert server.unread == sent
    server.consumed(stream, sent)
    assert Writable(stream) in carry(server, client)
    assert client.send(stream, b"y") == 1
    assert server.unread == 0


def test_a_window_in_use_grows_up_to_the_limit_unless_growth_is_not_allowed() -> None:
    for grows, expected in ((True, yamux.WINDOW_BYTES_MAX), (False, yamux.WINDOW_BYTES)):
        client, server, stream = pair()
        for _ in range(20):
            sent = 0
            while took := client.send(stream, b"x" * 60_000):
                sent += took
            carry(client, server)
            server.consumed(stream, sent, grows=grows)
            carry(server, client)
        assert sent == expected


def test_windows_of_all_streams_together_stay_below_the_limit() -> None:
    client, server = YamuxSession(is_client=True), YamuxSession(is_client=False)
    streams = [client.open() for _ in range(yamux.STREAMS_MAX)]
    carry(client, server)
    for _ in range(10):
        held = 0
        for stream in streams:
            sent = 0
            while took := client.send(stream, b"x" * 65_000):
                sent += took
            held += sent
            carry(client, server)
            server.consumed(stream, sent)
            carry(server, client)
    assert held <= yamux.WINDOWS_BYTES_MAX


def test_a_peer_that_sends_beyond_a_window_breaks_the_protocol() -> None:
    _, server, stream = pair()
    whole = b"x" * yamux.WINDOW_BYTES
    server.receive(frame(DATA, 0, stream, len(whole), whole))
    with pytest.raises(PeerError, match="takes 0"):
        server.receive(frame(DATA, 0, stream, 1))


def test_a_frame_longer_than_a_window_is_refused_before_it_is_read() -> None:
    _, server, stream = pair()
    with pytest.raises(PeerError, match="16777216 bytes"):
        server.receive(frame(DATA, 0, stream, 1 << 24))


def test_streams_beyond_the_limit_are_reset_and_the_others_live() -> None:
    _, server, _ = pair()
    events = []
    for number in range(200):
        events += server.receive(frame(WINDOW_UPDATE, SYN, 3 + 2 * number, 0))
    assert len(events) == yamux.STREAMS_MAX - 1
    assert server.refused == 200 - (yamux.STREAMS_MAX - 1)
    assert everything(server).count(struct.pack("!BBH", 0, WINDOW_UPDATE, RST)) >= server.refused
    assert server.receive(frame(DATA, 0, 1, 2, b"ok")) == [Received(1, b"ok")]


def test_this_side_opens_no_more_streams_than_it_would_take() -> None:
    client = YamuxSession(is_client=True)
    for _ in range(yamux.STREAMS_MAX):
        client.open()
    with pytest.raises(NetworkError, match="64 streams"):
        client.open()


@pytest.mark.parametrize(
    ("bytes_", "why"),
    [
        (frame(DATA, 0, 1, 0, version=1), "version 1"),
        (frame(4, 0, 1, 0), "type 4"),
        (frame(DATA, SYN, 0, 0), "stream 0"),
        (frame(WINDOW_UPDATE, SYN, 2, 0), "stream 2"),
        (frame(WINDOW_UPDATE, SYN, 1, 0), "stream 1"),
    ],
)
def test_malformed_frames_break_the_protocol(bytes_: bytes, why: str) -> None:
    _, server, _ = pair()
    with pytest.raises(PeerError, match=why):
        server.receive(bytes_)


def test_data_after_the_end_of_a_stream_breaks_the_protocol() -> None:
    client, server, stream = pair()
    client.finish(stream)
    assert carry(client, server) == [Ended(stream)]
    with pytest.raises(PeerError, match="finished"):
        server.receive(frame(DATA, 0, stream, 1, b"x"))


def test_each_direction_ends_on_its_own_and_both_free_the_stream() -> None:
    client, server, stream = pair()
    client.finish(stream)
    carry(client, server)
    assert server.send(stream, b"late") == 4
    assert Received(stream, b"late") in carry(server, client)
    server.finish(stream)
    carry(server, client)
    assert client.streams == server.streams == 0


def test_a_reset_frees_the_stream_and_what_was_in_flight_is_ignored() -> None:
    client, server, stream = pair()
    client.send(stream, b"in flight")
    server.reset(stream)
    assert carry(server, client) == [WasReset(stream)]
    late = frame(DATA, 0, stream, 9, b"in flight")
    assert server.receive(late + frame(WINDOW_UPDATE, 0, stream, 9)) == []
    assert client.streams == server.streams == server.unread == 0


def test_a_piece_of_a_circuit_fits_into_one_message_at_each_level() -> None:
    client, _, stream = pair()
    everything(client)
    client.send(stream, b"x" * 100_000)
    inner = client.output(PLAINTEXT_BYTES_MAX)
    message = 2 + len(inner) + 16  # of Noise, inside the circuit
    assert message + 12 <= PLAINTEXT_BYTES_MAX
    client.send(stream, b"x" * 10)
    assert len(inner) == yamux.PIECE_BYTES + 12


@pytest.mark.parametrize("seed", range(60))
def test_garbage_raises_nothing_but_peer_errors_and_is_not_stored(seed: int) -> None:
    rng = random.Random(seed)
    _, server, stream = pair()
    for _ in range(300):
        kind, flags = rng.randrange(4), rng.choice([0, 0, SYN, ACK, FIN, RST, rng.randrange(1 << 16)])
        number, length = rng.choice([stream, 3, 5, rng.randrange(1 << 32)]), rng.choice([0, 1, 40, 1 << 20])
        data = rng.randbytes(length if kind == DATA and length < 100 else rng.randrange(20))
        try:
            server.receive(frame(kind, flags, number, length, data))
        except PeerError:
            break
        assert server.unread <= yamux.WINDOWS_BYTES_MAX
        assert server.streams <= 2 * yamux.STREAMS_MAX


class OurEnd:
    """Our session as the other end of the secured connection of py-libp2p's yamux (on trio)."""

    def __init__(self, *, is_client: bool) -> None:
        self.session = YamuxSession(is_client=is_client)
        self.is_initiator = not is_client  # theirs
        self.events: list[yamux.Event] = []
        self._arriving = bytearray()
        self._changed = trio.Event()

    def notify(self) -> None:
        self._arriving += everything(self.session)
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._changed.wait()

    async def write(self, data: bytes) -> None:
        self.events += self.session.receive(data)
        self.notify()

    async def read(self, size: int) -> bytes:
        await self.until(lambda: len(self._arriving) >= size)
        data = bytes(self._arriving[:size])
        del self._arriving[:size]
        return data

    async def close(self) -> None: ...

    async def send(self, number: int, left: bytes) -> None:
        while left:
            took = self.session.send(number, left)
            left = left[took:]
            changed = self._changed
            self.notify()
            if took:
                await trio.lowlevel.checkpoint()
            elif changed is self._changed:
                await changed.wait()
            else:
                await self._changed.wait()
        self.session.finish(number)
        self.notify()

    async def take(self, number: int, size: int) -> None:
        while size:
            await self.until(lambda: self.events)
            for event in self.events:
                if isinstance(event, Received):
                    self.session.consumed(number, len(event.data))
                    size -= len(event.data)
            self.events.clear()
            self.notify()


@pytest.mark.parametrize("we_open", [True, False])
def test_py_libp2ps_yamux_understands_this_one(we_open: bool) -> None:
    ours = OurEnd(is_client=we_open)

    async def talk(nursery: trio.Nursery) -> None:
        theirs = Yamux(ours, None, is_initiator=not we_open)
        nursery.start_soon(theirs.start)
        await theirs.event_started.wait()
        if we_open:
            number = ours.session.open()
            ours.notify()
            stream = await theirs.accept_stream()
        else:
            stream = await theirs.open_stream()
            await ours.until(lambda: ours.events)
            number = ours.events[0].stream
            assert ours.events[0] == Opened(number)
        # more than a window in each direction
        nursery.start_soon(ours.send, number, b"x" * 600_000)
        size = 0
        while size < 600_000:
            size += len(await stream.read(100_000))
        ours.events.clear()
        nursery.start_soon(stream.write, b"y" * 400_000)
        await ours.take(number, 400_000)
        await stream.close()
        await ours.until(lambda: Ended(number) in ours.events)
        assert ours.session.streams == 0
        nursery.cancel_scope.cancel()

    async def bounded() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await talk(nursery)

    trio.run(bounded)
