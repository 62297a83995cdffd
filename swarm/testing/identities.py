"""Identities from a seed, so that a simulated swarm has the same PeerIDs, and the same places in the key
space, in every run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from unittest import mock

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.bindings import crypto_sign_open

from swarm.core import identity
from swarm.core.ids import PeerId

_SIGNATURES_MAX = 1 << 16  # that are remembered


class SeededIdentity:
    """Identity with the interface of `swarm.core.identity.Identity` (`peer_id`, `sign`) and a key that anyone
    can compute: for tests only.
    """

    path = None  # it is not kept on a disk

    def __init__(self, seed: int | str) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(
            hashlib.sha256(f"swarm test identity {seed}".encode()).digest()
        )
        self.peer_id = PeerId(self._key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def close(self) -> None:
        pass


class StandInIdentity:
    """Identity whose signatures are hashes, for models that need millions of them. Its peers verify with
    `stand_in_verify` in place of `swarm.core.identity.verify`.
    """

    def __init__(self, seed: int | str) -> None:
        self.peer_id = PeerId(hashlib.sha256(f"stand-in {seed}".encode()).digest())

    def sign(self, message: bytes) -> bytes:
        return _stand_in(self.peer_id, message)


def stand_in_verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Return whether a peer has made this stand-in signature."""
    return signature == _stand_in(peer_id, message)


def _stand_in(peer_id: PeerId, message: bytes) -> bytes:
    return hashlib.sha512(peer_id.public_key + message).digest()


@contextlib.contextmanager
def remembered_signatures() -> Iterator[None]:
    """Verify each signature once in this process: all peers of a simulated swarm verify the same records."""
    remembered = functools.lru_cache(_SIGNATURES_MAX)(crypto_sign_open)
    with mock.patch.object(identity, "crypto_sign_open", remembered):
        yield
