"""A round's result as every member holds it: the encoded average of every part, the same bytes everywhere.

It stays encoded until it is wanted: a round that fails costs no decoding, what is held is no larger than what
travelled, and who lacks a part can be given the very bytes. They lie in memory that outlives the round:
messages that were kept as they came had to be mapped anew by the kernel in each round, which cost a third of
its processor time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch

from averaging.reduction.devices import NO_QUEUES, Queue, Queues
from averaging.reduction.partition import Part, Plan
from averaging.reduction.reduce import blocks
from averaging.reduction.vector import FlatVector
from swarm.compression import Buffer, Codec


class ResultBuffer:
    """Memory for the averages of one round after the other."""

    def __init__(self, queues: Queues = NO_QUEUES) -> None:
        """`queues`: of the devices that the averages will be brought to."""
        self._queues = queues
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: Averages | None = None  # what lies there: members that come late can still be given it

    def room(self, size_bytes: int, averages: Averages) -> torch.Tensor:
        """So many bytes, flat uint8, for these averages; those that were there are gone."""
        if self._held is not None:
            self._held.gone = True
        self._held = averages
        if self._memory.numel() < size_bytes:
            self._memory = self._queues.host_memory(size_bytes, torch.uint8)
        return self._memory[:size_bytes]


class Averages:
    """Of each part of a plan its encoded average: whole once every part was kept, valid until the next round
    takes the landing.
    """

    def __init__(self, plan: Plan, codec: Codec, landing: ResultBuffer) -> None:
        self.plan, self.codec = plan, codec
        self._starts = [0, *accumulate(codec.encoded_bytes(part.numel) for part in plan.parts)]
        self._memory = landing.room(self._starts[-1], self)
        self._empty: set[int] = set()
        self.gone = False  # the next round has taken the memory

    def keep(self, part: Part, payload: Buffer, first_byte: int = 0) -> None:
        """The bytes of a part, or some of them from `first_byte` on. They were checked: the size fits, all
        values are finite.
        """
        self._empty.discard(part.index)
        start = self._starts[part.index] + first_byte
        np.copyto(self._memory[start : start + len(payload)].numpy(), np.frombuffer(payload, np.uint8))

    def keep_nothing(self, part: Part) -> None:
        """Nobody contributed to this part: it has no average, and members keep their own values."""
        self._empty.add(part.index)

    @property
    def whole(self) -> bool:
        """Does every part have an average?"""
        return not self._empty

    def payload(self, part: Part) -> torch.Tensor:
        """The bytes of a part that was kept: flat uint8, to be read only; none of an empty part."""
        return self._memory[
            self._starts[part.index] : self._starts[part.index + (part.index not in self._empty)]
        ]

    def write(self, target: FlatVector) -> None:
        """target[:] = the averages, where there are any. Each block is decoded where it is to lie, unless
        tensors meet within it.

        On a device it is done when `target.queues.finish` returns; what this thread asks of the device
        afterwards comes after it anyway.
        """
        for part, queue in self._there(target):
            values = self._brought(part, queue, target)
            for first, piece in target.pieces(part.start, part.stop):
                if piece.data_ptr() != values.data_ptr():
                    piece.copy_(values[first - part.start : first - part.start + piece.numel()])
        for start, stop, payload in self._blocks(target):
            pieces = list(target.pieces(start, stop))
            if len(pieces) == 1:
                place = pieces[0][1]
                values = self.codec.decode(payload, place)
                if values is not place:
                    np.copyto(place.numpy(), values.numpy())
                continue
            values = self.codec.decode(payload, torch.empty(stop - start))
            for first, piece in pieces:
                piece.copy_(values[first - start : first - start + piece.numel()])

    def subtract(self, target: FlatVector) -> None:
        """target[:] = the averages - target; 0 where there is no average."""
        for part in (self.plan.parts[index] for index in self._empty):
            for _, piece in target.pieces(part.start, part.stop):
                piece.zero_()
        for part, queue in self._there(target):
            values = self._brought(part, queue, None)
            for first, piece in target.pieces(part.start, part.stop):
                torch.sub(values[first - part.start : first - part.start + piece.numel()], piece, out=piece)
        scratch = torch.empty(max((part.numel for part in self.plan.parts), default=0))
        for start, stop, payload in self._blocks(target):
            values = self.codec.decode(payload, scratch[: stop - start])
            for first, piece in target.pieces(start, stop):
                torch.sub(
                    values[first - start : first - start + piece.numel()].to(piece.device), piece, out=piece
                )

    def decoded(self) -> torch.Tensor:
        """The whole vector, in a tensor of its own; NaN where there is no average."""
        whole = torch.full((self.plan.numel,), float("nan")) if self._empty else torch.empty(self.plan.numel)
        self.write(FlatVector([whole]))
        return whole

    def _there(self, target: FlatVector) -> Iterator[tuple[Part, Queue]]:
        """Parts that are to lie on one device with a queue: they are decoded there, whole."""
        for part in self.plan.parts if target.queues else ():
            queue = target.queues.of(target.device_of(part.start, part.stop))
            if queue is not None and part.index not in self._empty:
                yield part, queue

    def _brought(self, part: Part, queue: Queue, target: FlatVector | None) -> torch.Tensor:
        """The values of a part on the queue's device; in `target`, where that has them in one piece."""
        payload = queue.bring(self.payload(part))
        pieces = [piece for _, piece in target.pieces(part.start, part.stop)] if target is not None else []
        place = pieces[0] if len(pieces) == 1 else torch.empty(part.numel, device=payload.device)
        return self.codec.decode(payload, place)

    def _blocks(self, target: FlatVector) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The others, block by block: on the host."""
        there = {part.index for part, _ in self._there(target)}
        for part in self.plan.parts:
            if part.index in self._empty or part.index in there:
                continue
            payload = self.payload(part)
            for block in blocks(part, self.codec):
                yield (
                    part.start + block.start,
                    part.start + block.stop,
                    payload[block.first_byte : block.end_byte],
                )
