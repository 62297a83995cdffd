"""The flat float32 vector that a round averages, stored in one tensor or in several that follow one another,
on any device.

A round reads its values chunk by chunk. A chunk within one tensor is read in place; a chunk that crosses a
border is assembled in scratch space, on the device of its pieces, or on the host where these lie on different
devices. The round makes no pass over the whole vector.
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
    """Flat, contiguous float32 tensors, end to end. Holds references and never copies."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        queues: Queues | None = None,
        describe: Callable[[int], str] = "element {} of its vector".format,
    ) -> None:
        """Check the tensors. `queues`: of their devices, forked after the calls that made the values; None:
        made here. `describe` returns the words for an element, for messages. Raises UsageError when a tensor
        is not flat contiguous float32.
        """
        for tensor in tensors:
            if (
                tensor.dtype != torch.float32
                or tensor.dim() != 1
                or not tensor.is_contiguous()
                or tensor.is_meta
            ):
                raise UsageError(
                    f"a round averages flat contiguous float32 tensors, not {tuple(tensor.shape)} of "
                    f"{tensor.dtype} on {tensor.device}"
                )
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._starts = [0, *accumulate(tensor.numel() for tensor in self._tensors)]
        self.describe = describe
        self.devices = tuple(dict.fromkeys(tensor.device for tensor in self._tensors))
        self.queues = Queues(self.devices) if queues is None else queues

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self._starts[-1]

    def device_of(self, start: int, stop: int) -> torch.device:
        """Return the device on which `read` returns elements `start` to `stop`: their device, or the host if
        they lie on several.
        """
        if len(self.devices) == 1:
            return self.devices[0]
        found = {piece.device for _, piece in self.pieces(start, stop)}
        return found.pop() if len(found) == 1 else HOST

    def read(self, start: int, stop: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Return elements `start` to `stop`: a view where one tensor holds them all, else a copy, in
        `scratch` if given (flat float32, large enough, on `device_of` these elements).
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
        """Iterate over the pieces that hold elements `start` to `stop`, as (first element, writable view), in
        order.
        """
        place = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            begin, end = self._starts[place], min(self._starts[place + 1], stop)
            yield start, self._tensors[place][start - begin : end - begin]
            start, place = end, place + 1

    def element(self, index: int) -> float:
        """Return one value, for messages. Waits for its device."""
        ((_, piece),) = self.pieces(index, index + 1)
        with self.queues.working():
            return float(piece[0])


class HollowVector(FlatVector):
    """The vector of a member that contributes nothing: it has a size but no values."""

    def __init__(self, numel: int) -> None:
        super().__init__(())
        self._starts = [0, numel] if numel else [0]
