"""Average a tensor with all other processes that run this program.

In one terminal:    python examples/average.py
In others:          python examples/average.py ADDRESS        (the address that the first one prints)
"""

from __future__ import annotations

import sys

import torch

import swarm

ROUNDS = 5


def main() -> None:
    with swarm.Node(bootstrap=sys.argv[1:], listen="127.0.0.1:0") as node:
        print(f"join with:  python examples/average.py {node.addresses[0]}", flush=True)
        tensor = torch.rand(1_000_000)
        with swarm.Averager(node, [tensor], name="example", target_group_size=4) as averager:
            for _ in range(ROUNDS):
                own_mean = tensor.mean().item()
                result = averager.step(timeout_s=20, gather=own_mean)
                if result.failed:
                    print(f"no average in this round: {result.reason}", flush=True)
                    node.wait_joined(5)
                    continue
                before = ", ".join(f"{peer.short} {mean:.5f}" for peer, mean in result.gathered.items())
                print(
                    f"{len(result.peers)} peers, mean {tensor.mean():.5f} (before: {before}), "
                    f"digest {result.digest[:12]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
