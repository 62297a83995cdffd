"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from swarm.core.files import read_json_copy, replace_durably, write_private


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    replace_durably(path, lambda temporary: temporary.write_bytes(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def write_half(temporary: Path) -> None:
        temporary.write_bytes(b"ne")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        replace_durably(path, write_half)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_a_private_file_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_private(path, b"secret")
    assert path.read_bytes() == b"secret"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["empty", "random", "half", "deep", "folder"])
def test_a_damaged_copy_does_not_stop_the_program_and_commands_say_so(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: the sentence was a warning, and the commands show errors only."""
    caplog.set_level(logging.ERROR)
    path = tmp_path / "book"
    taken: list[object] = []
    raw = {"empty": b"", "random": bytes(range(256)), "half": b'{"peers": [', "deep": b"[" * 100_000}.get(
        damage
    )
    if raw is None:
        path.mkdir()
    else:
        path.write_bytes(raw)
    read_json_copy(path, "peer book", 1 << 20, taken.append)
    assert not taken
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the peer book {path} ")
    if raw is not None:
        assert (tmp_path / "book.damaged").read_bytes() == raw
        assert not path.exists()


def test_a_damaged_copy_that_cannot_be_moved_is_not_said_to_be_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.ERROR)
    path = tmp_path / "book"
    path.write_bytes(b"damage")

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    read_json_copy(path, "peer book", 1 << 20, lambda document: None)
    assert "it cannot be moved to book.damaged (Permission denied)" in caplog.text
    assert path.read_bytes() == b"damage"
