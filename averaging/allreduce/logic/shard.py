"""The shard that this member reduces: the values that arrived, the chunks that can be averaged, and the
senders that are too slow. Pure; the values themselves are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from averaging.allreduce.logic.effects import Reduce, RefuseSender
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.stragglers import (
    SENDER_S,
    SENDER_SHARE,
    StragglerDetector,
    TransferEta,
    too_late,
)
from averaging.reduction.reduce import Reduction
from swarm.core.errors import PeerError

# chunks of one sender that are buffered while those of others are missing; above this, reading from it pauses
AHEAD_MAX = 32


class OwnShard:
    """The reduction of this member's shard. Methods return the actions to take now."""

    def __init__(self, setup: RoundSetup) -> None:
        self._setup = setup
        self.chunks = setup.plan.shard(setup.own)
        senders = [place for place in setup.contributors if place != setup.own]
        self._reduction = Reduction(self.chunks, senders, setup.codec)
        strangers = [place for place in senders if setup.peer_id(place) in setup.group.strangers]
        self._stragglers = StragglerDetector(SENDER_S, setup.begun_s, strangers)
        owed_bytes = sum(setup.codec.encoded_bytes(chunk.numel) for chunk in self.chunks)
        self._eta = TransferEta(dict.fromkeys(senders, owed_bytes), SENDER_S, setup.begun_s)
        # number of chunks received from each sender; they arrive in order
        self._came = dict.fromkeys(setup.members, 0)
        self._inputs: dict[int, tuple[tuple[int, ...], bool]] = {}  # being reduced: (senders, own)
        self._reduced: set[int] = set()
        self.halted = False

    @property
    def reduced(self) -> bool:
        """Return whether every chunk is averaged."""
        return len(self._reduced) == len(self.chunks)

    @property
    def left_out(self) -> dict[int, str]:
        """Return the senders that were left out, and why."""
        return self._reduction.left_out

    def begin(self, own: bool) -> list[Reduce]:
        """Return the chunks that wait for nobody. `own`, here and below: this member contributes."""
        return self._ready(self._reduction.ready_at_start(), own)

    def expected(self, sender: int) -> int | None:
        """Return the chunk that this sender must send next; None for nothing."""
        nth = self._came[sender]
        return self.chunks[nth].index if nth < len(self.chunks) else None

    def remaining(self, sender: int) -> int:
        """Return how many chunks of this sender are still missing."""
        return self._reduction.remaining(sender)

    def is_ahead(self, sender: int) -> bool:
        """Return whether to stop reading from this sender for now, because other senders are behind."""
        return sender not in self.left_out and self._reduction.ahead(sender) > AHEAD_MAX

    def waited_for(self, own: bool) -> list[int]:
        """Return the senders that delay the first chunk that is not reduced."""
        return self._reduction.waited_for(own)

    def opened(self, sender: int) -> None:
        """Record that a sender opened its stream."""
        self._stragglers.worked(sender)

    def on_bytes(self, sender: int, size_bytes: int) -> None:
        """Record that a message of a sender, or a frame of one, arrived."""
        self._stragglers.worked(sender)
        self._eta.came(sender, size_bytes)

    def accept(self, sender: int, chunk: int, size_bytes: int, own: bool) -> list[Reduce]:
        """Accept a sender's values of a chunk. Raise PeerError when this chunk was not expected."""
        expected = self.expected(sender)
        if chunk != expected:
            wanted = "nothing more" if expected is None else f"chunk {expected}"
            raise PeerError(f"a contribution to chunk {chunk} where {wanted} was to come")
        self._came[sender] += 1
        return self._ready(self._reduction.accept(sender, chunk, size_bytes), own)

    def finished(self, sender: int, own: bool) -> list[Reduce | RefuseSender]:
        """Record that a sender has finished its stream."""
        unsent = len(self.chunks) - self._came[sender] if self.remaining(sender) else 0
        if not unsent:
            return []
        return self.leave_out(
            sender, f"it finished with {unsent} of {len(self.chunks)} chunks unsent", own=own
        )

    def leave_out(self, sender: int, reason: str, *, own: bool) -> list[Reduce | RefuseSender]:
        """Reduce without this sender from now on, and inform it."""
        known = sender in self.left_out
        found: list[Reduce | RefuseSender] = [*self._ready(self._reduction.leave_out(sender, reason), own)]
        if not known and sender in self.left_out:
            found.append(RefuseSender(sender, reason))
        return found

    def on_reduced(self, chunk: int) -> None:
        """Record that a chunk was averaged."""
        self._reduced.add(chunk)
        self._inputs.pop(chunk, None)

    def on_spoiled(self, chunk: int, flaws: Mapping[int, str], own: bool) -> list[Reduce | RefuseSender]:
        """Leave out these members, whose values made a chunk fail, and average it again."""
        found: list[Reduce | RefuseSender] = []
        for place, flaw in flaws.items():
            if place != self._setup.own:
                why = f"its values of chunk {chunk} cannot be averaged: {flaw}"
                found += self.leave_out(place, why, own=own)
        places, with_own = self._inputs[chunk]
        kept = tuple(place for place in places if place not in flaws)
        self._inputs[chunk] = kept, with_own and self._setup.own not in flaws
        return [*found, Reduce(chunk, *self._inputs[chunk])]

    def pace(self, own: bool, now_s: float) -> list[Reduce | RefuseSender]:
        """Continue without live senders that delay the others."""
        found: list[Reduce | RefuseSender] = []
        for place, idle_s in self._stragglers.tick(self.waited_for(own), now_s):
            found += self.leave_out(
                place, f"it sent nothing for {idle_s:.1f} s while a chunk waited for it", own=own
            )
        self._eta.due_s = self._setup.due_s(SENDER_SHARE)
        sending = [place for place in self._reduction.senders if self.remaining(place)]
        for place, more_s in self._eta.late(sending, now_s):
            found += self.leave_out(
                place,
                f"its values {too_late(more_s)}; the round has {self._setup.deadline_s - now_s:.0f} s",
                own=own,
            )
        return found

    def doing(self, sender: int) -> str:
        """Return what a member still had to send to this one, for the sentence about its failure; "" for
        nothing.
        """
        remaining = self.remaining(sender)
        return (
            f"sending; {remaining} of its {len(self.chunks)} chunks were still to come" if remaining else ""
        )

    def _ready(self, chunks: Iterable[int], own: bool) -> list[Reduce]:
        found = []
        for chunk in chunks if not self.halted else ():
            self._inputs[chunk] = self._reduction.take(chunk), own
            found.append(Reduce(chunk, *self._inputs[chunk]))
        return found
