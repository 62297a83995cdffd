"""Trainings in which most peers cannot be called but through relays, and the relays die one after another."""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarm.core.ids import Contact
from swarm.testing.checkers import Violations
from swarm.testing.dht_swarm import service_of
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual, until

PEERS, RELAYS = 10, 4
STEP_S, SAMPLES = 0.5, 4
LEARNED_S = 4.0  # until a peer behind a dead relay has a reservation at another one, and announces it
EPOCH_S_MAX = 10.0  # with a round that failed because its relay died
EPOCHS = 3  # between two deaths


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # each death is a warning of many peers


async def relays_of(network: SimulatedNetwork) -> list[SimulatedPeer]:
    """Make relays that are entry points, too, as those of `swarm bootstrap` are."""
    made = [network.peer() for _ in range(RELAYS)]
    services = [service_of(one) for one in made]
    for service in services[1:]:
        await service.join([made[0].contact])
    return made


def reserve(one: SimulatedPeer, relays: list[SimulatedPeer]) -> Contact:
    """Return the contact of a peer that has reservations at two relays."""
    live = [relay for relay in relays if relay.up]
    chosen = [live[(one.index + number) % len(live)].contact for number in range(min(2, len(live)))]
    return Contact(one.peer_id, (), tuple(chosen))


def behind(peers: list[TrainingPeer], relay: SimulatedPeer) -> list[TrainingPeer]:
    return [one for one in peers if relay.contact in one.peer.contact.relays]


@pytest.mark.parametrize(
    ("hidden", "seed"),
    [
        (3, 0),
        (9, 0),
        (10, 0),
        *(pytest.param(h, s, marks=pytest.mark.slow) for h in (3, 9, 10) for s in (1, 2, 3)),
    ],
)
def test_a_training_continues_while_its_relays_die_one_after_another(hidden: int, seed: int) -> None:
    async def main() -> None:
        network = SimulatedNetwork(seed)
        relays = await relays_of(network)
        checks = TrainingChecks(Violations(), step_s_max=300.0)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            config = TrainingConfig(target_batch_size=2 * PEERS * SAMPLES)
            swarm = TrainingSwarm(network, config, checks.on_step, group, relays)
            peers = []
            for number in range(PEERS):
                peer = network.peer(dialable=number >= hidden)
                if number < hidden:
                    peer.contact = reserve(peer, relays)
                peers.append(await swarm.add(peer=peer, batch=SAMPLES, compute_s=STEP_S))

            def epoch() -> int:
                return min(one.optimizer.epoch if one.optimizer is not None else 0 for one in peers)

            assert await until(lambda: epoch() >= EPOCHS, 120.0)
            for relay in relays[: RELAYS - 1]:
                affected, before, given = behind(peers, relay), epoch(), [one.given for one in peers]
                await network.crash(relay)
                checks.faults_s = loop.time()
                await asyncio.sleep(LEARNED_S)
                for one in affected:
                    one.node.announce(reserve(one.peer, relays))
                assert await until(lambda goal=before + EPOCHS: epoch() >= goal, EPOCHS * EPOCH_S_MAX)
                assert all(one.given > past for one, past in zip(peers, given, strict=True))
                checks.watch(peers, loop.time())
            assert await until(lambda: not checks.apart(peers), 30.0), checks.apart(peers)
            assert network.relayed_calls
            await swarm.close()
        assert not checks.violations.count, checks.violations.lines
        assert not network.errors, network.errors

    run_virtual(main())
