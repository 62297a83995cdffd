"""The decisions about the shard of a reducer that this member has lost: a pure state machine.

Missing chunks are downloaded from members that hold them. A chunk that nobody holds, and nobody can still get
from the lost reducer, is reduced again by the successor: the first member after it in group order that is
alive and can be dialed. A successor that lives and makes nothing of the chunks is passed over after some
time: the next one takes over too; and it waits only for a while for averages that are said to be on their way
to others. Each member determines the successor by its own view; when two members take the role, votes decide
between their results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from averaging.allreduce.logic.versions import Version

FETCHES_MAX = 6  # averages asked for at once, per shard; each is a chunk in memory
# averages that a member claimed but failed to deliver; after this many its claims are ignored
FAILURES_MAX = 32
# chunks reduced again at once, per shard; each needs a contribution of every member in memory
REDUCTIONS_MAX = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this member what it holds of the shard; `wait`: it may take its time to say something new."""

    place: int
    wait: bool


@dataclass(frozen=True, slots=True)
class Take:
    """Fetch this average from this member."""

    chunk: int
    place: int
    version: Version


@dataclass(frozen=True, slots=True)
class Redo:
    """Reduce this chunk again on this member."""

    chunk: int


@dataclass(slots=True)
class _Report:
    """The last report of a member."""

    held: dict[int, Version] = field(default_factory=dict)
    count: int = 0
    sealed: bool = False
    heard: bool = False
    asking: bool = False
    failures: int = 0


def successor(reducer: int, living: Collection[int], dialable: Collection[int], members: int) -> int | None:
    """Return the member that takes over the shard of `reducer`: the first after it in group order that is
    alive and can be dialed. None: there is none.
    """
    for distance in range(1, members):
        place = (reducer + distance) % members
        if place in living and place in dialable:
            return place
    return None


def attempt(reducer: int, place: int, members: int) -> int:
    """Return the attempt number of an average of `reducer`'s shard that the member at `place` made."""
    return (place - reducer) % members


