"""Cuts between two sides of a training, in both directions or in one, in every mode that has a history: what
the side with a quorum loses, and how soon afterwards all have one history.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import pytest

from averaging.history.grace import GRACE_S_MIN
from averaging.optim.reports import StepReport
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_scenarios import MODES
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

STEP_S, SAMPLES = 0.5, 4
EPOCH_S = 1.0  # length of an epoch with all peers
HEAL_S = 60.0
ROUND_FAILS_S = 8.0  # time until a round whose members were cut off has failed and the next one is found
DIRECTIONS = ("both", "from the first side", "to the first side")


class Scene(NamedTuple):
    """A cut of `cut_s` between two sides; the first side has the most senior electors."""

    mode: str
    sizes: tuple[int, int]
    direction: str
    cut_s: float

    @property
    def name(self) -> str:
        first, second = self.sizes
        return f"{self.mode} {first}-{second} {self.direction} {self.cut_s:g}"


@dataclass
class Outcome:
    """The effects of one cut."""

    healed_s: float = 0.0  # from the end of the cut until all peers have one history
    breaks: int = 0
    pause_s: float = 0.0  # the longest pause of the side with a quorum
    rounds_lost: int = 0  # failed rounds during the cut: the maximum over the peers of that side
    given_up: int = 0  # epochs given up, of all peers


ALL = [
    Scene(*one)
    for one in product(MODES, [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)], DIRECTIONS, [3.0, 6.0, 15.0, 60.0])
]
SHORT = [  # every mode, every direction and every length
    Scene("gradients", (1, 2), "both", 6.0),
    Scene("gradients", (1, 2), "from the first side", 6.0),
    Scene("gradients", (2, 1), "to the first side", 60.0),
    Scene("gradients-delayed", (2, 2), "from the first side", 15.0),
    Scene("local", (2, 1), "from the first side", 60.0),
    Scene("diloco", (1, 1), "to the first side", 3.0),
    Scene("diloco-delayed", (1, 2), "to the first side", 15.0),
    Scene("diloco-streaming", (2, 2), "both", 60.0),
]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("scene", SHORT, ids=[one.name for one in SHORT])
def test_a_cut_costs_a_quorum_one_round_and_leaves_one_history(scene: Scene) -> None:
    check(scene)


def test_the_side_that_gives_epochs_up_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Python shows no lower level by default: a user would not learn that work is lost, if no samples are."""
    caplog.set_level(logging.WARNING)
    outcome = run_virtual(cut(Scene("local", (2, 1), "both", 60.0)))
    assert outcome.given_up
    downloads = [one.message for one in caplog.records if one.message.startswith("downloading the state")]
    assert downloads
    assert all("made while it was cut off" in message for message in downloads)


@pytest.mark.slow
@pytest.mark.parametrize("scene", [one for one in ALL if one not in SHORT], ids=lambda one: one.name)
def test_any_cut_costs_a_quorum_one_round_and_leaves_one_history(scene: Scene) -> None:
    check(scene)


def check(scene: Scene) -> None:
    outcome = run_virtual(cut(scene))
    assert outcome.healed_s <= HEAL_S
    if scene.cut_s < GRACE_S_MIN:
        assert not outcome.breaks, "nobody continues by itself before the grace is over"
        assert not outcome.given_up
    # its own epochs, without the others' samples, and one failed round
    epoch_s = EPOCH_S * sum(scene.sizes) / scene.sizes[scene.sizes[1] > scene.sizes[0]]
    assert outcome.pause_s <= 2.0 * epoch_s + ROUND_FAILS_S
    assert outcome.rounds_lost <= 1


async def cut(scene: Scene) -> Outcome:
    """Cut a training in two, and watch it until it has one history again. Assert that no promise is
    broken.
    """
    network, outcome = SimulatedNetwork(1, LinkConfig(delay_s=0.03, jitter=0.5)), Outcome()
    checks, loop = TrainingChecks(Violations(), step_s_max=600.0), asyncio.get_running_loop()
    lost: dict[TrainingPeer, int] = {}
    is_cut = False

    def on_step(one: TrainingPeer, report: StepReport, seconds: float) -> None:
        checks.on_step(one, report, seconds)
        if is_cut:
            lost[one] = lost.get(one, 0) + report.rounds_failed

    count = sum(scene.sizes)
    async with asyncio.TaskGroup() as group:
        target = round(count * SAMPLES * EPOCH_S / STEP_S)
        config = TrainingConfig(target_batch_size=target, mode=MODES[scene.mode])
        swarm = TrainingSwarm(network, config, on_step, group)
        peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S) for _ in range(count)]
        assert await _until(lambda: all(one.optimizer and one.optimizer.epoch >= 4 for one in peers), 90.0)
        for one in peers:
            checks.ledger.read(one, loop.time())
        electors = checks.ledger.electors(checks.newest(peers) or b"") or ()
        peers.sort(key=lambda one: electors.index(one.peer.peer_id))
        sides = peers[: scene.sizes[0]], peers[scene.sizes[0] :]
        first, second = ([one.peer for one in side] for side in sides)
        quorum = sides[1] if len(second) > len(first) else sides[0]
        is_cut, head, since_s = True, b"", loop.time()
        if scene.direction == "both":
            network.partition(first)
        else:
            network.cut(*((first, second) if scene.direction == "from the first side" else (second, first)))
        end_s = loop.time() + scene.cut_s
        while loop.time() < end_s:
            await asyncio.sleep(0.25)
            newest = checks.newest(quorum) or b""
            if newest != head:
                head, since_s = newest, loop.time()
            outcome.pause_s = max(outcome.pause_s, loop.time() - since_s)
        is_cut = False
        network.heal()
        network.partition()
        assert await _until(lambda: not checks.apart(peers), HEAL_S)
        outcome.healed_s = loop.time() - end_s
        epoch = max(one.optimizer.epoch for one in peers if one.optimizer)
        assert await _until(lambda: all(one.optimizer and one.optimizer.epoch > epoch for one in peers), 60.0)
        assert not checks.apart(peers), "they train on together"
        await swarm.close()
    assert not checks.violations.count, checks.violations.lines
    outcome.breaks = sum(one.proposal.is_break for one in checks.ledger.certificates.values())
    outcome.rounds_lost = max(lost.get(one, 0) for one in quorum)
    outcome.given_up = checks.given_up
    return outcome


async def _until(holds: Callable[[], bool], limit_s: float) -> bool:
    end_s, found = asyncio.get_running_loop().time() + limit_s, False
    while not (found := holds()) and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110 - virtual
        await asyncio.sleep(0.25)
    return found
