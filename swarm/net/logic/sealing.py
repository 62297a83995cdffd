"""Frames of the bulk path: each one is encrypted and authenticated, and is valid at one place of one stream.

A frame is a header (kind, and size of what follows), the body encrypted with AES-128-GCM, and the tag of 16
bytes. The header is authenticated with the body. Each direction of each stream has keys of its own: the first
is derived from the secret of the connection (HMAC-SHA-256), and after 256 GiB another one from the last. The
nonce is the IV of the key exclusive-or the number of the frame with this key, as in TLS 1.3. A frame that was
altered, repeated, left out, reordered, reflected, or taken from another stream or connection therefore does
not open.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from swarm.core.ids import PeerId

BODY_BYTES_MAX = (4 << 20) + (64 << 10)
SECRET_BYTES, TOKEN_BYTES = 32, 16
TAG_BYTES = 16
_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size
_KEY_BYTES, _IV_BYTES = 16, 12
# AES blocks that one key encrypts: 2^34 are 256 GiB, and an attacker tells them from random bytes with a
# probability of 2^-61. TLS 1.3 allows about as many: 2^24.5 records of 16 KiB (RFC 8446, 5.5).
BLOCKS_MAX = 1 << 34
_BLOCK_BYTES = 16
_CONTEXT = b"swarm bulk 1\0"


class FrameKind(IntEnum):
    """The meaning of a frame."""

    PROOF = 1  # stream 0: the sender has the secret
    OPEN = 2  # from the caller: begins a stream; the body is the name of the method
    DATA = 3  # a message; an empty one says that the caller sends no more
    END = 4  # the last frame of a stream; from the callee: status and reason


_KINDS = frozenset(int(kind) for kind in FrameKind)


class FrameError(Exception):
    """A frame does not belong here; the text says why, without the peer."""


class FrameKey:
    """The key of one direction of one stream, at one end. Frames are sealed or opened in order. Before more
    than `BLOCKS_MAX` blocks are encrypted, both ends take the next key, which is derived from this one.
    """

    __slots__ = ("_blocks", "_cipher", "_count", "_iv", "_secret")

    def __init__(self, secret: bytes) -> None:
        self._take(secret)

    def _take(self, secret: bytes) -> None:
        self._secret = secret
        self._cipher = AESGCM(secret[:_KEY_BYTES])
        self._iv = int.from_bytes(secret[_KEY_BYTES : _KEY_BYTES + _IV_BYTES])
        self._count = self._blocks = 0

    def _next_nonce(self, sealed_bytes: int) -> bytes:
        """Count the next frame, whose body and tag have this size, take the next key if this one is used up,
        and return the frame's nonce.
        """
        blocks = -(-sealed_bytes // _BLOCK_BYTES) + 1  # with the one that encrypts the tag
        if self._blocks + blocks > BLOCKS_MAX:
            self._take(hmac.digest(self._secret, _CONTEXT + b"next", "sha256"))
        nonce = (self._iv ^ self._count).to_bytes(_IV_BYTES)
        self._count += 1
        self._blocks += blocks
        return nonce

    def skip(self, sealed_bytes: int) -> None:
        """Count the next frame without opening it. Its body and tag have this size."""
        self._next_nonce(sealed_bytes)

    def seal(self, kind: FrameKind, body: bytes, buffer: bytearray) -> memoryview:
        """Write the next frame to the buffer, and return a view of it. The body has at most `BODY_BYTES_MAX`
        bytes, and the buffer has room for `frame_bytes(len(body))`.
        """
        size = len(body) + TAG_BYTES
        header = _HEADER.pack(kind, size)
        frame = memoryview(buffer)[: HEADER_BYTES + size]
        frame[:HEADER_BYTES] = header
        nonce = self._next_nonce(size)  # before the cipher is looked up, which it may replace
        self._cipher.encrypt_into(nonce, body, header, frame[HEADER_BYTES:])
        return frame

    def open(
        self, header: bytes, sealed: memoryview, buffer: memoryview | None = None
    ) -> tuple[FrameKind, bytes | memoryview]:
        """Return kind and body of the next frame. A message that fits into the buffer is written to its
        start, and its body is a view of it. Raises FrameError when it is not the frame that the other end
        sealed next; what is in the buffer must not be used then.
        """
        nonce = self._next_nonce(len(sealed))
        kind, size = FrameKind(_HEADER.unpack(header)[0]), len(sealed) - TAG_BYTES
        body: bytes | memoryview
        try:
            if buffer is not None and kind is FrameKind.DATA and 0 < size <= len(buffer):
                body = buffer[:size]
                self._cipher.decrypt_into(nonce, sealed, header, body)
            else:
                body = self._cipher.decrypt(nonce, sealed, header)
        except InvalidTag:
            raise FrameError("a frame was altered, repeated or left out on the way") from None
        return kind, body


@dataclass(frozen=True, slots=True)
class BulkSecret:
    """The secret of one connection, known only to the two peers."""

    secret: bytes = field(repr=False)
    caller: PeerId
    callee: PeerId

    @property
    def token(self) -> bytes:
        """Return the token with which the connection begins. It is derived, so that a hostile callee cannot
        choose bytes that its caller sends to some port.
        """
        return hmac.digest(self.secret, _CONTEXT + b"token", "sha256")[:TOKEN_BYTES]

    def key(self, stream: int, *, from_caller: bool) -> FrameKey:
        """Return a new key for the frames of one direction of one stream. It must be made only once at each
        end, because its frames are counted from 0.
        """
        parts = (
            _CONTEXT,
            b"\1" if from_caller else b"\0",
            stream.to_bytes(8),
            self.caller.public_key,
            self.callee.public_key,
        )
        derived = hmac.digest(self.secret, b"".join(parts), "sha256")
        return FrameKey(derived)


def frame_bytes(body_bytes: int) -> int:
    """Return the size of a frame with a body of this size."""
    return HEADER_BYTES + body_bytes + TAG_BYTES


def sealed_bytes(header: bytes | bytearray, body_bytes_max: int = BODY_BYTES_MAX) -> int:
    """Return the number of bytes that follow this header. Raises FrameError when the header is wrong, or
    names a body of more than `body_bytes_max`: it is read before it can be authenticated.
    """
    kind: int
    size: int
    kind, size = _HEADER.unpack(header)
    if kind not in _KINDS or not TAG_BYTES <= size <= body_bytes_max + TAG_BYTES:
        raise FrameError("it sent something that is no frame")
    return size
