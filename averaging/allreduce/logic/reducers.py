"""This member's streams to the reducers of a round, and the averages that arrive on them. Pure."""

from __future__ import annotations

from averaging.allreduce.logic.assembly import Assembly
from averaging.allreduce.logic.effects import CheckAverage, CloseStream, OpenStream
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.stragglers import (
    REDUCER_S,
    REDUCER_SHARE,
    StragglerDetector,
    TransferEta,
    too_late,
)
from averaging.allreduce.logic.versions import Version


class ReducerStreams:
    """The reducers that this member takes averages from. Members are places in the group."""

    def __init__(self, setup: RoundSetup, assembly: Assembly) -> None:
        self._setup, self._assembly = setup, assembly
        owed: dict[int, int] = {}
        for chunk in setup.plan.chunks:
            if chunk.reducer != setup.own:
                owed[chunk.reducer] = owed.get(chunk.reducer, 0) + setup.codec.encoded_bytes(chunk.numel)
        self._owed = owed
        self._stragglers = StragglerDetector(REDUCER_S, setup.begun_s)
        self._eta = TransferEta(owed, REDUCER_S, setup.begun_s)
        self._open: set[int] = set()
        self._unchecked: dict[int, tuple[bytes, bytes]] = {}  # chunk: contributors and clipped

    def begin(self) -> list[OpenStream]:
        """Return the streams to open. An auxiliary member takes no averages."""
        if not self._setup.own_auxiliary:
            self._open = {place for place in self._setup.plan.reducers if place != self._setup.own}
        return [OpenStream(place) for place in sorted(self._open)]

    def shard_bytes(self, reducer: int) -> int:
        """Return the encoded size of a reducer's shard, in which values go out and averages come back."""
        return self._owed[reducer]

    def outstanding(self, reducer: int) -> bool:
        """Return whether averages of this reducer are still to come to this member."""
        return not self._setup.own_auxiliary and self._assembly.outstanding(reducer) > 0

    def on_average(
        self, reducer: int, chunk: int, contributors: bytes, clipped: bytes, size_bytes: int
    ) -> CheckAverage:
        """Record an average that arrived. Raise PeerError when it contradicts its header."""
        self._assembly.announce(reducer, chunk, contributors, size_bytes, clipped)
        self._unchecked[chunk] = contributors, clipped
        return CheckAverage(chunk, contributors, clipped)

    def on_checked(self, chunk: int, digest: bytes | None) -> bool:
        """Record that the bytes of an average were checked. Return whether they are valid."""
        contributors, clipped = self._unchecked.pop(chunk)
        if digest is None:
            self._assembly.forget(chunk)
            return False
        reducer = self._setup.plan.chunks[chunk].reducer
        if self._is_doubted(reducer):
            self._stragglers.worked(reducer)
        self._assembly.settle(chunk, Version(0, contributors, digest, clipped))
        return True

    def on_bytes(self, reducer: int, size_bytes: int) -> None:
        """Record that a message of a reducer, or a frame of one, arrived."""
        self._eta.came(reducer, size_bytes)
        if not self._is_doubted(reducer):
            self._stragglers.worked(reducer)

    def on_sent(self, reducer: int) -> None:
        """Record that a reducer took a chunk of this member's values."""
        self._stragglers.worked(reducer)

    def on_waiting(self, reducer: int, now_s: float) -> None:
        """Record that a reducer says that it waits for another member. Of one with faults in earlier rounds
        this excuses nothing.
        """
        if not self._is_doubted(reducer):
            self._eta.excused(reducer, now_s)

    def on_ended(self, reducer: int) -> None:
        """Record that a stream has ended."""
        self._open.discard(reducer)

    def close(self, reducer: int) -> list[CloseStream]:
        """End a stream, if it is open."""
        if reducer not in self._open:
            return []
        self._open.discard(reducer)
        return [CloseStream(reducer)]

    def close_all(self) -> list[CloseStream]:
        """End all streams."""
        return [effect for reducer in sorted(self._open) for effect in self.close(reducer)]

    def stalled(self, now_s: float) -> list[tuple[int, str]]:
        """Return the reducers that neither take nor send anything, each with a sentence about it."""
        return [
            (
                place,
                f"it took and gave nothing for {idle_s:.1f} s, with {self._assembly.share(place)} given",
            )
            for place, idle_s in self._stragglers.tick(self._waited_for(), now_s)
        ]

    def slow(self, now_s: float) -> list[tuple[int, str]]:
        """Return the reducers that are too slow for the time of the round, each with the reason."""
        self._eta.due_s = self._setup.due_s(REDUCER_SHARE)
        left_s = self._setup.deadline_s - now_s
        return [
            (place, f"its averages {too_late(more_s)}; the round has {left_s:.0f} s")
            for place, more_s in self._eta.late(self._waited_for(), now_s)
        ]

    def _is_doubted(self, reducer: int) -> bool:
        """Return whether averages alone, and no other message, are a sign of work of this reducer."""
        return self._setup.peer_id(reducer) in self._setup.group.doubted

    def _waited_for(self) -> list[int]:
        return [place for place in self._open if self.outstanding(place)]
