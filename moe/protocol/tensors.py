"""Lists of tensors as bytes. Each tensor is sent as its elements are, or through a codec of
`swarm.compression`, and is read in place where that is possible.

Shape and dtype are not sent: they follow from the expert's schema and the batch size. Everything that a peer
sends is checked before anything is computed with it: the number of tensors, their sizes in bytes, the codecs,
and that every floating-point element is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe.protocol.schema import Leaf
from swarm.compression import Buffer, Codec, find_wire_id, view_bytes, view_tensor
from swarm.compression.plain import SERIAL_ELEMENTS_MAX, PlainCodec
from swarm.core.errors import PeerError

ALIGNMENT = 16  # alignment of every tensor in a payload: vector loads and NumPy need aligned elements
CHUNK_BYTES = 1 << 20  # the size of a stream's messages
_COPIED_BYTES_MAX = 32 << 10
_PADDING = bytes(ALIGNMENT)
_DOT_DTYPES = (torch.float32, torch.float64)
_DOT_ELEMENTS_MAX = 8192  # of more than 10,000 OpenBLAS makes several threads' work
_FINITE = {dtype: PlainCodec("", 1, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class TensorPayload:
    """One encoded tensor of a payload. `codec` 0 means its elements as they are. `absent` means zeros, or a
    gradient that does not exist; it has no bytes.
    """

    codec: int
    version: int
    payload: Buffer
    absent: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.payload)

    @property
    def padding_bytes(self) -> int:
        """Return the number of padding bytes between this tensor and the next."""
        return -self.size_bytes % ALIGNMENT


@dataclass(frozen=True, slots=True)
class Header:
    """A peer's announcement of one tensor of its payload."""

    codec: int
    version: int
    size_bytes: int
    absent: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor as a peer sent it, checked and not decoded yet."""

    leaf: Leaf
    batch: int
    codec: Codec | None  # None: its elements as they are
    raw: torch.Tensor  # flat uint8, on the host
    values: torch.Tensor | None = None  # the same as elements of the leaf's dtype, where they were looked at

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the tensor, (batch, *shape), on the device of `raw`, which is `self.raw` or a copy of it.
        The result may be a view of `raw`.
        """
        shape, numel = (self.batch, *self.leaf.shape), self.batch * self.leaf.elements
        if self.codec is not None:
            values = torch.empty(numel, dtype=torch.float32, device=raw.device)
            return self.codec.decode(raw, values).to(self.leaf.dtype).reshape(shape)
        if not numel:
            return torch.empty(shape, dtype=self.leaf.dtype, device=raw.device)
        if raw is self.raw and self.values is not None:
            return self.values.view(shape)
        return raw.view(self.leaf.dtype).view(shape)


ABSENT = TensorPayload(0, 0, b"", absent=True)


def encode(tensors: Sequence[torch.Tensor | None], codec: Codec | None) -> list[TensorPayload]:
    """Encode tensors of any device; floating-point ones through `codec` (None: as they are). The result may
    be views of the tensors, so use it before they change. Encoding runs in the calling thread, on the host.
    """
    return [ABSENT if tensor is None else _encode(tensor.detach(), codec) for tensor in tensors]


def payload_bytes(payloads: Sequence[TensorPayload]) -> int:
    """Return the size of all payloads with their padding."""
    return sum([len(piece.payload) + -len(piece.payload) % ALIGNMENT for piece in payloads])


def join_payloads(payloads: Sequence[TensorPayload]) -> bytes:
    """Return all payloads as one, copied once."""
    parts: list[Buffer] = []
    for piece in payloads:
        parts.append(piece.payload)
        if padding := piece.padding_bytes:
            parts.append(_PADDING[:padding])
    return b"".join(parts)


def chunks(payloads: Sequence[TensorPayload]) -> Iterator[bytes]:
    """Yield the same bytes as `join_payloads`, in messages of CHUNK_BYTES, of which the last one may have
    fewer; also copied once.
    """
    parts: list[Buffer] = []
    size = 0
    for piece in payloads:
        padding_bytes, end = piece.padding_bytes, size + len(piece.payload) + piece.padding_bytes
        if end < CHUNK_BYTES:  # most tensors of a message with several requests
            parts.append(piece.payload)
            if padding_bytes:
                parts.append(_PADDING[:padding_bytes])
            size = end
            continue
        for payload in (piece.payload, _PADDING[:padding_bytes]):
            left = memoryview(payload).cast("B")
            while left:
                part, left = left[: CHUNK_BYTES - size], left[CHUNK_BYTES - size :]
                parts.append(part)
                size += len(part)
                if size == CHUNK_BYTES:
                    yield b"".join(parts)
                    parts, size = [], 0
    if parts:
        yield b"".join(parts)


