"""Tests of the identity file: libp2p's encoding, file mode, and use by one process at a time."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.errors import UsageError
from swarm.core.identity import Identity, verify
from swarm.core.ids import PeerId


def test_an_identity_file_is_created_once_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "identity.key"
    first = Identity.load(file)
    first.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = Identity.load(file, create=False)
    assert again.peer_id == first.peer_id
    again.close()
    again.close()
    assert sorted(path.name for path in file.parent.iterdir()) == ["identity.key", "identity.key.lock"]


def test_the_encoding_equals_libp2ps(tmp_path: Path) -> None:
    from libp2p.crypto.ed25519 import Ed25519PrivateKey
    from libp2p.crypto.pb import crypto_pb2
    from libp2p.peer.id import ID

    identity = Identity.generate()
    message = crypto_pb2.PrivateKey.FromString(identity.encode())
    assert message.key_type == crypto_pb2.KeyType.Ed25519
    assert message.data[32:] == identity.peer_id.public_key
    theirs = Ed25519PrivateKey.from_bytes(message.data[:32])
    assert ID.from_pubkey(theirs.get_public_key()).to_base58() == str(identity.peer_id)
    assert verify(identity.peer_id, b"text", theirs.sign(b"text"))
    assert theirs.get_public_key().verify(b"text", identity.sign(b"text"))

    file = tmp_path / "of-py-libp2p.key"
    file.write_bytes(theirs.serialize())
    file.chmod(0o600)
    loaded = Identity.load(file)
    assert loaded.peer_id == identity.peer_id
    loaded.close()


def test_the_example_of_the_specification_is_read(tmp_path: Path) -> None:
    """Check the test vector of the libp2p specification, "Peer Ids and Keys"."""
    seed = "7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    private = "08011240" + seed + "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    file = tmp_path / "identity.key"
    file.write_bytes(bytes.fromhex(private))
    file.chmod(0o600)
    loaded = Identity.load(file)
    assert (
        loaded.peer_id.public_key.hex() == "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    assert loaded.encode().hex() == private
    loaded.close()


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    file = tmp_path / "identity.key"
    program = (
        "import sys; from swarm.core.identity import Identity; "
        f"i = Identity.load({str(file)!r}); print(i.peer_id, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        peer_id = other.stdout.readline().strip()
        assert peer_id
        with pytest.raises(UsageError, match=f"process {other.pid} is using the identity file .*--identity"):
            Identity.load(file)
    finally:
        other.kill()  # the system releases its lock in any case
        other.communicate()
    identity = Identity.load(file)
    assert str(identity.peer_id) == peer_id
    identity.close()


def test_a_second_load_in_the_same_process_is_refused(tmp_path: Path) -> None:
    first = Identity.load(tmp_path / "identity.key")
    with pytest.raises(UsageError, match="one identity is one peer"):
        Identity.load(tmp_path / "identity.key")
    first.close()


def test_a_key_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "identity.key"
    Identity.load(file).close()
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        Identity.load(file)
    file.chmod(0o600)
    Identity.load(file).close()  # the refusal has released the lock


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        b"\x08\x01\x12\x40" + bytes(63),
        b"\x08\x00\x12\x20" + bytes(32),
        b"\x08\x01\x12\x40" + bytes(64),
    ],
)
def test_a_damaged_identity_file_is_refused_and_not_changed(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "identity.key"
    file.write_bytes(raw)
    file.chmod(0o600)
    with pytest.raises(UsageError, match=r"identity\.key is (damaged|not an Ed25519 identity)"):
        Identity.load(file)
    assert file.read_bytes() == raw


def test_an_unusable_identity_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no identity file"):
        Identity.load(tmp_path / "missing", create=False)
    (tmp_path / "plain").write_text("")
    with pytest.raises(UsageError, match="cannot use the identity file"):
        Identity.load(tmp_path / "plain" / "identity.key")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder"):
        Identity.load(tmp_path / "folder")
    for use in (Identity.load, Identity.read):
        with pytest.raises(UsageError, match=r"cannot use the identity file .*: File name too long"):
            use(tmp_path / ("x" * 300))
        with pytest.raises(UsageError, match="~no-such-user/key: there is no such home folder"):
            use("~no-such-user/key")
    with pytest.raises(UsageError, match=r"cannot write .*: File name too long"):
        Identity.generate().export(tmp_path / ("x" * 300), "a long enough passphrase")


@given(st.binary(max_size=200))
def test_only_the_owner_can_sign(message: bytes) -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(message)
    assert len(signature) == 64
    assert verify(one.peer_id, message, signature)
    assert not verify(other.peer_id, message, signature)
    assert not verify(one.peer_id, message + b"!", signature)
    assert not verify(one.peer_id, message, signature[:-1])
    assert not verify(one.peer_id, message, bytes(64))


def test_the_private_key_does_not_appear_in_repr() -> None:
    identity = Identity.generate()
    assert identity.encode()[4:36].hex() not in repr(identity)


def test_verifying_follows_the_standard() -> None:
    """Check RFC 8032, section 7.1, tests 2 and 3, and malleated signatures, which must be refused."""
    vectors = [
        (
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    ]
    for public, message, signature in (
        (PeerId(bytes.fromhex(p)), bytes.fromhex(m), bytes.fromhex(s)) for p, m, s in vectors
    ):
        assert verify(public, message, signature)
        assert not verify(public, message + b"\0", signature)
        assert not verify(public, message[1:], signature + message[:1])  # the same bytes, cut elsewhere
        assert not verify(public, signature[-1:] + message, signature[:-1])
        assert not verify(public, message, signature[:-1] + bytes([signature[-1] ^ 1]))
        assert not verify(public, message, b"")


def test_a_key_of_small_order_verifies_no_signature() -> None:
    """With the neutral element as key, a signature of (neutral element, 0) would fit every message."""
    neutral = b"\1" + bytes(31)
    assert not verify(PeerId(neutral), b"anything", neutral + bytes(32))


def test_nothing_is_left_beside_a_file_that_is_no_identity(tmp_path: Path) -> None:
    """Regression: the lock file stayed, for example next to a README in a checkout."""
    file = tmp_path / "README.md"
    file.write_text("A text of somebody.\n")
    for mode, said in ((0o644, "is no identity file"), (0o600, "is not an Ed25519 identity")):
        file.chmod(mode)
        with pytest.raises(UsageError, match=said):
            Identity.load(file)
        assert list(tmp_path.iterdir()) == [file]
