"""The Moshpit grid: which peers meet in a round when more hold an averager than one group takes (arXiv
2103.03239, in a form of ours).

A swarm of N peers, groups of M: the peers of one cell average, and there are C cells, enough for all. A cell
is a number below C. After a committed round the member at place y of the group (an order that the group id
gives) goes on to cell (cell · S + y) mod C, with S = min(C, M): a generalised de Bruijn graph. With C =
M^(d-1) a cell is a string of d - 1 digits which drops the oldest digit and takes up the place in the group,
so that nobody meets whom it has just met, and d rounds make M^d peers hold the exact average. No round number
and no axis has to be agreed upon: a cell is all that a peer remembers. What a member can do is in
docs/decisions/0013.

Pure: no I/O, time or chance. Every peer derives the shape from the number of holders that it counts, and its
first cell from its place among them; nobody assigns anything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from averaging.matchmaking.logic.group import GROUP_MEMBERS_MAX
from swarm.core.ids import PeerId

CELLS_MAX = 1 << 24
ROOM = -1  # the cell of those who found theirs empty, or full: the same whatever shape they believe in
PLACE_MAX = 32  # characters of a place within a key
# of what the coarser shape holds: a swarm that breathes around a border keeps its cells
_SHRINKS_BELOW = 0.75
_MARK = "\x1f"
_PLACE = re.compile(r"(\d{1,3})\.(\d{1,8})\.(\d{1,8})")
_ROOM_TEXT = "*"


@dataclass(frozen=True, slots=True)
class Shape:
    """How many cells, for groups of which size. One cell: no grid, everybody meets everybody."""

    group_size: int
    cells: int = 1

    @property
    def fan(self) -> int:
        """Into how many cells a full group scatters."""
        return min(self.cells, self.group_size)

    @property
    def rounds_to_mix(self) -> int:
        """Rounds after which every peer's value has reached every cell: d for M^d peers, who then hold the
        exact average.
        """
        rounds, reached = 1, 1
        while reached < self.cells:
            rounds, reached = rounds + 1, reached * self.fan
        return rounds

    def suits(self, peers: int) -> bool:
        """Whether so many peers may keep this shape; the ranges of neighbours overlap, except that one
        group's worth is never divided.
        """
        if self.cells == 1 or self.group_size < 2:
            return self.cells == 1 and (peers <= self.group_size or self.group_size < 2)
        coarser = _coarser(self.group_size, self.cells)
        least = coarser * self.group_size * (_SHRINKS_BELOW if coarser > 1 else 1.0)
        return least < peers <= self.cells * self.group_size

    def cell_of_rank(self, rank: int, peers: int) -> int:
        """Where a peer begins that is the `rank`-th of all: runs of equal length, so that views that differ
        by a peer differ little.
        """
        return rank * self.cells // peers

    def cell_after(self, cell: int, group_id: bytes, members: Collection[PeerId], own: PeerId) -> int:
        """The cell of the member `own` after the round of this group, which met in `cell`."""
        order = sorted(members, key=lambda member: hashlib.sha256(group_id + member.public_key).digest())
        place = order.index(own)
        if self.cells == 1:
            return 0
        if cell == ROOM:  # they came from anywhere: as far apart as they can
            return (int.from_bytes(group_id[:8], "big") + place * self.cells // len(order)) % self.cells
        # by the digit that is dropped: groups of one size fill all cells alike
        turned = place + cell * self.fan // self.cells
        return (cell * self.fan + turned % self.fan) % self.cells


def shape_for(peers: int, group_size: int) -> Shape:
    """The shape of a swarm without a past: the fewest cells that hold all, of those that a swarm may have."""
    cells = 1
    while group_size > 1 and cells * group_size < peers and cells < CELLS_MAX:
        cells = _finer(group_size, cells)
    return Shape(group_size, cells)


def _finer(group_size: int, cells: int) -> int:
    """M^k times 1, 3/2, 2, 3, 4, 6, 8, 12, … below M: about half as many again each time, and all powers of M
    among them.
    """
    unit = 1
    while cells >= unit * group_size:
        unit *= group_size
    if unit > 1 and cells < unit * 3 // 2:
        return unit * 3 // 2
    times = cells // unit
    if cells == unit * times:
        times = times * 4 // 3 if times % 3 == 0 else times + max(times // 2, 1)
        return unit * min(times, group_size)
    return 2 * unit


def _coarser(group_size: int, cells: int) -> int:
    before = at = 1
    while at < cells:
        before, at = at, _finer(group_size, at)
    return before


@dataclass(frozen=True, slots=True)
class Place:
    """Where peers meet: a cell of a shape, or the room of the strays."""

    shape: Shape
    cell: int

    @property
    def text(self) -> str:
        """As it travels; "" where there is no grid."""
        if self.cell == ROOM:
            return _ROOM_TEXT
        return f"{self.shape.group_size}.{self.shape.cells}.{self.cell}" if self.shape.cells > 1 else ""


def key_at(round_key: str, place: str) -> str:
    """The key under which peers of this place search: only equal keys meet."""
    return f"{round_key}{_MARK}{place}" if place else round_key


def split_key(key: str) -> tuple[str, str]:
    """(round key, place) of a key; the place is "" outside of a grid."""
    round_key, mark, place = key.rpartition(_MARK)
    if mark and (place == _ROOM_TEXT or _PLACE.fullmatch(place)):
        return round_key, place
    return key, ""


def shape_of(place: str) -> Shape | None:
    """The shape in which a place is; None for the room, for no grid, and for what is none."""
    found = _PLACE.fullmatch(place)
    if found is None:
        return None
    group_size, cells, cell = (int(digits) for digits in found.groups())
    if not (2 <= group_size <= GROUP_MEMBERS_MAX and 2 <= cells <= CELLS_MAX and cell < cells):
        return None
    return Shape(group_size, cells)


class AveragingGrid:
    """One peer's part in the grid: the shape that it believes in, and its cell."""

    def __init__(self, own: PeerId, group_size: int) -> None:
        self._own = own
        self._ids: list[PeerId] = [own]  # all holders by the records, sorted: what ranks are counted in
        self._persuaded = False  # our shape is that of others
        self._next: int | None = None  # the cell after the round in progress, should it be committed
        self.shape = Shape(group_size)
        self.cell = 0
        self._strayed = 0  # how often we found no place in our cell
        self.settled = False  # our cell follows from a group, no longer from our rank
        self.peers = 1  # that live, as far as we know, ourselves included

    @property
    def divided(self) -> bool:
        return self.shape.cells > 1

    @property
    def home(self) -> Place:
        return Place(self.shape, self.cell)

    @property
    def room(self) -> Place:
        return Place(self.shape, ROOM)

    @property
    def next(self) -> Place | None:
        """Where we shall be when the round in progress is committed."""
        return Place(self.shape, self._next) if self._next is not None else None

    @property
    def expected(self) -> int:
        """How many a cell should hold, at least."""
        return self.peers // self.shape.cells

    def saw(self, others: Iterable[PeerId], lost: Collection[PeerId] = ()) -> None:
        """The other holders by the records, of whom some are `lost`: they did not answer us. The shape
        follows the number of the rest.

        Ranks are counted in the records, which are the same for everybody: who is lost each peer finds out
        for itself.
        """
        self._ids = sorted({self._own, *others})
        self.peers = sum(peer_id not in lost for peer_id in self._ids)
        if not (self.shape.suits(self.peers) or (self._persuaded and self.shape.suits(len(self._ids)))):
            self._take(shape_for(self.peers, self.shape.group_size))
        elif not self.settled:
            self._rank()

    def heard(self, shape: Shape) -> bool:
        """Somebody lives in this shape. Where ours and theirs both suit the swarm, everybody takes the finer
        one: a bounded concession, since two or three shapes suit any number of peers. Whether it was taken.
        """
        if (
            shape.group_size != self.shape.group_size
            or shape.cells <= self.shape.cells
            or not shape.suits(len(self._ids))
        ):
            return False
        self._take(shape, persuaded=True)
        return True

    def began(self, place: Place, group_id: bytes, members: Collection[PeerId]) -> None:
        """We are in a group that met at `place`."""
        cell = place.cell if place.shape == self.shape else ROOM
        self._next = self.shape.cell_after(cell, group_id, members, self._own)

    def over(self, *, committed: bool) -> None:
        """Its round has ended: go on, or stay for another attempt."""
        if committed and self._next is not None:
            self.cell, self.settled = self._next, True
        self._next = None

    def stray(self) -> None:
        """Nobody could take us in our cell, which is empty or full: from now on we belong to another, as if
        by lot.
        """
        if self.divided:
            lot = hashlib.sha256(
                self._own.public_key + self.home.text.encode() + self._strayed.to_bytes(8, "big")
            ).digest()
            self._strayed += 1
            self.cell = (
                self.cell + 1 + int.from_bytes(lot[:8], "big") % (self.shape.cells - 1)
            ) % self.shape.cells
            self.settled = True

    def ranked(self) -> list[PeerId]:
        """The others who begin in our cell by their rank; nobody once we have moved on."""
        if self.settled or not self.divided:
            return []
        cells, peers = self.shape.cells, len(self._ids)
        first, end = -(-self.cell * peers // cells), -(-(self.cell + 1) * peers // cells)
        return [peer_id for peer_id in self._ids[first:end] if peer_id != self._own]

    def _take(self, shape: Shape, *, persuaded: bool = False) -> None:
        self.shape, self.settled, self._next, self._persuaded = shape, False, None, persuaded
        self._rank()

    def _rank(self) -> None:
        self.cell = self.shape.cell_of_rank(self._ids.index(self._own), len(self._ids))
