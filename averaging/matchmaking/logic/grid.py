"""The Moshpit grid: which peers meet in a round when more hold an averager than fit into one group (a variant
of arXiv 2103.03239).

In a swarm of N peers with groups of M, the peers of one cell average, and there are C cells, enough for all.
A cell is a number below C. After a committed round the member at place y of the group (an order derived from
the group id) moves to cell (cell · S + y) mod C, with S = min(C, M): a generalised de Bruijn graph. With C =
M^(d-1) a cell is a string of d - 1 digits that drops its oldest digit and appends the place in the group.
Peers that have just met therefore do not meet again, and after d rounds M^d peers hold the exact average.
Peers need not agree on a round number or an axis: the cell is all that a peer remembers. docs/decisions/0013
discusses hostile members.

The module has no I/O, time or randomness. Every peer derives the shape from the number of holders, and its
first cell from its rank among them; there is no coordinator.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from averaging.matchmaking.logic.group import GROUP_MEMBERS_MAX
from averaging.matchmaking.logic.presence_shards import HolderShard
from swarm.core.ids import PeerId

CELLS_MAX = 1 << 24
LOBBY = -1  # the lobby, for peers whose cell was empty or full; equal for every shape
ELECTORS = -2  # the cell of a run's electors, which decide together; equal for every shape
PLACE_MAX = 32  # characters of a place within a key
# share of the coarser shape's capacity; hysteresis keeps the cells of a swarm near a boundary
_SHRINKS_BELOW = 0.75
_EVEN_SHARE = 0.75  # share of the mean cell size above which a divided swarm stops waiting for more
_MARK = "\x1f"
_PLACE = re.compile(r"(\d{1,3})\.(\d{1,8})\.(\d{1,8})")
_LOBBY_TEXT, _ELECTORS_TEXT = "*", "+"


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of cells, and the size of groups. With one cell there is no grid: every peer may meet every
    other.
    """

    group_size: int
    cells: int = 1

    @property
    def fan_out(self) -> int:
        """Return the number of cells into which the members of a full group move."""
        return min(self.cells, self.group_size)

    @property
    def rounds_to_mix(self) -> int:
        """Return the number of rounds after which every peer's value has reached every cell: d for M^d peers,
        which then hold the exact average.
        """
        rounds, reached = 1, 1
        while reached < self.cells:
            rounds, reached = rounds + 1, reached * self.fan_out
        return rounds

    def suits(self, peers: int) -> bool:
        """Return whether a swarm of `peers` may keep this shape. The ranges of neighbouring shapes overlap,
        except that a swarm that fits into one group is never divided.
        """
        if self.cells == 1 or self.group_size < 2:
            return self.cells == 1 and (peers <= self.group_size or self.group_size < 2)
        coarser = _coarser(self.group_size, self.cells)
        peers_min = coarser * self.group_size * (_SHRINKS_BELOW if coarser > 1 else 1.0)
        return peers_min < peers <= self.cells * self.group_size

    def cell_of_rank(self, rank: int, peers: int) -> int:
        """Return the first cell of the peer that is the `rank`-th of `peers`. Cells are runs of equal length,
        so that views that differ by one peer differ little.
        """
        return rank * self.cells // peers

    def cell_after(self, cell: int, group_id: bytes, members: Collection[PeerId], own: PeerId) -> int:
        """Return the cell of the member `own` after the round of this group, which met in `cell`."""
        order = sorted(members, key=lambda member: hashlib.sha256(group_id + member.public_key).digest())
        place = order.index(own)
        if self.cells == 1:
            return 0
        if cell == LOBBY:  # the members came from any cell: spread them as far apart as possible
            return (int.from_bytes(group_id[:8], "big") + place * self.cells // len(order)) % self.cells
        # rotated by the digit that is dropped, so that groups of one size fill all cells evenly
        rotated = place + cell * self.fan_out // self.cells
        return (cell * self.fan_out + rotated % self.fan_out) % self.cells


def shape_for(peers: int, group_size: int) -> Shape:
    """Return the shape of a swarm without a past: the fewest cells that hold all peers, among the numbers of
    cells that a swarm may have.
    """
    cells = 1
    while group_size > 1 and cells * group_size < peers and cells < CELLS_MAX:
        cells = _finer(group_size, cells)
    return Shape(group_size, cells)


def _finer(group_size: int, cells: int) -> int:
    """Return the next number of cells: M^k times 1, 3/2, 2, 3, 4, 6, 8, 12, … below M. Each is about half as
    large again as the one before, and all powers of M are among them.
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
    """A meeting place of peers: a cell of a shape, the lobby of unmatched peers, or the electors' cell."""

    shape: Shape
    cell: int

    @property
    def text(self) -> str:
        """Return the form that is sent to other peers; "" without a grid."""
        if self.cell == LOBBY:
            return _LOBBY_TEXT
        if self.cell == ELECTORS:
            return _ELECTORS_TEXT
        return f"{self.shape.group_size}.{self.shape.cells}.{self.cell}" if self.shape.cells > 1 else ""


def key_at(round_key: str, place: str) -> str:
    """Return the key under which peers at this place search. Only peers with equal keys meet."""
    return f"{round_key}{_MARK}{place}" if place else round_key


def split_key(key: str) -> tuple[str, str]:
    """Split a key into (round key, place). The place is "" outside a grid."""
    round_key, mark, place = key.rpartition(_MARK)
    if mark and (place in (_LOBBY_TEXT, _ELECTORS_TEXT) or _PLACE.fullmatch(place)):
        return round_key, place
    return key, ""


def shape_of(place: str) -> Shape | None:
    """Return the shape that a place belongs to; None for the lobby, for no grid, and for malformed text."""
    found = _PLACE.fullmatch(place)
    if found is None:
        return None
    group_size, cells, cell = (int(digits) for digits in found.groups())
    if not (2 <= group_size <= GROUP_MEMBERS_MAX and 2 <= cells <= CELLS_MAX and cell < cells):
        return None
    return Shape(group_size, cells)


class AveragingGrid:
    """One peer's view of the grid: the shape that it assumes, and its cell."""

    def __init__(self, own: PeerId, group_size: int) -> None:
        self._own = own
        # the holders of this peer's shard in the records, sorted; ranks are positions in it. In a small swarm
        # there is one shard, of all holders
        self._ids: list[PeerId] = [own]
        self._shard = HolderShard()
        self._total = 1  # all holders by the records; in a divided swarm an estimate
        self._adopted = False  # the shape was adopted from other peers
        self._may_divide = True
        self._next: int | None = None  # the cell after the round in progress, if that is committed
        self.shape = Shape(group_size)
        self.cell = 0
        self._moves = 0  # number of searches without a group in this peer's cell
        self.has_moved = False  # True: the cell follows from a group; False: from the rank
        self.peers = 1  # live peers as far as known, this one included

    @property
    def divided(self) -> bool:
        return self.shape.cells > 1

    @property
    def home(self) -> Place:
        return Place(self.shape, self.cell)

    @property
    def lobby(self) -> Place:
        return Place(self.shape, LOBBY)

    @property
    def electors(self) -> Place:
        return Place(Shape(self.shape.group_size), ELECTORS)

    @property
    def next(self) -> Place | None:
        """Return the place of this peer after the round in progress, should it be committed; None when there
        is none.
        """
        return Place(self.shape, self._next) if self._next is not None else None

    @property
    def expected(self) -> int:
        """Return the smallest number of peers that a cell should hold. Where records are divided into shards
        cells are less even, because peers estimate their number and their ranks.
        """
        share = _EVEN_SHARE if self._shard.bits else 1.0
        return int(share * self.peers) // self.shape.cells

    def on_records(
        self,
        others: Iterable[PeerId],
        lost: Collection[PeerId] = (),
        shard: HolderShard | None = None,
        *,
        total: int = 0,
        may_divide: bool = True,
    ) -> None:
        """Process the other holders in the presence records; those in `lost` did not answer this peer. The
        shape follows the number of the rest. `shard`: the shard of these records; `total`: the number of
        holders by all shards that were read, if there were several. Without `may_divide` there is one cell
        for any number of holders.

        Ranks are counted over all records, which are the same for everybody, because each peer finds out by
        itself which peers are lost.
        """
        self._ids, self._shard = sorted({self._own, *others}), shard or HolderShard()
        self._total = max(total, len(self._ids))
        live = sum(peer_id not in lost for peer_id in self._ids)
        self.peers = max(self._total * live // len(self._ids), 1)
        self._may_divide = may_divide
        if not may_divide:
            self._set_shape(Shape(self.shape.group_size))
        elif not (self.shape.suits(self.peers) or (self._adopted and self.shape.suits(self._total))):
            self._set_shape(shape_for(self.peers, self.shape.group_size))
        elif not self.has_moved:
            self._set_first_cell()

    def adopt_shape(self, shape: Shape) -> bool:
        """Process the shape that another live peer assumes. Return whether it was adopted.

        When both shapes suit the swarm, all peers adopt the finer one. This is a bounded concession, since
        two or three shapes suit any number of peers.
        """
        if (
            not self._may_divide
            or shape.group_size != self.shape.group_size
            or shape.cells <= self.shape.cells
            or not shape.suits(self._total)
        ):
            return False
        self._set_shape(shape, adopted=True)
        return True

    def on_group_formed(self, place: Place, group_id: bytes, members: Collection[PeerId]) -> None:
        """Record that this peer is in a group that met at `place`."""
        cell = place.cell if place.shape == self.shape else LOBBY
        self._next = self.shape.cell_after(cell, group_id, members, self._own)

    def on_round_over(self, *, committed: bool) -> None:
        """Record the end of the round: move to the next cell when it was committed, or stay for another
        attempt.
        """
        if committed and self._next is not None:
            self.cell, self.has_moved = self._next, True
        self._next = None

    def move_to_other_cell(self) -> None:
        """Move to another, pseudo-random cell, because no peer was left in this peer's cell or its group was
        full.
        """
        if self.divided:
            selection_hash = hashlib.sha256(
                self._own.public_key + self.home.text.encode() + self._moves.to_bytes(8, "big")
            ).digest()
            self._moves += 1
            self.cell = (
                self.cell + 1 + int.from_bytes(selection_hash[:8], "big") % (self.shape.cells - 1)
            ) % self.shape.cells
            self.has_moved = True

    def initial_members(self) -> list[PeerId]:
        """Return the other peers that begin in this peer's cell by their rank; none once this peer has moved
        on.
        """
        if self.has_moved or not self.divided:
            return []
        cells, peers = self.shape.cells, self._ranks
        first, end = -(-self.cell * peers // cells), -(-(self.cell + 1) * peers // cells)
        before = self._shard.prefix * len(self._ids)
        return [
            peer_id
            for peer_id in self._ids[max(first - before, 0) : max(end - before, 0)]
            if peer_id != self._own
        ]

    @property
    def _ranks(self) -> int:
        """Return the number of ranks, as if all shards had the size of this peer's."""
        return len(self._ids) << self._shard.bits

    def _set_shape(self, shape: Shape, *, adopted: bool = False) -> None:
        self.shape, self.has_moved, self._next, self._adopted = shape, False, None, adopted
        self._set_first_cell()

    def _set_first_cell(self) -> None:
        rank = self._shard.prefix * len(self._ids) + self._ids.index(self._own)
        self.cell = self.shape.cell_of_rank(rank, self._ranks)
