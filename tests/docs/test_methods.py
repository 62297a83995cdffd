"""The reference needs the packages alone, as `make docs` installs them in a fresh clone."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.docs.pages import ROOT

LIST_METHODS = """
import sys

for extra in ("transformers", "peft", "pyarrow", "pytest", "hypothesis", "greenlet"):
    sys.modules[extra] = None  # as if it were not installed
from docs._ext.methods import methods

print(*sorted(methods()), sep="\\n")
"""


def test_calls_are_listed_without_the_packages_of_extras() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST_METHODS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"/swarm.Dht/Find", "/swarm.Node/DialBack"} <= set(done.stdout.splitlines())
