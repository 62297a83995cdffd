"""Volunteers on a Ray cluster. Each is an actor that Ray restarts when its machine or process is lost.

    python deploy/ray_volunteers.py --count 4 --gpus 1 -- ADDRESS --run cluster

Arguments after `--` are those of `swarm join`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import ray


@ray.remote(max_restarts=-1, max_task_retries=-1)  # a lost actor is recreated, and its call is repeated
class Volunteer:
    """One process of `swarm join`, which ends together with this actor."""

    def train(self, arguments: list[str]) -> dict[str, Any]:
        """Train until the run ends. Return the last events of each kind, by kind."""
        process = subprocess.Popen(
            [sys.executable, "-m", "swarm.cli", "join", *arguments, *OPTIONS],
            stdin=subprocess.PIPE,  # the child ends when this pipe closes with the actor
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        events: dict[str, Any] = {}
        for line in process.stdout:
            event = json.loads(line)
            events[event["event"]] = event
            if event["event"] in ("joined", "finished"):
                print(line, end="", flush=True)  # Ray shows it on the driver
        if process.wait():
            raise RuntimeError(f"swarm join ended with {process.returncode}: {events.get('error')}")
        return events


# Each process is a peer of its own, and several may share a machine.
OPTIONS = ("--identity", "new", "--yes", "--json", "--exit-with-parent", "--no-lan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0.0, help="of each volunteer")
    parser.add_argument("arguments", nargs="+", help="of swarm join")
    asked = parser.parse_args()
    ray.init()
    volunteers = [Volunteer.options(num_gpus=asked.gpus).remote() for _ in range(asked.count)]
    for events in ray.get([one.train.remote(asked.arguments) for one in volunteers]):
        finished = events["finished"]
        print(f"epoch {finished['epoch']}, {finished['samples']} samples: {finished['reason']}")


if __name__ == "__main__":
    main()
