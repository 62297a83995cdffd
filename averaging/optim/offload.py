"""Asynchronous copies between a device and the host, and the pinned memory that they go through.

A CUDA copy overlaps with other work only on a stream of its own and with pinned host memory. Events order
it both ways: it begins after the work queued so far on the trainer's stream, and the trainer's stream
continues after it where the device memory is about to be overwritten.

Not yet run on a GPU: tests check the order of calls, with a simulated device whose copies arrive as late as
CUDA allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from averaging.optim.memory import Fragment, fragments_between
from swarm.core.copies import Arrival, Copy, CopyStream, host_memory

_BLOCK_ELEMENTS_MIN = 1 << 18


class HostLink(Protocol):
    """Copies between one device and the host, on a stream of their own. Used by the trainer's thread."""

    def fetch(self, copies: Sequence[Copy]) -> Arrival:
        """Copy tensors of the device to the host, with the values they have after all work queued so far on
        the current stream.

        The sources must be neither freed nor written until the copies have arrived or `release` was called.
        """
        ...

    def release(self) -> None:
        """Make work queued on the current stream from now on wait for the copies queued so far. The host
        does not wait.
        """
        ...

    def upload(self, copies: Sequence[Copy]) -> Arrival:
        """Copy host memory to the device: after the work queued so far on the current stream, and before
        what is queued on it from now on.

        The host memory must not change until the copies have arrived.
        """
        ...

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return flat memory on the host from which copies to this device can be asynchronous."""
        ...


class OffloadLink:
    """The link to one CUDA device."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """Create the stream for copies. `cuda` is the module `torch.cuda`, or a simulated one in tests."""
        self._device, self._copies = device, CopyStream(device, cuda)

    def fetch(self, copies: Sequence[Copy]) -> Arrival:
        self._copies.follow()
        return self._copies.copy(copies)

    def release(self) -> None:
        self._copies.precede()

    def upload(self, copies: Sequence[Copy]) -> Arrival:
        arrival = self.fetch(copies)
        self.release()
        return arrival

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return host_memory(self._device, numel, dtype)


def link_of(device: torch.device) -> HostLink | None:
    """Return a link to this device; None where copies are synchronous: on the host itself, and on devices
    without streams.
    """
    return OffloadLink(device) if device.type == "cuda" else None


class OffloadLinks:
    """The links to all devices of a list of tensors; empty unless every one of these devices has one."""

    def __init__(
        self, tensors: Iterable[torch.Tensor], make: Callable[[torch.device], HostLink | None] = link_of
    ) -> None:
        made = {device: make(device) for device in dict.fromkeys(tensor.device for tensor in tensors)}
        found = {device: link for device, link in made.items() if link is not None}
        self._links = found if len(found) == len(made) else {}

    def __bool__(self) -> bool:
        return bool(self._links)

    def of(self, device: torch.device) -> HostLink:
        """Return the link to a device of one of the tensors."""
        return self._links[device]


class _Group:
    """Pinned memory for the tensors of one device and type, laid end to end over a few blocks."""

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, link: HostLink) -> None:
        self.link = link
        self.last: Arrival | None = None  # copies that may still use the blocks
        sizes = block_sizes(sum(numels))
        edges = [0, *accumulate(sizes)]
        self._starts = [0, *accumulate(numels)]
        self.blocks = [link.host_memory(size, dtype) for size in sizes]
        # for each tensor: its fragments with their memory
        self._pieces: dict[int, list[tuple[Fragment, torch.Tensor]]] = {}
        for edge, block, pieces in zip(edges, self.blocks, fragments_between(numels, edges), strict=False):
            for piece in pieces:
                at = self._starts[piece.place] + piece.start - edge
                self._pieces.setdefault(piece.place, []).append((piece, block[at : at + piece.numel]))

    def memory(self, place: int, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the memory of elements `start` to `stop` of a tensor: first element, end, and the flat
        memory itself.
        """
        for piece, memory in self._pieces.get(place, ()):
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                yield low, high, memory[low - piece.start : high - piece.start]

    def idle(self) -> None:
        """Return when no copy uses the blocks any more."""
        if self.last is not None:
            self.last.wait()
            self.last = None


class HostStaging:
    """Pinned memory with room for one copy of each of some tensors, in their own dtypes. Only one transfer
    uses it at a time.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], links: OffloadLinks) -> None:
        """Allocate the memory. `tensors` are the tensors on devices, or others of their shapes, dtypes and
        devices.
        """
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(place)
        self._groups: list[_Group] = []
        self._groups_of: dict[int, tuple[_Group, int]] = {}
        for (device, dtype), places in by_kind.items():
            group = _Group([tensors[place].numel() for place in places], dtype, links.of(device))
            self._groups.append(group)
            self._groups_of |= {place: (group, nth) for nth, place in enumerate(places)}

    def fetch(self, sources: Sequence[tuple[Fragment, torch.Tensor]]) -> None:
        """Queue copies of fragments of the tensors (flat, on their devices) into this memory. The host does
        not wait.

        The sources may be written or freed at once: the device's current stream continues after the copies.
        """
        self.wait()
        copies: dict[int, list[Copy]] = {}
        for piece, source in sources:
            group, nth = self._groups_of[piece.place]
            found = copies.setdefault(self._groups.index(group), [])
            for low, high, memory in group.memory(nth, piece.start, piece.stop):
                found.append((source[low - piece.start : high - piece.start], memory))
        for number, found in copies.items():
            group = self._groups[number]
            group.last = group.link.fetch(found)
            group.link.release()

    def wait(self) -> None:
        """Return when the copies are done."""
        for group in self._groups:
            group.idle()

    def fetched_values(self, piece: Fragment) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the fetched values of a fragment, after `wait`: first element, end, and the flat values."""
        group, nth = self._groups_of[piece.place]
        return group.memory(nth, piece.start, piece.stop)

    def upload(self, values: Iterable[tuple[Fragment, torch.Tensor, torch.Tensor]]) -> None:
        """Copy values on the host (flat, any dtype) to flat tensors on the devices, through this memory.
        The host does not wait for the end.

        Work queued on the devices' current streams afterwards runs after the copies.
        """
        self.wait()
        for piece, source, target in values:
            group, nth = self._groups_of[piece.place]
            for low, high, memory in group.memory(nth, piece.start, piece.stop):
                inside = slice(low - piece.start, high - piece.start)
                memory.copy_(source[inside])
                # overlaps with the conversion of the next values
                group.last = group.link.upload([(memory, target[inside])])


def block_sizes(numel: int) -> list[int]:
    """Split a number of elements into powers of two, the largest first; the rest is rounded up to the
    smallest block.

    Torch's allocator of pinned memory rounds each request up to a power of two: a single block would take
    up to twice what it holds.
    """
    sizes: list[int] = []
    while numel > 0:
        size = max(1 << (numel.bit_length() - 1), _BLOCK_ELEMENTS_MIN)
        sizes.append(size)
        numel -= size
    return sizes
