"""Servers choose the experts that a grid lacks, and move to them, without a master and not too often."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moe.protocol.names import ExpertUid
from moe.server.logic.placement import (
    BUSY_SETTLE_S,
    PATIENCE_S,
    SETTLE_S,
    STAY_S,
    BusyMeter,
    GridLoad,
    Placement,
    choose_needed,
    plan_moves,
)
from swarm.core.ids import PeerId
from swarm.testing.placed_pipeline import PlacedPipeline

STAGES = [ExpertUid.parse(f"block.{number}") for number in range(4)]
PEERS = [PeerId(bytes([number]) * 32) for number in range(64)]


def load_of(*counts: int, busy: tuple[float, ...] = ()) -> GridLoad:
    peers = iter(PEERS)
    shares = busy or tuple(0.0 for _ in counts)
    return {
        stage: {next(peers): share for _ in range(count)}
        for stage, count, share in zip(STAGES, counts, shares, strict=True)
    }


def test_a_new_server_takes_what_nobody_hosts_then_the_busiest_then_the_rarest() -> None:
    rng, newcomer = random.Random(0), PEERS[-1]
    assert choose_needed(load_of(1, 0, 1, 1), newcomer, 1, rng) == [STAGES[1]]
    assert choose_needed(load_of(2, 1, 2, 2, busy=(0.2, 0.1, 0.9, 0.3)), newcomer, 1, rng) == [STAGES[2]]
    assert choose_needed(load_of(3, 2, 1, 3), newcomer, 2, rng) == [STAGES[1], STAGES[2]]
    assert choose_needed(load_of(1, 1, 1, 1), newcomer, 9, rng) == STAGES
    assert choose_needed(load_of(1, 1, 1, 1), PEERS[0], 9, rng) == STAGES[1:]  # no expert twice


def test_servers_that_start_together_rarely_choose_the_same() -> None:
    chosen = Counter(
        choose_needed(load_of(0, 0, 0, 0), PEERS[seed], 1, random.Random(seed))[0] for seed in range(64)
    )
    assert set(chosen) == set(STAGES)


@pytest.mark.parametrize(
    ("counts", "busy", "expected"),
    [
        ((2, 2, 2, 2), (), None),
        ((1, 1, 1, 1), (1.0, 0.1, 0.1, 0.1), None),  # nobody can be spared
        ((2, 0, 1, 1), (0.9, 0.0, 0.9, 0.9), (0, 1)),
        ((0, 1, 1, 1), (), None),
        ((2, 2, 2, 1), (0.5, 0.5, 0.5, 1.0), None),  # another one would be as busy afterwards
        ((3, 2, 2, 1), (0.33, 0.5, 0.5, 1.0), (0, 3)),
        ((4, 2, 1, 1), (0.1, 0.2, 0.3, 0.5), None),  # nobody needs it
    ],
    ids=["even", "no-spare", "starved", "starved-no-spare", "no-gain", "gain", "idle"],
)
def test_the_plan_moves_a_server_only_where_it_helps(
    counts: tuple[int, ...], busy: tuple[float, ...], expected: tuple[int, int] | None
) -> None:
    plan = plan_moves(load_of(*counts, busy=busy))
    moves = [(STAGES.index(move.source), STAGES.index(move.target)) for move in plan]
    assert moves == ([expected] if expected else [])


def test_the_plan_never_takes_the_last_server_of_an_expert() -> None:
    load = load_of(2, 0, 0, 0)
    (move,) = plan_moves(load)
    assert move.source == STAGES[0]
    assert plan_moves(load_of(3, 0, 0, 0)) != plan_moves(load)
    assert len(plan_moves(load_of(3, 0, 0, 0))) == 2


def test_only_the_planned_server_moves_and_only_after_the_plan_has_stood() -> None:
    load = load_of(2, 0, 1, 1)
    (move,) = plan_moves(load)
    machines = {peer: Placement(peer) for peer in PEERS[:4]}
    assert [machine.step(load, 0.0) for machine in machines.values()] == [None] * 4
    assert [machine.step(load, SETTLE_S - 1.0) for machine in machines.values()] == [None] * 4
    acted = {peer: machine.step(load, SETTLE_S) for peer, machine in machines.items()}
    assert {peer: one for peer, one in acted.items() if one is not None} == {move.server: move}


def test_the_plan_continues_without_a_server_that_does_not_move() -> None:
    load = load_of(3, 0, 1, 1)
    (first,) = plan_moves(load)
    others = [peer for peer in load[STAGES[0]] if peer != first.server]
    machines = [Placement(peer) for peer in others]
    for machine in machines:
        machine.step(load, 0.0)
        assert machine.step(load, SETTLE_S + PATIENCE_S) is None
        machine.step(load, SETTLE_S + PATIENCE_S + 1.0)
    later_s = SETTLE_S + PATIENCE_S + 1.0 + SETTLE_S
    assert sum(machine.step(load, later_s) is not None for machine in machines) == 1


def test_a_server_that_has_moved_stays_for_a_while_unless_an_expert_has_no_server() -> None:
    busy = load_of(3, 2, 2, 1, busy=(0.33, 0.5, 0.5, 1.0))
    (move,) = plan_moves(busy)
    machine = Placement(move.server)
    machine.step(busy, 0.0)
    assert machine.step(busy, BUSY_SETTLE_S - 1.0) is None
    assert machine.step(busy, BUSY_SETTLE_S) == move
    machine.step(busy, BUSY_SETTLE_S + 1.0)
    assert machine.step(busy, BUSY_SETTLE_S + STAY_S - 1.0) is None
    assert machine.step(busy, BUSY_SETTLE_S + STAY_S) == move
    starved = {**busy, STAGES[3]: {}}
    (urgent,) = plan_moves(starved)
    machine = Placement(urgent.server)
    machine.step(busy, 0.0)
    machine.step(starved, 0.0)
    assert machine.step(starved, SETTLE_S) == urgent


@pytest.mark.parametrize("seed", range(6))
def test_throughput_with_departures_is_within_a_tenth_of_the_best_placement(seed: int) -> None:
    """Sixteen servers host four stages. One dies every ten minutes on average, and one comes."""
    pipeline = PlacedPipeline(seed, 16, STAGES)
    pipeline.run_with_departures(4 * 3600, every_s=600.0)
    assert pipeline.computed >= 0.9 * pipeline.possible, pipeline.computed / pipeline.possible
    rests = [
        after - before
        for server in pipeline.servers
        for before, after in zip(server.moves_s, server.moves_s[1:], strict=False)
    ]
    assert min(rests, default=STAY_S) >= SETTLE_S


@pytest.mark.parametrize("seed", range(6))
def test_a_stage_that_loses_all_its_servers_gets_one_within_two_minutes(seed: int) -> None:
    pipeline = PlacedPipeline(seed, 8, STAGES)
    for _ in range(60):
        pipeline.second()
    assert pipeline.lose(STAGES[1]) <= 120.0
    for _ in range(600):
        pipeline.second()
    assert sum(len(one.moves_s) for one in pipeline.servers) == 1, "one server moves, and nobody else"


def test_a_server_is_as_busy_as_it_was_in_the_last_window() -> None:
    meter = BusyMeter(100.0)
    assert meter.fraction(3.0, 103.0) == 0.0  # too early to say
    assert meter.fraction(15.0, 120.0) == 0.75
    assert meter.fraction(15.0, 125.0) == 0.75
    assert meter.fraction(15.0, 140.0) == 0.0
    assert meter.fraction(99.0, 150.0) == 1.0
