"""A peer whose round has failed learns later that the others committed it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

import pytest

from averaging.allreduce.logic.votes import VoteExchange
from averaging.history.certificate import RoundKind
from averaging.history.chain import Chain
from averaging.history.grace import GRACE_S_MIN
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_scenarios import MODES
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual, until

STEP_S, SAMPLES = 0.5, 4
BACK_S = 15.0  # until reports of the others have come, and the state is loaded


# without a cut, only deaf; a cut that is shorter than the grace; that ends as the grace does; and longer ones
CUTS_S = (0.0, 3.0, GRACE_S_MIN, GRACE_S_MIN + 5.5, 40.0)


class Scene(NamedTuple):
    """A round of one kind in one mode, the length of the cut in seconds, and the number of peers."""

    mode: str
    kind: RoundKind
    cut_s: float
    count: int

    @property
    def name(self) -> str:
        return f"{self.mode} {self.kind.name} {self.cut_s:g} {self.count}"


SCENES = [
    *(Scene("gradients", kind, cut_s, count) for kind in RoundKind for cut_s in CUTS_S for count in (2, 3)),
    *(
        Scene(mode, RoundKind.EPOCH, cut_s, 3)
        for mode in MODES
        if mode != "gradients"
        for cut_s in (0.0, 3.0, GRACE_S_MIN)
    ),
]
QUICK = [
    Scene("gradients", RoundKind.EPOCH, 0.0, 3),
    Scene("gradients", RoundKind.EPOCH, GRACE_S_MIN + 5.5, 2),
    Scene("gradients", RoundKind.STATE, 3.0, 3),
    Scene("diloco", RoundKind.EPOCH, GRACE_S_MIN, 3),
    Scene("diloco", RoundKind.EPOCH, 3.0, 3),
    Scene("gradients-delayed", RoundKind.EPOCH, 0.0, 3),
    Scene("diloco-streaming", RoundKind.EPOCH, 0.0, 3),
]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize(
    "scene", [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (one not in QUICK)) for one in SCENES]
)
@pytest.mark.parametrize("seed", range(1))
def test_a_peer_whose_round_failed_adopts_the_certificate_that_its_own_vote_made(
    seed: int, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: it brought the samples that are in the round's average to the next one, too."""
    back_s, checks = play(seed, scene, monkeypatch)
    assert not checks.violations.count, checks.violations.lines
    assert back_s <= BACK_S
    if scene.kind is RoundKind.STATE or scene.cut_s <= GRACE_S_MIN:  # later it gives up what it has made
        assert bool(checks.counted_elsewhere) is (scene.kind is RoundKind.EPOCH)


@pytest.mark.parametrize("mode", ["gradients", "local", "diloco", "diloco-streaming"])
def test_samples_that_are_contributed_twice_are_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chain, "has_worked", lambda *_: False)
    _, checks = play(0, Scene(mode, RoundKind.EPOCH, 0.0, 3), monkeypatch)
    assert "rounds that failed here" in checks.violations.lines[0]


def play(seed: int, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> tuple[float, TrainingChecks]:
    """The most junior elector votes, hears nothing of the others' votes, and is cut off once they have its
    own; then it hears that the round was committed. Return after how long it is back, and all checks.
    """
    mode, kind, cut_s, count = scene
    on_statement, late, deaf = VoteExchange.on_statement, list[TrainingPeer](), list[VoteExchange]()
    committed = asyncio.Event()

    def is_late(exchange: VoteExchange) -> bool:
        vote = exchange.own_vote
        return bool(late) and vote is not None and vote.voter == late[0].peer.peer_id

    def deaf_until_its_round_is_over(exchange: VoteExchange, *args: Any) -> bool:
        if is_late(exchange) and exchange.tally.proposal.kind is kind and not (deaf or exchange.over):
            deaf.append(exchange)
        if exchange in deaf and not exchange.over:
            return False
        found = on_statement(exchange, *args)
        certified = deaf and exchange not in deaf and exchange.certificate is not None
        if certified and exchange.tally.proposal == deaf[0].tally.proposal:
            committed.set()
        return found

    monkeypatch.setattr(VoteExchange, "on_statement", deaf_until_its_round_is_over)

    async def main() -> tuple[float, TrainingChecks]:
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.5))
        checks, loop = TrainingChecks(Violations(), step_s_max=600.0), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            # an epoch takes 1 s
            config = TrainingConfig(target_batch_size=2 * count * SAMPLES, mode=MODES[mode])
            swarm = TrainingSwarm(network, config, checks.on_step, group)
            peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S) for _ in range(count)]
            assert await until(lambda: all(_epoch(one) >= 3 for one in peers), 60.0)
            for one in peers:
                checks.ledger.read(one, loop.time())
            electors = checks.ledger.electors(checks.newest(peers) or b"") or ()
            late.append(max(peers, key=lambda one: electors.index(one.peer.peer_id)))
            others = [one for one in peers if one is not late[0]]
            async with asyncio.timeout(60.0):
                await committed.wait()
            if cut_s:
                network.partition([late[0].peer])
                await asyncio.sleep(cut_s)
                network.partition()
            healed_s = loop.time()
            assert await until(lambda: deaf[0].over, 60.0)
            assert await until(lambda: len({_head(one) for one in peers}) == 1, 120.0)
            back_s, epoch = loop.time() - healed_s, _epoch(others[0])
            assert await until(lambda: min(map(_epoch, peers)) > epoch + 2, 60.0), "they train on together"
            for one in peers:
                checks.ledger.read(one, loop.time())
            await swarm.close()
        head = deaf[0].tally.proposal.head
        extending = [one for one in checks.ledger.certificates.values() if one.proposal.head == head]
        assert [one.proposal for one in extending if not one.proposal.is_break] == [deaf[0].tally.proposal]
        breaks = [one for one in checks.ledger.certificates.values() if one.proposal.is_break]
        assert cut_s >= GRACE_S_MIN or not breaks, "nobody continues by itself before the grace is over"
        return back_s, checks

    return run_virtual(main())


def _epoch(one: TrainingPeer) -> int:
    return one.optimizer.epoch if one.optimizer is not None else 0


def _head(one: TrainingPeer) -> str:
    return one.optimizer.history_head if one.optimizer is not None else ""
