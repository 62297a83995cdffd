"""The flat float32 vector that a round averages, where it lies: in one tensor, or in many that follow one
another, on any device.

A round reads its values part by part. Where a part lies within one tensor it is read in place; a part that
reaches over a border is put together in scratch space, on the device of its pieces, or on the host where
these lie on different ones. No pass over the whole vector is made for the round's sake.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from averaging.reduction.devices import Queues
from swarm.core.errors import UsageError

HOST = torch.device("cpu")


class FlatVector:
    """Flat, contiguous float32 tensors, end to end. Holds references, never copies."""

    def __init__(self, tensors: Sequence[torch.Tensor], queues: Queues | None = None) -> None:
        """`queues`: of their devices, forked after what made the values; None: made here. UsageError when a
        tensor is anything else.
        """
        for tensor in tensors:
            if (
                tensor.dtype != torch.float32
                or tensor.dim() != 1
                or not tensor.is_contiguous()
                or tensor.is_meta
            ):
                raise UsageError(
                    f"a round averages flat contiguous float32 tensors, not {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
                )
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._starts = [0, *accumulate(tensor.numel() for tensor in self._tensors)]
        # What an element is called in messages: whoever made the vector of tensors that have names says it
        # better.
        self.describe: Callable[[int], str] = "element {} of its vector".format
        self.devices = tuple(dict.fromkeys(tensor.device for tensor in self._tensors))
        self.queues = Queues(self.devices) if queues is None else queues

    @property
    def numel(self) -> int:
        return self._starts[-1]

    def device_of(self, start: int, stop: int) -> torch.device:
        """Where `read` has elements `start` to `stop`: where they all are, else the host."""
        if len(self.devices) == 1:
            return self.devices[0]
        found = {piece.device for _, piece in self.pieces(start, stop)}
        return found.pop() if len(found) == 1 else HOST

    def read(self, start: int, stop: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Elements `start` to `stop`: a view where one tensor holds them all, else a copy, in `scratch` (flat
        float32, large enough, on `device_of` these elements).
        """
        place = bisect.bisect_right(self._starts, start) - 1
        if start < stop and stop <= self._starts[place + 1]:
            return self._tensors[place][start - self._starts[place] : stop - self._starts[place]]
        if scratch is None:
            scratch = torch.empty(stop - start, dtype=torch.float32, device=self.device_of(start, stop))
        for first, piece in self.pieces(start, stop):
            scratch[first - start : first - start + piece.numel()].copy_(piece)
        return scratch[: stop - start]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """What holds elements `start` to `stop`: each piece with the element at which it begins, in order,
        writable.
        """
        place = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            begin, end = self._starts[place], min(self._starts[place + 1], stop)
            yield start, self._tensors[place][start - begin : end - begin]
            start, place = end, place + 1

    def element(self, index: int) -> float:
        """One value, for messages. Waits for the device where it lies."""
        ((_, piece),) = self.pieces(index, index + 1)
        with self.queues.working():
            return float(piece[0])


class HollowVector(FlatVector):
    """The vector of a member that contributes nothing: it has a size, and nobody reads it."""

    def __init__(self, numel: int) -> None:
        super().__init__(())
        self._starts = [0, numel] if numel else [0]
