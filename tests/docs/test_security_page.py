"""Every attack on the page about security names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import swarm
from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints
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


def test_no_checkpoint_of_an_expert_runs_what_it_contains(tmp_path: Path) -> None:
    """Checkpoints were read by torch's unpickler, which ran code before torch 2.6 (CVE-2025-32434), and
    corrupted memory before 2.10 (CVE-2026-24747). They are safetensors now, and nothing is unpickled.
    """
    for folder in ("swarm", "averaging", "moe"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"\b(?:torch|pickle)\.loads?\(", file.read_text()), file

    class Touches:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "touched",)

    uid, expert = ExpertUid.parse("ffn.0"), swarm.Expert(torch.nn.Linear(4, 4), (torch.zeros(1, 4),))
    checkpoints = ExpertCheckpoints(tmp_path, {uid: expert})
    checkpoints.save()
    torch.save({"weight": Touches()}, checkpoints.generations(uid).newest_first()[0])
    assert ExpertCheckpoints(tmp_path, {uid: expert}).load() == []
    assert not (tmp_path / "touched").exists()
