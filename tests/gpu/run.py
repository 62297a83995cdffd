"""`make gpu`: one call that checks and measures everything on a machine with a GPU, within eight minutes and
without a network.

Steps have time limits of their own; one that fails or hangs does not keep the others from running. What is
found is written as it comes, so that a call that is cut short leaves what it had. Standard library alone:
packages that are missing are installed by its first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "gpu-site"
PAGES = ROOT / "build" / "gpu-pages"
TOTAL_S = 470.0
GPU_VARIABLE, DEVICE_VARIABLE = "SWARM_GPU", "SWARM_GPU_DEVICE"
FILES = (
    "environment.log",
    "tests.log",
    "figures.jsonl",
    "benchmark.log",
    "measured.json",
    "report.json",
    "report.txt",
)
_KILL_S = 5.0  # limit for a step to end after it is asked to
_VERSIONS = """
import json, platform, sys
found = {"python": platform.python_version()}
for name in (
    "torch", "numpy", "grpc", "google.protobuf", "pytest", "pydantic", "cryptography", "nacl", "blake3",
    "starlette",
):
    try:
        module = __import__(name, fromlist=["__version__"])
        found[name] = str(getattr(module, "__version__", "?"))
    except Exception as error:
        found[name] = f"missing: {type(error).__name__}: {error}"
import torch
found["cuda"] = str(torch.version.cuda)
found["device"] = "none"
if torch.cuda.is_available():
    traits = torch.cuda.get_device_properties(0)
    found |= {"device": traits.name, "memory": f"{traits.total_memory / 2**30:.0f} GiB"}
    found["compute capability"] = f"{traits.major}.{traits.minor}"
