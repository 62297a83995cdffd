"""The grid by itself: its shapes, the cells of peers after a round, and the remaining deviation from the mean
that torch computes.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from averaging.matchmaking.logic.cell_members import (
    CELL_MEMBERS_MAX,
    PEERS_MAX,
    CellMembers,
    is_over_by_word,
)
from averaging.matchmaking.logic.grid import (
    LOBBY,
    AveragingGrid,
    Place,
    Shape,
    key_at,
    shape_for,
    shape_of,
    split_key,
)
from swarm.core.ids import Address, Contact, PeerId
from swarm.testing.identities import SeededIdentity

PEERS = sorted(SeededIdentity(f"grid {number}").peer_id for number in range(400))


class Model:
    """A swarm in which every peer is present and every group of a cell averages: values and weights move from
    cell to cell.
    """

    def __init__(self, peers: int, group_size: int, rng: random.Random, *, weighted: bool = False) -> None:
        self.peers, self.rng = PEERS[:peers], rng
        self.shape = shape_for(peers, group_size)
        self.cells = {peer: self.shape.cell_of_rank(rank, peers) for rank, peer in enumerate(self.peers)}
        self.values = torch.tensor([rng.gauss(0.0, 1.0) for _ in self.peers], dtype=torch.float64)
        self.weights = torch.tensor(
            [rng.uniform(0.5, 20.0) if weighted else 1.0 for _ in self.peers], dtype=torch.float64
        )
        self.mean = float((self.values * self.weights).sum() / self.weights.sum())

    def sizes(self) -> list[int]:
        return list(Counter(self.cells.values()).values())

    def step(self) -> None:
        meeting: dict[int, list[int]] = {}
        for place, peer in enumerate(self.peers):
            meeting.setdefault(self.cells[peer], []).append(place)
        for cell, places in meeting.items():
            members, group_id = [self.peers[place] for place in places], self.rng.randbytes(32)
            whole = self.weights[places].sum()
            self.values[places] = (self.values[places] * self.weights[places]).sum() / whole
            self.weights[places] = whole / len(places)
            for member in members:
                self.cells[member] = self.shape.cell_after(cell, group_id, members, member)

    def deviation(self) -> float:
        return float((self.values - self.mean).square().mean().sqrt())


@pytest.mark.parametrize(
    ("group_size", "rounds"),
    [(2, 1), (2, 3), (2, 6), (3, 2), (3, 4), (4, 2), (4, 3), (5, 2), (6, 2), (7, 3), (16, 2)],
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_groups_of_m_are_exact_after_d_rounds(
    group_size: int, rounds: int, weighted: bool, seed: int
) -> None:
    model = Model(group_size**rounds, group_size, random.Random(seed), weighted=weighted)
    assert model.shape.rounds_to_mix == rounds
    for _ in range(rounds - 1):
        model.step()
        assert model.deviation() > 0.01
    model.step()
    if weighted:
        torch.testing.assert_close(
            model.values, torch.full_like(model.values, model.mean), rtol=0.0, atol=1e-12
        )
    else:
        assert model.deviation() < 1e-14


@pytest.mark.parametrize("seed", range(40))
def test_any_number_of_peers_keeps_the_mean_and_converges(seed: int) -> None:
    """Each `rounds_to_mix` rounds leave at most 1.25/M of the deviation, or 2.5/M if peers of a cell began
    with similar values. No cell outgrows a group.
    """
    rng = random.Random(seed)
    group_size = rng.choice([2, 3, 4, 5, 8, 16])
    peers = rng.randrange(group_size + 1, 12 * group_size)
    model = Model(peers, group_size, rng)
    if seed % 3 == 0:  # the first round brings little
        model.values = model.values.sort().values
    for share in (2.5 if seed % 3 == 0 else 1.25, 1.25, 1.25):
        before = model.deviation()
        for _ in range(model.shape.rounds_to_mix):
            assert max(model.sizes()) <= group_size
            assert max(model.sizes()) - min(model.sizes()) <= 2
            model.step()
            assert abs(float((model.values * model.weights).sum() / model.weights.sum()) - model.mean) < 1e-12
        assert model.deviation() <= before * share / group_size + 1e-12


@pytest.mark.parametrize(
    ("own_weight", "rounds", "deviation_min", "deviation_max"),
    [(True, 2, 1e-2, 1.0), (True, 40, 0.0, 1e-12), (False, 40, 1e-2, 1.0)],
)
def test_the_mean_is_kept_only_with_the_own_weight_in_every_round(
    own_weight: bool, rounds: int, deviation_min: float, deviation_max: float
) -> None:
    """A peer that uses its own weight again keeps the mean, though not exactly; equal weights after the first
    round lose it.
    """
    model = Model(16, 4, random.Random(1), weighted=True)
    given = model.weights.clone()
    for _ in range(rounds):
        model.step()
        model.weights[:] = given if own_weight else 1.0
    assert deviation_min <= model.deviation() <= deviation_max


def test_members_of_a_full_group_move_to_different_cells() -> None:
    for peers, group_size in ((64, 4), (256, 16), (12, 3), (200, 8)):
        shape = shape_for(peers, group_size)
        for cell in range(shape.cells):
            members = PEERS[cell : cell + group_size]
            after = [shape.cell_after(cell, bytes([cell % 256] * 32), members, member) for member in members]
            assert max(Counter(after).values()) == -(-group_size // shape.fan_out)
        from_lobby = {
            shape.cell_after(LOBBY, b"\x07" * 32, PEERS[:group_size], member) for member in PEERS[:group_size]
        }
        assert len(from_lobby) == min(group_size, shape.cells)


def test_shapes_hold_all_peers_and_change_with_hysteresis() -> None:
    for group_size in (2, 3, 4, 5, 7, 16, 64):
        for peers in range(1, 400):
            shape = shape_for(peers, group_size)
            assert shape.suits(peers)
            assert shape.cells * group_size >= peers
            assert (shape.cells == 1) == (peers <= group_size)
            assert peers <= group_size or 2 * shape.cells * group_size < 4 * peers + 2 * group_size
    assert shape_for(5, 1).cells == 1
    grid, changes = AveragingGrid(PEERS[0], 4), 0
    for turn in range(60):
        before = grid.shape
        grid.on_records(PEERS[1 : 24 + (turn * 7) % 3])  # 24 to 26: around a border
        changes += grid.shape != before
    assert changes == 2  # into the grid, and over the border once


def test_a_swarm_of_one_group_is_never_divided() -> None:
    grid = AveragingGrid(PEERS[0], 4)
    for others, cells in ((3, 1), (4, 2), (3, 1), (11, 3), (4, 2), (3, 1), (0, 1)):
        grid.on_records(PEERS[1 : 1 + others])
        assert grid.shape.cells == cells
        assert grid.divided == (others > 3)
        assert bool(grid.home.text) == grid.divided


def test_each_peer_begins_in_the_cell_of_its_rank_and_knows_the_other_members() -> None:
    grids = [AveragingGrid(peer, 4) for peer in PEERS[:11]]
    for grid in grids:
        grid.on_records(PEERS[:11])
    for peer, grid in zip(PEERS, grids, strict=False):
        members_at = {other for other, one in zip(PEERS, grids, strict=False) if one.cell == grid.cell} - {
            peer
        }
        assert set(grid.initial_members()) == members_at


def test_a_failed_round_leaves_a_peer_in_its_cell() -> None:
    grid = AveragingGrid(PEERS[0], 4)
    grid.on_records(PEERS[:16])
    home = grid.home
    for committed in (False, True):
        grid.on_group_formed(home, b"\x01" * 32, PEERS[:4])
        coming = grid.next
        grid.on_round_over(committed=committed)
        assert grid.home == (coming if committed else home)
        assert grid.has_moved == committed
    assert grid.initial_members() == []


def test_lost_peers_are_not_counted_unless_others_live_in_a_finer_shape() -> None:
    grid = AveragingGrid(PEERS[0], 4)
    grid.on_records(PEERS[1:5], lost={PEERS[4]})
    assert not grid.divided
    assert not grid.adopt_shape(Shape(4, 3)), "this does not suit the records"
    assert not grid.adopt_shape(Shape(3, 2)), "neither does another group size"
    assert grid.adopt_shape(Shape(4, 2))
    grid.on_records(PEERS[1:5], lost={PEERS[4]})
    assert grid.shape == Shape(4, 2), "other peers use this shape, and the records allow it"
    grid.on_records(PEERS[1:4])
    assert not grid.divided


def test_keys_carry_the_place_whatever_the_callers_round_key() -> None:
    place = Place(Shape(4, 8), 5)
    for round_key in ("", "7", "a\x1fb", "4.8.5"):
        key = key_at(round_key, place.text)
        assert split_key(key) == (round_key, place.text)
        assert split_key(round_key) == (round_key, "")
    assert shape_of(place.text) == Shape(4, 8)
    assert split_key(key_at("7", Place(Shape(4, 8), LOBBY).text)) == ("7", "*")
    for text in ("", "*", "4.8.8", "4.1.0", "1.2.0", "999.2.0", "4.99999999.1", "4.8", "x.y.z"):
        assert shape_of(text) is None


def contact(number: int) -> Contact:
    return Contact(PEERS[number], (Address(host="10.0.0.1", port=1 + number),))


def test_cell_members_follow_the_latest_turn_and_expire() -> None:
    cell_members, names = CellMembers(60.0), [PEERS[number] for number in range(3)]

    def members_at(place: str, now_s: float = 1.0) -> set[PeerId]:
        return {one.peer_id for one in cell_members.members_at(place, PEERS[9], now_s)}

    for number in range(3):
        cell_members.enter(contact(number), "a", 5, 0.0)
    assert members_at("a") == set(names)
    cell_members.enter(contact(0), "b", 4, 0.5)  # overtaken on its way
    assert members_at("b") == set()
    cell_members.enter(contact(0), "b", 6, 0.5)
    assert members_at("b") == {names[0]}
    assert members_at("a") == set(names[1:])
    cell_members.leave(names[0], "a", 7)  # it is elsewhere by now
    cell_members.leave(names[1], "a", 4)  # it has come again since
    assert members_at("b") == {names[0]}
    assert members_at("a") == set(names[1:])
    cell_members.leave(names[1], "a", 8)
    assert members_at("a") == {names[2]}
    assert members_at("a", 61.0) == set()
    assert len(cell_members) == 1


@pytest.mark.parametrize(
    ("members", "strangers", "is_over"),
    [
        ("", "", False),
        ("y", "", False),
        ("yy", "", True),
        ("yn", "", False),
        ("yyn", "", True),
        ("ynn", "", False),
        ("", "y", False),
        ("", "yy", True),
        ("n", "yy", False),
        ("y", "n", False),
        ("y", "y", True),
        ("y", "yy", True),
        ("yn", "yy", False),
        ("yy", "nnn", True),
    ],
)
def test_a_round_is_over_by_the_word_of_two_hosts_and_never_against_most_of_those_with_standing(
    members: str, strangers: str, is_over: bool
) -> None:
    """Regression test: a single host was believed, any stranger that had made an identity for the cell. Later
    strangers did not count where one host with standing had replied: that one alone was not enough, although
    two strangers alone were.
    """
    said = {PEERS[place]: word == "y" for place, word in enumerate(members + strangers)}
    standing = PEERS[: len(members)]
    assert is_over_by_word(said, lambda peer: peer in standing) is is_over


def test_cell_members_are_limited() -> None:
    cell_members = CellMembers(60.0)
    for number in range(PEERS_MAX + 50):
        cell_members.enter(Contact(SeededIdentity(number).peer_id, ()), "a", 1, 0.0)
    assert len(cell_members) == PEERS_MAX
    assert len(cell_members.members_at("a", PEERS[0], 1.0)) == CELL_MEMBERS_MAX