def expected_bytes(leaves: Sequence[Leaf], batch: int, codec: Codec | None) -> int:
    """Return the size of a payload of such tensors."""
    total = 0
    for leaf in leaves:
        size = batch * leaf.sample_bytes
        if codec is not None and leaf.is_floating:
            size = codec.encoded_bytes(batch * leaf.elements)
        total += size + -size % ALIGNMENT
    return total


def check_headers(headers: Sequence[Header], leaves: Sequence[Leaf], batch: int, *, absent_from: int) -> int:
    """Return the number of payload bytes that must follow these headers. Raises PeerError, which says which
    header is wrong; it is known before the payload is received.

    Tensors may be absent from number `absent_from` on.
    """
    if len(headers) != len(leaves):
        raise PeerError(f"{len(leaves)} tensors are expected, not {len(headers)}")
    total = 0
    for number, (header, leaf) in enumerate(zip(headers, leaves, strict=True)):
        wanted = batch * leaf.sample_bytes
        if header.absent:
            if number < absent_from:
                raise PeerError(f"tensor {number} is missing")
            wanted = 0
        elif header.codec:
            codec = find_wire_id(header.codec, header.version)
            if codec is None:
                raise PeerError(
                    f"tensor {number} came in codec {header.codec}, version {header.version}, "
                    "which this peer does not have"
                )
            if not leaf.is_floating:
                raise PeerError(
                    f"tensor {number} is {leaf}: only floating-point tensors are sent through a codec"
                )
            wanted = codec.encoded_bytes(batch * leaf.elements)
        if header.size_bytes != wanted:
            raise PeerError(
                f"tensor {number}, {leaf} with a batch of {batch}, has {wanted} bytes, "
                f"not {header.size_bytes}"
            )
        total += wanted + -wanted % ALIGNMENT
    return total


def decode(
    headers: Sequence[Header],
    leaves: Sequence[Leaf],
    batch: int,
    payload: Buffer | torch.Tensor,
    *,
    is_finite: bool = False,
) -> list[torch.Tensor | None]:
    """Decode a payload into tensors on the host. Where a payload of more than 32 KiB has the elements as they
    are, these are views of it; a smaller one is copied first. `headers` must have passed `check_headers`.
    `is_finite`: all of it was looked at as float32, and has neither NaN nor infinity.

    Raises PeerError when the payload has another size, an element is not allowed by its dtype or codec, or is
    NaN or infinity.
    """
    return [
        None if one is None else one.decode(one.raw)
        for one in check_payload(headers, leaves, batch, payload, is_finite=is_finite)
    ]


def check_payload(
    headers: Sequence[Header],
    leaves: Sequence[Leaf],
    batch: int,
    payload: Buffer | torch.Tensor,
    *,
    is_finite: bool = False,
) -> list[Encoded | None]:
    """Check a payload as `decode` does, with the same errors, without decoding it. The result can be decoded
    later and on another device.
    """
    raw = payload if isinstance(payload, torch.Tensor) else _bytes_of(payload)
    found: list[Encoded | None] = []
    start = 0
    for number, (header, leaf) in enumerate(zip(headers, leaves, strict=True)):
        end = start + header.size_bytes
        if end > raw.numel():
            raise PeerError(f"the payload ends within tensor {number}")
        if header.absent:
            found.append(None)
            continue
        own = raw if end - start == raw.numel() else raw[start:end]
        is_checked = is_finite and leaf.dtype is torch.float32
        found.append(_check_tensor(header, leaf, batch, own, number, is_checked))
        start = end + -end % ALIGNMENT
    if start != raw.numel():
        raise PeerError(f"the payload has {raw.numel()} bytes, not {start}")
    return found


