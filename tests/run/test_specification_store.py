"""The copy of a specification on disk: what a member knows, no swarm forgets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.core.identity import Identity
from swarm.run.specification import RunSpecification, SignedSpecification, sign
from swarm.run.specification_store import SPECIFICATIONS_MAX, SpecificationStore


def specification(name: str = "tiny", batch_size: int = 8) -> RunSpecification:
    return RunSpecification.from_table(
        {"name": name, "target_batch_size": 64, "batch_size": batch_size, "task": {"name": "bytelm"}}, "test"
    )


def signed(owner: Identity, *, name: str = "tiny", version: int = 1) -> SignedSpecification:
    return sign(specification(name), owner, version=version, created_s=0.0)


def file_of(folder: Path, one: SignedSpecification) -> Path:
    return folder / f"{one.run_id}.specification"


def test_what_is_saved_is_there_and_an_older_version_does_not_replace_it(tmp_path: Path) -> None:
    kept, owner = SpecificationStore(tmp_path / "runs"), Identity.generate()
    assert (kept.load(signed(owner).run_id), kept.all()) == (None, [])
    for version in (2, 1):
        kept.save(signed(owner, version=version))
    assert kept.load(signed(owner).run_id) == signed(owner, version=2)
    kept.save(signed(owner, version=3))
    assert kept.all() == [signed(owner, version=3)]


def test_only_what_the_owner_signed_is_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, owner, other = SpecificationStore(tmp_path), Identity.generate(), Identity.generate()
    true, stranger = signed(owner), signed(other)
    for raw in (b"", b"garbage", true.blob[:-1] + bytes([true.blob[-1] ^ 1]), stranger.blob, bytes(1 << 20)):
        file_of(tmp_path, true).write_bytes(raw)
        assert kept.load(true.run_id) is None
        assert kept.all() == []
    assert "is passed over" in caplog.text
    kept.save(true)
    assert kept.load(true.run_id) == true
    assert kept.load("../identity") is None
    (tmp_path / "no-run.specification").write_bytes(true.blob)
    assert kept.all() == [true]


def test_the_folder_is_bounded_and_a_disk_that_fails_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, owner = SpecificationStore(tmp_path), Identity.generate()
    runs = [signed(owner, name=f"run-{number}") for number in range(SPECIFICATIONS_MAX + 2)]
    for number, run in enumerate(runs):
        kept.save(run)
        os.utime(file_of(tmp_path, run), (number, number))
    kept.save(runs[-1])
    assert {run.name for run in kept.all()} == {run.name for run in runs[2:]}
    (tmp_path / "file").write_bytes(b"")
    SpecificationStore(tmp_path / "file" / "runs").save(runs[0])
    assert "cannot be kept" in caplog.text
