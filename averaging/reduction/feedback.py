"""Error feedback: what a lossy codec left out of one round goes into the next (Seide et al. 2014; Karimireddy
et al., arXiv 1901.09847).

A member loses something twice: as a sender, when it encodes its values, and as a reducer, when it encodes the
average of its span. Each side keeps what was lost, element by element, and adds it to what it encodes next.

Nothing counts before the round is committed. During a round the new residuals are staged beside the old ones;
a commit puts them in their place, a roll-back forgets them, and the caller still has what it wanted to send.
So over any sequence of rounds, committed and failed, the sum of what the others decoded plus what is held
equals the sum of what was given in committed rounds. Two roundings of float32 a round limit that: of `values
+ residual`, and of `that - what was decoded`, each at most 2^-24 of its result. (The second is exact for
codecs that round to multiples of a step: operands that are no further apart than a factor of two, or one of
them 0.)

Pure: no clock, no chance, no I/O. Different parts may be worked on in several threads at once; a commit takes
place when none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.reduction.devices import NO_QUEUES, Queues
from averaging.reduction.vector import HOST, FlatVector
from swarm.compression import Buffer, Codec
from swarm.core.errors import UsageError

_FORMAT = 1


# of a vector: so many elements lie on this device, then so many on that one
Cut = Sequence[tuple[int, torch.device]]


class Residual:
    """What one side has not delivered yet of the elements `start` to `stop` of the vector: float32, zeros at
    first.

    `cut`: where it lies; None: on the host. Twice the memory of that span: what is held, and what the round
    that is open would make of it.
    """

    def __init__(self, start: int, stop: int, cut: Cut | None = None, queues: Queues = NO_QUEUES) -> None:
        self.start, self.stop = start, stop
        self._cut, self._queues = cut if cut is not None else [(stop - start, HOST)], queues
        zeros = [torch.zeros(numel, dtype=torch.float32, device=device) for numel, device in self._cut]
        self.vector = FlatVector(zeros, queues)
        self._spare: FlatVector | None = None

    @property
    def held(self) -> torch.Tensor:
        """On the host: not to be written. Not of an open round."""
        self._queues.finish()
        return self.vector.read(0, self.stop - self.start).to(HOST)

    def fill(self, values: torch.Tensor) -> None:
        """Hold these (flat float32 on the host) from now on."""
        for start, piece in self.vector.pieces(0, self.stop - self.start):
            piece.copy_(values[start : start + piece.numel()])
        self._queues.fork()

    def stage(self) -> Staged:
        """What the next round makes of it."""
        spare, self._spare = self._spare, None
        if spare is None:
            # memory belongs to the stream that works on it: given back, it goes to nobody else too early
            with self._queues.working():
                pieces = [
                    torch.empty(numel, dtype=torch.float32, device=device) for numel, device in self._cut
                ]
                spare = FlatVector(pieces, self._queues)
        return Staged(self, spare)

    def replace(self, new: FlatVector) -> None:
        """Hold `new` from now on."""
        self.vector, self._spare = new, self.vector


class Staged:
    """A residual in an open round. Its memory is its own: a thread that still works on a round that was given
    up harms no later one.
    """

    def __init__(self, residual: Residual, new: FlatVector) -> None:
        self._residual, self._old, self._new = residual, residual.vector, new
        self._ranges: dict[int, int] = {}  # start: stop, of what is staged

    def covers(self, start: int, stop: int) -> bool:
        """Are all these elements among ours?"""
        return self._residual.start <= start <= stop <= self._residual.stop

    def add(self, start: int, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out[:] = values + what is held for elements `start` on: what is to be encoded. `out` may be
        `values`.
        """
        for at, held in self._of(self._old, start, start + values.numel()):
            end = at + held.numel()
            torch.add(values[at:end], held.to(values.device), out=out[at:end])
        return out

    def keep(self, start: int, given: torch.Tensor, decoded: torch.Tensor | None) -> None:
        """`given` was encoded, and the others read it as `decoded`; None: they never got it. Again for the
        same elements: this counts.

        Elements that are staged again are so in the ranges of before (parts, and blocks of parts, are).
        """
        for at, place in self._of(self._new, start, start + given.numel()):
            end = at + place.numel()
            if decoded is None:
                place.copy_(given[at:end])
            elif place.device == given.device:
                torch.sub(given[at:end], decoded[at:end], out=place)
            else:
                place.copy_(given[at:end] - decoded[at:end])
        self._ranges[start] = start + given.numel()

    def clear(self, start: int, stop: int) -> None:
        """Elements `start` to `stop`, with what was held for them, are delivered without loss."""
        for _, place in self._of(self._new, start, stop):
            place.zero_()
        self._ranges[start] = stop

    def commit(self) -> None:
        """What is staged is held from now on; the rest stays as it was."""
        at = self._residual.start
        for start, stop in [*sorted(self._ranges.items()), (self._residual.stop, self._residual.stop)]:
            if at < start:
                for (_, new), (_, old) in zip(
                    self._of(self._new, at, start), self._of(self._old, at, start), strict=True
                ):
                    new.copy_(old)
            at = max(at, stop)
        self._residual.replace(self._new)

    def _of(self, buffer: FlatVector, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """What holds these elements, each piece with its distance from `start`."""
        assert self.covers(start, stop)
        first = self._residual.start
        return ((at + first - start, piece) for at, piece in buffer.pieces(start - first, stop - first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a member reduces, and for whom: as long as it does not change, its residual fits the averages."""

    start: int
    stop: int
    members: bytes  # whatever tells this group of peers from another: a digest over them in group order


NO_SHARD = Shard(start=0, stop=0, members=b"")


class FeedbackRound:
    """One round's transaction: `sent` and `reduced` for each part, then `commit` or `roll_back`. Made by
    `Feedback.begin`.
    """

    def __init__(
        self, sender: Staged, reducer: Staged | None, codec: Codec, ended: Callable[[bool, bool], None]
    ) -> None:
        self._sender, self._reducer, self._codec = sender, reducer, codec
        self._ended: Callable[[bool, bool], None] | None = ended
        self._withdrawn = False

    # ---- sender

    def give(self, start: int, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What to encode where `values` (flat float32, of elements `start` on) would be; written to `out`, of
        the same size.
        """
        self._check_open()
        return self._sender.add(start, values, out)

    def sent(
        self, start: int, given: torch.Tensor, payload: Buffer | torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """`given` was encoded as `payload`. `scratch`: flat float32, of its size, may be written. Repeated
        calls say the same thing.
        """
        self._check_open()
        self._sender.keep(start, given, self._codec.decode(payload, scratch))

    def kept(self, start: int, stop: int) -> None:
        """Our own part of the average, which we reduce and which is not encoded: `give` it nevertheless,
        nothing of it is lost.
        """
        self._check_open()
        self._sender.clear(start, stop)

    def undelivered(self, start: int, values: torch.Tensor) -> None:
        """The round is about to be committed, and its average of these elements was made without us: all of
        it stays here.
        """
        self._check_open()
        scratch = torch.empty_like(values)
        self._sender.keep(start, self._sender.add(start, values, scratch), None)

    def withdraw(self) -> None:
        """Our values cannot be sent, NaN is among them: whatever becomes of the round, the sender's residual
        stays what it is.
        """
        self._check_open()
        self._withdrawn = True

    # ---- reducer

    def correct(self, start: int, average: torch.Tensor) -> None:
        """average += what was left out of earlier averages of these elements, in place.

        Elements outside of the round's span, which a member reduces in the place of a dead one, have no
        residual: nothing happens.
        """
        self._check_open()
        if self._reducer is not None and self._reducer.covers(start, start + average.numel()):
            self._reducer.add(start, average, average)

    def reduced(
        self, start: int, corrected: torch.Tensor, payload: Buffer | torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """The corrected average was encoded as `payload`, which every member decodes."""
        self._check_open()
        if self._reducer is not None and self._reducer.covers(start, start + corrected.numel()):
            self._reducer.keep(start, corrected, self._codec.decode(payload, scratch))

    # ---- end

    @property
    def open(self) -> bool:
        """Is it neither committed nor rolled back?"""
        return self._ended is not None

    def commit(self) -> None:
        """Every member has the averages: residuals move on."""
        self._check_open()
        if not self._withdrawn:
            self._sender.commit()
        if self._reducer is not None:
            self._reducer.commit()
        self._end(True, not self._withdrawn)

    def roll_back(self) -> None:
        """The round failed: residuals are what they were. Without effect on one that has ended, so that every
        way out may call it.
        """
        if self._ended is not None:
            self._end(False, False)

    def _end(self, committed: bool, sent: bool) -> None:
        ended, self._ended = self._ended, None
        assert ended is not None
        ended(committed, sent)

    def _check_open(self) -> None:
        if self._ended is None:
            raise UsageError("this round of error feedback has ended: begin another one")


class Feedback:
    """The residuals of one averager, over a vector of `numel` elements that travels in `codec`; one round at
    a time.

    `reduces`: hold a residual for the span that this member reduces, too. Not where reducers are audited:
    what they encode must then follow from what they were sent. `cut`: where the vector lies, and the sender's
    residual with it; a round's work on it is done within `queues`' `working`. The reducer's is on the host.
    """

    def __init__(
        self,
        numel: int,
        codec: Codec,
        *,
        reduces: bool = True,
        cut: Cut | None = None,
        queues: Queues = NO_QUEUES,
    ) -> None:
        self.numel, self.codec, self.reduces = numel, codec, reduces
        self.committed = 0  # rounds
        self.sent = 0  # of these, those to which this member contributed
        # times that a reducer's residual was given up, because the span or the members changed
        self.dropped = 0
        self.dropped_norm = 0.0  # of the last one
        self._cut, self._queues = cut, queues
        self._sender = Residual(0, numel, cut, queues)
        self._reducer = Residual(0, 0)
        self._span = NO_SHARD
        self._round: FeedbackRound | None = None

    def begin(self, span: Shard = NO_SHARD) -> FeedbackRound:
        """Open a round, in which this member reduces `span`; UsageError when one is open.

        Another span, or other members: the reducer's residual is dropped now, and counted, whatever becomes
        of the round.
        """
        if self._round is not None:
            raise UsageError("a round of error feedback is open: commit it or roll it back first")
        if not 0 <= span.start <= span.stop <= self.numel:
            raise UsageError(f"a span of elements {span.start} to {span.stop} in a vector of {self.numel}")
        if self.reduces and span != self._span:
            if self._reducer.held.any():
                self.dropped += 1
                self.dropped_norm = float(self._reducer.held.norm())
            self._reducer, self._span = Residual(span.start, span.stop), span
        reducer = self._reducer.stage() if self.reduces and span.start < span.stop else None
        self._round = FeedbackRound(self._sender.stage(), reducer, self.codec, self._end)
        return self._round

    def norms(self) -> tuple[float, float]:
        """The Euclidean norms of what the sender and the reducer hold: for reports. A sender's that grows
        without end says that the codec is too coarse for these values.
        """
        return float(self._sender.held.norm()), float(self._reducer.held.norm())

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs, copied: the next round writes where this one read. An open round does not show
        in it.
        """
        return {
            "format": _FORMAT,
            "codec": [self.codec.name, self.codec.version],
            "sender": self._sender.held.clone(),
            "span": [self._span.start, self._span.stop, self._span.members],
            "reducer": self._reducer.held.clone(),
            "committed": self.committed,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. UsageError says what is wrong with it, and nothing has
        changed.

        Residuals of another codec are welcome: they are values like any other.
        """
        if self._round is not None:
            raise UsageError("a round of error feedback is open: load its state before or after")
        missing = {"format", "sender", "span", "reducer", "committed", "dropped"} - set(state)
        if missing or state["format"] != _FORMAT:
            raise UsageError(
                f"this is no saved error feedback: {', '.join(sorted(missing)) or 'its format'} is not what it must be"
            )
        span = _span_of(state["span"], self.numel)
        sender = _residual_of(
            state["sender"], Residual(0, self.numel, self._cut, self._queues), "the sender's"
        )
        reducer = _residual_of(state["reducer"], Residual(span.start, span.stop), "the reducer's")
        for name in ("committed", "dropped"):
            if type(state[name]) is not int or state[name] < 0:
                raise UsageError(f"{name} is a number of times, not {state[name]!r:.40}")
        self._sender, self.committed, self.dropped = sender, state["committed"], state["dropped"]
        if self.reduces:
            self._reducer, self._span = reducer, span

    def release(self, stop: int) -> torch.Tensor:
        """What the sender holds of elements 0 to `stop`, handed over: neither side holds anything of them any
        more.
        """
        if self._round is not None:
            raise UsageError("a round of error feedback is open: residuals are handed over before or after")
        released = self._sender.held[:stop].clone()
        reduced = max(min(stop, self._reducer.stop) - self._reducer.start, 0)
        for vector, end in ((self._sender.vector, stop), (self._reducer.vector, reduced)):
            for _, piece in vector.pieces(0, end):
                piece.zero_()
        return released

    def _end(self, committed: bool, sent: bool) -> None:
        self.committed += committed
        self.sent += sent
        self._round = None


def _span_of(saved: Any, numel: int) -> Shard:
    if not isinstance(saved, list | tuple) or [type(item) for item in saved] != [int, int, bytes]:
        raise UsageError("the span of saved error feedback is its start, its stop and its members")
    start, stop, members = saved
    if not 0 <= start <= stop <= numel:
        raise UsageError(
            f"the saved error feedback is of a span from {start} to {stop}; the vector has {numel} elements"
        )
    return Shard(start=start, stop=stop, members=members)


def _residual_of(saved: Any, residual: Residual, whose: str) -> Residual:
    """`residual`, filled with what was saved."""
    if (
        not isinstance(saved, torch.Tensor)
        or saved.dtype != torch.float32
        or saved.shape != (residual.stop - residual.start,)
    ):
        found = (
            f"{tuple(saved.shape)} of {saved.dtype}"
            if isinstance(saved, torch.Tensor)
            else type(saved).__name__
        )
        raise UsageError(
            f"{whose} residual is {residual.stop - residual.start} elements of torch.float32, not {found}"
        )
    if not bool(torch.isfinite(saved).all()):
        raise UsageError(f"{whose} residual has NaN or infinity in it")
    residual.fill(saved)
    return residual
