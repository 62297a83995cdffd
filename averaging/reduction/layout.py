"""The layout of a list of tensors in the flat float32 vector that a round averages, and the hash by which
peers check that theirs agree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgpack
import torch

from averaging.matchmaking.logic.messages import VectorSchema
from swarm.compression import Codec
from swarm.core.errors import UsageError

TENSORS_MAX = 1 << 20
ELEMENTS_MAX = 1 << 40  # 4 TiB in float32: beyond any peer, far below where offsets overflow
_VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shapes and dtypes of a list of floating-point tensors, which follow one another in the vector without
    gaps.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise UsageError(f"{len(self.shapes)} shapes for {len(self.dtypes)} dtypes")
        if len(self.shapes) > TENSORS_MAX:
            raise UsageError(f"at most {TENSORS_MAX} tensors are averaged together, not {len(self.shapes)}")
        for place, dtype in enumerate(self.dtypes):
            if not dtype.is_floating_point:
                raise UsageError(f"tensor {place} is of {dtype}: only floating-point tensors are averaged")
        if self.numel > ELEMENTS_MAX:
            raise UsageError(f"at most {ELEMENTS_MAX} elements are averaged together, not {self.numel}")

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> TensorLayout:
        """Return the layout of `tensors`. Raises UsageError that names the tensor that cannot be averaged."""
        for place, tensor in enumerate(tensors):
            if tensor.layout != torch.strided:
                raise UsageError(f"tensor {place} is {tensor.layout}: only dense tensors are averaged")
        return cls(
            tuple(tuple(tensor.shape) for tensor in tensors), tuple(tensor.dtype for tensor in tensors)
        )

    @property
    def numels(self) -> tuple[int, ...]:
        """Return the number of elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the element of the vector at which each tensor begins."""
        return tuple(accumulate(self.numels, initial=0))[:-1]

    @property
    def numel(self) -> int:
        """Return the number of elements of the vector."""
        return sum(self.numels)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise UsageError unless `tensors` have this layout."""
        if len(tensors) != len(self.shapes):
            raise UsageError(f"{len(tensors)} tensors where there were {len(self.shapes)}")
        for place, (tensor, shape, dtype) in enumerate(zip(tensors, self.shapes, self.dtypes, strict=True)):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise UsageError(
                    f"tensor {place} is {tuple(tensor.shape)} of {tensor.dtype}; it was {shape} of {dtype}"
                )

    def find_tensor(self, element: int) -> int:
        """Return the index of the tensor that holds this element of the vector."""
        for place, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            if offset <= element < offset + numel:
                return place
        raise UsageError(f"element {element} is outside of a vector of {self.numel}")

    def describe(self, element: int, names: Sequence[str] = ()) -> str:
        """Return a description of an element of the vector: its index and its tensor, by name where tensors
        have names.
        """
        place = self.find_tensor(element)
        name = repr(names[place]) if names else str(place)
        return f"element {element - self.offsets[place]} of its tensor {name}, {self.shapes[place]},"


def schema_hash(layout: TensorLayout, codec: Codec) -> bytes:
    """Return 32 bytes that are equal on two peers exactly when their tensors and codec agree: shapes, dtypes,
    order, codec with its version.
    """
    tensors = [
        [list(shape), str(dtype).removeprefix("torch.")]
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    ]
    return hashlib.sha256(
        msgpack.packb([_VERSION, tensors, codec.name, codec.wire_id, codec.version])
    ).digest()


def vector_schema(layout: TensorLayout, codec: Codec, settings: str, chunk_bytes: int) -> VectorSchema:
    """Return the schema that peers compare before they meet: tensors, codec, settings and size of chunks.

    `settings`: the averager's settings as text. The text of the schema has the beginning of its digest, which
    distinguishes tensors of the same number and size.
    """
    settings_and_cut = f"{settings} {chunk_bytes}".encode()
    digest = hashlib.sha256(schema_hash(layout, codec) + settings_and_cut).digest()
    text = (
        f"{len(layout.shapes)} tensors with {layout.numel:,} elements, {codec.name}, {settings} "
        f"(#{digest.hex()[:8]})"
    )
    return VectorSchema(digest=digest, text=text, codec=codec.name)
