"""Volunteers whose device runs out of memory or fails, over real sockets and with the real command."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.cli import main
from swarm.core.errors import SwarmError
from swarm.node import Node
from swarm.run import events
from swarm.run import volunteer as volunteer_module
from swarm.run.directory import RunDirectory
from swarm.run.estimate import estimate_run
from swarm.run.signed import sign
from swarm.run.specification import End, RunSpecification
from swarm.run.task import Task, TaskData, make_task
from swarm.run.volunteer_config import VolunteerConfig

HERE = "127.0.0.1:0"
LOOPBACK = ["--listen", HERE, "--json", "--device", "cpu", "--checkpoint-every", "1h"]
RUN = """
name = "tiny"
members = "open"
target_batch_size = 32
batch_size = 8
[task]
name = "bytelm"
settings = {width = 16, layers = 1, heads = 2, context = 16, data_bytes = 65536}
[end]
epochs = 3
"""
FAILURE = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call"
)


class StandIn:
    """A task that calls a function before it computes a batch."""

    def __init__(self, task: Task, look: Callable[[int], None]) -> None:
        self._task, self._look = task, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def load_data(self, folder: Path | None, device: torch.device) -> TaskData:
        data = self._task.load_data(folder, device)
        compute, look = data.loss, self._look

        def loss(model: torch.nn.Module, samples: int) -> torch.Tensor:
            look(samples)
            return compute(model, samples)

        data.loss = loss  # type: ignore[method-assign]
        return data


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Set the function that is called before each batch with its number of samples."""

    def install(look: Callable[[int], None]) -> None:
        monkeypatch.setattr(volunteer_module, "make_task", lambda *chosen: StandIn(make_task(*chosen), look))

    return install


@pytest.fixture
def command(tmp_path: Path, home: Path) -> list[str]:
    (tmp_path / "run.toml").write_text(RUN)
    return ["start", str(tmp_path / "run.toml"), "--identity", "new", *LOOPBACK]


def events_of(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_a_volunteer_that_runs_out_of_memory_trains_in_smaller_micro_batches(
    command: list[str], looked_at: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []

    def room_for_two(samples: int) -> None:
        if samples > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        sizes.append(samples)

    looked_at(room_for_two)
    assert main(command) == 0
    emitted, errors = events_of(capsys)
    assert errors == ""
    notices = [event["text"] for event in emitted if event["event"] == "notice"]
    assert [text for text in notices if "does not fit" in text] == [
        "a step does not fit into the memory of cpu: training with 4 samples at a time instead of 8",
        "a step does not fit into the memory of cpu: training with 2 samples at a time instead of 4",
    ]
    finished = next(event for event in emitted if event["event"] == "finished")
    assert finished["samples"] == sum(sizes) == 3 * 32


def test_a_volunteer_without_memory_for_one_sample_ends_with_a_sentence(
    command: list[str], looked_at: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(samples: int) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    looked_at(no_room)
    assert main(command) == 1
    _, error = events_of(capsys)
    assert error == (
        "swarm: a step does not fit into the memory of cpu, even with one sample at a time: "
        "close other programs that use it, or volunteer with a device that has more memory\n"
    )


def test_a_failed_device_ends_the_command_with_a_sentence_and_nothing_saved(
    command: list[str], looked_at: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    steps = []

    def fails_in_the_seventh_step(samples: int) -> None:
        steps.append(samples)
        if len(steps) == 7:  # the first epoch is complete
            raise RuntimeError(FAILURE)

    looked_at(fails_in_the_seventh_step)
    assert main(command) == 1
    emitted, error = events_of(capsys)
    assert error == (
        "swarm: cpu failed, and this process cannot use it any more "
        "(CUDA error: device-side assert triggered): start again; "
        "if it fails again, give another --device and look at the driver's messages (`nvidia-smi`, `dmesg`)\n"
    )
    assert [event["event"] for event in emitted if event["event"] in ("epoch", "finished", "error")] == [
        "epoch",
        "error",
    ]
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.parametrize("mode", ["gradients", "diloco"])
def test_a_volunteer_whose_device_fails_leaves_the_run(mode: str, looked_at: Callable[..., None]) -> None:
    """The volunteer's progress report is withdrawn at once; it would otherwise live for half a minute."""
    failing = threading.Event()

    def may_fail(samples: int) -> None:
        if failing.is_set():
            raise RuntimeError(FAILURE)

    looked_at(may_fail)
    specification = RunSpecification.from_toml(f'mode = "{mode}"\n{RUN}', "test").model_copy(
        update={"end": End()}
    )
    with Node(listen=HERE) as entry, Node(bootstrap=entry.addresses, listen=HERE) as node:
        assert node.wait_joined(10)
        signed = sign(specification, node.identity, version=1, created_s=0.0)
        directory = RunDirectory(node.dht.service, clock=node.clock)
        seen = []

        def after_two_epochs(event: events.Event) -> None:
            if isinstance(event, events.EpochDone) and event.epoch == 2:
                seen.append(
                    entry.network.run(
                        estimate_run(entry.dht.service, signed.run_id, entry.peer_id, entry.clock), 10.0
                    ).peers
                )
                failing.set()

        config = VolunteerConfig(device="cpu")
        volunteer = volunteer_module.Volunteer(
            node, signed, directory, config, after_two_epochs, threading.Event()
        )
        with pytest.raises(SwarmError, match="cpu failed, and this process cannot use it any more"):
            volunteer.train(torch.device("cpu"), new=True)
        assert seen == [1]
        assert (
            entry.network.run(
                estimate_run(entry.dht.service, signed.run_id, entry.peer_id, entry.clock), 10.0
            ).peers
            == 0
        )
