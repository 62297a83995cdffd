"""A payload arrives at a minimum pace, or its sender is cut off."""

from __future__ import annotations

import asyncio

import pytest

from moe.protocol.methods import PACE_BYTES_PER_S_MIN, SILENCE_S_MAX, receive_payload
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.net.rpc import copy_into
from swarm.testing.virtual_loop import run_virtual


class Sender:
    """The receiving end of a stream on which a message of a given size comes at regular intervals."""

    peer_id = PeerId(bytes(32))

    def __init__(self, size_bytes: int, interval_s: float) -> None:
        self._message, self._interval_s = bytes(size_bytes), interval_s

    async def receive(self) -> bytes:
        await asyncio.sleep(self._interval_s)
        return self._message

    async def receive_into(self, buffer: memoryview) -> int | None:
        return copy_into(await self.receive(), buffer)

    async def send(self, message: bytes) -> None: ...
    async def finish(self) -> None: ...
    def cancel(self) -> None: ...


def test_one_byte_every_twenty_seconds_ends_in_less_than_a_minute() -> None:
    async def scenario() -> None:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(PeerError, match="too slowly"):
            await receive_payload(Sender(1, 20.0), 1 << 20)
        assert asyncio.get_running_loop().time() - began_s < 2 * SILENCE_S_MAX

    run_virtual(scenario())


def test_a_silent_sender_is_cut_off() -> None:
    async def scenario() -> None:
        with pytest.raises(PeerError, match="sent nothing for 30 s"):
            await receive_payload(Sender(1, 31.0), 2)

    run_virtual(scenario())


def test_a_payload_at_the_minimum_pace_arrives_and_each_message_is_reported() -> None:
    async def scenario() -> None:
        reported: list[int] = []
        sender = Sender(64 << 10, (64 << 10) / PACE_BYTES_PER_S_MIN)
        payload = await receive_payload(sender, 16 << 20, reported.append)
        assert payload.numel() == sum(reported) == 16 << 20

    run_virtual(scenario())
