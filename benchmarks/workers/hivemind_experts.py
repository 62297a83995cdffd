"""The server of experts of hivemind (rank 0), and callers of it. Runs in hivemind's environment."""

from __future__ import annotations

import time
from typing import Any

import hivemind  # type: ignore[import-not-found,unused-ignore]
from hivemind.moe.client.expert import create_remote_experts  # type: ignore[import-not-found,unused-ignore]
from hivemind.moe.server import ModuleBackend, Server  # type: ignore[import-not-found,unused-ignore]
from hivemind.moe.server.dht_handler import get_experts  # type: ignore[import-not-found,unused-ignore]
from hivemind.utils.tensor_descr import BatchTensorDescriptor  # type: ignore[import-not-found,unused-ignore]

from benchmarks.expert_load import WIDTH, module_of, serve_orders, zero_rate_sgd
from benchmarks.worker_channel import WorkerChannel

MAX_BATCH_SIZE = 8192
FIND_TIMEOUT_S = 30.0
FIND_POLL_S = 0.2


def main() -> None:
    channel = WorkerChannel()
    if channel.configuration["rank"] == 0:
        serve(channel)
    else:
        call(channel)


def serve(channel: WorkerChannel) -> None:
    """Serve until the command has ended."""
    dht = hivemind.DHT(start=True)
    backends = {}
    for kind, width in WIDTH.items():
        module = module_of(kind)
        backends[f"{kind}.0"] = ModuleBackend(
            name=f"{kind}.0",
            module=module,
            optimizer=zero_rate_sgd(module.parameters()),
            args_schema=(BatchTensorDescriptor(width),),
            max_batch_size=MAX_BATCH_SIZE,
        )
    server = Server(
        dht, backends, num_connection_handlers=channel.configuration["handlers"], device="cpu", start=False
    )
    server.run_in_background(await_ready=True)
    channel.publish("address", str(dht.get_visible_maddrs()[0]))
    channel.send("ready")
    while True:
        channel.receive()


def call(channel: WorkerChannel) -> None:
    """Make calls as the command orders."""
    dht = hivemind.DHT(initial_peers=[channel.published("address")], start=True)
    experts = {kind: found(dht, f"{kind}.0") for kind in WIDTH}
    serve_orders(channel, experts)


def found(dht: Any, uid: str) -> Any:
    """Return the expert as soon as it is declared. Raises TimeoutError when it is not in time."""
    deadline_s = time.monotonic() + FIND_TIMEOUT_S
    while True:
        info = get_experts(dht, [uid])[0]
        if info is not None:
            return create_remote_experts([info], dht)[0]
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{uid} was not declared in {FIND_TIMEOUT_S:g} s")
        time.sleep(FIND_POLL_S)


if __name__ == "__main__":
    main()
