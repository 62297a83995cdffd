"""Between the user's tensors and the flat float32 vector that a round works on, in the caller's thread.

Tensors that are flat float32 on the host already, and lie still for as long as the round takes, are read where they are; others are copied.
The copy's buffer lives as long as the averager: no round allocates its 256 MB anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from averaging.reduction.averages import Averages
from averaging.reduction.layout import TensorLayout
from averaging.reduction.vector import FlatVector, HollowVector
from swarm.errors import UsageError


class Staging:
    """Holds the tensors to average. They may be of any float type, device and stride."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        for place, tensor in enumerate(self.tensors):
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(f"tensor {place} is a {type(tensor).__name__}, not a torch.Tensor")
            if tensor.is_meta:
                raise UsageError(f"tensor {place} is on the meta device: it has no values to average yet")
        self.layout = TensorLayout.of(self.tensors)
        _refuse_overlaps(self.tensors)
        self._cuda = sorted({tensor.device.index for tensor in self.tensors if tensor.is_cuda})
        self._copy: torch.Tensor | None = None  # made when it is first needed

    def take(self, *, lent: bool) -> FlatVector:
        """The vector that goes into a round; UsageError when a tensor has changed its shape or type since.

        `lent`: the tensors stay as they are until the result is written, so that a copy can be spared.
        """
        self.layout.check(self.tensors)
        flat = self._flat() if lent else None
        if flat is not None:
            return flat
        copy = self._buffer()
        with torch.no_grad():
            for tensor, view in self._pairs(copy):
                view.copy_(tensor, non_blocking=True)
        self._settle()
        return FlatVector([copy])

    def nothing(self) -> FlatVector:
        """For who contributes nothing: tensors are not read."""
        return HollowVector(self.layout.numel)

    def put(self, averages: Averages) -> None:
        """Replace the tensors' values by the averages. The staged copy is spent."""
        self.layout.check(self.tensors)
        flat = self._flat()
        if flat is not None:
            averages.write(flat)
            return
        if not averages.whole:  # parts without an average keep their values
            self.take(lent=False)
        copy = self._buffer()
        averages.write(FlatVector([copy]))
        with torch.no_grad():
            for tensor, view in self._pairs(copy):
                tensor.copy_(view, non_blocking=True)
        self._settle()

    def add_difference(self, averages: Averages) -> None:
        """Add the averages minus what `take` copied to the tensors, which may have moved on since. The staged copy is spent."""
        self.layout.check(self.tensors)
        copy = self._buffer()
        averages.subtract(FlatVector([copy]))
        with torch.no_grad():
            for tensor, view in self._pairs(copy):
                tensor.add_(view.to(tensor.device, non_blocking=True).to(tensor.dtype))
        self._settle()

    def _flat(self) -> FlatVector | None:
        """The tensors themselves as the vector, when they are what a round can work on."""
        if not all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in self.tensors):
            return None
        return FlatVector([tensor.detach().view(-1) for tensor in self.tensors])

    def _buffer(self) -> torch.Tensor:
        if self._copy is None:
            pinned = bool(self._cuda)  # copies from and to pinned memory run side by side with each other
            self._copy = torch.empty(self.layout.numel, dtype=torch.float32, pin_memory=pinned)
        return self._copy

    def _pairs(self, vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = []
        for tensor, offset, numel in zip(self.tensors, self.layout.offsets, self.layout.numels, strict=True):
            if numel:
                pairs.append((tensor.detach(), vector[offset : offset + numel].view(tensor.shape)))
        return pairs

    def _settle(self) -> None:
        """Wait for copies that were only queued: the network thread knows nothing of CUDA streams."""
        for index in self._cuda:
            torch.cuda.current_stream(index).synchronize()


def _refuse_overlaps(tensors: Sequence[torch.Tensor]) -> None:
    """UsageError when an element belongs to two tensors, or twice to one: it would be averaged, or moved by a delta, more than once."""
    by_storage: dict[tuple[torch.device, int], list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UsageError(
                f"tensor {place} is expanded: several of its elements are one number in memory; pass the tensor it was made of"
            )
        by_storage.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append((place, tensor))
    for sharing in by_storage.values():
        reaching: list[tuple[int, int, torch.Tensor]] = []  # end, place: those that begin before the next one
        for place, tensor in sorted(sharing, key=lambda one: _span(one[1])):
            begin, end = _span(tensor)
            reaching = [one for one in reaching if one[0] > begin]
            for _, other_place, other in reaching:
                if _meet(tensor, other):
                    raise UsageError(f"tensors {other_place} and {place} share memory: pass tied weights once")
            reaching.append((end, place, tensor))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the byte after the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common: interleaved columns of one matrix have not."""
    if one.dtype != other.dtype:
        return True
    begin = min(one.storage_offset(), other.storage_offset())
    end = max(_span(one)[1], _span(other)[1])
    length = (end - min(one.data_ptr(), other.data_ptr())) // one.element_size()
    marks = torch.zeros(length, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())
