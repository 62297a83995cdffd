"""Copy bytes between two ends, for relays and tunnels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from swarm.core.errors import NetworkError, SwarmError


class SpliceEnd(Protocol):
    """One end: a stream or a TCP connection. Reading and writing raise NetworkError when it is gone."""

    async def read(self) -> bytes:
        """Return the next bytes; none when the other side has finished."""
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes; wait while the other side accepts none."""
        ...

    def finish(self) -> None:
        """Send no more."""
        ...


async def splice(
    one: SpliceEnd, other: SpliceEnd, pace: Callable[[int], float] | None = None, idle_s: float | None = None
) -> None:
    """Copy bytes between two ends in both directions until both have finished.

    `pace(size)` returns the seconds to wait before `size` bytes are forwarded. `idle_s`: an end that sends
    nothing for this time is closed; None: never. Raises NetworkError when an end is gone.
    """

    async def pump(source: SpliceEnd, sink: SpliceEnd) -> None:
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    data = await source.read()
            except TimeoutError:
                raise NetworkError(f"the circuit carried nothing for {idle_s:.0f} s") from None
            if not data:
                sink.finish()
                return
            if pace is not None and (wait_s := pace(len(data))) > 0.0:
                await asyncio.sleep(wait_s)
            await sink.write(data)

    errors: list[str] = []
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(pump(one, other))
            group.create_task(pump(other, one))
    except* SwarmError as failed:
        errors += [str(error) for error in failed.exceptions]
    if errors:
        raise NetworkError(errors[0])
