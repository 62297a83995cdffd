"""Average a tensor with all other processes that run this program.

In one terminal:    python examples/average.py
In others:          python examples/average.py ADDRESS        (the address that the first one prints)
"""

from __future__ import annotations

import sys
import time

import torch

import swarm

ROUNDS = 5
PAUSE_S = 2.0


def main() -> None:
    with swarm.Node(bootstrap=sys.argv[1:], listen="127.0.0.1:0") as node:
        print(f"join with:  python examples/average.py {node.addresses[0]}", flush=True)
        tensor = torch.rand(1_000_000)
        with swarm.Averager(node, [tensor], name="example", target_group_size=4) as averager:
            rounds = 0
            while rounds < ROUNDS:
                own_mean = tensor.mean().item()
                result = averager.step(timeout_s=20, gather=own_mean)
                if result.failed:
                    print(f"no average this time: {result.reason}", flush=True)
                    time.sleep(PAUSE_S)
                    continue
                rounds += 1
                before = ", ".join(f"{peer.short} {mean:.5f}" for peer, mean in result.gathered.items())
                print(
                    f"{len(result.peers)} peers, mean {tensor.mean():.5f} (before: {before}), "
                    f"digest {result.digest[:12]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
