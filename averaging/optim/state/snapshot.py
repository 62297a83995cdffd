"""A training state as bytes: one blob, `4-byte little-endian header length | msgpack header | tensors`.
Pure.

Each tensor begins at a multiple of 64 bytes; chunks have 1 MiB. A snapshot's digest covers its chunks'
digests, so that each chunk can be verified separately, whichever peer sent it. Equal states give equal
blobs.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import numpy
import torch
from blake3 import blake3

from swarm.core.device import usable_cores
from swarm.core.errors import PeerError

CHUNK_BYTES = 1 << 20
Blob = bytearray | memoryview
ALIGNMENT_BYTES = 64
_T = TypeVar("_T")
_R = TypeVar("_R")
_FORMAT = 1
_HEADER_BYTES_MAX = 64 << 20
_EPOCH_MAX = 1 << 40
_STRIDE_MAX = 1 << 48  # elements; of a tensor without elements, the product of its other dimensions
_THREADS_MAX = 4  # of `in_threads`: memory is the limit
_DEPTH_MAX = 8  # nesting of hyperparameters
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MADV_POPULATE_WRITE = 23  # of Linux 5.14


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the state at one epoch, ready to be served."""

    epoch: int
    version: int  # version of the state
    canonical: bool  # the state was the output of an averaging round
    blob: Blob
    chunk_digests: tuple[bytes, ...]

    @property
    def digest(self) -> bytes:
        """Return the digest of the whole state."""
        return snapshot_digest(len(self.blob), self.chunk_digests)

    def chunk(self, index: int) -> memoryview:
        """Return the bytes of a chunk."""
        return memoryview(self.blob)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def snapshot_digest(total_bytes: int, chunk_digests: Sequence[bytes]) -> bytes:
    """Return the identifier of a state: 32 bytes that commit to every chunk."""
    return blake3(struct.pack("<4sQQ", b"swst", total_bytes, CHUNK_BYTES) + b"".join(chunk_digests)).digest()


def chunk_digest(chunk: bytes | memoryview) -> bytes:
    """Return the BLAKE3 digest of a chunk."""
    return blake3(chunk).digest()


def pieces_digest(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Return `chunk_digest` of a chunk whose bytes are in several places."""
    whole = blake3()
    for piece in pieces:
        whole.update(piece)
    return whole.digest()


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Positions in the blob of a state: the prefix (header length and header), then the tensors, with zeros
    between them.
    """

    prefix: bytes
    starts: list[int]  # start of each tensor, in bytes from the beginning of the blob
    lengths: list[int]  # length of each tensor, in bytes
    total_bytes: int

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place of the tensor, low, high) for every tensor that has bytes [low, high) of the blob's
        bytes [begin, end).
        """
        for place in range(max(bisect.bisect_right(self.starts, begin) - 1, 0), len(self.starts)):
            start = self.starts[place]
            if start >= end:
                break
            low, high = max(begin, start), min(end, start + self.lengths[place])
            if low < high:
                yield place, low, high


def encode_snapshot(
    epoch: int, header: Mapping[str, Any], named: Sequence[tuple[str, torch.Tensor]]
) -> bytearray:
    """Return the blob of `named` tensors and a header of plain values (`plain`)."""
    layout = plan_snapshot(epoch, header, named)
    blob = bytearray(layout.total_bytes)
    blob[: len(layout.prefix)] = layout.prefix
    flat = torch.frombuffer(blob, dtype=torch.uint8)
    for (_, tensor), start in zip(named, layout.starts, strict=True):
        if tensor.numel():
            flat[start : start + tensor.nbytes].copy_(flat_bytes(tensor))
    return blob


def plan_snapshot(
    epoch: int, header: Mapping[str, Any], named: Sequence[tuple[str, torch.Tensor]]
) -> BlobLayout:
    """Return the layout of the blob of `named` tensors and a header of plain values (`plain`), without
    reading a tensor.
    """
    described = [[name, DTYPE_NAMES[t.dtype], list(t.shape)] for name, t in named]
    packed = pack({**header, "format": _FORMAT, "epoch": epoch, "tensors": described})
    starts, total_bytes = _places(4 + len(packed), [t for _, t in named])
    return BlobLayout(
        struct.pack("<I", len(packed)) + packed, starts, [t.nbytes for _, t in named], total_bytes
    )


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as bytes, on its device: its own memory where that is contiguous, else a
    copy.
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def allocate_zeros(total_bytes: int) -> Blob:
    """Allocate zeros to be overwritten. Raise MemoryError when there is no memory.

    Memory pages are not touched here: they are allocated when they are written, large ones where the system
    has them. A bytearray would be written twice, and its small pages cost a newcomer more processor time
    than all the digests.
    """
    return memoryview(numpy.zeros(total_bytes, dtype=numpy.uint8))  # type: ignore[arg-type, unused-ignore]


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy `source` to `target` without the interpreter's lock: pages that are written for the first time
    may be slow.
    """
    numpy.copyto(numpy.frombuffer(target, dtype=numpy.uint8), numpy.frombuffer(source, dtype=numpy.uint8))


