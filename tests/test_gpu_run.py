"""The script behind `make gpu`: steps that fail or hang keep no other from running, and what was found is in
the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.gpu import run

ROOT = Path(__file__).parent.parent
RECORDS = """
import json, os
with open(os.environ["SWARM_GPU_FIGURES"], "a") as file:
    rate = {"figure": "rate", "value": 3.0, "unit": "GB/s", "at_least": 1.0, "test": "t"}
    file.write(json.dumps(rate) + "\\n")
    file.write(json.dumps({"test": "t", "outcome": "failed", "seconds": 1.0, "why": "it was slow"}) + "\\n")
    file.write('{"half')
"""


def python(name: str, program: str, limit_s: float = 20.0) -> run.Step:
    return run.Step(name, [sys.executable, "-c", program], limit_s)


def test_a_step_that_fails_or_hangs_keeps_no_other_from_running(tmp_path: Path) -> None:
    runner = run.Runner(tmp_path, total_s=60.0)
    forever = "import threading; print('here', flush=True); threading.Event().wait()"
    runner.run(
        [
            python("fails", "raise SystemExit(3)"),
            python("hangs", forever, limit_s=3.0),
            python("good", RECORDS),
        ]
    )
    runner.run([python("next", "print('later')")])
    assert {one.step: one.outcome for one in runner.outcomes} == {
        "fails": "failed",
        "hangs": "ran out of time",
        "good": "passed",
        "next": "passed",
    }
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tests"] == {"passed": 0, "failed": 1, "skipped": 0}
    assert [one["figure"] for one in report["figures"]] == ["rate"]
    text = (tmp_path / "report.txt").read_text()
    assert "rate: 3 GB/s  (at least 1)" in text
    assert "it was slow" in text
    log = (tmp_path / "tests.log").read_text()
    assert "[hangs] here" in log
    assert "[next] later" in log
    assert {path.name for path in tmp_path.iterdir()} <= set(run.FILES)


def test_a_step_of_the_gpu_run_gets_at_most_the_time_that_later_steps_leave(tmp_path: Path) -> None:
    runner = run.Runner(tmp_path, total_s=8.0)
    began_s = time.monotonic()
    runner.run([python("hangs", "import threading; threading.Event().wait()", limit_s=60.0)], reserved_s=6.0)
    runner.run([python("reserved", "pass")], reserved_s=7.9)
    assert time.monotonic() - began_s < 8.0
    assert [one.outcome for one in runner.outcomes] == ["ran out of time", "left out"]


def test_processes_that_a_step_started_end_with_it(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys; waiting = 'import threading; threading.Event().wait()'; "
        "print(subprocess.Popen([sys.executable, '-c', waiting]).pid)"
    )
    run.Runner(tmp_path, total_s=60.0).run([python("parent", child)])
    [number] = re.findall(r"^\[parent\] (\d+)$", (tmp_path / "tests.log").read_text(), re.MULTILINE)
    with contextlib.suppress(psutil.NoSuchProcess):  # killed: it may need a moment to end
        child_process = psutil.Process(int(number))
        if child_process.status() != psutil.STATUS_ZOMBIE:
            child_process.wait(10.0)


@pytest.mark.parametrize(("device", "threads"), [("cpu", "1"), ("cuda", "None")])
def test_steps_on_the_host_compute_with_one_thread_and_those_on_a_gpu_with_all(
    device: str, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run side by side: their threads waited for one another, and seconds of work took minutes."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(run.DEVICE_VARIABLE, device)
    said = "import os; print('threads:', os.environ.get('OMP_NUM_THREADS'))"
    run.Runner(tmp_path, total_s=60.0).run([python("host", said)])
    assert f"[host] threads: {threads}\n" in (tmp_path / "tests.log").read_text()


@pytest.mark.skipif(
    os.environ.get("SWARM_GPU_DEVICE", "cpu") != "cpu", reason="all threads are used in tests of a GPU"
)
def test_tests_on_the_host_compute_with_one_thread() -> None:
    assert torch.get_num_threads() == 1


def test_every_check_runs_and_there_is_time_for_the_benchmark() -> None:
    groups = run.check_steps()
    selected = {
        argument
        for group in groups
        for step in group
        for argument in step.command
        if argument.startswith("tests/gpu/")
    }
    assert selected == {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert len(run.FILES) <= 8
    assert run.TOTAL_S < 480.0


def test_the_wheels_are_those_of_constraints() -> None:
    """`make gpu-wheels` asks for exact versions, each once."""
    asked = subprocess.run(
        ["make", "-n", "gpu-wheels"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    wanted = re.findall(r'"([^"]*)"', asked)
    known = (ROOT / "constraints.txt").read_text().splitlines()
    assert len(wanted) == len(set(wanted)) >= 13
    assert all(one in known for one in wanted), [one for one in wanted if one not in known]


@pytest.mark.parametrize("asked", ["nothing", "a GPU that is not there"])
def test_checks_are_skipped_unless_they_were_asked_for_and_fail_without_a_gpu(asked: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SWARM_GPU")}
    if asked != "nothing":
        environment |= {"SWARM_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_delayed_round.py",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == (0 if asked == "nothing" else 1), said
    assert ("1 skipped" if asked == "nothing" else "no CUDA device: torch") in said
