"""Identities from a seed, so that a simulated swarm has the same PeerIDs, and the same places in the key
space, in every run.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.core.ids import PeerId


class SeededIdentity:
    """Identity with the interface of `swarm.core.identity.Identity` (`peer_id`, `sign`) and a key that anyone
    can compute: for tests only.
    """

    def __init__(self, seed: int | str) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(
            hashlib.sha256(f"swarm test identity {seed}".encode()).digest()
        )
        self.peer_id = PeerId(self._key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def close(self) -> None:
        pass