def allocate_pages(memory: memoryview) -> bool:
    """Let the system find memory for the pages of new memory that were not written yet, without changing what
    is in them and without the interpreter's lock. In a virtual machine this may take longer than writing
    them. Return whether the system can do that.
    """
    if sys.platform != "linux":
        return False
    start = numpy.frombuffer(memory, dtype=numpy.uint8).ctypes.data
    begin, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, start + len(memory)
    length = ctypes.c_size_t(max(end - begin, 0))
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), length, _MADV_POPULATE_WRITE)


def range_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer type, or of bool."""
    if dtype is torch.bool:
        return 0, 1
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers are finite, in one pass without a temporary: terms of a finite sum are
    finite. Where the sum is not, although it may only be too large, both NaN and infinity show in the minimum
    and the maximum.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    if tensor.sum(dtype=wide).isfinite():
        return True
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def in_threads(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Return `function` of each item, computed on several threads where torch's own use fewer cores than
    there are. The threads must not need the state's lock.
    """
    threads = min(_THREADS_MAX, usable_cores() // torch.get_num_threads(), len(items))
    if threads <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads, "swarm-state") as pool:
        return list(pool.map(function, items))


def write_marks(tensors: Iterable[torch.Tensor]) -> tuple[object, ...]:
    """Return addresses and torch's write counts of tensors: they are equal as long as torch sees no write.
    It counts none of inference tensors, whose marks equal no others.
    """
    return tuple(
        object() if tensor.is_inference() else (tensor.data_ptr(), tensor._version) for tensor in tensors
    )


def memory_of(flat: torch.Tensor) -> memoryview | None:
    """Return the memory of a tensor of `flat_bytes`, or None when it is on a device."""
    if flat.device.type != "cpu":
        return None
    return memoryview(flat.numpy())  # type: ignore[arg-type, unused-ignore]


def digests_of(blob: Blob) -> tuple[bytes, ...]:
    """Return the digests of every chunk. This takes a second for a gigabyte, so do not call it under a
    lock.
    """
    view = memoryview(blob)
    return tuple(chunk_digest(view[at : at + CHUNK_BYTES]) for at in range(0, len(blob), CHUNK_BYTES))


