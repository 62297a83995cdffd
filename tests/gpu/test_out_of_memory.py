"""A device that is full is a failed round or a smaller batch, never an exception in the training loop."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from averaging.averager import Averager
from benchmarks.cuda.device import Figure, limited_memory
from benchmarks.cuda.peers import step_all
from swarm.cli import main
from swarm.node import Node

RUN = """
name = "full"
target_batch_size = {target}
batch_size = {batch}
seed = 1
[task]
name = "bytelm"
[task.settings]
width = {width}
layers = {layers}
context = {context}
data_bytes = 1048576
[end]
epochs = 2
"""


@pytest.mark.parametrize("error_feedback", [False, True])
def test_a_round_without_room_on_the_device_fails_and_the_next_one_succeeds(
    error_feedback: bool, nodes: list[Node], device: torch.device, small: bool
) -> None:
    elements = 100_000 if small else 32_000_000
    mine = [torch.randn(elements, generator=torch.Generator().manual_seed(place)) for place in range(2)]
    mean = (mine[0] + mine[1]) / 2
    mine[0] = mine[0].to(device)
    before = mine[0].clone()
    with ExitStack() as stack:
        options = {"name": "full", "codec": "int8", "error_feedback": error_feedback}
        averagers = [
            stack.enter_context(Averager(node, [one], **options))
            for node, one in zip(nodes, mine, strict=True)
        ]  # type: ignore[arg-type]
        with limited_memory(device, 1 << 20) as scarce:
            results = step_all(averagers, timeout_s=5.0) if scarce else []
            if scarce:
                assert results[0].failed, results
                assert "memory" in f"{results[0].reason} {results[0].detail}", results
                assert torch.equal(mine[0], before), "a failed round left its marks on the tensors"
        results = step_all(averagers)
        assert not any(result.failed for result in results), results
    assert torch.allclose(mine[0].cpu(), mean, atol=0.1)


def test_a_volunteer_without_room_for_its_batch_trains_with_smaller_ones(
    tmp_path: Path, device: torch.device, figure: Figure, small: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = (
        {"width": 32, "layers": 1, "context": 32, "batch": 4}
        if small
        else {"width": 512, "layers": 4, "context": 512, "batch": 64}
    )
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(target=2 * shape["batch"], **shape))
    options = ["--json", "--listen", "127.0.0.1:0", "--checkpoint-every", "0", "--device", str(device)]
    with limited_memory(device, 2 << 30) as scarce, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWARM_HOME", str(tmp_path / "home"))
        status = main(["start", str(file), *options])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert not status, said[-3:]
    finished = next(one for one in said if one.get("event") == "finished")
    assert finished["epoch"] == 2, said
    if scarce:
        texts = " ".join(str(one.get("text", "")) for one in said)
        assert "samples at a time" in texts, said
        estimate, peak = finished["device_memory_bytes"], finished["device_memory_peak_bytes"]
        figure("volunteer's device memory over its estimate", peak / estimate, "×", at_most=1.0)
