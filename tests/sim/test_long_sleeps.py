"""Peers that were away for more certificates than a history keeps come back to the swarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest

from averaging.history.lineage import GRACE_S_MIN
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

STEP_S, SAMPLES = 0.5, 4
KEPT = 12
BACK_S = 60.0


@pytest.mark.parametrize(
    ("scene", "count"),
    [("junior sleeps", 4), ("senior sleeps", 4), ("junior sleeps", 2), ("senior sleeps", 2),
     ("junior cut", 4), ("senior cut", 4), ("junior cut", 2), ("senior cut", 2), ("all gone", 4)],
)
@pytest.mark.parametrize("seed", range(1))
def test_a_peer_comes_back(
    seed: int, scene: str, count: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr("averaging.history.lineage.CERTIFICATES_MAX", KEPT)

    async def main() -> None:
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.5))
        checks, loop = TrainingChecks(Violations(), step_s_max=600.0), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=2 * count * SAMPLES), checks.on_step, group)
            peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S) for _ in range(count)]
            assert await until(lambda: epoch(peers) >= 3, 60.0)
            for one in peers:
                checks.ledger.read(one, loop.time())
            electors = checks.ledger.electors(checks.newest(peers) or b"") or ()
            peers.sort(key=lambda one: electors.index(one.peer.peer_id))
            sleeper = peers[0] if scene.startswith("senior") else peers[-1]
            others = [one for one in peers if one is not sleeper]
            sleeper.peer.frozen, sleeper.hangs = True, "cut" not in scene
            began = epoch([sleeper])
            if scene == "all gone":
                await asyncio.sleep(1.0)
                new = [await swarm.add(batch=SAMPLES, compute_s=STEP_S) for _ in range(3)]
                assert await until(lambda: epoch(new) > began + 8, 60.0)
                for one in others:
                    await swarm.kill(one)
                    await asyncio.sleep(3.0)
                others = new
            start_s = loop.time()
            assert await until(lambda: epoch(others) > began + KEPT + 5, 200.0)
            if "cut" in scene:
                assert await until(lambda: epoch([sleeper]) > began + KEPT + 5, 200.0)
            print(scene, count, "away", loop.time() - start_s, epoch(others), epoch([sleeper]))
            for one in (sleeper, *others):
                checks.ledger.read(one, loop.time())
            sleeper.peer.frozen = sleeper.hangs = False
            woke_s = loop.time()
            back = await until(lambda: len({one.optimizer.history_head for one in (sleeper, *others)}) == 1, 120.0)
            print("back", back, loop.time() - woke_s, epoch(others), epoch([sleeper]), [one.optimizer.history_head[:6] for one in (sleeper, *others)])
            await swarm.close()
        print(checks.violations.lines)
        assert back

    run_virtual(main())


def epoch(peers: Sequence[TrainingPeer]) -> int:
    return min(one.optimizer.epoch if one.optimizer is not None else 0 for one in peers)


async def until(holds: Callable[[], bool], limit_s: float) -> bool:
    end_s = asyncio.get_running_loop().time() + limit_s
    while not (found := holds()) and asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(0.25)
    return found
