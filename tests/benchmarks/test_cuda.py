"""The section about GPUs: its workloads at a tiny size on the host, and its refusal where there is no GPU."""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import cuda
from benchmarks.__main__ import main
from benchmarks.cuda.device import DEVICE_VARIABLE
from benchmarks.cuda.peers import recorded_waits
from benchmarks.report import as_record


@pytest.mark.slow
def test_every_part_measures_rows_that_can_be_stored() -> None:
    messages: list[str] = []
    rows = list(
        itertools.chain.from_iterable(cuda.rows(messages.append, device=torch.device("cpu"), size=cuda.TINY))
    )
    found = {row.identifier.removeprefix("cuda-"): as_record(row, "run") for row in rows}
    assert len(found) == len(rows)
    assert {
        "copy",
        "codec-int8-encode",
        "round",
        "step-accumulating",
        "step-diloco-offload",
        "state",
        "state-step",
        "experts",
    } <= set(found)
    on_the_device_alone = {name for name in found if "memory" in name or "pinned" in name}
    assert all(record["ours_value"] > 0 for name, record in found.items() if name not in on_the_device_alone)
    assert len(messages) >= len(rows)


def test_waits_are_recorded_on_watched_threads_only() -> None:
    def pin() -> None:
        with contextlib.suppress(RuntimeError):  # there is no CUDA device to page-lock memory for
            torch.zeros(3, pin_memory=True)

    with recorded_waits(["swarm-network"]) as found:
        for name in ("swarm-network", "swarm-network-pool_0"):
            thread = threading.Thread(target=pin, name=name)
            thread.start()
            thread.join()
    assert found == ["pinned zeros on swarm-network"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: nothing to refuse")
def test_the_section_is_refused_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    done = CliRunner().invoke(main, ["--only", "cuda", "--figures", str(tmp_path), "--pages", str(tmp_path)])
    assert done.exit_code == 1
    assert "needs a CUDA device" in done.output
    assert not list(tmp_path.iterdir())
