"""Peers that were away for more certificates than a history keeps come back to the swarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from averaging.history.lineage import CERTIFICATES_MAX
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual, until

STEP_S, SAMPLES = 0.5, 4
BACK_S = 20.0  # until reports of the others have come, and the state is loaded

SCENES = [
    *((how, who, count) for how in ("sleeps", "cut") for who in (-1, 0) for count in (4, 2)),
    ("restarts", 0, 2),
]
QUICK = [("sleeps", -1, 2), ("sleeps", 0, 2), ("cut", -1, 4), ("cut", 0, 2), ("restarts", 0, 2)]


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Log nothing of what peers warn about for hundreds of epochs, in this test only."""
    caplog.set_level(logging.CRITICAL, "averaging")


@pytest.mark.parametrize(
    ("how", "who", "count", "kept"),
    [
        *(pytest.param(*scene, 6, marks=[pytest.mark.slow] * (scene not in QUICK)) for scene in SCENES),
        pytest.param("sleeps", -1, 4, CERTIFICATES_MAX, marks=pytest.mark.slow),
        pytest.param("sleeps", -1, 2, CERTIFICATES_MAX, marks=pytest.mark.slow),
        pytest.param("sleeps", 0, 2, CERTIFICATES_MAX, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", range(1))
@pytest.mark.usefixtures("quiet")
def test_a_peer_returns_after_more_certificates_than_a_history_keeps(
    seed: int, how: str, who: int, count: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most senior (0) or the most junior elector (-1) sleeps, its network and its trainer; is cut off
    while it trains on, for as many certificates on both sides; or ends, and starts again with its last state.
    """
    monkeypatch.setattr("averaging.history.lineage.CERTIFICATES_MAX", kept)

    async def main() -> float:
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.5))
        checks, loop = TrainingChecks(Violations(), step_s_max=600.0), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            config = TrainingConfig(target_batch_size=2 * count * SAMPLES)  # an epoch takes 1 s
            swarm = TrainingSwarm(network, config, checks.on_step, group)
            peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S) for _ in range(count)]
            assert await until(lambda: _epoch(peers) >= 3, 60.0)
            for one in peers:
                checks.ledger.read(one, loop.time())
            electors = checks.ledger.electors(checks.newest(peers) or b"") or ()
            peers.sort(key=lambda one: electors.index(one.peer.peer_id))
            away = peers.pop(who)
            began, checkpoint = _epoch([away]), away.save()
            if how == "restarts":
                await swarm.kill(away)
            away.peer.frozen, away.hangs = how == "cut" or how == "sleeps", how == "sleeps"
            away.peer.clock.stopped_s = away.peer.clock.swarm_s() if how == "sleeps" else None
            trains = peers if how != "cut" else [away, *peers]
            assert await until(lambda: _epoch(trains) > began + kept + 5, 4.0 * (kept + 20) * count)
            for one in (away, *peers):
                checks.ledger.read(one, loop.time())
            back_s = loop.time()
            away.peer.frozen, away.hangs, away.peer.clock.stopped_s = False, False, None
            if how == "restarts":
                away = await swarm.add(peer=away.peer, checkpoint=checkpoint, batch=SAMPLES, compute_s=STEP_S)
            assert await until(lambda: len({_head(one) for one in (away, *peers)}) == 1, 120.0)
            back_s, epoch = loop.time() - back_s, _epoch(peers)
            assert await until(lambda: _epoch([away, *peers]) > epoch + 2, 60.0), "they train on together"
            await swarm.close()
        assert not checks.violations.count, checks.violations.lines
        return back_s

    assert run_virtual(main()) <= BACK_S


def _epoch(peers: Sequence[TrainingPeer]) -> int:
    return min(one.optimizer.epoch if one.optimizer is not None else 0 for one in peers)


def _head(one: TrainingPeer) -> str:
    return one.optimizer.history_head if one.optimizer is not None else ""
