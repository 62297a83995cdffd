"""Copies of specifications on disk: they survive the swarm, and only those that the owner signed count."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from swarm.core.identity import Identity
from swarm.run.signed import SignedSpecification, sign
from swarm.run.specification import RunSpecification
from swarm.run.specification_store import SPECIFICATIONS_MAX, SpecificationStore


def specification(name: str = "tiny", batch_size: int = 8) -> RunSpecification:
    return RunSpecification.from_table(
        {"name": name, "target_batch_size": 64, "batch_size": batch_size, "task": {"name": "bytelm"}}, "test"
    )


def signed(owner: Identity, *, name: str = "tiny", version: int = 1) -> SignedSpecification:
    return sign(specification(name), owner, version=version, created_s=0.0)


def file_of(folder: Path, one: SignedSpecification) -> Path:
    return folder / f"{one.run_id}.specification"


def test_a_saved_specification_is_not_replaced_by_an_older_version(tmp_path: Path) -> None:
    store, owner = SpecificationStore(tmp_path / "runs"), Identity.generate()
    assert (store.load(signed(owner).run_id), store.all()) == (None, [])
    for version in (2, 1):
        store.save(signed(owner, version=version))
    assert store.load(signed(owner).run_id) == signed(owner, version=2)
    store.save(signed(owner, version=3))
    assert store.all() == [signed(owner, version=3)]


def test_files_that_the_owner_did_not_sign_are_set_aside_with_one_sentence_that_commands_show(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: the next save replaced a damaged copy, with what the owner had revoked, in silence."""
    caplog.set_level(logging.ERROR)  # the default of the commands
    store, owner, other = SpecificationStore(tmp_path), Identity.generate(), Identity.generate()
    valid, foreign = signed(owner), signed(other)
    for raw in (b"", b"garbage", valid.blob[:-1] + bytes([valid.blob[-1] ^ 1]), foreign.blob, bytes(1 << 20)):
        file_of(tmp_path, valid).write_bytes(raw)
        caplog.clear()
        assert store.load(valid.run_id) is None
        assert store.all() == []
        aside = file_of(tmp_path, valid).with_suffix(".specification.damaged")
        assert aside.read_bytes() == raw
        assert [record.getMessage().count(f"it was moved to {aside.name}") for record in caplog.records] == [
            1
        ]
    store.save(valid)
    assert store.load(valid.run_id) == valid
    assert store.load("../identity") is None
    (tmp_path / "no-run.specification").write_bytes(valid.blob)
    assert store.all() == [valid]


def test_the_folder_is_bounded_and_disk_errors_are_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, owner = SpecificationStore(tmp_path), Identity.generate()
    runs = [signed(owner, name=f"run-{number}") for number in range(SPECIFICATIONS_MAX + 2)]
    for number, run in enumerate(runs):
        store.save(run)
        os.utime(file_of(tmp_path, run), (number, number))
    store.save(runs[-1])
    assert {run.name for run in store.all()} == {run.name for run in runs[2:]}
    (tmp_path / "file").write_bytes(b"")
    SpecificationStore(tmp_path / "file" / "runs").save(runs[0])
    assert "cannot be saved" in caplog.text
