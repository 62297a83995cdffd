"""Between the user's tensors and the flat float32 vector that a round works on: one pass in, one pass out, in the caller's thread.

The buffers live as long as the averager: no round allocates its 256 MB anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from averaging.layout import TensorLayout
from swarm.errors import UsageError


class Staging:
    """Holds the tensors to average and the vector that mirrors them. Tensors may be of any float type, device and stride."""

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
        pinned = bool(self._cuda)  # copies from and to pinned memory run side by side with each other
        self.vector = torch.empty(self.layout.numel, dtype=torch.float32, pin_memory=pinned)  # what goes into a round
        self._average: torch.Tensor | None = None

    @property
    def average(self) -> torch.Tensor:
        """Where a round's result goes; made for the first group, so that a peer that is alone never pays for it."""
        if self._average is None:
            self._average = torch.empty_like(self.vector, pin_memory=self.vector.is_pinned() if self._cuda else False)
        return self._average

    def take(self) -> None:
        """Copy the tensors into the vector. UsageError when one of them has changed its shape or type since."""
        self.layout.check(self.tensors)
        with torch.no_grad():
            for tensor, view in self._pairs(self.vector):
                view.copy_(tensor, non_blocking=True)
        self._settle()

    def put(self, vector: torch.Tensor) -> None:
        """Replace the tensors' values by those of `vector`."""
        self.layout.check(self.tensors)
        with torch.no_grad():
            for tensor, view in self._pairs(vector):
                tensor.copy_(view, non_blocking=True)
        self._settle()

    def add_difference(self, vector: torch.Tensor) -> None:
        """Add `vector` minus what `take` copied to the tensors, which may have moved on since. The staged copy is spent."""
        self.layout.check(self.tensors)
        torch.sub(vector, self.vector, out=self.vector)
        with torch.no_grad():
            for tensor, view in self._pairs(self.vector):
                tensor.add_(view.to(tensor.device, non_blocking=True).to(tensor.dtype))
        self._settle()

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
