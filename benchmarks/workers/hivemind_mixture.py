"""Servers of experts of hivemind (ranks 0 to 3), and a trainer with a mixture layer over them. Runs in
hivemind's environment.
"""

from __future__ import annotations

import hivemind  # type: ignore[import-not-found,unused-ignore]
import torch
from hivemind.moe.client.moe import RemoteMixtureOfExperts  # type: ignore[import-not-found,unused-ignore]
from hivemind.moe.server import ModuleBackend, Server  # type: ignore[import-not-found,unused-ignore]
from hivemind.utils.tensor_descr import BatchTensorDescriptor  # type: ignore[import-not-found,unused-ignore]

from benchmarks.mixture_load import (
    BATCH,
    COLUMNS,
    K_BEST,
    ROWS,
    SERVERS,
    TIMEOUT_S,
    WIDTH,
    module_of,
    perform,
    set_gate,
    zero_rate_sgd,
)
from benchmarks.worker_channel import WorkerChannel
from benchmarks.workers.hivemind_peer import joined

HANDLERS = 2  # connection handlers per server; more processes than cores are slower


def main() -> None:
    channel = WorkerChannel()
    torch.set_num_threads(1)
    rank = channel.configuration["rank"]
    dht = joined(channel)
    if rank < SERVERS:
        serve(channel, dht, rank)
    else:
        train(channel, dht)


def serve(channel: WorkerChannel, dht: hivemind.DHT, row: int) -> None:
    """Serve until the command has ended."""
    backends = {}
    for column in range(COLUMNS):
        module = module_of(row, column)
        backends[f"ffn.{row}.{column}"] = ModuleBackend(
            name=f"ffn.{row}.{column}",
            module=module,
            optimizer=zero_rate_sgd(module.parameters()),
            args_schema=(BatchTensorDescriptor(WIDTH),),
            max_batch_size=16 * BATCH,
        )
    server = Server(dht, backends, num_connection_handlers=HANDLERS, device="cpu", start=False)
    server.run_in_background(await_ready=True)
    channel.send("ready")
    while True:
        channel.receive()


def train(channel: WorkerChannel, dht: hivemind.DHT) -> None:
    """Make steps as the command orders."""
    layer = RemoteMixtureOfExperts(
        in_features=WIDTH,
        grid_size=(ROWS, COLUMNS),
        dht=dht,
        uid_prefix="ffn.",
        k_best=K_BEST,
        k_min=K_BEST,
        forward_timeout=TIMEOUT_S,
        timeout_after_k_min=TIMEOUT_S,
        backward_k_min=K_BEST,
        backward_timeout=TIMEOUT_S,
    )
    set_gate(layer.proj)
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "steps":
            channel.send("done", **perform(layer, layer.proj, order))


if __name__ == "__main__":
    main()
