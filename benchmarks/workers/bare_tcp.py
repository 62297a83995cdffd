"""A peer that moves the bytes of a butterfly all-reduce over plain TCP connections, one each way to every
other peer.

It shows what the emulated link and TCP themselves allow in a round that begins with idle connections, as a
round of swarm does.
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


def main() -> None:
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
    each_bytes = (
        2 * settings["vector_bytes"] // peers
    )  # values for the other's shard, averages of the own shard
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "prepare":
            channel.send("prepared")
        elif order["do"] == "round":
            wait_until(order["at_s"])
            _run_concurrently(
                [partial(_send, one, each_bytes) for one in out]
                + [partial(_take, one, each_bytes) for one in taken]
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


def _send(connection: socket.socket, size_bytes: int) -> None:
    zeros = memoryview(bytes(_BUFFER_BYTES))
    while size_bytes:
        size_bytes -= connection.send(zeros[: min(size_bytes, _BUFFER_BYTES)])


def _take(connection: socket.socket, size_bytes: int) -> None:
    room = memoryview(bytearray(_BUFFER_BYTES))
    while size_bytes:
        got = connection.recv_into(room[: min(size_bytes, _BUFFER_BYTES)])
        if not got:
            raise ConnectionError("the other peer is gone")
        size_bytes -= got


if __name__ == "__main__":
    main()
