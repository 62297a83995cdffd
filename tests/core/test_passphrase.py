"""Exported identities: only the passphrase opens them, and no key is overwritten."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from swarm.core.errors import UsageError
from swarm.core.identity import Identity
from swarm.core.passphrase import TEXT_BYTES_MAX, decrypt, encrypt

PASSPHRASE = "correct horse battery"


def test_an_exported_identity_is_restored_with_its_passphrase_only(tmp_path: Path) -> None:
    own = Identity.generate()
    copy, restored = tmp_path / "copy", tmp_path / "new" / "identity"
    own.export(copy, PASSPHRASE)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert own.encode() not in copy.read_bytes()
    with pytest.raises(UsageError, match="passphrase is wrong"):
        Identity.restore(copy, restored, "another passphrase")
    assert not restored.exists()
    assert Identity.restore(copy, restored, PASSPHRASE).peer_id == own.peer_id
    assert stat.S_IMODE(restored.stat().st_mode) == 0o600
    assert Identity.read(restored).peer_id == own.peer_id


def test_no_key_and_no_copy_is_overwritten(tmp_path: Path) -> None:
    own, other = Identity.generate(), tmp_path / "identity"
    Identity.load(other).close()
    before = other.read_bytes()
    own.export(tmp_path / "copy", PASSPHRASE)
    for write in (
        lambda: own.export(other, PASSPHRASE),
        lambda: Identity.restore(tmp_path / "copy", other, PASSPHRASE),
    ):
        with pytest.raises(UsageError, match="exists"):
            write()
    assert other.read_bytes() == before


def test_a_short_passphrase_and_a_missing_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 8"):
        Identity.generate().export(tmp_path / "copy", "short")
    with pytest.raises(UsageError, match="cannot read the exported identity"):
        Identity.restore(tmp_path / "none", tmp_path / "identity", PASSPHRASE)


def test_a_damaged_copy_is_refused_with_one_sentence(tmp_path: Path) -> None:
    text = encrypt(b"secret", PASSPHRASE).encode()
    damaged = text[:30] + (b"A" if text[30:31] != b"A" else b"B") + text[31:]
    with pytest.raises(UsageError, match="damaged"):
        decrypt(damaged, PASSPHRASE)
    for other in (
        b"",
        b"swarm-secret-1",
        b"swarm-secret-1 AAAA",
        b"\xff\x00",
        text * 2,
        bytes(TEXT_BYTES_MAX + 9),
    ):
        with pytest.raises(UsageError, match="no exported identity"):
            decrypt(other, PASSPHRASE)
    secret = tmp_path / "copy"
    secret.write_text(encrypt(b"no identity", PASSPHRASE))
    with pytest.raises(UsageError, match="not an Ed25519 identity"):
        Identity.restore(secret, tmp_path / "identity", PASSPHRASE)
