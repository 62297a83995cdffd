"""Fixtures of more than one test module over sockets."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder of four short texts to train on."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(
            f"the quick brown fox number {number} jumps over the lazy dog. " * 300
        )
    return folder
