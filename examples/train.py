"""Train a small model together with whoever else runs this program: a plain torch loop, one line of which is
the swarm.

In one terminal:    python examples/train.py
In others:          python examples/train.py ADDRESS          (the address that the first one prints)
"""

from __future__ import annotations

import sys

import torch

import swarm

EPOCHS = 300  # alone about half a minute: time to start the second one
BATCH = 32


def main() -> None:
    torch.manual_seed(0)  # who starts alone starts here; who joins later downloads the state
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    truth = torch.randn(16)
    with swarm.Node(bootstrap=sys.argv[1:], listen="127.0.0.1:0") as node:
        print(f"join me:  python examples/train.py {node.addresses[0]}", flush=True)
        inner = torch.optim.Adam(model.parameters(), lr=3e-3)
        with swarm.Optimizer(
            inner, node=node, run="example", target_batch_size=4096, batch_size_per_step=BATCH
        ) as optimizer:
            optimizer.load_state_from_peers(timeout_s=30)
            data = torch.Generator().manual_seed(node.peer_id.dht_id % 2**63)  # everybody draws other samples
            while optimizer.epoch < EPOCHS:
                inputs = torch.randn(BATCH, 16, generator=data)
                loss = (model(inputs).squeeze(1) - (inputs @ truth).sin()).square().mean()
                loss.backward()
                report = optimizer.step()
                optimizer.zero_grad()
                if report.stepped:
                    print(
                        f"epoch {optimizer.epoch}: loss {loss.item():.4f}, "
                        f"{len(optimizer.progress.peers)} peers",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
