"""The other processes of a measurement on a GPU: a peer with almost no work, a newcomer that joins, callers
of an expert.

They are separate processes, so that their Python and host work does not slow down the measured trainer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import swarm
from averaging.optim.optimizer import Diloco, Gradients, Optimizer
from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, Worker
from benchmarks.worker_channel import WorkerChannel

HERE = "127.0.0.1:0"
RUN = "gpu"
MODES: dict[str, Any] = {"delayed": Gradients(delayed=True), "diloco": Diloco()}
LOCAL = swarm.NodeConfig(preset="local")
STATE_TENSORS = 16
READY_S = 60.0
EXPERT = "ffn.0"
_STEP_S = 0.1  # between two steps of the peer with almost no work
_THREADS = 8  # of host arithmetic in one companion


@contextmanager
def companions(configurations: Sequence[dict[str, Any]]) -> Iterator[list[Worker]]:
    """Start a process for each, and wait until each has reported "ready". Raises LaunchFailed with the last
    log lines if one does not.
    """
    variables = [f"OMP_NUM_THREADS={min(_THREADS, os.cpu_count() or 1)}"]
    if "PYTHONPATH" in os.environ:  # a launch drops it, but packages may be in a separate folder
        variables.append(f"PYTHONPATH={os.environ['PYTHONPATH']}")
    launch = Launch(
        "companion",
        python=OWN_PYTHON,
        module="benchmarks.cuda.companion",
        configurations=configurations,
        within=lambda _, command: ["env", *variables, *command],
    )
    with launch:
        launch.receive("ready", READY_S)
        yield launch.workers


def trainer(
    address: str, device: torch.device, shapes: Sequence[Sequence[int]], **options: Any
) -> dict[str, Any]:
    """A configuration: a peer of the run `RUN` in `options["mode"]` that has parameters of these shapes, and
    always gradients.
    """
    return {
        "kind": "train",
        "address": address,
        "device": str(device),
        "shapes": [list(shape) for shape in shapes],
        **options,
    }


def newcomer(address: str, device: torch.device, elements: int) -> dict[str, Any]:
    """A configuration: a peer that fetches the state of a `counting_optimizer` when it is told to."""
    return {"kind": "join", "address": address, "device": str(device), "elements": elements}


def callers(address: str, count: int, samples: int, width: int) -> dict[str, Any]:
    """A configuration: `count` callers of `EXPERT`, each a thread with one forward and backward pass in
    flight.
    """
    return {
        "kind": "call",
        "address": address,
        "device": "cpu",
        "count": count,
        "samples": samples,
        "width": width,
    }


def counting_optimizer(
    node: swarm.Node, device: torch.device, elements: int, target: int
) -> tuple[list[torch.nn.Parameter], Optimizer]:
    """An optimizer whose state says when it was read: every element is minus the number of epochs, so that a
    torn copy is seen.

    Every epoch subtracts a learning rate of 1 times a gradient of 1, which is exact in float32 up to 2^24
    epochs.
    """
    parameters = [
        torch.nn.Parameter(torch.zeros(elements // STATE_TENSORS, device=device))
        for _ in range(STATE_TENSORS)
    ]
    for p in parameters:
        p.grad = torch.ones_like(p)
    inner = torch.optim.SGD(parameters, lr=1.0)
    options: dict[str, Any] = {
        "target_batch_size": target,
        "batch_size_per_step": 1,
        "state_sync_epochs": 0,
    }
    return parameters, Optimizer(inner, node=node, run=RUN, **options)


def whole(parameters: Sequence[torch.Tensor], epoch: int) -> bool:
    """Return whether every element has the value of this epoch."""
    return all(bool((p.detach() == -float(epoch)).all()) for p in parameters)


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    with swarm.Node(bootstrap=[settings["address"]], listen=HERE, config=LOCAL) as node:
        {"train": _train, "join": _join, "call": _call}[settings["kind"]](channel, node, settings)


def _train(channel: WorkerChannel, node: swarm.Node, settings: dict[str, Any]) -> None:
    """Steps with constant gradients until the command ends this process."""
    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    parameters = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in settings["shapes"]
    ]
    for p in parameters:
        p.grad = torch.full_like(p, 1e-3)
    inner = torch.optim.AdamW(parameters, lr=1e-4)
    options = {key: settings[key] for key in ("codec", "target_batch_size")}
    pause = threading.Event()
    optimizer = Optimizer(
        inner,
        node=node,
        run=RUN,
        batch_size_per_step=1,
        mode=MODES[settings["mode"]],
        state_sync_epochs=0,
        **options,
    )
    with optimizer:
        optimizer.step()
        channel.send("ready")
        threading.Thread(
            target=channel.receive, daemon=True
        ).start()  # ends this process when the command is gone
        while True:
            optimizer.step()
            pause.wait(_STEP_S)


def _join(channel: WorkerChannel, node: swarm.Node, settings: dict[str, Any]) -> None:
    """Join again at each order, and leave as soon as the state has arrived, because trainers wait at the end
    of an epoch for peers that stay.
    """
    device = torch.device(settings["device"])
    channel.send("ready")
    while channel.receive()["do"] == "load":
        parameters, optimizer = counting_optimizer(node, device, settings["elements"], 1 << 40)
        with optimizer:
            loaded = optimizer.load_state_from_peers(timeout_s=60.0)
            epoch = optimizer.epoch
        right = loaded.loaded and whole(parameters, epoch)
        channel.send(
            "loaded",
            ok=right,
            reason=loaded.reason or f"epoch {epoch} is torn: {not right}",
            seconds=loaded.seconds,
            epoch=epoch,
        )


def _call(channel: WorkerChannel, node: swarm.Node, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    experts = [swarm.RemoteExpert(node, EXPERT) for _ in range(settings["count"])]
    x = torch.randn(settings["samples"], settings["width"], dtype=torch.bfloat16)
    experts[0](x)
    channel.send("ready")
    while True:
        order = channel.receive()
        until_s = time.monotonic() + order["seconds"]
        done, failures = [0] * len(experts), list[str]()

        def call(
            place: int, until_s: float = until_s, done: list[int] = done, failures: list[str] = failures
        ) -> None:
            while time.monotonic() < until_s:
                try:
                    inputs = x.clone().requires_grad_()
                    experts[place](inputs).sum().backward()
                    done[place] += 1
                except swarm.SwarmError as error:
                    failures.append(f"{type(error).__name__}: {error}"[:200])

        threads = [threading.Thread(target=call, args=(place,)) for place in range(len(experts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        channel.send("called", calls=sum(done), failures=failures[:3], failed=len(failures))


if __name__ == "__main__":
    main()
