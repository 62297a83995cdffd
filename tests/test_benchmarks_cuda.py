"""The section about GPUs: its workloads in short, on the host, and what it says where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import cuda
from benchmarks.__main__ import main
from benchmarks.report import as_record


def test_rows_can_be_kept() -> None:
    said: list[str] = []
    rows = cuda.rows(
        said.append, device="cpu", size=cuda.Size(elements=50_000, width=16, layers=2, batch=4, rounds=2)
    )
    assert len({row.identifier for row in rows}) == len(rows) == len(cuda.CODECS) + 2
    assert all(as_record(row, "run")["ours_value"] > 0 for row in rows)
    assert len(said) == len(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: nothing to refuse")
def test_it_refuses_where_there_is_no_gpu(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--only", "cuda", "--docs", str(tmp_path)])
    assert done.exit_code == 1
    assert "needs a CUDA device" in done.output
    assert not list(tmp_path.iterdir())
