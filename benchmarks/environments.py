"""The environments of measured systems: this interpreter, hivemind's environment (made when missing), and the
machine.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.launch import ROOT, Launch

OWN_PYTHON = Path(sys.executable)
HIVEMIND_PYTHON_VARIABLE = "SWARM_BENCHMARK_HIVEMIND_PYTHON"
HIVEMIND_VERSION = "1.1.12"
# With a newer NumPy hivemind's 8-bit codecs fail silently; its imports need an old setuptools.
HIVEMIND_REQUIREMENTS = ("torch==2.13.0", f"hivemind=={HIVEMIND_VERSION}", "numpy==2.2.6", "setuptools<81")
INSTALL_TIMEOUT_S = 1800.0


class NoEnvironment(Exception):
    """The environment of another library cannot be used. The text says why and what to do."""


def hivemind_python(say: Callable[[str], None]) -> Path:
    """Return the interpreter of hivemind's environment; make the environment when there is none."""
    chosen = os.environ.get(HIVEMIND_PYTHON_VARIABLE)
    python = Path(chosen) if chosen else ROOT / ".venv-hivemind" / "bin" / "python"
    if not chosen and not _has_hivemind(python):
        say(f"making an environment for hivemind {HIVEMIND_VERSION} in .venv-hivemind (minutes, once)")
        _run([sys.executable, "-m", "venv", str(python.parent.parent)])
        _run(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--only-binary",
                "hivemind",
                *HIVEMIND_REQUIREMENTS,
            ]
        )
    if not _has_hivemind(python):
        raise NoEnvironment(
            f"hivemind {HIVEMIND_VERSION} cannot be imported by {python}: remove that environment, "
            f"or name another interpreter in {HIVEMIND_PYTHON_VARIABLE}"
        )
    return python


def _has_hivemind(python: Path) -> bool:
    if not python.exists():
        return False
    question = "import importlib.metadata as m, hivemind; print(m.version('hivemind'), m.version('numpy'))"
    answer = subprocess.run(
        [str(python), "-c", question], capture_output=True, text=True, timeout=120, check=False
    )
    return answer.returncode == 0 and answer.stdout.split() == [HIVEMIND_VERSION, "2.2.6"]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoEnvironment(
            f"`{' '.join(command[1:4])} …` took longer than {INSTALL_TIMEOUT_S:g} s"
        ) from error
    if done.returncode:
        raise NoEnvironment(
            f"`{' '.join(command[1:4])} …` failed: " + " | ".join(done.stderr.strip().splitlines()[-3:])
        )


def machine() -> dict[str, str]:
    """Describe the machine for readers of the figures, without anything that identifies it."""
    return {
        "processor": f"{os.cpu_count()} × {_processor_model()}",
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
        "system": (
            f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}"
        ),
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("torch", "grpcio", "numpy", "uvloop")),
        "load at start": f"{os.getloadavg()[0]:.1f} (one-minute average)",
    }


def _processor_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def memory_copy_bytes_per_s() -> float:
    """Return the bytes that all cores together copy in a second (each byte read once and written once)."""
    cores = os.cpu_count() or 1
    with Launch(
        "memory copy",
        python=OWN_PYTHON,
        module="benchmarks.workers.memory_copy",
        configurations=[{}] * min(cores, 8),
    ) as launch:
        launch.receive("ready", 60.0)
        launch.send("copy", at_s=time.monotonic() + 0.1)
        return float(sum(answer["bytes_per_s"] for answer in launch.receive("copied", 60.0)))