print(json.dumps(found))
import swarm, swarm.cli, averaging.optim.optimizer, moe.server.expert_server, moe.client.remote
import benchmarks.__main__, benchmarks.cuda
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A command with a time limit, and the file that its output goes to."""

    name: str
    command: Sequence[str]
    limit_s: float
    log: str = "tests.log"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """How a step ended: "passed", "failed", "ran out of time", or "left out"."""

    step: str
    outcome: str
    seconds: float = 0.0
    why: str = ""


def pytest_step(
    name: str, limit_s: float, *selected: str, before: Sequence[str] = (), **environment: str
) -> Step:
    """Run these test files or tests. Warnings are those of other versions than ours, and no failures."""
    options = [
        "-v",
        "-ra",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
        "-o",
        "faulthandler_timeout=60",
        "--durations=5",
    ]
    return Step(
        name, [*before, sys.executable, "-m", "pytest", *options, *selected], limit_s, environment=environment
    )


def check_steps() -> list[list[Step]]:
    """Groups of steps: those of one group run side by side. What measures time runs alone."""
    sanitizer = shutil.which("compute-sanitizer")
    beside = [
        pytest_step("codecs", 90, "tests/gpu/test_codecs.py"),
        pytest_step("rounds", 110, "tests/gpu/test_rounds.py"),
        pytest_step("training", 110, "tests/gpu/test_training.py"),
        pytest_step("recipes", 120, "tests/gpu/test_recipes.py"),
        pytest_step("memory", 110, "tests/gpu/test_memory.py"),
        pytest_step("out of memory", 100, "tests/gpu/test_out_of_memory.py"),
    ]
    if sanitizer is not None:
        command = [
            sanitizer,
            "--tool",
            "memcheck",
            "--target-processes",
            "application-only",
            "--error-exitcode",
            "1",
        ]
        some = (
            "tests/gpu/test_codecs.py",
            "tests/gpu/test_rounds.py",
            "-k",
            "(bytes_and_values and normal) or (same_values and int8 and replace and mixed)",
        )
        # without torch's own cache each tensor is an allocation of its own, whose borders are known
        small = {"SWARM_GPU_SMALL": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        beside.append(pytest_step("memcheck", 120, *some, before=command, **small))
    alone = [
        pytest_step("network thread", 50, "tests/gpu/test_network_thread.py"),
        pytest_step("delayed round", 55, "tests/gpu/test_delayed_round.py"),
        pytest_step("state while training", 75, "tests/gpu/test_state_while_training.py"),
        pytest_step("experts", 50, "tests/gpu/test_experts.py"),
    ]
    return [beside, *([step] for step in alone)]


def benchmark_step(out: Path) -> Step:
    return Step(
        "benchmark",
        [sys.executable, "-m", "benchmarks", "--only", "cuda", "--figures", str(out), "--pages", str(PAGES)],
        170,
        log="benchmark.log",
    )


class Runner:
    """Runs steps within what is left of the time, and keeps a report of how they ended."""

    def __init__(self, out: Path, total_s: float, patience: float = 1.0) -> None:
        """`patience`: how many times as long everything may take, on a machine that is slow."""
        self.out, self.patience = out, patience
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + total_s * patience
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self.outcomes: list[Outcome] = []
        self.environment: dict[str, Any] = {}
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (out / name).unlink(missing_ok=True)

    def run(self, steps: Sequence[Step], reserved_s: float = 0.0) -> None:
        """Run these side by side, leaving `reserved_s` of the whole time to what comes after them."""
        threads = [
            threading.Thread(target=self._run, args=(step, reserved_s * self.patience)) for step in steps
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, step: Step, reserved_s: float) -> None:
        left_s = self._deadline_s - reserved_s - time.monotonic()
        limit_s = min(step.limit_s * self.patience, left_s)
        if limit_s <= 1.0 or self._stopped:
            self._keep(
                Outcome(step.name, "left out", why="interrupted" if self._stopped else "no time was left")
            )
            return
        began_s = time.monotonic()
        with (self.out / step.log).open("a", encoding="utf-8", buffering=1) as log:
            log.write(f"[{step.name}] {' '.join(step.command)}\n")
            process = subprocess.Popen(
                list(step.command),
                cwd=ROOT,
                env={**os.environ, **self._variables(), **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            with self._lock:
                self._running[step.name] = process
            reader = threading.Thread(target=_copy_lines, args=(process, log, step.name), daemon=True)
            reader.start()
            try:
                status = process.wait(limit_s)
                outcome, why = ("passed", "") if status == 0 else ("failed", f"exit status {status}")
            except subprocess.TimeoutExpired:
                outcome, why = "ran out of time", f"not done after {limit_s:.0f} s"
            _end(process)
            reader.join(_KILL_S)
            if process.stdout is not None:
                process.stdout.close()
        with self._lock:
            del self._running[step.name]
        self._keep(Outcome(step.name, outcome, round(time.monotonic() - began_s, 1), why))

    def _variables(self) -> dict[str, str]:
        paths = [
            str(ROOT),
            *([str(SITE)] if SITE.is_dir() else []),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        return {
            GPU_VARIABLE: "1",
            "SWARM_GPU_FIGURES": str(self.out / "figures.jsonl"),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            # steps run side by side, and OpenMP's threads wait for one another spinning
            **({"OMP_NUM_THREADS": "1"} if os.environ.get(DEVICE_VARIABLE) == "cpu" else {}),
        }

    def _keep(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes.append(outcome)
            print(
                f"[{time.monotonic() - self._started_s:4.0f} s] {outcome.step}: {outcome.outcome} "
                f"in {outcome.seconds:.0f} s {outcome.why}"
            )
            sys.stdout.flush()
            self.write_report()

    def write_report(self) -> None:
        """The report as it is now, as JSON and as text."""
        records = list(_records(self.out / "figures.jsonl"))
        tests = [record for record in records if "test" in record and "outcome" in record]
        report = {
            "environment": self.environment,
            "seconds": round(time.monotonic() - self._started_s, 1),
            "steps": [
                {"step": one.step, "outcome": one.outcome, "seconds": one.seconds, "why": one.why}
                for one in self.outcomes
            ],
            "tests": {
                kind: sum(test["outcome"] == kind for test in tests)
                for kind in ("passed", "failed", "skipped")
            },
            "failed": [test for test in tests if test["outcome"] == "failed"],
            "skipped": [test for test in tests if test["outcome"] == "skipped"],
            "figures": [record for record in records if "figure" in record],
        }
        (self.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (self.out / "report.txt").write_text(as_text(report), encoding="utf-8")

    def stop(self) -> None:
        """End what runs, and begin nothing more."""
        self._stopped = True
        with self._lock:
            running = list(self._running.values())
        for process in running:
            _end(process)


def as_text(report: dict[str, Any]) -> str:
    """The summary that is printed last."""
    lines = [", ".join(f"{key} {value}" for key, value in report["environment"].items()), ""]
    lines += [
        f"{one['step']:24} {one['outcome']:16} {one['seconds']:6.1f} s  {one['why']}".rstrip()
        for one in report["steps"]
    ]
    lines += ["", ", ".join(f"{count} tests {kind}" for kind, count in report["tests"].items()), ""]
    for one in report["figures"]:
        bounds = "".join(
            f"  ({key.replace('_', ' ')} {one[key]:g})" for key in ("at_most", "at_least") if key in one
        )
        lines.append(f"{one['figure']}: {one['value']:g} {one['unit']}{bounds}")
    for one in report["failed"]:
        lines += ["", f"FAILED {one['test']}", *(f"    {line}" for line in one["why"].splitlines()[-8:])]
    return "\n".join(lines) + "\n"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of JSON objects; one that is half-written is passed over."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _copy_lines(process: subprocess.Popen[str], log: TextIO, name: str) -> None:
    assert process.stdout is not None
    # the file was closed: somebody who is not ended keeps the other end open
    with contextlib.suppress(ValueError):
        for line in process.stdout:
            log.write(f"[{name}] {line}")


def _end(process: subprocess.Popen[str]) -> None:
    """End the step's process, if it runs, and all of its group that it left behind."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def install_step(wheels: Path) -> Step:
    """Install the wheels into a folder of their own, without a network. It precedes the machine's own."""
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    options = [
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
        "--upgrade",
        "--quiet",
        "--target",
        str(SITE),
    ]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, *files]
    return Step("install", command, 60, log="environment.log")


