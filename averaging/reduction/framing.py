"""The framing of bulk messages: `4 bytes of header length | protobuf header | payload`, read without a copy.

A payload of a megabyte inside a protobuf field would be copied twice more at each end. Here it is copied
once, into the message, and the receiver works on a view of the bytes that the transport delivered.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError

from swarm.compression import Buffer
from swarm.core.errors import PeerError
from swarm.wire.reduce_pb2 import ExchangeHeader

HEADER_BYTES_MAX = 4096
# what CPython's bytes guarantee for their content: vector loads and NumPy want aligned elements
_ALIGNMENT = 16
_LENGTH = struct.Struct("<I")
_PADDING_OVERHEAD = 2  # tag and length of the padding field


def pack(header: ExchangeHeader, *payload: Buffer) -> bytes:
    """Return one message, with the payload given in any number of pieces. Sets the header's padding so that
    the payload begins aligned.
    """
    if not payload:
        raw = header.SerializeToString()
        return _LENGTH.pack(len(raw)) + raw
    header.ClearField("padding")
    excess = (_LENGTH.size + header.ByteSize() + _PADDING_OVERHEAD) % _ALIGNMENT
    header.padding = bytes(_ALIGNMENT - excess)
    raw = header.SerializeToString()
    return b"".join((_LENGTH.pack(len(raw)), raw, *payload))


def unpack(message: bytes) -> tuple[ExchangeHeader, memoryview]:
    """Return the header and a view of the payload (empty when there is none). Raises PeerError when `message`
    has no valid header.
    """
    if len(message) < _LENGTH.size:
        raise PeerError(f"a message of {len(message)} bytes has no header")
    (header_bytes,) = _LENGTH.unpack_from(message)
    start = _LENGTH.size + header_bytes
    if header_bytes > HEADER_BYTES_MAX or start > len(message):
        raise PeerError(f"a message of {len(message)} bytes announces a header of {header_bytes}")
    header = ExchangeHeader()
    try:
        header.ParseFromString(message[_LENGTH.size : start])
    except DecodeError:
        raise PeerError("a message has a header that cannot be parsed") from None
    return header, memoryview(message)[start:]
