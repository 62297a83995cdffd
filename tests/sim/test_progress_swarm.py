"""Swarms of progress machines under a virtual clock: reports arrive late, get lost, or lie. A failing case
is its seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from averaging.optim.progress.logic.reports import REPORT_TTL_S, EpochProgress, ProgressReport
from swarm.core.ids import PeerId


@dataclass
class Trainer:
    progress: EpochProgress
    batch: int
    step_s: float
    next_step_s: float
    samples: int = 0
    inbox: list[tuple[float, PeerId, ProgressReport]] = field(default_factory=list)


class Swarm:
    """Trainers of different speed. Reports reach the others after random delays; the peer that sees the
    epoch full begins the next for all.
    """

    def __init__(self, seed: int, peers: int, target: int) -> None:
        self.rng = random.Random(seed)
        self.now_s, self.target = 1000.0, target
        self.trainers = {PeerId(number.to_bytes(32, "big")): self._trainer(number) for number in range(peers)}
        self.closed: list[tuple[float, int]] = []  # when, with how many samples in truth
        self.unbelieved = 0

    def _trainer(self, number: int) -> Trainer:
        speed = self.rng.choice([1.0, 0.5, 0.4])
        step_s = 0.1 / speed * self.rng.uniform(0.9, 1.1)
        progress = EpochProgress(PeerId(number.to_bytes(32, "big")), self.target, self.now_s)
        return Trainer(progress, batch=8, step_s=step_s, next_step_s=self.now_s + step_s)

    def tell(self, sender: PeerId, report: ProgressReport) -> None:
        for peer, trainer in self.trainers.items():
            if peer != sender and self.rng.random() > 0.1:  # one in ten is lost
                trainer.inbox.append((self.now_s + self.rng.uniform(0.01, 0.6), sender, report))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.04
            for peer, trainer in self.trainers.items():
                self._move(peer, trainer)

    def _move(self, peer: PeerId, trainer: Trainer) -> None:
        for message in [m for m in trainer.inbox if m[0] <= self.now_s]:
            trainer.inbox.remove(message)
            trainer.progress.on_report(message[1], message[2], self.now_s)
        if self.now_s >= trainer.next_step_s:
            trainer.next_step_s += trainer.step_s
            trainer.samples += trainer.batch
            trainer.progress.update_own(trainer.samples, trainer.batch / trainer.step_s, self.now_s)
            self.tell(peer, trainer.progress.own_report)
        if trainer.progress.is_full(self.now_s):
            self.close(peer)

    def close(self, leader: PeerId) -> None:
        epoch = self.trainers[leader].progress.epoch
        self.unbelieved += sum(
            not t.progress.is_plausibly_full(epoch, self.now_s)
            for peer, t in self.trainers.items()
            if peer != leader
        )
        self.closed.append((self.now_s, sum(t.samples for t in self.trainers.values())))
        for trainer in self.trainers.values():
            trainer.samples = 0
            trainer.progress.begin_epoch(epoch + 1, self.now_s)


@pytest.mark.parametrize("seed", range(5))
def test_epochs_close_near_the_target(seed: int) -> None:
    swarm = Swarm(seed, peers=random.Random(seed).randint(2, 12), target=2000)
    swarm.run(80.0)
    assert len(swarm.closed) >= 3
    for _, samples in swarm.closed:
        assert 0.85 * 2000 <= samples <= 1.2 * 2000, f"seed {seed}"
    assert swarm.unbelieved == 0, "all peers believe the one that begins an epoch"


@pytest.mark.parametrize("seed", range(3))
def test_one_liar_neither_closes_epochs_early_nor_moves_the_epoch(seed: int) -> None:
    swarm = Swarm(seed, peers=8, target=4000)
    liar = PeerId(b"\xff" * 32)

    def lie() -> None:
        epoch = next(iter(swarm.trainers.values())).progress.epoch
        wild = swarm.rng.choice([epoch, epoch, epoch + 1, epoch + 10**6])
        now_s = swarm.now_s
        swarm.tell(
            liar,
            ProgressReport(
                epoch=wild, samples=1 << 40, rate=1e12, at_s=now_s, since_s=swarm.rng.choice([0.0, now_s])
            ),
        )

    # among the first two or three voices that a peer ever hears there is no majority; afterwards there is
    swarm.run(3.0)
    for _ in range(150):
        lie()
        swarm.run(0.2)
        for trainer in swarm.trainers.values():
            assert trainer.progress.swarm_epoch(swarm.now_s) <= trainer.progress.epoch + 1
    assert swarm.closed, f"seed {seed}: the liar stopped the swarm"
    for _, samples in swarm.closed:
        assert samples >= 4000 * 8 / (8 + 3) * 0.85, f"seed {seed}: the liar counted as more than three peers"


@pytest.mark.parametrize("seed", range(3))
def test_a_late_joiner_sees_the_epoch_as_the_others_do(seed: int) -> None:
    swarm = Swarm(seed, peers=4, target=20_000)
    swarm.run(30.0)
    peer = PeerId((99).to_bytes(32, "big"))
    newcomer = swarm._trainer(99)
    swarm.trainers[peer] = newcomer
    swarm.run(2.0)
    newcomer.samples = 0
    newcomer.progress.begin_epoch(next(iter(swarm.trainers.values())).progress.epoch, swarm.now_s, late=True)
    swarm.run(1.0)
    seen = newcomer.progress.view(swarm.now_s).samples
    truth = sum(trainer.samples for trainer in swarm.trainers.values())
    assert seen == pytest.approx(truth, rel=0.1), f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_a_dead_peer_stops_counting(seed: int) -> None:
    swarm = Swarm(seed, peers=5, target=3000)
    swarm.run(20.0)
    dead = next(iter(swarm.trainers))
    del swarm.trainers[dead]
    swarm.run(REPORT_TTL_S + 1.0)
    assert all(dead not in trainer.progress.others(swarm.now_s) for trainer in swarm.trainers.values())
    closed = len(swarm.closed)
    swarm.run(60.0)
    assert len(swarm.closed) > closed
