"""Noise: encryption and proof of PeerIDs on a connection, by the handshake of py-libp2p. Only this file
imports that library, and uses only its Noise handshake and its keys.

The other parts of version 0.8.1 that a host needs fail when strangers connect; docs/decisions/0040 lists the
faults and how each is avoided. This module changes the used parts as follows:

- A different version of the library, or a different source text of these parts, is refused, because the
  changes were made for the reviewed text.
- Noise is the only security protocol. The library's own default also accepts `/plaintext/2.0.0`, which takes
  anybody who knows a public key for its owner. There is no list to which a protocol could be added.
- A handshake that fails raises PeerError or NetworkError. The library passes on errors of protobuf, `noise`
  and `cryptography`. It has no time limit either; the caller of `handshake` sets one.
- The handshake names yamux (libp2p's "inlined muxer negotiation"), which saves the round trip to agree on it.
  The library has the fields for it, but neither sends nor reads them in a handshake.
- A handshake may send 4 KiB. The library reads up to 64 KiB for each of its messages.
- A peer has an Ed25519 key, as everywhere in swarm. The library also accepts RSA, secp256k1 and ECDSA.
- Failures of strangers are not logged. The library logs them at the level ERROR.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.libp2p.agreement import answer, confirm, propose
from swarm.libp2p.logic import yamux
from swarm.libp2p.pipes import Pipe

PROTOCOL = "/noise"
VERSION = "0.8.1"
# SHA-256 of the source text of the reviewed and tested modules
SOURCES = {
    "libp2p.security.noise.io": "a2194d3c2695e688061ea0efbdbaf26522d4522fd600b2e36fd9394fafaa247f",
    "libp2p.security.noise.messages": "5add6ddf05b91315c90774669b4656b1c9c5d1045651dd954c4157d86ed173a2",
    "libp2p.security.noise.patterns": "07410f643eb4a9883613a9b6156447918b2d9b9923581054e9df00132be5bb29",
}
HANDSHAKE_BYTES_MAX = 4096  # both messages of a peer together; those of an honest peer have about 250
_MESSAGE_BYTES_MAX = 65_535
PLAINTEXT_BYTES_MAX = _MESSAGE_BYTES_MAX - 16  # maximum of one message, which carries a tag


@dataclass(frozen=True, slots=True)
class _Library:
    """The parts of py-libp2p that are used, after its version was checked."""

    ed25519: Any  # the class of private keys
    x25519_pair: Any
    peer_id: Any
    pattern: Any  # the Noise handshake XX
    payload: Any  # the class of what a peer says about itself in the handshake
    extensions: Any  # the class of its part that names stream multiplexers


def check(version: str, sources: Mapping[str, str]) -> None:
    """Raise UsageError unless `version` and the digests `sources` are those for which this module is made."""
    other = [name for name, digest in SOURCES.items() if sources.get(name) != digest]
    if version != VERSION or other:
        what = f"version {version}" if version != VERSION else f"changed files ({', '.join(other)})"
        raise UsageError(
            f"the libp2p package has {what}, and was tried in version {VERSION} only: "
            f"run `pip install --force-reinstall libp2p=={VERSION}`"
        )


@functools.cache
def _library() -> _Library:
    """Import the used parts of py-libp2p. The first import takes 0.5 s and 51 MB."""
    version = importlib.metadata.version("libp2p")
    if version != VERSION:  # check before the import, which runs the code
        check(version, SOURCES)
    from libp2p.crypto.ed25519 import Ed25519PrivateKey
    from libp2p.crypto.x25519 import create_new_key_pair
    from libp2p.peer.id import ID
    from libp2p.security.noise import io, messages, patterns

    modules = (io, messages, patterns)
    check(
        version,
        {one.__name__: hashlib.sha256(inspect.getsource(one).encode()).hexdigest() for one in modules},
    )
    logging.getLogger("libp2p").setLevel(logging.CRITICAL + 1)
    return _Library(
        Ed25519PrivateKey,
        create_new_key_pair,
        ID,
        patterns.PatternXX,
        messages.NoiseHandshakePayload,
        messages.NoiseExtensions,
    )


class Noise:
    """The keys of one host: secures connections as the peer of this identity. Loads py-libp2p.

    Raises UsageError when the installed version of py-libp2p is not the one that was tried.
    """

    def __init__(self, identity: Identity) -> None:
        self._library = _library()
        self.peer_id = identity.peer_id
        self._key = self._library.ed25519.from_bytes(identity.private_key.private_bytes_raw())
        self._static = self._library.x25519_pair().private_key
        self._own = self._library.peer_id(identity.peer_id.to_bytes())

    async def handshake(self, pipe: Pipe, *, is_client: bool, expected: PeerId | None) -> SecureChannel:
        """Agree on Noise and on keys over a connection, and return the secured channel to the peer that has
        proven its PeerID. `is_client`: this side has dialed. `expected`: the required PeerID; None: any.

        Raises NetworkError when the connection ends, PeerError when the handshake fails or another peer
        answers. Has no timeout of its own: the caller sets one.
        """
        pattern, said = self._pattern()
        reading = _Handshaking(pipe, is_proposed=is_client)
        if is_client:
            await propose(pipe, PROTOCOL)
        else:
            await answer(pipe, frozenset([PROTOCOL]))
        try:
            if is_client:
                session = await pattern.handshake_outbound(reading, None)
            else:
                session = await pattern.handshake_inbound(reading)
            peer_id = PeerId.from_bytes(session.get_remote_peer().to_bytes())
            extensions = self._library.payload.deserialize(bytes(said)).extensions
        except (NetworkError, PeerError):
            raise
        except Exception as error:
            raise PeerError(f"its Noise handshake failed: {type(error).__name__}: {error}"[:200]) from error
        if expected is not None and peer_id != expected:
            raise PeerError(f"another peer is there: {peer_id}")
        uses_yamux = extensions is not None and yamux.PROTOCOL in extensions.stream_muxers
        return SecureChannel(pipe, session.conn.noise_state, peer_id, uses_yamux=uses_yamux)

    def _pattern(self) -> tuple[Any, bytearray]:
        """Return the library's handshake, made to name yamux, and a buffer that has the peer's payload after
        it.
        """
        pattern, said = self._library.pattern(self._own, self._key, self._static), bytearray()
        payload = pattern.make_handshake_payload(self._library.extensions(stream_muxers=[yamux.PROTOCOL]))
        pattern.make_handshake_payload = lambda: payload
        create_state = pattern.create_noise_state

        def create_noise_state(prologue: bytes | None = None) -> Any:
            state = create_state(prologue)
            read_message = state.read_message

            def read(data: bytes) -> bytearray:
                said[:] = read_message(data)  # the peer's last message has its payload
                return said

            state.read_message = read
            return state

        pattern.create_noise_state = create_noise_state
        return pattern, said


class _Handshaking:
    """The pipe as the library's handshake uses it, with a limit of bytes. `is_proposed`: the answer to the
    proposal of Noise comes before the peer's first message.
    """

    def __init__(self, pipe: Pipe, *, is_proposed: bool) -> None:
        self._pipe, self._is_proposed = pipe, is_proposed
        self._left = HANDSHAKE_BYTES_MAX

    async def read(self, size: int) -> bytes:
        if self._is_proposed:
            self._is_proposed = False
            await confirm(self._pipe, PROTOCOL)
        self._left -= size
        if self._left < 0:
            raise PeerError(f"its Noise handshake has more than {HANDSHAKE_BYTES_MAX} bytes")
        return await self._pipe.read_exactly(size) if size else b""

    async def write(self, data: bytes) -> None:
        await self._pipe.write(data)


class SecureChannel:
    """Bytes to and from the peer at the other end, encrypted. One task reads, and one writes. `uses_yamux`:
    both peers have named yamux in the handshake, so it is not negotiated any more.
    """

    def __init__(self, pipe: Pipe, state: Any, peer_id: PeerId, *, uses_yamux: bool) -> None:
        self._pipe, self._state = pipe, state
        self._left = b""
        self.peer_id, self.uses_yamux = peer_id, uses_yamux

    async def read(self) -> bytes:
        """Return the next bytes, possibly none. Raises NetworkError when the connection ends, PeerError when
        they were not encrypted by the peer.
        """
        if self._left:
            data, self._left = self._left, b""
            return data
        size = int.from_bytes(await self._pipe.read_exactly(2), "big")
        return _decrypted(self._state, await self._pipe.read_exactly(size) if size else b"")

    async def read_exactly(self, size: int) -> bytes:
        """Return `size` bytes; raises as `read` does."""
        data = b""
        while len(data) < size:
            data += await self.read()
        self._left = data[size:]
        return data[:size]

    async def write(self, data: bytes) -> None:
        """Send bytes. A task that is cancelled here leaves the connection broken. Raises NetworkError when
        the connection has ended.
        """
        out = []
        for at in range(0, len(data), PLAINTEXT_BYTES_MAX):
            message = self._state.encrypt(data[at : at + PLAINTEXT_BYTES_MAX])
            out += [len(message).to_bytes(2, "big"), message]
        await self._pipe.write(b"".join(out))

    def close(self) -> None:
        """End the connection at once."""
        self._pipe.close()


def _decrypted(state: Any, data: bytes) -> bytes:
    try:
        plain: bytes = state.decrypt(data)
    except Exception as error:
        raise PeerError("it sent bytes that it did not encrypt, or a relay changed them") from error
    return plain
