"""`swarm start` and `swarm join` under `torchrun`: real commands, one of them with two processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.wire.json_commands import Command, commands, digests
from tests.wire.small_run import write_small_run

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DONE_S = 120.0

# continues the table of the optimizer
SECTIONS = """
clip_norm = 1.0
[optimizer.schedule]
warmup_epochs = 3
[end]
seconds = 45
"""


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["gradients", "diloco"])
def test_a_volunteer_of_two_processes_trains_beside_one_of_one(tmp_path: Path, mode: str) -> None:
    more = f'members = "open"\nmode = "{mode}"\ncodec = "float32"\n'
    file = write_small_run(tmp_path, more, target=48, width=16, sections=SECTIONS)
    with commands() as started:
        one = (sys.executable,)
        here = ("--listen", "127.0.0.1:0", "--preset", "local", "--no-lan")
        started.append(Command(tmp_path / "first", one, "start", str(file), *here))
        address = started[0].read_until("listening")["addresses"][0]
        started.append(Command(tmp_path / "second", TORCHRUN, "join", address, "--yes", *here))
        finished = [command.read_until("finished") for command in started]
        assert finished[1]["samples"] > 0
        assert finished[0]["validation_loss"] is not None
        shared = set(digests(started[0])) & set(digests(started[1]))
        assert shared, "no round had both"
        # A busy machine takes smaller steps than 4 samples of each process.
        assert finished[1]["samples"] % 2 == 0, "both processes train equally many samples a step"
        for command in started:
            assert command.process.wait(DONE_S) == 0
