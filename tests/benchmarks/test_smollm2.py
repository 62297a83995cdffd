"""`make bench` trains the real language model, which the tests replace by a tiny one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("arguments", "is_trained"), [([], True), (["ARGS=--only dht"], False)])
def test_make_bench_trains_the_real_model_unless_it_is_told_what_to_measure(
    arguments: list[str], is_trained: bool
) -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ("-m benchmarks.smollm2" in shown.stdout) == is_trained