class Repair:
    """One lost shard. It is told which averages other members hold and which actions succeeded; `poll`
    returns the actions to take, each once until its outcome is reported.
    """

    def __init__(
        self, reducer: int, *, own: int, dialable: Iterable[int], members: int, trusted: bool
    ) -> None:
        """Start the repair. `trusted`: the reducer is alive and only the connection broke, so averages that
        it holds may still be requested.
        """
        self.reducer = reducer
        self._own = own
        self._dialable = frozenset(dialable)
        self._members = members
        self._living = set(range(members)) if trusted else set(range(members)) - {reducer}
        self.trusted = trusted
        # the successor cannot ask this member, which asks it, whether it lacks anything or not
        self._helping = own not in self._dialable
        self._reports = {place: _Report() for place in self._dialable if place != own}
        self._waits = True  # wait for members that may still receive averages of the lost reducer
        self._passed_over: set[int] = set()  # live successors that did not deliver in time
        self._lacking: set[int] = set()
        self._busy: set[int] = set()
        self._redoing: set[int] = set()
        # (chunk, place, digest) that the member failed to deliver
        self._failed: set[tuple[int, int, bytes]] = set()

    @property
    def owner(self) -> int | None:
        """Return the member that takes over."""
        candidates = self._living - self._passed_over - {self.reducer}
        return successor(self.reducer, candidates, self._dialable, self._members)

    @property
    def owned(self) -> bool:
        """Return whether this member takes over."""
        return self.owner == self._own

    @property
    def lacking(self) -> frozenset[int]:
        """Return the chunks that are still missing."""
        return frozenset(self._lacking)

    @property
    def needs_successor(self) -> bool:
        """Return whether this member lacks chunks, or may have to give a successor its values of them."""
        return bool(self._lacking) or self._helping

    def known(self, place: int) -> tuple[int, bool]:
        """Return this member's last report: how many averages it holds, and whether it is sealed."""
        report = self._reports[place]
        return report.count, report.sealed

    # ---- events

    def lack(self, chunks: Iterable[int]) -> None:
        """Add chunks that this member needs."""
        self._lacking |= set(chunks)

    def mark_failed(self, place: int) -> None:
        """Mark a member as dead, or as one that gave up."""
        self._living.discard(place)

    def distrust(self) -> None:
        """Stop requesting averages from the lost reducer."""
        self.trusted = False
        self._living.discard(self.reducer)

    def wait_no_more(self) -> None:
        """Reduce chunks that nobody holds again, although a member says that their averages may still reach
        it.
        """
        self._waits = False

    def pass_over(self) -> None:
        """Let the next member take over too: the successor has made nothing for too long."""
        if self.owner is not None:
            self._passed_over.add(self.owner)

    def on_report(self, place: int, held: Mapping[int, Version], sealed: bool) -> None:
        """Process a member's inventory."""
        report = self._reports[place]
        # an empty average is accepted only if this member found it itself
        made = attempt(self.reducer, place, self._members)
        report.held = {
            chunk: version
            for chunk, version in held.items()
            if not version.empty or version.attempt == made != 0
        }
        report.count, report.sealed, report.heard, report.asking = len(held), sealed, True, False
        if report.failures >= FAILURES_MAX:
            report.held, report.sealed = {}, True

    def pause(self, place: int) -> None:
        """Stop asking this member until `on_silence`."""
        self._reports[place].asking = True

    def on_silence(self, place: int) -> None:
        """Ask a member again: it could not be asked, it refused, or its pause is over."""
        self._reports[place].asking = False

    def on_held(self, chunk: int) -> None:
        """Record that a chunk is in place, from any source."""
        self._lacking.discard(chunk)
        self._busy.discard(chunk)
        self._redoing.discard(chunk)

    def on_failed(self, take: Take) -> None:
        """Record that a member could not send an average."""
        self._failed.add((take.chunk, take.place, take.version.digest))
        self._reports[take.place].failures += 1
        self._busy.discard(take.chunk)

    # ---- decisions

    def poll(self) -> list[Ask | Take | Redo]:
        """Return the actions to take now."""
        if not self.needs_successor:
            return []
        todo: list[Ask | Take | Redo] = list(self._asks())
        asked = [place for place in sorted(self._reports) if place in self._living]
        may_redo = self.owned and (
            not self._waits
            or all(self._reports[place].heard and self._reports[place].sealed for place in asked)
        )
        for chunk in sorted(self._lacking - self._busy):
            take = self._source(chunk, asked)
            if take is not None:
                if len(self._busy) - len(self._redoing) < FETCHES_MAX:
                    self._busy.add(chunk)
                    todo.append(take)
            elif may_redo and len(self._redoing) < REDUCTIONS_MAX:
                self._busy.add(chunk)
                self._redoing.add(chunk)
                todo.append(Redo(chunk))
        return todo

    def _asks(self) -> Iterable[Ask]:
        owner = self.owner
        for place, report in sorted(self._reports.items()):
            if place not in self._living or report.asking:
                continue
            # a successor that was passed over may still produce the chunks
            again = place == owner or place in self._passed_over
            if place == self.reducer or (owner == self._own and not report.sealed):
                again = again or bool(self._lacking)
            if again or (self._lacking and not report.heard):
                report.asking = True
                yield Ask(place, wait=report.heard)

    def _source(self, chunk: int, asked: list[int]) -> Take | None:
        """Return the member to download from: those that hold the lowest attempt take turns, so that none
        gets all requests.
        """
        found = []
        for place in asked:
            version = self._reports[place].held.get(chunk)
            if version is not None and (chunk, place, version.digest) not in self._failed:
                found.append(Take(chunk, place, version))
        if not found:
            return None
        lowest = min((take.version.empty, take.version.attempt) for take in found)
        best = [take for take in found if (take.version.empty, take.version.attempt) == lowest]
        return best[chunk % len(best)]
