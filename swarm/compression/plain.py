"""The codecs that keep every element: float32 unchanged, float16 and bfloat16 rounded to nearest even.
Little-endian on the wire.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swarm.compression.codec import Buffer, exact_device, register, view_bytes, view_tensor

# torch splits a larger cast among a team of threads. Where peers and trainers share the cores, the team waits
# for its slowest thread: up to 6 ms where one thread takes 0.1 (measured, two cores). A block of this size
# runs in the calling thread.
SERIAL_ELEMENTS_MAX = 32768

if sys.byteorder != "little":  # no machine that torch supports
    raise ImportError("swarm's tensors travel in little-endian order, and this machine's is another")


_BLOCK_ELEMENTS = 1 << 17  # with their float32 values and a sum: about a megabyte, which fits a core's cache


def _has_team() -> bool:
    """Return whether torch splits work on the host among several threads."""
    return torch.get_num_threads() > 1


def cast(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` to `target`, both flat, with a cast, on the calling thread alone when they are on the
    host.
    """
    if (
        source.numel() <= SERIAL_ELEMENTS_MAX
        or source.device.type != "cpu"
        or target.device.type != "cpu"
        or not _has_team()
    ):
        target.copy_(source)
    else:
        torch._foreach_copy_(
            torch.split(target, SERIAL_ELEMENTS_MAX), torch.split(source, SERIAL_ELEMENTS_MAX)
        )


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """One floating-point number per element. Satisfies `Codec`."""

    name: str
    wire_id: int
    dtype: torch.dtype
    version: int = 1
    block: int = 0  # elements; 0: what suits this machine

    @property
    def block_elements(self) -> int:
        """Return a size that torch processes in one call without a team of threads, and whose data fit the
        cache; fewer calls are faster.
        """
        return self.block or (SERIAL_ELEMENTS_MAX if _has_team() else _BLOCK_ELEMENTS)

    @property
    def bits_per_element(self) -> float:
        return 8.0 * self.dtype.itemsize

    @property
    def magnitude_max(self) -> float:
        return float(torch.finfo(self.dtype).max)

    def encoded_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def error_bound(self, magnitude: float) -> float:
        """Return half a unit in the last place of `magnitude`; below the smallest normal number, half the
        smallest step.
        """
        if self.dtype == torch.float32:
            return 0.0
        info = torch.finfo(self.dtype)
        return max(magnitude, info.smallest_normal) * info.eps / 2

    def encode(self, values: torch.Tensor, scratch: torch.Tensor) -> memoryview:
        if values.device.type != "cpu":
            # on a CUDA device: half the bytes cross to the host
            values = values.to(exact_device(values.device)).to(self.dtype)
        elif self.dtype == torch.float32:
            return view_tensor(values)
        encoded = scratch[: self.encoded_bytes(values.numel())].view(self.dtype)
        cast(values, encoded)
        return view_tensor(encoded)

    def write(self, values: torch.Tensor, out: torch.Tensor) -> None:
        place = exact_device(values.device)
        if place == values.device:
            cast(values, out.view(self.dtype))
        else:
            out.copy_(values.to(place).to(self.dtype).view(torch.uint8))

    def decode(self, payload: Buffer | torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        encoded = (payload if isinstance(payload, torch.Tensor) else view_bytes(payload)).view(self.dtype)
        place = exact_device(scratch.device)
        if place != scratch.device:
            return scratch.copy_(
                self.decode(payload, torch.empty(scratch.numel(), dtype=torch.float32, device=place))
            )
        if encoded.device != place:
            encoded = encoded.to(place)
        if self.dtype == torch.float32 and place.type == "cpu":
            return encoded
        cast(encoded, scratch)
        return scratch

    def is_finite(self, payload: Buffer | torch.Tensor) -> bool:
        """Check the bits: NaN and infinity have all bits of the exponent set, and are the largest numbers of
        either sign.
        """
        raw = payload if isinstance(payload, torch.Tensor) else view_bytes(payload)
        if raw.numel() % self.dtype.itemsize or not raw.numel():
            return not raw.numel()
        return all_finite_bits(raw.numpy(), self.dtype)

    def flaw(self, payload: Buffer | torch.Tensor, numel: int) -> str:
        size = len(payload)
        if size != self.encoded_bytes(numel):
            return f"{numel} elements in {self.name} are {self.encoded_bytes(numel)} bytes, not {size}"
        if self.is_finite(payload):
            return ""
        bad = (
            ~torch.isfinite(self.decode(payload, torch.empty(numel, dtype=torch.float32, device="cpu")))
        ).nonzero()
        return f"element {int(bad[0])} is NaN or infinity"


# the bits of a number as an unsigned and as a signed integer, and those of infinity
_BITS: dict[torch.dtype, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]], int]] = {
    torch.float32: (np.uint32, np.int32, 0x7F80_0000),
    torch.float16: (np.uint16, np.int16, 0x7C00),
    torch.bfloat16: (np.uint16, np.int16, 0x7F80),
}

_CACHED_ELEMENTS = 1 << 16  # the second pass over this many finds them in a core's cache


def all_finite_bits(array: npt.NDArray[Any], dtype: torch.dtype) -> bool:
    """Return whether an array, not empty and contiguous, has no NaN and no infinity. Its bytes are numbers of
    `dtype`, one of three floating-point types. NumPy's extrema take one thread and a few microseconds.
    """
    unsigned, signed, infinity = _BITS[dtype]
    limit = infinity + (1 << (8 * dtype.itemsize - 1))
    numbers = array.reshape(-1).view(signed)
    if len(numbers) <= _CACHED_ELEMENTS:
        return bool(np.maximum.reduce(numbers) < infinity) and bool(
            np.maximum.reduce(numbers.view(unsigned)) < limit
        )
    return all(
        np.maximum.reduce(part) < infinity and np.maximum.reduce(part.view(unsigned)) < limit
        for part in (
            numbers[start : start + _CACHED_ELEMENTS] for start in range(0, len(numbers), _CACHED_ELEMENTS)
        )
    )


# nothing is cast, and smaller blocks cost more in calls
FLOAT32 = PlainCodec("float32", 1, torch.float32, block=1 << 18)
FLOAT16 = PlainCodec("float16", 2, torch.float16)
BFLOAT16 = PlainCodec("bfloat16", 3, torch.bfloat16)

for _codec in (FLOAT32, FLOAT16, BFLOAT16):
    register(_codec)
