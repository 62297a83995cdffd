"""A peer that moves the bytes of a butterfly all-reduce over plain TCP connections, one each way to every
other peer.

It shows what the emulated link and TCP themselves allow in a round that begins with idle connections, as a
round of swarm does. No byte waits for another one, so that no all-reduce can be faster. With `in_order`
(`bare_tcp_butterfly`), the averages of a shard leave only when the values for them have come from everybody.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.worker_channel import WorkerChannel, wait_until

PORT = 5000
_BUFFER_BYTES = 1 << 18


def main(*, in_order: bool = False) -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    rank, peers = settings["rank"], settings["peers"]
    server = socket.create_server((settings["host"], PORT), backlog=peers)
    channel.publish(f"listening {rank}", settings["host"])
    out = [
        socket.create_connection((channel.published(f"listening {other}"), PORT))
        for other in range(peers)
        if other != rank
    ]
    taken = [server.accept()[0] for _ in range(peers - 1)]
    shard_bytes = settings["vector_bytes"] // peers  # of values for the other's shard, then of averages
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "prepare":
            channel.send("prepared")
        elif order["do"] == "round":
            arrived = Arrived(len(taken), shard_bytes)
            wait_until(order["at_s"])
            _run_concurrently(
                [partial(_send, one, shard_bytes, arrived if in_order else None) for one in out]
                + [partial(_take, one, 2 * shard_bytes, arrived, nth) for nth, one in enumerate(taken)]
            )
            channel.send(
                "done", ok=True, reason="", end_s=time.monotonic(), grouped_s=order["at_s"], group=peers
            )
        elif order["do"] == "check":
            channel.send("checked", delivered=1.0, worst=0.0)


def _run_concurrently(jobs: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Arrived:
    """How many bytes of the values for the own shard have come from every other peer."""

    def __init__(self, peers: int, shard_bytes: int) -> None:
        self._came = [0] * peers
        self._shard_bytes = shard_bytes
        self._changed = threading.Condition()

    def add(self, peer: int, size_bytes: int) -> None:
        """Count bytes that have come from a peer."""
        with self._changed:
            self._came[peer] += size_bytes
            self._changed.notify_all()

    def wait(self, beyond_bytes: int) -> int:
        """Return how many bytes of averages there can be, once it is more than `beyond_bytes`."""
        with self._changed:
            self._changed.wait_for(lambda: min(self._came) > beyond_bytes)
            return min(*self._came, self._shard_bytes)


def _send(connection: socket.socket, shard_bytes: int, arrived: Arrived | None) -> None:
    """Send values and averages, the averages not before their values have `arrived`."""
    zeros = memoryview(bytes(_BUFFER_BYTES))
    sent, ready = 0, shard_bytes if arrived is not None else 2 * shard_bytes
    while sent < 2 * shard_bytes:
        if sent == ready and arrived is not None:
            ready = shard_bytes + arrived.wait(sent - shard_bytes)
        sent += connection.send(zeros[: min(ready - sent, _BUFFER_BYTES)])


def _take(connection: socket.socket, size_bytes: int, arrived: Arrived, nth: int) -> None:
    room = memoryview(bytearray(_BUFFER_BYTES))
    while size_bytes:
        got = connection.recv_into(room[: min(size_bytes, _BUFFER_BYTES)])
        if not got:
            raise ConnectionError("the other peer is gone")
        size_bytes -= got
        arrived.add(nth, got)


if __name__ == "__main__":
    main()
