"""`swarm identity --export/--import` and `swarm recover` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.core.identity import Identity
from swarm.run.signed import sign
from swarm.run.specification import RunSpecification
from swarm.run.specification_store import SpecificationStore

TABLE = {"name": "tiny", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}


def test_an_identity_moves_to_another_machine(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word, copy, target = tmp_path / "word", tmp_path / "copy", tmp_path / "other"
    word.write_text("correct horse battery\n")
    assert main(["identity", "--create", "--json"]) == 0
    peer_id = json.loads(capsys.readouterr().out)["peer_id"]
    assert main(["identity", "--export", str(copy), "--passphrase-file", str(word)]) == 0
    assert f"an encrypted copy is in {copy}" in capsys.readouterr().out
    arguments = ["identity", "--import", str(copy), "--passphrase-file", str(word)]
    assert main(arguments) == 2
    assert "no key is ever overwritten" in capsys.readouterr().err
    assert main([*arguments, "--identity", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peer_id"] == peer_id
    word.write_text("another passphrase\n")
    assert main([*arguments, "--identity", str(tmp_path / "third")]) == 2
    assert "the passphrase is wrong" in capsys.readouterr().err
    assert main(["identity", "--export", str(tmp_path / "more")]) == 2
    assert "--passphrase-file" in capsys.readouterr().err


def test_a_run_that_nobody_trains_is_recovered_on_disk(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, key = Identity.generate(), tmp_path / "recovery"
    recovery = Identity.load(key)
    recovery.close()
    table = {**TABLE, "recovery_key": str(recovery.peer_id), "ended": True}
    known = sign(RunSpecification.from_table(table, "test"), owner, version=9, created_s=1.0)
    store = SpecificationStore(home / "runs")
    store.save(known)
    assert main(["identity", "--create"]) == 0
    assert main(["recover", "tiny", "--recovery-key", str(key)]) == 0
    assert "no member was informed" in capsys.readouterr().out
    stored = store.load(known.run_id)
    assert stored is not None
    assert stored.owner == Identity.read(home / "identity").peer_id
    assert not stored.specification.ended
    assert main(["recover", "tiny", "--recovery-key", str(home / "identity")]) == 2
    assert "the recovery key of tiny@" in capsys.readouterr().err
