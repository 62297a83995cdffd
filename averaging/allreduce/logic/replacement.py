"""The replacement of averages that this member holds by those that others hold: before a vote by the versions
that most members hold, and after a decision by the certified versions. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from averaging.allreduce.logic.assembly import Assembly
from averaging.allreduce.logic.effects import AskInventory, FetchChunk
from averaging.allreduce.logic.values import Inventory, InventoryQuestion
from averaging.allreduce.logic.versions import Version, winners

_FETCHES_MAX = 6  # averages fetched at once; each is a chunk in memory
EVERYTHING = InventoryQuestion()


class ChunkFetches:
    """Fetches of averages in other versions than this member holds; the holders of each are asked in turn."""

    def __init__(self, chosen: Mapping[int, tuple[Version, Sequence[int]]], assembly: Assembly) -> None:
        """Start. `chosen`: by chunk, the version to fetch and the members that hold it."""
        self._todo: deque[tuple[int, Version, list[int]]] = deque()
        self._busy: dict[int, tuple[Version, list[int]]] = {}
        for chunk, (version, places) in chosen.items():
            held = assembly.held.get(chunk)
            if held is None or not held.same(version):
                first = chunk % len(places) if places else 0
                self._todo.append((chunk, version, [*places[first:], *places[:first]]))

    @property
    def done(self) -> bool:
        """Return whether nothing is left to fetch, or nobody could send it."""
        return not self._todo and not self._busy

    def next(self) -> list[FetchChunk]:
        """Return the fetches to start now."""
        found = []
        while self._todo and len(self._busy) < _FETCHES_MAX:
            chunk, version, places = self._todo.popleft()
            if places:
                self._busy[chunk] = version, places[1:]
                found.append(FetchChunk(places[0], chunk, version))
        return found

    def expects(self, chunk: int, version: Version) -> bool:
        """Return whether this object started the fetch."""
        return chunk in self._busy and self._busy[chunk][0] == version

    def on_fetched(self, chunk: int, ok: bool) -> None:
        """Record that a fetch has ended."""
        version, places = self._busy.pop(chunk)
        if not ok and places:
            self._todo.appendleft((chunk, version, places))


class Adoption:
    """Takes the averages that a majority voted for from any member that holds them: their digest proves
    them.
    """

    def __init__(self, result: bytes, candidates: Sequence[int], assembly: Assembly) -> None:
        self.result = result
        self.why = "nobody can be dialed"  # reason why it has not succeeded yet
        self._candidates = deque(candidates)
        self._asked: int | None = None
        self._fetches: ChunkFetches | None = None
        self._assembly = assembly

    @property
    def failed(self) -> bool:
        """Return whether nobody is left to ask."""
        return not self._candidates and self._asked is None

    def next(self) -> list[AskInventory | FetchChunk]:
        """Return what to do now."""
        if self._fetches is not None:
            if not self._fetches.done:
                return list(self._fetches.next())
            self._fetches = None
            self._asked = None
        if self._asked is None and self._candidates:
            self._asked = self._candidates.popleft()
            return [AskInventory(self._asked, EVERYTHING)]
        return []

    def on_inventory(self, place: int, inventory: Inventory, chunks: int) -> None:
        """A candidate said what it holds. `chunks`: of the whole vector."""
        if place != self._asked or self._fetches is not None:
            return
        if len(inventory.versions) == chunks and self._assembly.result(inventory.versions) == self.result:
            self.why = "a member could not give all of it"
            self._fetches = ChunkFetches(
                {chunk: (version, [place]) for chunk, version in inventory.versions.items()}, self._assembly
            )
        else:
            self.on_no_inventory(place, "what it holds is not what was decided")

    def on_no_inventory(self, place: int, why: str) -> None:
        """A candidate could not be asked."""
        if place == self._asked and self._fetches is None:
            self.why, self._asked = why, None

    def expects(self, chunk: int, version: Version) -> bool:
        """Return whether this object started the fetch."""
        return self._fetches is not None and self._fetches.expects(chunk, version)

    def on_fetched(self, chunk: int, ok: bool) -> None:
        """Record that a fetch has ended."""
        assert self._fetches is not None
        self._fetches.on_fetched(chunk, ok)


class Convergence:
    """Takes of every chunk the version that most members hold, before this member votes."""

    def __init__(self, places: Iterable[int], assembly: Assembly, own: int | None) -> None:
        """`places`: members to ask. `own`: this member's place, if what it holds counts, as it does where
        others can ask for it.
        """
        self._waiting = set(places)
        self._unasked = sorted(self._waiting)
        self._tables: dict[int, Mapping[int, Version]] = {}
        self._assembly, self._own = assembly, own
        self._fetches: ChunkFetches | None = None

    @property
    def done(self) -> bool:
        """Return whether everything that could be had is in place."""
        return self._fetches is not None and self._fetches.done

    def next(self, chunks: int) -> list[AskInventory | FetchChunk]:
        """Return what to do now. `chunks`: of the whole vector."""
        asks, self._unasked = self._unasked, []
        if not self._waiting and self._fetches is None:
            if self._own is not None:
                self._tables[self._own] = dict(self._assembly.held)
            chosen = winners(self._tables, range(chunks))
            self._fetches = ChunkFetches(
                {
                    chunk: (version, [place for place in places if place != self._own])
                    for chunk, (version, places) in chosen.items()
                },
                self._assembly,
            )
        found: list[AskInventory | FetchChunk] = [AskInventory(place, EVERYTHING) for place in asks]
        return found + (list(self._fetches.next()) if self._fetches is not None else [])

    def on_inventory(self, place: int, inventory: Inventory) -> None:
        """A member said what it holds."""
        if place in self._waiting:
            self._tables[place] = inventory.versions
            self._waiting.discard(place)

    def on_no_inventory(self, place: int) -> None:
        """A member failed, or could not be asked."""
        self._waiting.discard(place)

    def expects(self, chunk: int, version: Version) -> bool:
        """Return whether this object started the fetch."""
        return self._fetches is not None and self._fetches.expects(chunk, version)

    def on_fetched(self, chunk: int, ok: bool) -> None:
        """Record that a fetch has ended."""
        assert self._fetches is not None
        self._fetches.on_fetched(chunk, ok)
