"""Messages in frames: messages arrive unchanged, whichever side is slow; false sizes are refused."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from averaging.allreduce.config import MESSAGE_BYTES_MAX
from averaging.allreduce.frames import (
    FRAME_BYTES_LEAST,
    FRAME_BYTES_MIN,
    SEND_BUFFER_BYTES,
    FramedStream,
    FrameSize,
)
from averaging.reduction.framing import pack, unpack
from averaging.reduction.speed import Speed
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.testing.identities import SeededIdentity
from swarm.testing.virtual_loop import VirtualClock, run_virtual
from swarm.wire.reduce_pb2 import ExchangeContribution, ExchangeFrames, ExchangeHeader, ExchangeOpen


class Wire:
    """A stream to itself: what is sent can be received. A byte takes `byte_s`."""

    def __init__(self, *messages: bytes, byte_s: float = 0.0) -> None:
        self.sent: deque[bytes] = deque(messages)
        self.byte_s = byte_s

    @property
    def peer_id(self) -> PeerId:
        return SeededIdentity("wire").peer_id

    async def send(self, message: bytes) -> None:
        await asyncio.sleep(len(message) * self.byte_s)
        self.sent.append(message)

    async def receive(self) -> bytes | None:
        return self.sent.popleft() if self.sent else None

    async def finish(self) -> None:
        return None

    def cancel(self) -> None:
        return None


def contribution(size: int) -> bytes:
    return pack(
        ExchangeHeader(contribution=ExchangeContribution(chunk=3)), bytes(nth % 251 for nth in range(size))
    )


def stream(wire: Wire, bytes_per_s: float | None, came: list[int]) -> FramedStream:
    speed = Speed()
    if bytes_per_s is not None:
        speed.committed(int(bytes_per_s), 1.0)
    return FramedStream(wire, VirtualClock(0.0, 0.0), speed, came.append, lambda: None)


@pytest.mark.parametrize("size", [0, 100, FRAME_BYTES_MIN, FRAME_BYTES_MIN + 1, 1 << 20])
@pytest.mark.parametrize("bytes_per_s", [None, 1e3, 4e6, 1e9])
def test_messages_cut_into_frames_arrive_whole(size: int, bytes_per_s: float | None) -> None:
    async def main() -> None:
        wire, came = Wire(byte_s=1e-5), list[int]()
        both = stream(wire, bytes_per_s, came)
        await both.send(contribution(size))
        await both.send(contribution(7))
        largest = max(len(message) for message in wire.sent)
        assert await both.receive() == contribution(size)
        assert await both.receive() == contribution(7)
        assert await both.receive() is None
        assert sum(came) == len(contribution(size)) + len(contribution(7))
        if bytes_per_s == 1e9:
            assert len(came) == 2  # whole
        elif size == 1 << 20:
            assert largest == (80_000 if bytes_per_s == 4e6 else FRAME_BYTES_MIN)

    run_virtual(main())


@pytest.mark.parametrize(("size", "messages"), [(100, 1), (1 << 20, 1 + 1 + 14)])
def test_an_opening_travels_with_the_first_message_if_that_is_small(size: int, messages: int) -> None:
    opening = ExchangeHeader(open=ExchangeOpen(plan_digest=b"cut"))

    async def main() -> None:
        wire = Wire()
        sender = stream(wire, 4e6, [])
        sender.begin(opening)
        await sender.send(contribution(size))
        await sender.finish()
        assert len(wire.sent) == messages  # the opening, what announces frames, and the frames
        header, first = unpack(wire.sent.popleft())
        assert header.open == opening.open
        came = list[int]()
        receiver = stream(wire, None, came)
        receiver.resume(first)
        assert await receiver.receive() == contribution(size)
        assert await receiver.receive() is None
        assert sum(came) == len(contribution(size))

    run_virtual(main())


def test_a_stream_that_sends_nothing_sends_its_opening() -> None:
    async def main() -> None:
        wire = Wire()
        sender = stream(wire, 4e6, [])
        sender.begin(ExchangeHeader(open=ExchangeOpen(plan_digest=b"cut")))
        await sender.finish()
        (message,) = wire.sent
        header, first = unpack(message)
        assert header.HasField("open")
        assert not first

    run_virtual(main())


def test_frames_of_an_unknown_link_grow_when_it_shows_to_be_fast() -> None:
    size = FrameSize(None)
    size.taken(SEND_BUFFER_BYTES, 0.001)
    assert size.next_bytes() == FRAME_BYTES_MIN  # buffers have swallowed it
    size.taken(10 << 20, 0.1)
    assert size.next_bytes() > 1 << 20
    size.taken(1 << 20, 1000.0)
    assert size.next_bytes() == FRAME_BYTES_MIN


def test_frames_of_a_fast_link_are_large_soon_after_the_buffers_are_full() -> None:
    """Even where those took long to fill, as while connections are made and values are encoded."""
    size, frames, taken = FrameSize(None), 0, 0
    while taken < SEND_BUFFER_BYTES:
        size.taken(size.next_bytes(), 0.01)
        taken += size.next_bytes()
    while size.next_bytes() < MESSAGE_BYTES_MAX:
        size.taken(size.next_bytes(), size.next_bytes() / 1e9)
        frames += 1
    assert frames < 8


def test_time_without_a_message_does_not_make_frames_smaller() -> None:
    """A reducer waits for the values of others before it sends its first average, and between averages."""

    async def main() -> None:
        wire = Wire(byte_s=1e-9)
        reducer = stream(wire, None, [])
        for _ in range(4):
            await asyncio.sleep(10.0)
            await reducer.send(contribution(1 << 20))
        assert len(wire.sent[-1]) > 1 << 20, "the last message is whole"

    run_virtual(main())


@pytest.mark.parametrize(
    ("announced", "frames", "words"),
    [
        (MESSAGE_BYTES_MAX + 1, [b"x"], "at most"),
        (0, [b"x"], "at most"),
        (FRAME_BYTES_LEAST + 5, [bytes(FRAME_BYTES_LEAST), b"678901"], "1 bytes more"),
        (FRAME_BYTES_LEAST + 5, [bytes(FRAME_BYTES_LEAST)], None),  # ends within a message: it has ended
        (10, [b"", b"1234567890"], "a frame of 0 bytes with 10 to come"),
        (10, [b"12345", b"67890"], "a frame of 5 bytes with 10 to come"),
        (2 * FRAME_BYTES_LEAST, [bytes(FRAME_BYTES_LEAST - 1)], f"at least {FRAME_BYTES_LEAST} are"),
    ],
)
def test_wrong_announced_sizes_are_refused(announced: int, frames: list[bytes], words: str | None) -> None:
    async def main() -> None:
        opening = pack(ExchangeHeader(frames=ExchangeFrames(bytes=announced)))
        taken = stream(Wire(opening, *frames), None, [])
        if words is None:
            assert await taken.receive() is None
        else:
            with pytest.raises(PeerError, match=words):
                await taken.receive()

    run_virtual(main())
