"""Network partitions of seconds to a minute: the time until all peers share one history and equal states
again, the epochs that each side made meanwhile, and the cost to the side with the quorum.

All modes with a common state are measured; peers in mode "gossip" have none.

The nodes are in this process; calls and streams between the two sides fail during the partition. A training
step is a small model's with a pause, so that the machine's cores do not matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product

import torch

from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import Diloco, Gradients, Local
from averaging.optim.optimizer import Optimizer
from averaging.optim.reports import StepReport
from benchmarks.results import Aim, Row, Series
from swarm.node import Node
from swarm.testing.cuts import Cuts

SIZES = ((1, 1), (1, 2), (2, 2))  # peers on the two sides
CUTS_S = (3.0, 6.0, 15.0, 60.0)
MODES: dict[str, ModeSettings] = {
    "gradients": Gradients(),
    "gradients-delayed": Gradients(delayed=True),
    "local": Local(),
    "diloco": Diloco(),
    "diloco-streaming": Diloco(streaming=2),
}
STEP_S = 0.05
EPOCHS_BEFORE = 4
EPOCHS_AFTER = 3
TARGET, BATCH, FEATURES = 64, 4, 16
HEAL_S_MAX = 60.0
ROUNDS_LOST_MAX = 1.0  # by the side with the quorum
_WAIT_S_MAX = 60.0
_POLL_S = 0.02


@dataclass
class Trainer:
    """One peer that trains in a thread of its own, from `start` to `close`."""

    node: Node
    mode: ModeSettings
    reports: list[StepReport] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Join the run and train."""
        torch.manual_seed(0)
        self.model = torch.nn.Linear(FEATURES, 4)
        self.optimizer = Optimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05),
            node=self.node,
            run="cuts",
            target_batch_size=TARGET,
            batch_size_per_step=BATCH,
            mode=self.mode,
        )
        self._executor = ThreadPoolExecutor(1)
        self._training = self._executor.submit(self._train)

    def _train(self) -> None:
        generator = torch.Generator().manual_seed(self.node.peer_id.public_key[0])
        while not self._stop.wait(STEP_S):
            x = torch.randn(BATCH, FEATURES, generator=generator)
            self.optimizer.zero_grad()
            (self.model(x) - x[:, :4]).square().mean().backward()
            self.reports.append(self.optimizer.step())

    def state(self) -> tuple[int, str, str]:
        """Return the epoch, the digest of the state, and the head of its history."""
        epoch, digest = self.optimizer.state_digest()
        return epoch, digest, self.optimizer.history_head

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stop.set()

    def close(self) -> None:
        """Wait for the thread and leave the run. Raise the error that ended the training."""
        try:
            self._training.result(_WAIT_S_MAX)
        finally:
            self._executor.shutdown(wait=False)
            self.optimizer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The effects of one cut."""

    agreed_s: float | None  # from its end until all peers had one head and equal states; None: they never had
    epochs_during: int  # that were completed during the cut, on the side that completed more
    epochs_given_up: int  # by the peers of the other side, the most of any
    rounds_lost: int  # that failed during the cut, of a peer on the side that completed more, the most of any


def measure(mode: str, sizes: tuple[int, int], cut_s: float, *, both_ways: bool = True) -> Outcome:
    """Cut a swarm into two sides for `cut_s`. `mode`: of `MODES`. Raise a trainer's error."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(listen="127.0.0.1:0"))]
        nodes += [
            stack.enter_context(Node(nodes[0].addresses, listen="127.0.0.1:0")) for _ in range(sum(sizes) - 1)
        ]
        cuts, trainers = Cuts(nodes), [Trainer(node, MODES[mode]) for node in nodes]
        for trainer in trainers:
            trainer.start()
        try:
            _wait(lambda: all(trainer.optimizer.epoch >= EPOCHS_BEFORE for trainer in trainers))
            before = max(trainer.optimizer.epoch for trainer in trainers)
            reported = [len(trainer.reports) for trainer in trainers]
            cuts.cut(nodes[: sizes[0]], nodes[sizes[0] :], both_ways=both_ways)
            time.sleep(cut_s)
            epochs = [trainer.optimizer.epoch for trainer in trainers]
            lost = [
                sum(report.rounds_failed for report in trainer.reports[first:])
                for trainer, first in zip(trainers, reported, strict=True)
            ]
            cuts.heal()
            agreed_s = _agreed_s(trainers)
            reached = max(trainer.optimizer.epoch for trainer in trainers)
            _wait(lambda: all(trainer.optimizer.epoch >= reached + EPOCHS_AFTER for trainer in trainers))
            stays = _agreed_s(trainers)
        finally:
            for trainer in trainers:
                trainer.stop()
            for trainer in trainers:
                trainer.close()
    given_up = max(report.epochs_given_up for trainer in trainers for report in trainer.reports)
    sides = (range(sizes[0]), range(sizes[0], len(trainers)))
    further = max(sides, key=lambda side: max(epochs[number] for number in side))
    return Outcome(
        agreed_s=agreed_s if stays is not None else None,
        epochs_during=max(epochs) - before,
        epochs_given_up=given_up,
        rounds_lost=max(lost[number] for number in further),
    )


