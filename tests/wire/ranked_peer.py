"""One rank of a peer, as `torchrun` starts it: trains the small model of `trainers` with its other ranks, and
with the peers at an address. Prints a line of JSON. Started by test_process_group.py.

    python ranked_peer.py '{"kind": "ddp", "run": "name", "bootstrap": [], "epochs": 4, "mode": "gradients"}'
"""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import swarm  # noqa: E402
from averaging.optim.process_group import ProcessGroupOptimizer  # noqa: E402
from tests.wire.trainers import BATCH, LOCAL, QUICK, TARGET, adam, backward, batch, build  # noqa: E402


def shared_by_ranks(net: torch.nn.Module, kind: str) -> torch.nn.Module:
    """Return the model as several ranks hold it."""
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    if kind == "unshared":
        return net
    from torch.distributed.fsdp import fully_shard

    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    return net


def join(
    stack: ExitStack, asked: dict[str, Any], net: torch.nn.Module, run: str
) -> tuple[swarm.Node | None, ProcessGroupOptimizer]:
    """Return the node of rank 0 and the optimizer, both closed with the stack."""
    node = None
    if dist.get_rank() == 0:
        node = stack.enter_context(swarm.Node(asked["bootstrap"], "127.0.0.1:0", config=LOCAL))
    opt = ProcessGroupOptimizer(
        adam(net),
        node=node,
        run=run,
        target_batch_size=asked.get("target", TARGET),
        batch_size_per_step=BATCH,
        mode=asked["mode"],
        codec="float32",
        config=QUICK,
        state_sync_epochs=0,
    )
    return node, stack.enter_context(opt)


def main(asked: dict[str, Any]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    net = shared_by_ranks(build(asked.get("seed", 0)), asked["kind"])
    with ExitStack() as stack:
        node, opt = join(stack, asked, net, asked["run"])
        if node is not None:
            print(json.dumps({"address": node.addresses[0], "pid": os.getpid()}), flush=True)
        loaded = opt.load_state_from_peers(timeout_s=30)
        batches, reports = 0, []
        resumes_at = asked.get("resumes_at")
        while opt.epoch < asked["epochs"]:
            if (
                opt.epoch == resumes_at
            ):  # as a program that is started again: nothing is left but what it saved
                resumes_at = None
                saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
                stack.close()
                net = shared_by_ranks(build(seed=99), asked["kind"])
                node, opt = join(stack, asked, net, f"{asked['run']} again")
                net.load_state_dict(weights)
                opt.load_state_dict(saved)
            opt.zero_grad()
            backward(net, batch(1000 * asked.get("number", 0) + size * batches + rank))
            batches += 1
            dying, dies_at = asked.get("dies_at", (None, 0))
            if dying == rank and opt.epoch >= dies_at:  # a peer that has fallen behind skips epochs
                os._exit(1)
            report = opt.step()
            reports.append(report)
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
        found = {
            "rank": rank,
            "epoch": opt.epoch,
            "batches": batches,
            "loaded": loaded.loaded,
            "contributed": sum(report.contributed for report in reports),
            "parameters": [one.detach().flatten().tolist() for one in whole],
            "digest": opt.swarm.state_digest() if opt.swarm is not None else None,
        }
        print(json.dumps(found), flush=True)
        if node is not None and asked.get("waits"):
            sys.stdin.readline()  # others may still load its state
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
