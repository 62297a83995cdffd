"""A peer of a small run that counts the samples that it has contributed. It also runs with the packages of an
earlier commit, and uses only features that these have.
"""

from __future__ import annotations

import select
import sys
import time

import psutil
import torch

import swarm
from benchmarks.membership_profile import ProcessProfile
from benchmarks.worker_channel import WorkerChannel

PARAMETERS = 1 << 18
STEP_S = 0.05  # stands for forward and backward
LOAD_TIMEOUT_S = 60.0
LEAVE_S = 5.0


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(PARAMETERS))
    inner = torch.optim.SGD([parameter], lr=1e-3)
    address = f"address-{settings['generation']}"
    entries = [] if settings["founds"] else [channel.published(address, LOAD_TIMEOUT_S)]
    samples, does, began_s = 0, "", time.monotonic()
    begun: dict[str, float] = {}  # figures of the moment at which the present epoch began
    with (
        swarm.Node([*settings["invites"], *entries], listen="127.0.0.1:0") as node,
        swarm.Optimizer(
            inner, node=node, run=settings["run"], target_batch_size=settings["target"], batch_size_per_step=1
        ) as optimizer,
    ):
        profile: ProcessProfile | None = None
        if settings["founds"]:
            channel.publish(address, node.addresses[0])
        else:
            optimizer.load_state_from_peers(timeout_s=LOAD_TIMEOUT_S)
        while does != "leave":
            if select.select([sys.stdin], [], [], STEP_S)[0]:
                does = channel.receive()["do"]
                if does == "count":
                    processor_s = time.process_time()
                    channel.send(
                        "counted",
                        samples=samples,
                        processor_s=processor_s,
                        begun=begun,
                        profile=profile.end() if profile is not None else {},
                    )
                    # between two counts, so that joining is not part of it
                    profile = ProcessProfile(node) if settings.get("is_profiled") and not profile else None
                continue
            parameter.grad = torch.zeros_like(parameter)
            contributed = optimizer.step().contributed
            if contributed and not samples:
                channel.send("contributed", seconds=time.monotonic() - began_s)
            samples += contributed
            if optimizer.epoch != begun.get("epoch"):
                sent_bytes = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
                begun = {
                    "epoch": optimizer.epoch,
                    "processor_s": time.process_time(),
                    "sent_bytes": sent_bytes,
                }
    channel.send("left")
    channel.receive()  # the end of the launch


if __name__ == "__main__":
    main()
