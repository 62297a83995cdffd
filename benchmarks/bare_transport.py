"""The lower bound of an all-reduce: `grpc.aio` moves a butterfly's bytes over TLS between local processes.

Every process cuts its vector into one shard per process, streams each shard to its owner in messages of
`message_bytes`, and receives as many bytes on the same stream. Messages are made before the clock starts,
from as many different bytes as the vector has; received bytes are dropped. Nothing is encoded, added, checked
or decoded. The result is the cost of gRPC, TLS, the kernel and the event loop.
`averaging.allreduce.allreduce` is measured for comparison, in turn, in the same run.

    with BareButterfly(vector_bytes=64 << 20) as bare:
        seconds = bare.round()

Run as a program, it prints the seconds of a few rounds as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

METHOD = "/bare.Butterfly/Exchange"
SPLIT_BYTES_MAX = 4 << 20  # a round of swarm sends no larger messages


class BareButterfly:
    """Worker processes that idle between rounds, so that rounds can take turns with other measurements.

    Raises RuntimeError when a worker dies. Workers end with their parent.
    """

    def __init__(self, *, vector_bytes: int, processes: int = 4, message_bytes: int = 1 << 20) -> None:
        if not 0 < message_bytes <= SPLIT_BYTES_MAX:
            raise ValueError(f"message_bytes is between 1 and {SPLIT_BYTES_MAX}, not {message_bytes}")
        certificate, key = _self_signed()
        self._setup = {
            "vector_bytes": vector_bytes,
            "message_bytes": message_bytes,
            "certificate": certificate,
            "key": key,
        }
        self._processes = processes
        self._workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> BareButterfly:
        environment = {**os.environ, "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR")}
        try:
            for rank in range(self._processes):
                self._workers.append(
                    subprocess.Popen(
                        [sys.executable, os.path.abspath(__file__), "--worker"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                        env=environment,
                        start_new_session=True,
                    )
                )
                self._send(self._workers[rank], {**self._setup, "rank": rank, "processes": self._processes})
            ports = [self._receive(worker)["port"] for worker in self._workers]
            for worker in self._workers:
                self._send(worker, {"ports": ports})
            for worker in self._workers:
                self._receive(worker)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def round(self) -> float:
        """Run one butterfly. Return its seconds, from the start message to the end of the last process."""
        return self.round_detail()[0]

    def round_detail(self) -> tuple[float, float]:
        """Run one butterfly. Return (wall seconds, processor seconds of all processes together)."""
        started_s = time.perf_counter()
        for worker in self._workers:
            self._send(worker, {"go": True})
        replies = [self._receive(worker) for worker in self._workers]
        return time.perf_counter() - started_s, sum(reply["processor_s"] for reply in replies)

    def _send(self, worker: subprocess.Popen[str], message: dict[str, Any]) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(json.dumps(message) + "\n")
            worker.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(f"a bare transport worker died (exit code {worker.poll()})") from error

    def _receive(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError(f"a bare transport worker died (exit code {worker.wait()})")
        reply = json.loads(line)
        assert isinstance(reply, dict)
        return reply

    def _stop(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):
                worker.communicate("", timeout=2) if worker.poll() is None else None
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def _self_signed() -> tuple[str, str]:
    """Return a certificate and its key for `localhost`, as PEM text."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()


def shard_messages(vector_bytes: int, processes: int, message_bytes: int) -> list[list[int]]:
    """Return, for each process, the sizes of the messages that carry its shard to it."""
    edges = [vector_bytes * rank // processes for rank in range(processes + 1)]
    shards = itertools.pairwise(edges)
    return [
        [min(message_bytes, end - offset) for offset in range(start, end, message_bytes)]
        for start, end in shards
    ]


async def _exchange(channel: Any, messages: Sequence[bytes]) -> None:
    call = channel.stream_stream(METHOD)()

    async def send() -> None:
        for message in messages:
            await call.write(message)
        await call.done_writing()

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        for message in messages:
            reply = await call.read()
            if len(reply) != len(message):
                raise RuntimeError(f"{len(reply)} bytes came back where {len(message)} were sent")


async def _work(lines: asyncio.StreamReader) -> None:
    import grpc
    import grpc.aio

    async def receive() -> dict[str, Any]:
        message = json.loads(await lines.readline() or "{}")  # end of input: the parent has ended
        assert isinstance(message, dict)
        return message

    def send(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    setup = await receive()
    rank, processes, certificate, key = (
        setup["rank"],
        setup["processes"],
        setup["certificate"].encode(),
        setup["key"].encode(),
    )
    shards = shard_messages(setup["vector_bytes"], processes, setup["message_bytes"])
    # the parts of the vector; those of the own shard stand for averages
    payloads = [[os.urandom(size) for size in sizes] for sizes in shards]
    served: asyncio.Queue[None] = asyncio.Queue()

    async def echo(_request: Any, context: Any) -> None:
        for average in payloads[rank]:
            if len(await context.read()) != len(average):
                raise RuntimeError("the cut differs")
            await context.write(average)
        served.put_nowait(None)

    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", SPLIT_BYTES_MAX + 1024),
        ("grpc.max_send_message_length", SPLIT_BYTES_MAX + 1024),
    ]
    server = grpc.aio.server(options=options)
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(METHOD.split("/")[1], {METHOD.split("/")[2]: handler}),)
    )
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    send({"port": port})
    ports = (await receive())["ports"]
    trust = grpc.ssl_channel_credentials(certificate)
    options = [
        *options,
        ("grpc.ssl_target_name_override", "localhost"),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    others = [other for other in range(processes) if other != rank]
    channels = {
        other: grpc.aio.secure_channel(f"127.0.0.1:{ports[other]}", trust, options=options)
        for other in others
    }
    for channel in channels.values():
        await channel.channel_ready()
    send({"ready": True})
    while "go" in await receive():
        before = resource.getrusage(resource.RUSAGE_SELF)
        async with asyncio.TaskGroup() as group:
            for other, channel in channels.items():
                group.create_task(_exchange(channel, payloads[other]))
        for _ in channels:
            await served.get()
        after = resource.getrusage(resource.RUSAGE_SELF)
        send(
            {
                "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                "page_faults": after.ru_minflt - before.ru_minflt,
            }
        )
    for channel in channels.values():
        await channel.close()
    await server.stop(0)


async def _worker() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await _work(reader)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Seconds of a butterfly's bytes over bare grpc.aio with TLS, on loopback."
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, default=64, help="vector per process, 10^6 bytes")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--message-kib", type=int, default=1024)
    options = parser.parse_args(arguments)
    if options.worker:
        try:
            import uvloop

            uvloop.run(_worker())
        except ImportError:
            asyncio.run(_worker())
        return
    with BareButterfly(
        vector_bytes=options.megabytes * 10**6,
        processes=options.processes,
        message_bytes=options.message_kib << 10,
    ) as bare:
        bare.round()
        details = [bare.round_detail() for _ in range(options.rounds)]
    seconds = [wall_s for wall_s, _ in details]
    processor_s = statistics.median(processor_s for _, processor_s in details)
    print(
        json.dumps({"seconds": seconds, "median_s": statistics.median(seconds), "processor_s": processor_s})
    )


if __name__ == "__main__":
    main()
