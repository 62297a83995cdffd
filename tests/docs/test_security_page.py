"""Every attack on the page about security names a test that exists."""

from __future__ import annotations

import pickle
import re
import tomllib
from pathlib import Path

import pytest
import torch

from tests.docs.pages import DOCS, ROOT

_ROWS = [line for line in (DOCS / "security.md").read_text().splitlines() if "`tests/" in line]
_NAMED = [
    (path, test) for row in _ROWS for path, test in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
]


def test_the_page_names_a_test_for_every_attack() -> None:
    assert len(_NAMED) == len(_ROWS) >= 25


@pytest.mark.parametrize(("path", "test"), _NAMED, ids=[test for _, test in _NAMED])
def test_a_test_that_the_page_names_exists(path: str, test: str) -> None:
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_torch_reads_checkpoints_without_running_what_they_contain(tmp_path: Path) -> None:
    """`weights_only` ran code before torch 2.6 (CVE-2025-32434), and corrupted memory before 2.10
    (CVE-2026-24747).
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (lowest,) = (one.removeprefix("torch>=") for one in project["dependencies"] if one.startswith("torch>="))
    (pinned,) = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for version in (lowest, pinned):
        assert tuple(map(int, version.split(".")[:2])) >= (2, 10)
    loads = [
        call
        for folder in ("swarm", "averaging", "moe")
        for file in (ROOT / folder).rglob("*.py")
        for call in re.findall(r"(?:torch|pickle)\.loads?\([^\n]*", file.read_text())
    ]
    assert loads, "else this test looks in the wrong place"
    assert all("weights_only=True" in call for call in loads)

    class Touches:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "touched",)

    torch.save({"weight": Touches()}, tmp_path / "checkpoint")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "checkpoint", weights_only=True)
    assert not (tmp_path / "touched").exists()
