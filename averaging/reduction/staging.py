"""The step between the user's tensors and the flat float32 vector that a round works on, in the caller's
thread.

A contiguous float32 tensor that does not change during the round is read in place. Other tensors are copied,
on their device: nothing goes to the host before it is encoded. Only these copies take memory, which lives as
long as the averager, so that rounds need not allocate it again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from averaging.reduction.averages import Averages
from averaging.reduction.devices import Queues
from averaging.reduction.layout import TensorLayout
from averaging.reduction.sharded import refuse_sharded
from averaging.reduction.vector import FlatVector, HollowVector
from swarm.core.errors import UsageError


class Staging:
    """The tensors to average. They may be of any float type, stride and device, and on several devices."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], queues: Queues | None = None, names: Sequence[str] = ()
    ) -> None:
        """Check the tensors. `queues`: the queues of their devices; None: made here. `names`: their names in
        messages; empty when they have none. Raises UsageError for tensors that cannot be averaged.
        """
        self.tensors = tuple(tensors)
        for place, tensor in enumerate(self.tensors):
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(f"tensor {place} is a {type(tensor).__name__}, not a torch.Tensor")
            if tensor.is_meta:
                raise UsageError(f"tensor {place} is on the meta device: it has no values to average yet")
        refuse_sharded(self.tensors, "tensor")
        self.layout = TensorLayout.of(self.tensors)
        refuse_overlaps(self.tensors)
        self.queues = Queues(tensor.device for tensor in self.tensors) if queues is None else queues
        self._describe = functools.partial(self.layout.describe, names=tuple(names))
        # by device: flat float32, of the largest size needed so far
        self._copies: dict[torch.device, torch.Tensor] = {}

    @property
    def cut(self) -> list[tuple[int, torch.device]]:
        """Return how the vector is distributed: (number of elements, device) for each run of tensors on one
        device.
        """
        runs: list[tuple[int, torch.device]] = []
        for tensor in self.tensors:
            before = runs.pop() if runs and runs[-1][1] == tensor.device else (0, tensor.device)
            runs.append((before[0] + tensor.numel(), tensor.device))
        return runs

    def take(self, *, read_in_place: bool) -> FlatVector:
        """Return the vector that goes into a round. Raises UsageError when a tensor has changed its shape or
        type.

        `read_in_place`: the tensors do not change until the result is written, so that float32 ones need no
        copy.
        """
        self.layout.check(self.tensors)
        vector = self._vector(read_in_place=read_in_place)
        with torch.no_grad():
            for tensor, copy in self._pairs(read_in_place=read_in_place):
                copy.copy_(tensor, non_blocking=True)
        self.queues.fork()  # the round begins after the calls of this thread so far
        return vector

    def nothing(self) -> FlatVector:
        """Return the vector of a member that contributes nothing; the tensors are not read."""
        self.queues.fork()
        return HollowVector(self.layout.numel)

    def put(self, averages: Averages) -> None:
        """Replace the tensors' values by the averages. Overwrites the staged copy."""
        self.layout.check(self.tensors)
        if not averages.whole:  # chunks without an average keep their values
            self.take(read_in_place=True)
        averages.write(self._vector(read_in_place=True))
        with torch.no_grad():
            for tensor, copy in self._pairs(read_in_place=True):
                tensor.copy_(copy, non_blocking=True)

    def add_difference(self, averages: Averages) -> None:
        """Add the averages minus what `take` copied to the tensors, which may have changed since. Overwrites
        the staged copy.
        """
        self.layout.check(self.tensors)
        pairs = self._pairs(read_in_place=False)
        # for differences in the tensors' own types: allocated before a tensor is written
        rooms: dict[tuple[torch.device, torch.dtype], int] = {}
        for tensor, _ in pairs:
            kind = (tensor.device, tensor.dtype)
            rooms[kind] = max(rooms.get(kind, 0), tensor.numel() * (tensor.dtype != torch.float32))
        scratch = {
            (device, dtype): torch.empty(numel, dtype=dtype, device=device)
            for (device, dtype), numel in rooms.items()
        }
        averages.subtract(self._vector(read_in_place=False))
        with torch.no_grad():
            for tensor, difference in pairs:
                if tensor.dtype != torch.float32:
                    room = scratch[tensor.device, tensor.dtype][: tensor.numel()]
                    difference = room.view(tensor.shape).copy_(difference)
                tensor.add_(difference)

    def _vector(self, *, read_in_place: bool) -> FlatVector:
        """Return the vector of tensors that are read in place and of ranges of the copies."""
        pieces: list[torch.Tensor] = []
        run: tuple[torch.device, int, int] | None = None  # a range of the copies: device, begin, end
        for tensor, place in zip(self.tensors, self._places(read_in_place=read_in_place), strict=True):
            if run is not None and (place is None or tensor.device != run[0] or place[0] != run[2]):
                pieces.append(self._copies[run[0]][run[1] : run[2]])
                run = None
            if place is None:
                # not `view(-1)`, which keeps a stride of 0 of a tensor with one element
                pieces.append(tensor.detach().as_strided((tensor.numel(),), (1,)))
            else:
                run = (tensor.device, place[0] if run is None else run[1], place[1])
        if run is not None:
            pieces.append(self._copies[run[0]][run[1] : run[2]])
        return FlatVector(pieces, self.queues, self._describe)

    def _places(self, *, read_in_place: bool) -> list[tuple[int, int] | None]:
        """Return the range of each tensor in the copies of its device, allocating these as needed; None for a
        tensor that is read in place.
        """
        ends: dict[torch.device, int] = {}
        places: list[tuple[int, int] | None] = []
        for tensor in self.tensors:
            if read_in_place and tensor.dtype == torch.float32 and tensor.is_contiguous():
                places.append(None)
            else:
                begin = ends.get(tensor.device, 0)
                ends[tensor.device] = begin + tensor.numel()
                places.append((begin, ends[tensor.device]))
        for device, end in ends.items():
            if device not in self._copies or self._copies[device].numel() < end:
                self._copies.pop(device, None)  # before the new one is allocated: never both at a time
                self._copies[device] = torch.empty(end, dtype=torch.float32, device=device)
        return places

    def _pairs(self, *, read_in_place: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return every tensor that is not read in place, with its copy."""
        return [
            (tensor.detach(), self._copies[tensor.device][place[0] : place[1]].view(tensor.shape))
            for tensor, place in zip(self.tensors, self._places(read_in_place=read_in_place), strict=True)
            if place is not None and tensor.numel()
        ]


def refuse_overlaps(tensors: Sequence[torch.Tensor]) -> None:
    """Raise UsageError when an element belongs to two tensors, or twice to one: it would be averaged, or
    changed by a delta, more than once.
    """
    by_storage: dict[tuple[torch.device, int], list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UsageError(
                f"tensor {place} is expanded: several of its elements are one number in memory; pass the "
                "tensor it was made of"
            )
        by_storage.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(
            (place, tensor)
        )
    for sharing in by_storage.values():
        reaching: list[
            tuple[int, int, torch.Tensor]
        ] = []  # (end, place, tensor) of tensors that begin before the next one
        for place, tensor in sorted(sharing, key=lambda one: _byte_range(one[1])):
            begin, end = _byte_range(tensor)
            reaching = [one for one in reaching if one[0] > begin]
            for _, other_place, other in reaching:
                if _meet(tensor, other):
                    raise UsageError(
                        f"tensors {other_place} and {place} share memory: pass tied weights once"
                    )
            reaching.append((end, place, tensor))


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address after its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors whose byte ranges overlap have an element in common. Interleaved columns of
    one matrix have not.
    """
    if one.dtype != other.dtype:
        return True
    begin = min(one.storage_offset(), other.storage_offset())
    end = max(_byte_range(one)[1], _byte_range(other)[1])
    length = (end - min(one.data_ptr(), other.data_ptr())) // one.element_size()
    marks = torch.zeros(length, dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())
