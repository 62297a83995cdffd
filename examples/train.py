"""Train a small model together with all other processes that run this program, in a plain torch loop.

In one terminal:    python examples/train.py
In others:          python examples/train.py ADDRESS          (the address that the first one prints)
"""

from __future__ import annotations

import sys

import torch

import swarm

EPOCHS = 300  # about half a minute for one process: time to start a second one
BATCH = 32


def main() -> None:
    torch.manual_seed(0)  # the first peer starts with these parameters; later peers download the state
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    truth = torch.randn(16)
    with swarm.Node(bootstrap=sys.argv[1:], listen="127.0.0.1:0") as node:
        print(f"join with:  python examples/train.py {node.addresses[0]}", flush=True)
        inner = torch.optim.Adam(model.parameters(), lr=3e-3)
        with swarm.Optimizer(
            inner, node=node, run="example", target_batch_size=4096, batch_size_per_step=BATCH
        ) as opt:
            opt.load_state_from_peers(timeout_s=30)
            data = torch.Generator().manual_seed(node.peer_id.dht_id % 2**63)  # every peer has other samples
            while opt.epoch < EPOCHS:
                inputs = torch.randn(BATCH, 16, generator=data)
                loss = (model(inputs).squeeze(1) - (inputs @ truth).sin()).square().mean()
                loss.backward()
                report = opt.step()
                opt.zero_grad()
                if report.stepped:
                    peers = len(opt.progress.peers)
                    print(f"epoch {opt.epoch}: loss {loss.item():.4f}, {peers} peers", flush=True)


if __name__ == "__main__":
    main()
