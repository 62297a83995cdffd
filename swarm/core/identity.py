"""A peer's identity: an Ed25519 key, kept in a file that one process at a time may use.

The file holds libp2p's protobuf `PrivateKey` (libp2p specification, "Peer Ids and Keys"): type Ed25519 and
the 64 bytes of private and public key, so that any libp2p implementation can read it. py-libp2p writes the 32
private bytes alone, old versions of other implementations 96 bytes: both can be read, too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from nacl.bindings import crypto_sign_open
from nacl.exceptions import BadSignatureError

from swarm.core.errors import UsageError
from swarm.core.files import write_private
from swarm.core.home import user_path
from swarm.core.ids import PeerId
from swarm.core.passphrase import TEXT_BYTES_MAX, decrypt, encrypt

_SEED_BYTES = 32
_SIGNATURE_BYTES = 64
_FILE_BYTES_MAX = 1024
# Protobuf: field 1 (type) varint 1 (Ed25519), field 2 (data) of a one-byte length.
_ENCODED_PREFIX = bytes.fromhex("080112")


class DamagedIdentity(UsageError):
    """The file of an identity does not hold a key."""


class MissingIdentity(UsageError):
    """There is no file of an identity."""


class IdentityInUse(UsageError):
    """Another process runs a peer with this identity file."""


class Signer(Protocol):
    """The key that signs for a peer: an `Identity`, or a seeded one in tests."""

    @property
    def peer_id(self) -> PeerId: ...

    def sign(self, message: bytes) -> bytes: ...


class Identity:
    """An Ed25519 key pair. `close()` releases the file's lock; an identity without a file has none."""

    def __init__(self, key: Ed25519PrivateKey, *, path: Path | None = None, lock: int | None = None) -> None:
        self._key = key
        self.path = path
        self._lock = lock
        self.peer_id = PeerId(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    @classmethod
    def generate(cls) -> Identity:
        """Generate a new identity that lives in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike[str], create: bool = True) -> Identity:
        """Read the identity file and lock it; create it (mode 0600) when there is none and `create` is set.

        Raises UsageError when the file cannot be read, is no Ed25519 identity, is readable by others, or is
        in use by another process.
        """
        file = user_path(path)
        lock: int | None = None
        try:
            if create:
                file.parent.mkdir(parents=True, exist_ok=True)
            elif not file.exists():
                raise _no_file(file)
            if file.exists():  # no lock file is left next to a file that is no identity
                _decode(_read_or_create(file), file)
            lock = _take_lock(file)
            raw = _read_or_create(file)
            key = Ed25519PrivateKey.from_private_bytes(_decode(raw, file))
        except OSError as error:
            _free_lock(lock)
            raise UsageError(f"cannot use the identity file {file}: {error.strerror or error}") from error
        except BaseException:
            _free_lock(lock)
            raise
        return cls(key, path=file, lock=lock)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Identity:
        """Read the identity file without locking it: to sign as its owner, not to run a peer with it. Raises
        MissingIdentity when there is none, and UsageError as `load` does.
        """
        file = user_path(path)
        try:
            if not file.exists():
                raise _no_file(file)
            return cls(Ed25519PrivateKey.from_private_bytes(_decode(_read_or_create(file), file)), path=file)
        except OSError as error:
            raise UsageError(f"cannot use the identity file {file}: {error.strerror or error}") from error

    def export(self, path: str | os.PathLike[str], passphrase: str) -> None:
        """Write a copy that is encrypted with a passphrase to a new file (mode 0600).

        Raises UsageError when the passphrase is too short, or the file exists or cannot be written.
        """
        _write_new(user_path(path), encrypt(self.encode(), passphrase).encode())

    @classmethod
    def restore(
        cls, exported: str | os.PathLike[str], path: str | os.PathLike[str], passphrase: str
    ) -> Identity:
        """Make an identity file (mode 0600) from an exported copy, and read it as `read` does.

        Raises UsageError when the copy cannot be read, the passphrase is wrong, or the identity file exists.
        """
        source, file = user_path(exported), user_path(path)
        try:
            with source.open("rb") as stream:
                text = stream.read(TEXT_BYTES_MAX + 1)
        except OSError as error:
            raise UsageError(
                f"cannot read the exported identity {source}: {error.strerror or error}"
            ) from error
        raw = decrypt(text, passphrase)
        _decode(raw, source)
        _write_new(file, raw)
        return cls.read(file)

    @property
    def private_key(self) -> Ed25519PrivateKey:
        """Return the private key, which is needed to issue certificates only."""
        return self._key

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature of a message, 64 bytes."""
        return self._key.sign(message)

    def encode(self) -> bytes:
        """Return the identity as libp2p's protobuf `PrivateKey`."""
        return _encode(self._key)

    def close(self) -> None:
        """Release the file for other processes. Idempotent."""
        lock, self._lock = self._lock, None
        _free_lock(lock)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id}{f', {self.path}' if self.path else ''})"


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Return whether this peer signed this message. libsodium takes half the time of OpenSSL, and is
    stricter: it refuses keys of small order.
    """
    # libsodium takes signature and message in one piece, so bytes could move from one into the other.
    if len(signature) != _SIGNATURE_BYTES:
        return False
    try:
        crypto_sign_open(signature + message, peer_id.public_key)
    except (BadSignatureError, ValueError):
        return False
    return True


def _no_file(file: Path) -> MissingIdentity:
    return MissingIdentity(
        f"there is no identity file {file}: name another one with --identity, or "
        "make one with `swarm identity --create`"
    )


def _encode(key: Ed25519PrivateKey) -> bytes:
    data = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()) + key.public_key().public_bytes(
        Encoding.Raw, PublicFormat.Raw
    )
    return _ENCODED_PREFIX + bytes([len(data)]) + data


def _decode(raw: bytes, file: Path) -> bytes:
    """Return the 32 private bytes. The layout is fixed for Ed25519; a full protobuf parser would accept more
    than is meant.
    """
    prefix, rest = raw[: len(_ENCODED_PREFIX)], raw[len(_ENCODED_PREFIX) :]
    if (
        prefix != _ENCODED_PREFIX
        or not rest
        or rest[0] != len(rest) - 1
        or rest[0] not in (_SEED_BYTES, 64, 96)
    ):
        raise DamagedIdentity(
            f"{file} is not an Ed25519 identity in libp2p's encoding; move it away, and restore it with "
            "`swarm identity --import` from an exported copy, or have a new one made"
        )
    seed, publics = rest[1 : 1 + _SEED_BYTES], rest[1 + _SEED_BYTES :]
    public = (
        Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    )
    if publics != public * (len(publics) // _SEED_BYTES):
        raise DamagedIdentity(f"{file} is damaged: its public and private keys do not belong together")
    return seed


def _write_new(file: Path, raw: bytes) -> None:
    """Write a private file. Raises UsageError if there is one already: a key cannot be made again."""
    try:
        if file.exists():
            raise UsageError(f"{file} exists, and no key is ever overwritten: choose another file")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, raw)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error


def _read_or_create(file: Path) -> bytes:
    if not file.exists():
        raw = _encode(Ed25519PrivateKey.generate())
        write_private(file, raw)
        return raw
    if file.is_dir():
        raise UsageError(f"{file} is a folder, not an identity file: name another one, or move it away")
    with file.open("rb") as stream:
        raw = stream.read(_FILE_BYTES_MAX)
    mode = stat.S_IMODE(file.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        if not raw.startswith(_ENCODED_PREFIX):
            raise UsageError(f"{file} is no identity file: name one, or a new file, which is then made")
        raise UsageError(
            f"{file} holds a private key but others may read it (mode {mode:04o}): run `chmod 600 {file}`"
        )
    return raw


def _take_lock(file: Path) -> int:
    """Lock `<file>.lock`, not the file itself, which may be replaced. The system releases the lock when the
    process ends for any reason.
    """
    lock_file = file.with_name(f"{file.name}.lock")
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        _lock_exclusively(descriptor)
    except OSError:
        owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip() if hasattr(os, "pread") else ""
        os.close(descriptor)
        who = f"process {owner}" if owner.isdigit() else "another process"
        raise IdentityInUse(
            f"{who} is using the identity file {file}, and one identity is one peer: "
            "stop that process, or give this one a file of its own (--identity PATH)"
        ) from None
    os.truncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _lock_exclusively(descriptor: int) -> None:
    """Lock the file without waiting. Raises OSError when another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _free_lock(lock: int | None) -> None:
    if lock is not None:
        with contextlib.suppress(OSError):
            os.close(lock)
