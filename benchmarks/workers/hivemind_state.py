"""A peer that donates the state of a hivemind averager, or downloads it. Runs in hivemind's environment."""

from __future__ import annotations

import time

import hivemind  # type: ignore[import-not-found,unused-ignore]
import torch

from benchmarks.worker_channel import WorkerChannel
from benchmarks.workers.hivemind_peer import joined

LOAD_TIMEOUT_S = 180.0


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    dht = joined(channel)
    torch.manual_seed(1 if settings["gives"] else 2)
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.randn(settings["elements"] // 16) for _ in range(16)],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=4,
        allow_state_sharing=bool(settings["gives"]),
    )
    time.sleep(2.0 if settings["gives"] else 0.0)  # it declares itself as a donor in the background
    channel.send("ready")
    while (order := channel.receive())["do"] != "stop":
        if order["do"] == "load":
            began_s = time.monotonic()
            found = averager.load_state_from_peers(timeout=LOAD_TIMEOUT_S)
            took_s = time.monotonic() - began_s
            torch.manual_seed(1)
            expected = [torch.randn(settings["elements"] // 16) for _ in range(4)][3]
            right = found is not None and bool(torch.equal(found[1][3][:100], expected[:100]))
            channel.send(
                "loaded", ok=right, reason="" if right else "no state, or another", seconds=took_s, donors=1
            )
    channel.send("stopped")


if __name__ == "__main__":
    main()