def pack(value: Any) -> bytes:
    """Encode a value as msgpack."""
    packed = msgpack.packb(value, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def _places(start: int, tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the start of each tensor, and the length of the whole."""
    places = []
    for tensor in tensors:
        start = -(-start // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        places.append(start)
        start += tensor.nbytes
    return places, start


def read_header(blob: Blob) -> tuple[dict[str, Any], int]:
    """Return the header of a blob, and the position of its first tensor. Raise PeerError when it is
    malformed.
    """
    (header_bytes,) = struct.unpack_from("<I", blob) if len(blob) >= 4 else (0,)
    if not 0 < header_bytes <= min(_HEADER_BYTES_MAX, len(blob) - 4):
        raise PeerError("the state has no header")
    try:
        header = msgpack.unpackb(memoryview(blob)[4 : 4 + header_bytes], raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a map as the key of a map
        raise PeerError(f"the state's header is not msgpack: {error}") from None
    epoch = header.get("epoch") if isinstance(header, dict) else None
    if (
        not isinstance(epoch, int)
        or isinstance(epoch, bool)
        or not 0 <= epoch <= _EPOCH_MAX
        or header.get("format") != _FORMAT
    ):
        raise PeerError("the state's header is of another format")
    return header, 4 + header_bytes


def read_tensors(blob: Blob, header: Mapping[str, Any], start: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a blob by name, without copying. Raise PeerError when the header does not
    describe them correctly.
    """
    described = header.get("tensors")
    if not isinstance(described, list):
        raise PeerError("the state describes no tensors")
    views: dict[str, torch.Tensor] = {}
    flat = torch.frombuffer(blob, dtype=torch.uint8)
    for item in described:
        if (
            not isinstance(item, list)
            or len(item) != 3
            or not isinstance(item[0], str)
            or not isinstance(item[1], str)
            or item[1] not in _DTYPES
            or item[0] in views
        ):
            raise PeerError("the state describes a tensor wrongly")
        name, dtype, shape = item[0], _DTYPES[item[1]], item[2]
        if (
            not isinstance(shape, list)
            or len(shape) > 16
            or not all(type(n) is int and 0 <= n <= len(blob) for n in shape)  # a bool is no dimension
            or math.prod(n or 1 for n in shape) > _STRIDE_MAX
        ):
            raise PeerError(f"the state gives {name[:40]!r} an impossible shape")
        start = -(-start // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        nbytes = math.prod(shape) * dtype.itemsize
        if start + nbytes > len(blob):
            raise PeerError(f"the state ends before {name[:40]!r} does")
        views[name] = (
            flat[start : start + nbytes].view(dtype).reshape(shape)
            if nbytes
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
        start += nbytes
    if start != len(blob):
        raise PeerError("the state is longer than its tensors")
    return views


def mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def plain(value: Any, depth: int, number: Callable[[torch.Tensor], Any] = torch.Tensor.item) -> Any:
    """Return the numbers of a nested structure, fit for msgpack, with None for everything else. `number`
    returns the value of a tensor with one element.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor):
        return number(value) if value.numel() == 1 else None
    if depth >= _DEPTH_MAX:
        return None
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1, number) for item in value]
    if isinstance(value, Mapping):
        return {
            key: plain(value[key], depth + 1, number)
            for key in sorted(value, key=str)
            if isinstance(key, (str, int))
        }
    return None


def merge(own: Any, theirs: Any, depth: int) -> Any:
    """Return our structure with their numbers. Ours stays where theirs is missing, of another type or not
    finite.
    """
    if isinstance(own, torch.Tensor):
        fits = own.numel() == 1 and isinstance(theirs, (int, float)) and math.isfinite(theirs)
        return torch.full_like(own, theirs) if fits else own
    if isinstance(own, (int, float)) and not isinstance(own, bool):  # flags are configuration, not state
        fits = isinstance(theirs, (int, float)) and not isinstance(theirs, bool) and math.isfinite(theirs)
        return theirs if fits else own
    if (
        depth < _DEPTH_MAX
        and isinstance(own, (list, tuple))
        and isinstance(theirs, list)
        and len(own) == len(theirs)
    ):
        merged = [merge(one, other, depth + 1) for one, other in zip(own, theirs, strict=True)]
        return tuple(merged) if isinstance(own, tuple) else merged
    if depth < _DEPTH_MAX and isinstance(own, dict) and isinstance(theirs, dict):
        merged_map = own.copy()
        for key in own.keys() & theirs.keys():  # not update(): a Counter would add
            merged_map[key] = merge(own[key], theirs[key], depth + 1)
        return merged_map
    return own