def _agreed_s(trainers: list[Trainer]) -> float | None:
    began_s = time.monotonic()
    agree = _wait(lambda: len({trainer.state() for trainer in trainers}) == 1, HEAL_S_MAX)
    return time.monotonic() - began_s if agree else None


def _wait(condition: Callable[[], bool], timeout_s: float = _WAIT_S_MAX) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def rows(
    say: Callable[[str], None], cases: Iterable[tuple[float, str]] = tuple(product(CUTS_S, MODES))
) -> Iterator[list[Row]]:
    """Measure every mode with every cut, and yield two rows for each length of a cut and each mode."""
    for cut_s, mode in cases:
        outcomes = {sizes: measure(mode, sizes, cut_s) for sizes in SIZES}
        notes = [
            f"{one} and {other} peers: {outcome.epochs_during} epochs during the cut, "
            f"{outcome.epochs_given_up} given up after it, {outcome.rounds_lost} rounds failed on the "
            "side with the quorum"
            for (one, other), outcome in outcomes.items()
        ]
        agreed = ", ".join(
            "never" if one.agreed_s is None else f"{one.agreed_s:.1f} s" for one in outcomes.values()
        )
        say(f"{mode}, {cut_s:g} s: {agreed}; {'; '.join(notes)}")
        yield _rows(mode, cut_s, outcomes, tuple(notes))


def _rows(
    mode: str, cut_s: float, outcomes: dict[tuple[int, int], Outcome], notes: tuple[str, ...]
) -> list[Row]:
    agreed = [outcome.agreed_s for outcome in outcomes.values() if outcome.agreed_s is not None]
    workload = f"swarms of 2, 3 and 4 peers cut in two for {cut_s:g} s: {mode}"
    return [
        Row(
            identifier=f"cuts-{mode}-{cut_s:g}",
            workload=workload,
            quantity="from the end of the cut until all have one history and equal parameters",
            ours=Series(
                name=f"swarm {mode}, cut of {cut_s:g} s",
                unit="s",
                samples=tuple(agreed),
                failed=len(outcomes) - len(agreed),
            ),
            peer=None,
            aim=Aim(of="ours", sense="at most", value=HEAL_S_MAX),
            limit="the next report of a peer on the other side, and the download of the state",
            notes=notes,
        ),
        Row(
            identifier=f"cuts-{mode}-{cut_s:g}-lost",
            workload=workload,
            quantity="rounds that failed during the cut, on the side with the quorum",
            ours=Series(
                name=f"swarm {mode}, rounds lost in a cut of {cut_s:g} s",
                unit="rounds",
                samples=(float(max(outcome.rounds_lost for outcome in outcomes.values())),),
            ),
            peer=None,
            aim=Aim(of="ours", sense="at most", value=ROUNDS_LOST_MAX),
            limit="the round that runs when the cut begins",
        ),
    ]
