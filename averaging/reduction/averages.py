"""The result of a round as every member holds it: the encoded average of every chunk, with the same bytes
everywhere.

The averages stay encoded until they are needed: a round that fails costs no decoding, the result is no larger
than what travelled, and a member that lacks a chunk can be given the exact bytes. They are stored in memory
that outlives the round. Keeping the received messages instead made the kernel map their memory again in every
round, which cost a third of the round's processor time.

Averages for a device are copied there encoded and decoded there, on the stream of the thread that takes the
result. The copies begin when the round is committed (`upload`), in the round's own thread, as far as the ring
of `RING_BYTES` has room; the rest follow while the first are being decoded. Earlier copies could be of
averages that still fail or are replaced, and without the ring they would take as much device memory as the
encoded vector. The thread that takes the result does not wait: its stream waits for each copy, and the next
round waits for the last copy before it uses the host memory again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from averaging.reduction.devices import NO_QUEUES, Queue, Queues, Upload
from averaging.reduction.partition import Chunk, Plan
from averaging.reduction.reduce import blocks
from averaging.reduction.vector import HOST, FlatVector
from swarm.compression import Buffer, Codec

# device memory for encoded averages; larger: more of them are copied before the result is taken
RING_BYTES = 32 << 20
BLOCK_BYTES_MAX = 64 << 20  # size of a block of pinned memory for averages
_SLOTS_MIN = 2  # one is copied to while the other is decoded


class ResultBuffer:
    """Host memory for the averages of successive rounds, and the pinned memory that copies from devices go
    through.
    """

    def __init__(self, queues: Queues = NO_QUEUES) -> None:
        """Create an empty buffer. `queues`: of the devices that the averages will be copied to."""
        self.queues = queues
        # pinned buffers, flat uint8, by size
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._blocks: list[torch.Tensor] = []
        # the averages stored here, which members that ask late can still be given
        self._held: Averages | None = None

    def take(self, averages: Averages) -> None:
        """Give the memory to these averages and mark the previous ones as overwritten. Does not wait."""
        if self._held is not None:
            self._held.gone = True
        self._held = averages

    def room(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory for chunks of these sizes in bytes, flat uint8 each, once no copy to a device reads
        it any more.
        """
        self.queues.finish_uploads()
        if not self.queues and sum(block.numel() for block in self._blocks) < sum(sizes):
            self._blocks = [torch.empty(sum(sizes), dtype=torch.uint8, device=HOST)]
        return self._cut(sizes)

    def _cut(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Lay the chunks out in the blocks, one after the other, and allocate blocks as they are needed.

        torch rounds pinned memory up to a power of two. Blocks are therefore powers of two, and together
        hardly larger than the chunks.
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

        The memory is kept from round to round: allocating pinned memory takes milliseconds and may wait for
        the device.
        """
        size_bytes = _power_of_two(size_bytes)
        try:
            return self._spare[size_bytes].pop()
        except IndexError:  # no test beforehand, since several threads borrow
            return queues.host_memory(size_bytes, torch.uint8)

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take back buffers from `borrow`."""
        for buffer in buffers:
            self._spare[buffer.numel()].append(buffer)


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is not smaller than `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


class Averages:
    """The encoded average of each chunk of a plan. It is valid until the next round takes the
    result buffer.
    """

    def __init__(self, plan: Plan, codec: Codec, result_buffer: ResultBuffer) -> None:
        self.plan, self.codec, self.result_buffer = plan, codec, result_buffer
        self._sizes = [codec.encoded_bytes(chunk.numel) for chunk in plan.chunks]
        self._empty: set[int] = set()
        self._ahead: dict[int, Upload] = {}  # by chunk: uploads begun before the result is taken
        self.gone = False  # the next round has taken the memory
        self.written = False  # `write` or `subtract` has changed its target
        self._places: list[torch.Tensor] | None = None  # the memory of each chunk
        result_buffer.take(self)
        if not result_buffer.queues:
            self.prepare(receives=False)

    def prepare(self, *, receives: bool) -> None:
        """Allocate all memory that the round's result needs: on the host and, if this member `receives` it,
        on the devices.

        May wait for the device, so call it in a thread of the pool. Without this call host memory is
        allocated at first use.
        """
        self._places = self.result_buffer.room(self._sizes)
        if receives:
            self._reserve(self.result_buffer.queues)

    def _reserve(self, queues: Queues) -> None:
        slot_bytes = max(self._sizes, default=0)
        if slot_bytes:
            queues.reserve(slot_bytes, min(max(RING_BYTES // slot_bytes, _SLOTS_MIN), len(self._sizes)))

    def keep(self, chunk: Chunk, payload: Buffer, first_byte: int = 0) -> None:
        """Store the bytes of a chunk, or some of them from `first_byte` on. The caller has checked that the
        size fits and all values are finite.
        """
        self._empty.discard(chunk.index)
        place = self._place(chunk)[first_byte : first_byte + len(payload)]
        np.copyto(place.numpy(), np.frombuffer(payload, np.uint8))

    def _place(self, chunk: Chunk) -> torch.Tensor:
        if self._places is None:
            self.prepare(receives=False)
        assert self._places is not None
        return self._places[chunk.index]

    def mark_empty(self, chunk: Chunk) -> None:
        """Record that nobody contributed to this chunk: it has no average, and members keep their
        own values.
        """
        self._empty.add(chunk.index)

    @property
    def whole(self) -> bool:
        """Return whether every chunk has an average."""
        return not self._empty

    def payload(self, chunk: Chunk) -> torch.Tensor:
        """Return the stored bytes of a chunk, flat uint8, read-only; no bytes for an empty chunk."""
        place = self._place(chunk)
        return place[:0] if chunk.index in self._empty else place

    def upload(self, target: FlatVector) -> None:
        """Begin to copy the first averages to the devices of `target`, as far as there is room; `write` or
        `subtract` copies the rest.
        """
        self._reserve(target.queues)
        for chunk, queue in self._there(target):
            upload = queue.upload(self.payload(chunk))
            if upload is not None:
                self._ahead[chunk.index] = upload

    def write(self, target: FlatVector) -> None:
        """Write the averages to `target`, leaving elements without an average as they are.

        Each block is decoded directly into `target`, unless it crosses a border between tensors. On a device
        this is queued on the current stream of this thread, like any call of torch, without waiting. The
        first chunk passes through scratch memory: if decoding runs out of memory there, `written` is false.
        """
        scratch = self._scratch(target)
        for chunk, payload in self._uploaded(target):
            pieces = list(target.pieces(chunk.start, chunk.stop))
            if self.written and len(pieces) == 1:
                self._decode(payload, pieces[0][1])
                continue
            values = self.codec.decode(payload, scratch[payload.device][: chunk.numel])
            self.written = True
            for first, piece in pieces:
                piece.copy_(values[first - chunk.start : first - chunk.start + piece.numel()])
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
        """Replace `target` by averages - target, and by 0 where there is no average. On a device
        as `write`.
        """
        there = self._scratch(target)
        for chunk in (self.plan.chunks[index] for index in self._empty):
            for _, piece in target.pieces(chunk.start, chunk.stop):
                piece.zero_()
        for chunk, payload in self._uploaded(target):
            values = self.codec.decode(payload, there[payload.device][: chunk.numel])
            for first, piece in target.pieces(chunk.start, chunk.stop):
                torch.sub(values[first - chunk.start : first - chunk.start + piece.numel()], piece, out=piece)
        scratch = torch.empty(self._numel_max, dtype=torch.float32, device=HOST)
        for start, stop, payload in self._blocks(target):
            values = self.codec.decode(payload, scratch[: stop - start])
            for first, piece in target.pieces(start, stop):
                torch.sub(
                    values[first - start : first - start + piece.numel()].to(piece.device), piece, out=piece
                )
        self.written = True

    def decoded(self) -> torch.Tensor:
        """Return the whole vector decoded, flat float32 on the host, as a new tensor; NaN where there is no
        average.
        """
        whole = torch.empty(self.plan.numel, dtype=torch.float32, device=HOST)
        if self._empty:
            whole.fill_(float("nan"))
        self.write(FlatVector([whole], NO_QUEUES))
        return whole

    @property
    def _numel_max(self) -> int:
        return max((chunk.numel for chunk in self.plan.chunks), default=0)

    def _there(self, target: FlatVector) -> Iterator[tuple[Chunk, Queue]]:
        """Iterate over the chunks that lie on one device with a queue, and are decoded there as a whole."""
        for chunk in self.plan.chunks if target.queues else ():
            queue = target.queues.of(target.device_of(chunk.start, chunk.stop))
            if queue is not None and chunk.index not in self._empty:
                yield chunk, queue

    def _scratch(self, target: FlatVector) -> dict[torch.device, torch.Tensor]:
        """Allocate memory for the decoded values of one chunk on each device.

        It is allocated before anything is written, so that running out of memory leaves the target unchanged.
        """
        if not self._ahead:
            self._reserve(target.queues)
        numels: dict[torch.device, int] = {}
        for chunk, _ in self._there(target):
            _, piece = next(target.pieces(chunk.start, chunk.stop))
            numels[piece.device] = max(numels.get(piece.device, 0), chunk.numel)
        return {
            device: torch.empty(numel, dtype=torch.float32, device=device) for device, numel in numels.items()
        }

    def _uploaded(self, target: FlatVector) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Iterate over the chunks that lie on one device, with their bytes there. The bytes are valid until
        the next iteration.
        """
        for chunk, queue in self._there(target):
            upload = self._ahead.pop(chunk.index, None) or queue.upload(self.payload(chunk))
            assert upload is not None, (
                "each upload is read before the next one is begun, and there are at least two slots"
            )
            with upload.ready() as payload:
                yield chunk, payload

    def _decode(self, payload: torch.Tensor, place: torch.Tensor) -> None:
        """Decode `payload` into `place`."""
        values = self.codec.decode(payload, place)
        if values.data_ptr() != place.data_ptr():
            place.copy_(values)

    def _blocks(self, target: FlatVector) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Iterate over the blocks of all other chunks as (start, stop, payload): these are decoded on the
        host.
        """
        there = {chunk.index for chunk, _ in self._there(target)}
        for chunk in self.plan.chunks:
            if chunk.index in self._empty or chunk.index in there:
                continue
            payload = self.payload(chunk)
            for block in blocks(chunk, self.codec):
                yield (
                    chunk.start + block.start,
                    chunk.start + block.stop,
                    payload[block.first_byte : block.end_byte],
                )
