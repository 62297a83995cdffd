"""Help the trainers of `examples/train.py` with a machine that does not train: it reduces for them.

In one terminal:    python examples/train.py
In another:         python examples/train.py ADDRESS          (the address that the first one prints)
In a third:         python examples/auxiliary.py ADDRESS
"""

from __future__ import annotations

import argparse

import torch

import swarm


def main() -> None:
    parser = argparse.ArgumentParser(description="Reduce for the trainers of a run, without training.")
    parser.add_argument("address", help="the address that a trainer prints")
    parser.add_argument("--rounds", type=int, default=1000, help="leave after this many rounds (1000)")
    options = parser.parse_args()
    # the same model, optimizer and schedule as the trainers have; its values do not matter
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    inner = torch.optim.Adam(model.parameters(), lr=3e-3)
    with (
        swarm.Node(bootstrap=[options.address], listen="127.0.0.1:0") as node,
        swarm.AuxiliaryPeer(inner, node=node, run="example") as helper,
    ):
        rounds = 0
        while rounds < options.rounds:
            result = helper.step(timeout_s=60.0)
            if result.failed:
                print(f"no round: {result.detail or result.reason}", flush=True)
            else:
                rounds += 1
                print(f"round {rounds}: reduced for {len(result.peers) - 1} trainers", flush=True)


if __name__ == "__main__":
    main()
