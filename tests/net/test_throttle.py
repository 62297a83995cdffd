"""Tests of a node's bandwidth cap on streams and calls in virtual time: it is kept within 5 % and used up."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

import pytest

from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.net.throttle import WIRE_PER_BYTE, Bandwidth, Throttle
from swarm.testing.virtual_loop import run_virtual


class Unlimited:
    """A stream on a link without limits: sending returns at once, and there is always a message to receive.
    It counts both.
    """

    def __init__(self, size_bytes: int) -> None:
        self.message = bytes(size_bytes)
        self.sent_bytes = self.taken_bytes = 0

    @property
    def peer_id(self) -> PeerId:
        return Identity.generate().peer_id

    async def send(self, message: bytes) -> None:
        self.sent_bytes += len(message)

    async def receive(self) -> bytes | None:
        self.taken_bytes += len(self.message)
        return self.message

    async def finish(self) -> None:
        return None

    def cancel(self) -> None:
        return None


@pytest.mark.parametrize("cap", [250e3, 2.5e6])
@pytest.mark.parametrize("streams", [1, 2, 12])
@pytest.mark.parametrize("size_bytes", [4 << 10, 64 << 10])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_cap_is_kept_and_used_within_5_per_cent(
    cap: float, streams: int, size_bytes: int, direction: str
) -> None:
    """Measure bytes on the wire, headers included, while there is always something to send and to receive;
    the other direction has another cap.
    """
    caps = {"up": cap, "down": 3 * cap} if direction == "up" else {"up": 3 * cap, "down": cap}

    async def forever(step: Callable[[], Awaitable[object]], until_s: float) -> None:
        while asyncio.get_running_loop().time() < until_s:
            await step()

    async def main() -> float:
        """Return the rate at which bytes passed."""
        throttle = Throttle(Bandwidth(up_bytes_per_s=caps["up"], down_bytes_per_s=caps["down"]))
        links = [Unlimited(size_bytes) for _ in range(streams)]
        other = throttle.stream(Unlimited(size_bytes))
        began_s = asyncio.get_running_loop().time()
        until_s = began_s + 2.5
        async with asyncio.TaskGroup() as tasks:
            busy = tasks.create_task(
                forever(
                    other.receive if direction == "up" else functools.partial(other.send, bytes(1000)),
                    until_s,
                )
            )
            for link in links:
                stream = throttle.stream(link)
                tasks.create_task(
                    forever(
                        functools.partial(stream.send, link.message) if direction == "up" else stream.receive,
                        until_s,
                    )
                )
        assert busy.done()
        return sum(link.sent_bytes + link.taken_bytes for link in links) / (
            asyncio.get_running_loop().time() - began_s
        )

    assert 0.95 <= run_virtual(main()) * WIRE_PER_BYTE / cap <= 1.05


def test_a_direction_without_a_cap_is_not_delayed() -> None:
    async def main() -> float:
        began_s = asyncio.get_running_loop().time()
        stream = Throttle(Bandwidth(up_bytes_per_s=1.0)).stream(Unlimited(1 << 20))
        assert await stream.receive() is not None
        return asyncio.get_running_loop().time() - began_s

    assert run_virtual(main()) == 0.0


def test_what_passes_is_counted_with_and_without_caps_and_caps_can_change() -> None:
    async def main() -> tuple[float, float]:
        loop, throttle = asyncio.get_running_loop(), Throttle(Bandwidth())
        stream = throttle.stream(Unlimited(1000))
        await stream.send(bytes(300))
        await stream.receive()
        throttle.count(20, 3)
        assert throttle.passed == (320, 1003)
        assert not throttle.options
        began_s = loop.time()
        throttle.set_bandwidth(Bandwidth(up_bytes_per_s=WIRE_PER_BYTE * 1e6, down_bytes_per_s=1e9))
        assert throttle.options
        for _ in range(10):
            await stream.send(bytes(10**6))
        capped_s = loop.time() - began_s
        throttle.set_bandwidth(Bandwidth())
        await stream.send(bytes(10**8))
        assert throttle.passed[0] == 320 + 110 * 10**6
        return capped_s, loop.time() - began_s

    capped_s, all_s = run_virtual(main())
    assert capped_s == pytest.approx(10.0, abs=0.1)
    assert all_s == capped_s
