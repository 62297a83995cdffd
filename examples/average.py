"""Average a tensor with whoever else runs this program.

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
        print(f"join me:  python examples/average.py {node.addresses[0]}", flush=True)
        tensor = torch.rand(1_000_000)
        with swarm.Averager(node, [tensor], name="example", target_group_size=4) as averager:
            for _ in range(ROUNDS):
                before = tensor.mean().item()
                result = averager.step(timeout_s=20, gather=before)
                if result.failed:
                    print(f"no average this time: {result.reason}", flush=True)
                    node.wait_joined(5)
                    continue
                others = ", ".join(f"{peer.short} had {value:.5f}" for peer, value in result.gathered.items())
                print(
                    f"{len(result.peers)} peers, mean {tensor.mean():.5f} ({others}), digest "
                    f"{result.digest[:12]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
