"""A round's result as every member holds it: the encoded average of every part, the same bytes everywhere.

It stays encoded until it is wanted: a round that fails costs no decoding, what is held is no larger than what
travelled, and a member that lacks a part can be given the very bytes. They lie in memory that outlives the
round: messages that were kept as they came had to be mapped anew by the kernel in each round, which cost a
third of its processor time.

Averages for a device are copied there encoded, and decoded there, on the stream of the thread that takes the
result. The copies begin when the round is committed (`upload`), in the round's own thread, as far as the ring
of `RING_BYTES` has room; the rest follow while the first are being decoded. Earlier they would be copies of
what may yet fail or be replaced, and without the ring they would take as much device memory as the encoded
vector. The thread that takes the result waits for nothing: its stream waits for each copy, and the next round
waits for the last copy before it uses the host memory again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from averaging.reduction.devices import NO_QUEUES, Queue, Queues, Upload
from averaging.reduction.partition import Part, Plan
from averaging.reduction.reduce import blocks
from averaging.reduction.vector import HOST, FlatVector
from swarm.compression import Buffer, Codec

# device memory for encoded averages on their way; larger: more of them are there before the result is taken
RING_BYTES = 32 << 20
BLOCK_BYTES_MAX = 64 << 20  # of the pinned memory that averages lie in
_SLOTS_MIN = 2  # one is copied to while the other is decoded


class ResultBuffer:
    """Host memory for the averages of one round after the other, and the pinned memory that its copies from
    devices go through.
    """

    def __init__(self, queues: Queues = NO_QUEUES) -> None:
        """`queues`: of the devices that the averages will be brought to."""
        self.queues = queues
        # pinned buffers, flat uint8, by size
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._blocks: list[torch.Tensor] = []
        # whose averages lie there: members that come late can still be given them
        self._held: Averages | None = None

    def take(self, averages: Averages) -> None:
        """Hand the memory to these averages; those that were there are gone. Waits for nothing."""
        if self._held is not None:
            self._held.gone = True
        self._held = averages

    def room(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory for parts of so many bytes, flat uint8 each, once no copy to a device reads it any
        more.
        """
        self.queues.finish_uploads()
        if not self.queues and sum(block.numel() for block in self._blocks) < sum(sizes):
            self._blocks = [torch.empty(sum(sizes), dtype=torch.uint8, device=HOST)]
        return self._cut(sizes)

    def _cut(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Lay the parts out in the blocks, one after the other, and allocate blocks as they are needed.

        torch rounds pinned memory up to a power of two: the blocks are powers of two, and together hardly
        larger than the parts.
        """
        places: list[torch.Tensor] = []
        remaining, nth, begin = sum(sizes), 0, 0
        for size in sizes:
            while nth < len(self._blocks) and begin + size > self._blocks[nth].numel():
                nth, begin = nth + 1, 0
            if nth == len(self._blocks):
                block_bytes = max(
                    min(BLOCK_BYTES_MAX, _power_of_two(remaining + 1) // 2), _power_of_two(size)
                )
                self._blocks.append(self.queues.host_memory(block_bytes, torch.uint8))
            places.append(self._blocks[nth][begin : begin + size])
            remaining, begin = remaining - size, begin + size
        return places

    def borrow(self, size_bytes: int, queues: Queues) -> torch.Tensor:
        """Return flat uint8 host memory of at least this size, for copies from the devices of `queues`, until
        it is given back.

        It is kept from round to round: to allocate pinned memory takes milliseconds, and may wait for the
        device.
        """
        size_bytes = _power_of_two(size_bytes)
        try:
            return self._spare[size_bytes].pop()
        except IndexError:  # not asked for beforehand: several threads borrow
            return queues.host_memory(size_bytes, torch.uint8)

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take back what was borrowed."""
        for buffer in buffers:
            self._spare[buffer.numel()].append(buffer)


def _power_of_two(size: int) -> int:
    """The smallest one that is not smaller."""
    return 1 << (size - 1).bit_length() if size else 0


class Averages:
    """Of each part of a plan its encoded average: whole once every part was kept, valid until the next round
    takes the landing.
    """

    def __init__(self, plan: Plan, codec: Codec, landing: ResultBuffer) -> None:
        self.plan, self.codec, self.landing = plan, codec, landing
        self._sizes = [codec.encoded_bytes(part.numel) for part in plan.parts]
        self._empty: set[int] = set()
        self._ahead: dict[int, Upload] = {}  # by part: what was begun before the result is taken
        self.gone = False  # the next round has taken the memory
        self.written = False  # what `write` or `subtract` was given is not what it was before
        self._places: list[torch.Tensor] | None = None  # the memory of each part
        landing.take(self)
        if not landing.queues:
            self.prepare(lands=False)

    def prepare(self, *, lands: bool) -> None:
        """Have all memory that the round's result needs: on the host and, if it `lands` here, on the devices.

        May wait for the device: to be called in a thread of the pool. What is on the host is done at first
        use otherwise.
        """
        self._places = self.landing.room(self._sizes)
        if lands:
            self._reserve(self.landing.queues)

    def _reserve(self, queues: Queues) -> None:
        slot_bytes = max(self._sizes, default=0)
        if slot_bytes:
            queues.reserve(slot_bytes, min(max(RING_BYTES // slot_bytes, _SLOTS_MIN), len(self._sizes)))

    def keep(self, part: Part, payload: Buffer, first_byte: int = 0) -> None:
        """The bytes of a part, or some of them from `first_byte` on. They were checked: the size fits, all
        values are finite.
        """
        self._empty.discard(part.index)
        place = self._place(part)[first_byte : first_byte + len(payload)]
        np.copyto(place.numpy(), np.frombuffer(payload, np.uint8))

    def _place(self, part: Part) -> torch.Tensor:
        if self._places is None:
            self.prepare(lands=False)
        assert self._places is not None
        return self._places[part.index]

    def keep_nothing(self, part: Part) -> None:
        """Nobody contributed to this part: it has no average, and members keep their own values."""
        self._empty.add(part.index)

    @property
    def whole(self) -> bool:
        """Does every part have an average?"""
        return not self._empty

    def payload(self, part: Part) -> torch.Tensor:
        """The bytes of a part that was kept: flat uint8, to be read only; none of an empty part."""
        place = self._place(part)
        return place[:0] if part.index in self._empty else place

    def upload(self, target: FlatVector) -> None:
        """Begin to copy the averages to the devices of `target`, the first ones, as far as there is room;
        `write` or `subtract` go on.
        """
        self._reserve(target.queues)
        for part, queue in self._there(target):
            upload = queue.upload(self.payload(part))
            if upload is not None:
                self._ahead[part.index] = upload

    def write(self, target: FlatVector) -> None:
        """target[:] = the averages, where there are any. Each block is decoded where it is to lie, unless
        tensors meet within it.

        On a device this is queued like any call of torch on this thread's current stream: nothing waits.
        What was decoded first passes through scratch memory: if decoding runs out of memory, then before
        `written`.
        """
        scratch = self._scratch(target)
        for part, payload in self._uploaded(target):
            pieces = list(target.pieces(part.start, part.stop))
            if self.written and len(pieces) == 1:
                self._decode(payload, pieces[0][1])
                continue
            values = self.codec.decode(payload, scratch[payload.device][: part.numel])
            self.written = True
            for first, piece in pieces:
                piece.copy_(values[first - part.start : first - part.start + piece.numel()])
        self.written = True
        for start, stop, payload in self._blocks(target):
            pieces = list(target.pieces(start, stop))
            if len(pieces) == 1:
                place = pieces[0][1]
                values = self.codec.decode(payload, place)
                if values is not place:
                    np.copyto(place.numpy(), values.numpy())
                continue
            values = self.codec.decode(payload, torch.empty(stop - start, dtype=torch.float32, device=HOST))
            for first, piece in pieces:
                piece.copy_(values[first - start : first - start + piece.numel()])

    def subtract(self, target: FlatVector) -> None:
        """target[:] = the averages - target; 0 where there is no average. On a device as `write`."""
        there = self._scratch(target)
        for part in (self.plan.parts[index] for index in self._empty):
            for _, piece in target.pieces(part.start, part.stop):
                piece.zero_()
        for part, payload in self._uploaded(target):
            values = self.codec.decode(payload, there[payload.device][: part.numel])
            for first, piece in target.pieces(part.start, part.stop):
                torch.sub(values[first - part.start : first - part.start + piece.numel()], piece, out=piece)
        scratch = torch.empty(self._numel_max, dtype=torch.float32, device=HOST)
        for start, stop, payload in self._blocks(target):
            values = self.codec.decode(payload, scratch[: stop - start])
            for first, piece in target.pieces(start, stop):
                torch.sub(
                    values[first - start : first - start + piece.numel()].to(piece.device), piece, out=piece
                )
        self.written = True

    def decoded(self) -> torch.Tensor:
        """The whole vector, in a tensor of its own; NaN where there is no average."""
        whole = torch.empty(self.plan.numel, dtype=torch.float32, device=HOST)
        if self._empty:
            whole.fill_(float("nan"))
        self.write(FlatVector([whole], NO_QUEUES))
        return whole

    @property
    def _numel_max(self) -> int:
        return max((part.numel for part in self.plan.parts), default=0)

    def _there(self, target: FlatVector) -> Iterator[tuple[Part, Queue]]:
        """The parts that are to lie on one device with a queue: they are decoded there, whole."""
        for part in self.plan.parts if target.queues else ():
            queue = target.queues.of(target.device_of(part.start, part.stop))
            if queue is not None and part.index not in self._empty:
                yield part, queue

    def _scratch(self, target: FlatVector) -> dict[torch.device, torch.Tensor]:
        """Memory for the values of one part on each device.

        It is allocated before anything is written, so that running out of memory leaves the target as it was.
        """
        if not self._ahead:
            self._reserve(target.queues)
        numels: dict[torch.device, int] = {}
        for part, _ in self._there(target):
            _, piece = next(target.pieces(part.start, part.stop))
            numels[piece.device] = max(numels.get(piece.device, 0), part.numel)
        return {
            device: torch.empty(numel, dtype=torch.float32, device=device) for device, numel in numels.items()
        }

    def _uploaded(self, target: FlatVector) -> Iterator[tuple[Part, torch.Tensor]]:
        """The parts that are to lie on one device, with their bytes there: valid until the next one is asked
        for.
        """
        for part, queue in self._there(target):
            upload = self._ahead.pop(part.index, None) or queue.upload(self.payload(part))
            assert upload is not None, (
                "each upload is read before the next one is begun, and there are at least two slots"
            )
            with upload.ready() as payload:
                yield part, payload

    def _decode(self, payload: torch.Tensor, place: torch.Tensor) -> None:
        """place[:] = the values."""
        values = self.codec.decode(payload, place)
        if values.data_ptr() != place.data_ptr():
            place.copy_(values)

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
