"""Copies memory: the bandwidth that bounds everything on loopback."""

from __future__ import annotations

import time

import torch

from benchmarks.conversation import Conversation, wait_until

BUFFER_BYTES = 256 << 20
REPEATS = 4


def main() -> None:
    talk = Conversation()
    torch.set_num_threads(1)
    source, target = torch.ones(BUFFER_BYTES // 4), torch.zeros(BUFFER_BYTES // 4)
    talk.say("ready")
    wait_until(talk.hear()["at_s"])
    started_s = time.monotonic()
    for _ in range(REPEATS):
        target.copy_(source)
    talk.say("copied", bytes_per_s=BUFFER_BYTES * REPEATS / (time.monotonic() - started_s))
    talk.hear()


if __name__ == "__main__":
    main()
