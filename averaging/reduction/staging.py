"""Between the user's tensors and the flat float32 vector that a round works on, in the caller's thread.

A tensor that is contiguous float32 already, and lies still for as long as the round takes, is read where it
is; others are copied, on their device: nothing goes to the host before it is encoded. The copies, and only
these, take memory, which lives as long as the averager: no round allocates its 256 MB anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from averaging.reduction.averages import Averages
from averaging.reduction.devices import Queues
from averaging.reduction.layout import TensorLayout
from averaging.reduction.sharded import refuse_sharded
from averaging.reduction.vector import FlatVector, HollowVector
from swarm.core.errors import UsageError


class Staging:
    """Holds the tensors to average. They may be of any float type, stride and device, also of several."""

    def __init__(self, tensors: Sequence[torch.Tensor], queues: Queues | None = None) -> None:
        """`queues`: of the tensors' devices, when not the usual ones."""
        self.tensors = tuple(tensors)
        for place, tensor in enumerate(self.tensors):
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(f"tensor {place} is a {type(tensor).__name__}, not a torch.Tensor")
            if tensor.is_meta:
                raise UsageError(f"tensor {place} is on the meta device: it has no values to average yet")
        refuse_sharded(self.tensors, "tensor")
        self.layout = TensorLayout.of(self.tensors)
        _refuse_overlaps(self.tensors)
        self.queues = Queues(tensor.device for tensor in self.tensors) if queues is None else queues
        # of each device: flat float32, as long as was needed so far
        self._copies: dict[torch.device, torch.Tensor] = {}

    @property
    def cut(self) -> list[tuple[int, torch.device]]:
        """Where the vector lies: so many elements on this device, then so many on that one."""
        runs: list[tuple[int, torch.device]] = []
        for tensor in self.tensors:
            before = runs.pop() if runs and runs[-1][1] == tensor.device else (0, tensor.device)
            runs.append((before[0] + tensor.numel(), tensor.device))
        return runs

    def take(self, *, lent: bool) -> FlatVector:
        """The vector that goes into a round; UsageError when a tensor has changed its shape or type since.

        `lent`: the tensors stay as they are until the result is written, so that copies can be spared.
        """
        self.layout.check(self.tensors)
        vector = self._vector(lent=lent)
        with torch.no_grad():
            for tensor, copy in self._pairs(lent=lent):
                copy.copy_(tensor, non_blocking=True)
        self.queues.fork()  # the round begins after what this thread has asked of the devices
        return vector

    def nothing(self) -> FlatVector:
        """For who contributes nothing: tensors are not read."""
        self.queues.fork()
        return HollowVector(self.layout.numel)

    def put(self, averages: Averages) -> None:
        """Replace the tensors' values by the averages. The staged copy is spent."""
        self.layout.check(self.tensors)
        if not averages.whole:  # parts without an average keep their values
            self.take(lent=True)
        averages.write(self._vector(lent=True))
        with torch.no_grad():
            for tensor, copy in self._pairs(lent=True):
                tensor.copy_(copy, non_blocking=True)

    def add_difference(self, averages: Averages) -> None:
        """Add the averages minus what `take` copied to the tensors, which may have moved on since. The staged
        copy is spent.
        """
        self.layout.check(self.tensors)
        pairs = self._pairs(lent=False)
        # for differences in the tensors' own types: allocated before a tensor is written
        rooms: dict[tuple[torch.device, torch.dtype], int] = {}
        for tensor, _ in pairs:
            kind = (tensor.device, tensor.dtype)
            rooms[kind] = max(rooms.get(kind, 0), tensor.numel() * (tensor.dtype != torch.float32))
        scratch = {
            (device, dtype): torch.empty(numel, dtype=dtype, device=device)
            for (device, dtype), numel in rooms.items()
        }
        averages.subtract(self._vector(lent=False))
        with torch.no_grad():
            for tensor, difference in pairs:
                if tensor.dtype != torch.float32:
                    room = scratch[tensor.device, tensor.dtype][: tensor.numel()]
                    difference = room.view(tensor.shape).copy_(difference)
                tensor.add_(difference)

    def _vector(self, *, lent: bool) -> FlatVector:
        """Tensors that are read where they are, and between them stretches of the copies."""
        pieces: list[torch.Tensor] = []
        run: tuple[torch.device, int, int] | None = None  # of a copy: its device, begin, end
        for tensor, place in zip(self.tensors, self._places(lent=lent), strict=True):
            if run is not None and (place is None or tensor.device != run[0] or place[0] != run[2]):
                pieces.append(self._copies[run[0]][run[1] : run[2]])
                run = None
            if place is None:
                pieces.append(tensor.detach().view(-1))
            else:
                run = (tensor.device, place[0] if run is None else run[1], place[1])
        if run is not None:
            pieces.append(self._copies[run[0]][run[1] : run[2]])
        return FlatVector(pieces, self.queues)

    def _places(self, *, lent: bool) -> list[tuple[int, int] | None]:
        """Where the copy of each tensor begins and ends in its device's copies, for which there is room
        afterwards.

        None for a tensor that is read where it is.
        """
        ends: dict[torch.device, int] = {}
        places: list[tuple[int, int] | None] = []
        for tensor in self.tensors:
            if lent and tensor.dtype == torch.float32 and tensor.is_contiguous():
                places.append(None)
            else:
                begin = ends.get(tensor.device, 0)
                ends[tensor.device] = begin + tensor.numel()
                places.append((begin, ends[tensor.device]))
        for device, end in ends.items():
            if device not in self._copies or self._copies[device].numel() < end:
                self._copies.pop(device, None)  # first: there is no need for both at a time
                self._copies[device] = torch.empty(end, dtype=torch.float32, device=device)
        return places

    def _pairs(self, *, lent: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every tensor that is not read where it is, with its copy."""
        return [
            (tensor.detach(), self._copies[tensor.device][place[0] : place[1]].view(tensor.shape))
            for tensor, place in zip(self.tensors, self._places(lent=lent), strict=True)
            if place is not None and tensor.numel()
        ]


def _refuse_overlaps(tensors: Sequence[torch.Tensor]) -> None:
    """UsageError when an element belongs to two tensors, or twice to one: it would be averaged, or moved by a
    delta, more than once.
    """
    by_storage: dict[tuple[torch.device, int], list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UsageError(
                f"tensor {place} is expanded: several of its elements are one number in memory; pass the tensor it was made of"
            )
        by_storage.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(
            (place, tensor)
        )
    for sharing in by_storage.values():
        reaching: list[tuple[int, int, torch.Tensor]] = []  # end, place: those that begin before the next one
        for place, tensor in sorted(sharing, key=lambda one: _span(one[1])):
            begin, end = _span(tensor)
            reaching = [one for one in reaching if one[0] > begin]
            for _, other_place, other in reaching:
                if _meet(tensor, other):
                    raise UsageError(
                        f"tensors {other_place} and {place} share memory: pass tied weights once"
                    )
            reaching.append((end, place, tensor))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the byte after the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common: interleaved columns of one matrix
    have not.
    """
    if one.dtype != other.dtype:
        return True
    begin = min(one.storage_offset(), other.storage_offset())
    end = max(_span(one)[1], _span(other)[1])
    length = (end - min(one.data_ptr(), other.data_ptr())) // one.element_size()
    marks = torch.zeros(length, dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())
