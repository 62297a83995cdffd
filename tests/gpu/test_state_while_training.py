"""The state is read while training continues: of one moment, at a gigabyte a second, without slowing the
trainer by more than a fifth.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.cuda.device import Figure
from benchmarks.cuda.model import Size
from benchmarks.cuda.serving import Served, state_to_disk, state_to_newcomers

TIMES = 3


@pytest.fixture(params=["default stream", "side stream"])
def stream(request: pytest.FixtureRequest, device: torch.device) -> torch.cuda.Stream | None:
    """The trainer's own; None for the default one, and on the host."""
    return torch.cuda.Stream(device) if request.param == "side stream" and device.type == "cuda" else None


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """In memory where the system offers that: what is measured is not the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def judge(served: Served, what: str, figure: Figure) -> None:
    assert not served.wrong, served.wrong
    assert len(served.bytes_per_s) == TIMES
    figure(f"{what}, rate", statistics.median(served.bytes_per_s) / 1e9, "GB/s", at_least=1.0)
    figure(f"{what}, step meanwhile over undisturbed", served.slowdown, "×", at_most=1.2)


def test_a_newcomer_gets_the_state_of_one_moment(
    size: Size, device: torch.device, stream: torch.cuda.Stream | None, figure: Figure
) -> None:
    judge(state_to_newcomers(size, device, times=TIMES, stream=stream), "state to a newcomer", figure)


def test_a_checkpoint_written_during_training_is_of_one_epoch(
    size: Size, device: torch.device, stream: torch.cuda.Stream | None, fast_folder: Path, figure: Figure
) -> None:
    judge(state_to_disk(size, device, fast_folder, times=TIMES, stream=stream), "checkpoint", figure)
