"""A server on a GPU whose expert is asked for an index out of range: an error after which the process can use
the device no more.

It runs as a process of its own, named by a test, and prints the server's result as one line of JSON.
"""

from __future__ import annotations

import json
import sys

import torch

import swarm


class Table(torch.nn.Module):
    """Rows by their numbers; no bounds are checked before the GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(16, 8)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows(numbers)
        return found


def attempt(caller: swarm.RemoteExpert, number: int) -> str:
    """The name of the error that a call ends with; empty for an answer."""
    try:
        with torch.no_grad():
            caller(torch.tensor([number]))
    except swarm.SwarmError as error:
        return type(error).__name__
    return ""


def main(device: str) -> None:
    expert = swarm.Expert(Table(), (torch.zeros(1, dtype=torch.int64),), device=device)
    with (
        swarm.Node(listen="127.0.0.1:0") as host,
        swarm.Node(bootstrap=host.addresses, listen="127.0.0.1:0") as guest,
    ):
        server = swarm.ExpertServer(host, {"table.0": expert})
        caller = swarm.RemoteExpert(guest, "table.0", forward_timeout_s=10.0)
        said = {"good": attempt(caller, 3), "bad": attempt(caller, 1_000_000)}
        said["ended"] = str(device != "cpu" and server.ended.wait(20.0))
        said["failed"] = server.failed or "" if device != "cpu" else ""
        said["after"] = attempt(swarm.RemoteExpert(guest, "table.0", forward_timeout_s=5.0), 3)
        print(json.dumps(said), flush=True)
        server.close()


if __name__ == "__main__":
    main(sys.argv[1])
