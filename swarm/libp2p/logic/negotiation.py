"""multistream-select, with which two ends of a connection or stream agree on a protocol: encoding and limits.

Every message is a line: its length as a varint, the text, and a newline. Source: libp2p specification
"Connection establishment", multistream-select 1.0.0.
"""

from __future__ import annotations

from swarm.core.errors import PeerError
from swarm.libp2p.logic.messages import varint

MULTISTREAM = "/multistream/1.0.0"
UNKNOWN = "na"
LINE_BYTES_MAX = 256  # more than twice the longest protocol name of this host
PROPOSALS_MAX = 16  # proposals of a peer before its stream is closed


def encode_line(text: str) -> bytes:
    """Encode one message."""
    raw = text.encode() + b"\n"
    return varint(len(raw)) + raw


def decode_line(raw: bytes) -> str:
    """Decode one message, without its length. Raises PeerError if it is not a line of printable text."""
    text = raw[:-1].decode(errors="replace")
    if not raw.endswith(b"\n") or not text.isprintable():
        raise PeerError("it did not send a line of text during protocol negotiation")
    return text


class Answerer:
    """The side that answers: takes the peer's messages and returns what to send."""

    def __init__(self, protocols: frozenset[str]) -> None:
        self._protocols = protocols
        self._proposals = 0
        self._greeted = False
        self.agreed: str | None = None

    def answer(self, text: str) -> bytes:
        """Return the answer to one message. Raises PeerError after a wrong greeting, and after too many
        proposals.
        """
        if not self._greeted:
            if text != MULTISTREAM:
                raise PeerError(f"it does not speak multistream-select 1.0.0, but sent {text[:40]!r}")
            self._greeted = True
            return encode_line(MULTISTREAM)
        self._proposals += 1
        if self._proposals > PROPOSALS_MAX:
            raise PeerError(f"it proposed more than {PROPOSALS_MAX} protocols")
        if text not in self._protocols:
            return encode_line(UNKNOWN)
        self.agreed = text
        return encode_line(text)
