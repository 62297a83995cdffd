"""Nothing needs uvloop or `os.fork`: modules are imported, and tests run, in a process that has neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("swarm", "averaging", "moe")
IMPORTED = """
import importlib, pkgutil, sys
from tests.without_fork_and_uvloop import hide_uvloop_and_fork
hide_uvloop_and_fork()
for package in {packages}:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if module.name.rpartition(".")[2] != "__main__" and not module.name.startswith({left_out}):
            importlib.import_module(module.name)
assert sys.modules["uvloop"] is None
"""
# links are emulated in the namespaces of Linux; libraries of extras may be absent
LEFT_OUT = (
    "swarm.testing.links",
    "swarm.testing.linkrelay",
    "swarm.frameworks",
    "swarm.run.tasks.causal_lm_",
)


def test_every_module_is_imported_without_uvloop_and_fork() -> None:
    code = IMPORTED.format(packages=PACKAGES, left_out=LEFT_OUT)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "chosen",
    [
        ["tests/core", "tests/run/test_specification.py", "tests/cli/test_keys.py"],
        ["tests/wire/test_averager.py", "-k", "weighted"],
        ["tests/wire/test_run_joining.py", "-k", "after_its_creator_left"],
    ],
    ids=lambda chosen: chosen[0],
)
def test_unit_tests_pass_without_uvloop_and_fork(chosen: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.without_fork_and_uvloop", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