def look_around(runner: Runner) -> None:
    """Print versions and the device. The step fails when a package is missing."""
    step = Step("environment", [sys.executable, "-c", _VERSIONS], 60, log="environment.log")
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        query = "--query-gpu=name,driver_version,memory.total,memory.used,pstate"
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            done = subprocess.run(
                [smi, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
            )
            runner.environment["nvidia-smi"] = done.stdout.strip()
    runner.run([step])
    for line in (runner.out / "environment.log").read_text(encoding="utf-8").splitlines():
        _, _, text = line.partition("] ")
        if text.startswith("{"):
            with contextlib.suppress(ValueError):
                runner.environment |= json.loads(text)
    print(json.dumps(runner.environment), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="where the report, figures and logs go"
    )
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first (make gpu-wheels)")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="time limits times this, on a slow machine"
    )
    parser.add_argument("--only", action="append", help="this step alone; repeatable")
    chosen = parser.parse_args(arguments)
    runner = Runner(chosen.out.resolve(), TOTAL_S, chosen.patience)

    def on_signal(number: int, _frame: object) -> None:
        runner.stop()
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    shutil.rmtree(SITE, ignore_errors=True)
    if chosen.wheels is not None:
        runner.run([install_step(chosen.wheels)])
    look_around(runner)
    groups = [
        [step for step in group if not chosen.only or step.name in chosen.only] for group in check_steps()
    ]
    measure = benchmark_step(runner.out)
    measured = not chosen.only or measure.name in chosen.only
    for group in groups:
        runner.run(group, reserved_s=measure.limit_s - 20.0 if measured else 0.0)
    if measured:
        runner.run([measure])
    runner.write_report()
    print((runner.out / "report.txt").read_text(encoding="utf-8"))
    good = all(one.outcome == "passed" for one in runner.outcomes)
    print(f"{'all of it passed' if good else 'NOT all of it passed'}; the report is in {chosen.out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
