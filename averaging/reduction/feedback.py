"""Error feedback: the error of a lossy codec in one round is added to the values of the next (Seide et al.
2014; Karimireddy et al., arXiv 1901.09847).

A member makes two errors: as a sender, when it encodes its values, and as a reducer, when it encodes the
average of its shard. Each side keeps the error of each element as a residual, and adds it to the values that
it encodes next.

Residuals change only when the round is committed. During a round the new residuals are staged next to the old
ones; a commit replaces the old ones, a roll-back drops the new ones, and the caller still has the values that
it wanted to send. So over any sequence of rounds, committed and failed, the sum of what the others decoded
plus the residual equals the sum of what was given in committed rounds. Two roundings of float32 per round
limit that: of `values + residual`, and of `that - what was decoded`, each at most 2^-24 of its result. (The
second is exact for codecs that round to multiples of a step: the operands differ by at most a factor of two,
or one of them is 0.)

Pure: no clock, no randomness, no I/O. Several threads may work on different chunks at once; a commit takes
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


# The distribution of a vector: (number of elements, device) for each run of elements on one device.
Cut = Sequence[tuple[int, torch.device]]


class Residual:
    """The error that one side has not delivered yet, for the elements `start` to `stop` of the vector:
    float32, zeros at first.

    `cut`: the devices that it lies on; None: the host. Takes twice the memory of that range: for the current
    residual, and for the staged one of an open round.
    """

    def __init__(self, start: int, stop: int, cut: Cut | None = None, queues: Queues = NO_QUEUES) -> None:
        self.start, self.stop = start, stop
        self._cut, self._queues = cut if cut is not None else [(stop - start, HOST)], queues
        zeros = [torch.zeros(numel, dtype=torch.float32, device=device) for numel, device in self._cut]
        self.vector = FlatVector(zeros, queues)
        self._spare: FlatVector | None = None

    @property
    def held(self) -> torch.Tensor:
        """Return the current residual on the host, read-only. Changes of an open round are not included."""
        self._queues.finish()
        return self.vector.read(0, self.stop - self.start).to(HOST)

    def fill(self, values: torch.Tensor) -> None:
        """Replace the residual by `values`, flat float32 on the host."""
        for start, piece in self.vector.pieces(0, self.stop - self.start):
            piece.copy_(values[start : start + piece.numel()])
        self._queues.fork()

    def stage(self) -> Staged:
        """Return a staged copy for the next round."""
        spare, self._spare = self._spare, None
        if spare is None:
            # Memory belongs to the stream that works on it, so that its reuse waits for that stream.
            with self._queues.working():
                pieces = [
                    torch.empty(numel, dtype=torch.float32, device=device) for numel, device in self._cut
                ]
                spare = FlatVector(pieces, self._queues)
        return Staged(self, spare)

    def replace(self, new: FlatVector) -> None:
        """Replace the residual by `new`."""
        self.vector, self._spare = new, self.vector


class Staged:
    """The residual of an open round. It has memory of its own, so that a thread that still works on a
    cancelled round cannot change a later one.
    """

    def __init__(self, residual: Residual, new: FlatVector) -> None:
        self._residual, self._old, self._new = residual, residual.vector, new
        self._ranges: dict[int, int] = {}  # start: stop of the staged ranges

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all these elements belong to the residual."""
        return self._residual.start <= start <= stop <= self._residual.stop

    def add(self, start: int, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write `values` plus the residual of the elements from `start` on to `out`, which is what to encode,
        and return `out`. `out` may be `values`.
        """
        for at, held in self._of(self._old, start, start + values.numel()):
            end = at + held.numel()
            torch.add(values[at:end], held.to(values.device), out=out[at:end])
        return out

    def keep(self, start: int, given: torch.Tensor, decoded: torch.Tensor | None) -> None:
        """Stage the error of `given`, which the others decode as `decoded`; None: they never received it. A
        repeated call replaces the one before.

        The ranges of a repeated call must be those of the call before (chunks, and blocks of chunks, are).
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
        """Stage zeros for the elements `start` to `stop`: they, with their residual, were delivered without
        loss.
        """
        for _, place in self._of(self._new, start, stop):
            place.zero_()
        self._ranges[start] = stop

    def restore(self, start: int, stop: int) -> None:
        """Stage the current residual of the elements `start` to `stop` unchanged."""
        for (_, new), (_, old) in zip(
            self._of(self._new, start, stop), self._of(self._old, start, stop), strict=True
        ):
            new.copy_(old)
        self._ranges[start] = stop

    def increase(self, start: int, error: torch.Tensor) -> None:
        """Add `error` to the staged values of the elements from `start` on. They were staged as one range."""
        if start not in self._ranges:
            self.restore(start, start + error.numel())
        for at, place in self._of(self._new, start, start + error.numel()):
            place.add_(error[at : at + place.numel()].to(place.device))

    def commit(self) -> None:
        """Make the staged values the residual; elements that were not staged keep theirs."""
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
        """Iterate over the pieces of `buffer` that hold these elements, each with its distance
        from `start`.
        """
        assert self.covers(start, stop)
        first = self._residual.start
        return ((at + first - start, piece) for at, piece in buffer.pieces(start - first, stop - first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The range that a member reduces, and the group. While neither changes, the reducer's residual fits the
    averages.
    """

    start: int
    stop: int
    members: bytes  # identifies the group: the public keys of its members, in group order


NO_SHARD = Shard(start=0, stop=0, members=b"")


class FeedbackRound:
    """The transaction of one round: `sent` and `reduced` for each chunk, then `commit` or `roll_back`.
    `Feedback.begin` makes it.
    """

    def __init__(
        self, sender: Staged, reducer: Staged | None, codec: Codec, ended: Callable[[bool, bool], None]
    ) -> None:
        self._sender, self._reducer, self._codec = sender, reducer, codec
        self._ended: Callable[[bool, bool], None] | None = ended
        self._withdrawn = False

    # ---- sender

    def give(self, start: int, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the values to encode instead of `values` (flat float32, of the elements from `start` on) to
        `out`, of the same size, and return it.
        """
        self._check_open()
        return self._sender.add(start, values, out)

    def sent(
        self, start: int, given: torch.Tensor, payload: Buffer | torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Record that `given` was encoded as `payload`. `scratch`: flat float32 of the same size, may be
        written. Calls may be repeated.
        """
        self._check_open()
        self._sender.keep(start, given, self._codec.decode(payload, scratch))

    def kept(self, start: int, stop: int) -> None:
        """Record that these elements have no error: this member reduces them itself, without encoding its
        values. Call `give` for them as well.
        """
        self._check_open()
        self._sender.clear(start, stop)

    def undelivered(self, start: int, values: torch.Tensor) -> None:
        """Record, before a commit, that the average of these elements was made without this member: the whole
        of `values` stays in the residual.
        """
        self._check_open()
        scratch = torch.empty_like(values)
        self._sender.keep(start, self._sender.add(start, values, scratch), None)

    def keep_sender_residual(self) -> None:
        """Leave the sender's residual unchanged, whether or not the round commits: nothing was sent."""
        self._check_open()
        self._withdrawn = True

    def withheld(self, start: int, stop: int) -> None:
        """Record, before a commit, that these elements were not delivered and will not be, because the values
        contain NaN. Their residual stays unchanged.
        """
        self._check_open()
        self._sender.restore(start, stop)

    def deliver_next(self, start: int, error: torch.Tensor) -> None:
        """Add `error`, which this member made as a successor of a lost reducer, to what it sends in the next
        round. Call it before a commit, for whole chunks.
        """
        self._check_open()
        self._sender.increase(start, error)

    # ---- reducer

    def correct(self, start: int, average: torch.Tensor) -> None:
        """Add the error of earlier averages of these elements to `average`, in place.

        Elements outside of the round's shard, which a member reduces for a failed one, have no residual and
        are left unchanged.
        """
        self._check_open()
        if self._reducer is not None and self._reducer.covers(start, start + average.numel()):
            self._reducer.add(start, average, average)

    def reduced(
        self, start: int, corrected: torch.Tensor, payload: Buffer | torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Record that the corrected average was encoded as `payload`, which every member decodes."""
        self._check_open()
        if self._reducer is not None and self._reducer.covers(start, start + corrected.numel()):
            self._reducer.keep(start, corrected, self._codec.decode(payload, scratch))

    # ---- end

    @property
    def open(self) -> bool:
        """Return whether the round is neither committed nor rolled back."""
        return self._ended is not None

    def commit(self, *, sent: bool = True) -> None:
        """Replace the residuals by the staged ones: every member has the averages. `sent`: this member
        contributed to all of them that it was to contribute to.
        """
        self._check_open()
        if not self._withdrawn:
            self._sender.commit()
        if self._reducer is not None:
            self._reducer.commit()
        self._end(True, sent and not self._withdrawn)

    def roll_back(self) -> None:
        """Drop the staged residuals: the round failed. Does nothing on a round that has ended."""
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

    `reduces`: keep a residual for the shard that this member reduces as well. Not allowed where reducers are
    audited: the bytes that they encode must then follow from the contributions alone. `cut`: the devices of
    the vector, and of the sender's residual; a round's work on it is done within `queues`' `working`. The
    reducer's residual is on the host.
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
        self.committed = 0  # number of committed rounds
        self.sent = 0  # committed rounds to which this member contributed
        # how often a reducer's residual was dropped because the shard or the members changed
        self.dropped = 0
        self._cut, self._queues = cut, queues
        self._sender = Residual(0, numel, cut, queues)
        self._reducer = Residual(0, 0)
        self._shard = NO_SHARD
        self._round: FeedbackRound | None = None

    def begin(self, shard: Shard = NO_SHARD) -> FeedbackRound:
        """Open a round in which this member reduces `shard`. Raises UsageError when one is open.

        If the shard or the members have changed, the reducer's residual is dropped now, and counted, with any
        outcome of the round.
        """
        if self._round is not None:
            raise UsageError("a round of error feedback is open: commit it or roll it back first")
        if not 0 <= shard.start <= shard.stop <= self.numel:
            raise UsageError(f"a shard of elements {shard.start} to {shard.stop} in a vector of {self.numel}")
        if self.reduces and shard != self._shard:
            if self._reducer.held.any():
                self.dropped += 1
            self._reducer, self._shard = Residual(shard.start, shard.stop), shard
        reducer = self._reducer.stage() if self.reduces and shard.start < shard.stop else None
        self._round = FeedbackRound(self._sender.stage(), reducer, self.codec, self._end)
        return self._round

    def norms(self) -> tuple[float, float]:
        """Return the Euclidean norms of the sender's and the reducer's residual, for reports. A sender's norm
        that grows without limit means that the codec is too coarse for these values.
        """
        return float(self._sender.held.norm()), float(self._reducer.held.norm())

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state needed to resume. Changes of an open round are not included."""
        return {
            "format": _FORMAT,
            "codec": [self.codec.name, self.codec.version],
            "sender": self._sender.held.clone(),
            "span": [self._shard.start, self._shard.stop, self._shard.members],
            "reducer": self._reducer.held.clone(),
            "committed": self.committed,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. Raise UsageError, with nothing changed, when it does not fit.
        Residuals of another codec are accepted: they are ordinary values.
        """
        if self._round is not None:
            raise UsageError("a round of error feedback is open: load its state before or after")
        missing = {"format", "sender", "span", "reducer", "committed", "dropped"} - set(state)
        if missing or state["format"] != _FORMAT:
            raise UsageError(
                f"this is no saved error feedback: {', '.join(sorted(missing)) or 'its format'} is not "
                "what it must be"
            )
        shard = _shard_from(state["span"], self.numel)
        sender = _residual_of(
            state["sender"], Residual(0, self.numel, self._cut, self._queues), "the sender's"
        )
        reducer = _residual_of(state["reducer"], Residual(shard.start, shard.stop), "the reducer's")
        for name in ("committed", "dropped"):
            if type(state[name]) is not int or state[name] < 0:
                raise UsageError(f"{name} is a number of times, not {state[name]!r:.40}")
        self._sender, self.committed, self.dropped = sender, state["committed"], state["dropped"]
        if self.reduces:
            self._reducer, self._shard = reducer, shard

    def release(self, stop: int) -> torch.Tensor:
        """Return the sender's residual of elements 0 to `stop`, and set both residuals of these elements to
        zero.
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


def _shard_from(saved: Any, numel: int) -> Shard:
    """Return the saved shard. Raises UsageError when it is invalid."""
    if not isinstance(saved, list | tuple) or [type(item) for item in saved] != [int, int, bytes]:
        raise UsageError("the shard of saved error feedback is its start, its stop and its members")
    start, stop, members = saved
    if not 0 <= start <= stop <= numel:
        raise UsageError(
            f"the saved error feedback is of a shard from {start} to {stop}; the vector has {numel} elements"
        )
    return Shard(start=start, stop=stop, members=members)


def _residual_of(saved: Any, residual: Residual, whose: str) -> Residual:
    """Return `residual`, filled with the saved values. Raises UsageError when these are invalid."""
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