def _bytes_of(payload: Buffer) -> torch.Tensor:
    """Return a flat uint8 tensor of a payload; small ones are copied, which is quicker than `view_bytes`."""
    if 0 < len(payload) <= _COPIED_BYTES_MAX:
        return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return view_bytes(payload)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, on any device, has no NaN and no infinity."""
    dtype = tensor.dtype
    if not dtype.is_floating_point:
        return True
    if (
        dtype in _DOT_DTYPES
        and tensor.numel() <= _DOT_ELEMENTS_MAX
        and tensor.is_cpu
        and tensor.is_contiguous()
    ):
        # quicker still: BLAS, on one thread
        values = tensor.detach().numpy().reshape(-1)
        if math.isfinite(np.dot(values, values)):
            return True
    elif tensor.numel() <= SERIAL_ELEMENTS_MAX:
        # the quickest way for a small tensor, as in `averaging.optim.finite`; finite numbers whose sum is not
        # finite are looked at below
        total = tensor.detach().sum(dtype=torch.float32 if dtype.itemsize < 4 else None)
        if math.isfinite(total.item()):
            return True
    check = _FINITE.get(dtype)
    if check is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return bool(torch.isfinite(tensor).all())
    return check.is_finite(flat_bytes(tensor))


def is_finite_as_float32(raw: torch.Tensor) -> bool:
    """Return whether flat uint8, looked at as float32, has no NaN and no infinity."""
    return raw.numel() % 4 == 0 and is_finite(raw.view(torch.float32))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any device, flat uint8; a copy where its elements do not lie one after
    the other.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    # torch calls a tensor of one element contiguous whatever its stride, which is 0 after `expand`
    if flat.numel() and flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def encode_on_device(tensor: torch.Tensor, codec: Codec | None) -> tuple[Header, torch.Tensor]:
    """Encode one tensor as `encode` does, to flat uint8 on its own device. The operations are queued; nothing
    waits for the device.
    """
    if codec is not None and tensor.is_floating_point():
        flat = tensor.to(torch.float32).reshape(-1)
        out = torch.empty(codec.encoded_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        codec.write(flat, out)
        return Header(codec.wire_id, codec.version, out.numel()), out
    raw = flat_bytes(tensor)
    return Header(0, 0, raw.numel()), raw


def finite_flags(tensors: Sequence[torch.Tensor | None]) -> tuple[list[int], torch.Tensor]:
    """Check several tensors on one device for NaN and infinity. Return the numbers of the floating-point
    ones, and in their order one flag each (1: finite), flat uint8 on the device. The operations are queued;
    nothing waits for the device.
    """
    by_dtype: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None and tensor.dtype.is_floating_point and tensor.numel():
            numbers, alike = by_dtype.setdefault(tensor.dtype, ([], []))
            numbers.append(number)
            alike.append(tensor)
    if not by_dtype:
        return [], torch.empty(0, dtype=torch.uint8, device="cpu")
    # the maximum norm is NaN or infinite where an element is: one call for all tensors of a dtype
    flags = [
        torch.isfinite(torch.stack(torch._foreach_norm(alike, float("inf"))))
        for _, alike in by_dtype.values()
    ]
    return [number for numbers, _ in by_dtype.values() for number in numbers], torch.cat(flags).view(
        torch.uint8
    )


def _encode(tensor: torch.Tensor, codec: Codec | None) -> TensorPayload:
    if codec is not None and tensor.is_floating_point():
        flat = tensor.to(torch.float32).reshape(-1)
        scratch = torch.empty(codec.encoded_bytes(flat.numel()), dtype=torch.uint8, device="cpu")
        return TensorPayload(codec.wire_id, codec.version, codec.encode(flat, scratch))
    if tensor.is_cpu and tensor.is_contiguous() and tensor.ndim and tensor.stride(-1) == 1:
        # the common case, with fewer operations; NumPy does not have bfloat16
        flat = tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor
        return TensorPayload(0, 0, flat.numpy().data.cast("B") if tensor.numel() else b"")
    raw = flat_bytes(tensor.to("cpu"))
    return TensorPayload(0, 0, view_tensor(raw) if raw.numel() else b"")


def _check_tensor(
    header: Header, leaf: Leaf, batch: int, raw: torch.Tensor, number: int, is_checked: bool
) -> Encoded:
    if header.codec:
        codec = find_wire_id(header.codec, header.version)
        assert codec is not None  # `check_headers` has found it
        flaw = codec.flaw(raw, batch * leaf.elements)
        if flaw:
            raise PeerError(f"tensor {number}: {flaw}")
        return Encoded(leaf, batch, codec, raw)
    if not raw.numel():
        return Encoded(leaf, batch, None, raw)
    if leaf.dtype == torch.bool and int(np.maximum.reduce(raw.numpy())) > 1:
        raise PeerError(f"tensor {number}: a bool is 0 or 1")
    values = raw.view(leaf.dtype)
    if not is_checked and not is_finite(values):
        place = int((~torch.isfinite(values)).nonzero()[0])
        raise PeerError(
            f"tensor {number}: element {place} (sample {place // max(math.prod(leaf.shape), 1)}) "
            "is NaN or infinity"
        )
    return Encoded(leaf, batch, None, raw, values)
