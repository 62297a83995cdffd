"""Training with four peers, each in its own process (in tests: thread), with the same local steps and aligned
rounds.

Batches, the order of steps and the moments at which rounds are applied follow from the seed. The rounds are
those of `swarm.Optimizer`, on real sockets, with its codecs and error feedback. The peers do not compete to
close an epoch: every peer makes the same number of steps. Values that are missing from a round, which a busy
machine may cause, are counted.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from averaging.optim.background_round import RunningRound
from averaging.optim.epoch_averager import AveragingOptions, EpochAverager
from averaging.optim.modes import Mode, ModeParts
from averaging.optim.optimizer import OptimizerConfig
from benchmarks.training_setups import Scale, TrainingSetup
from swarm.core.ids import PeerId
from swarm.core.presets import WAN
from swarm.node import Node
from swarm.run.task import Draw
from swarm.run.tasks.bytelm_model import ByteData, ByteTransformer
from swarm.run.tasks.corpus import read_corpus

PEERS = 4
ATTEMPTS_MAX = 3
RETRY_S = 1.0
READY_S = 60.0
SLOW_S = 60.0
HELD_OUT_SAMPLES = 512
_BETAS = (0.9, 0.95)


class RoundsFailed(Exception):
    """A round of a training on loopback failed in every attempt."""


class Data:
    """Training batches and the held-out text on which the loss is measured."""

    def __init__(self, scale: Scale, folder: Path | None = None) -> None:
        """Read text from `folder`; None reads the sources of Python's standard library."""
        corpus = read_corpus(folder, bytes_max=scale.data_bytes, sample_bytes=scale.context + 1)
        self._training = ByteData(corpus, context=scale.context, device=torch.device("cpu"))
        held_out = torch.frombuffer(corpus.held_out, dtype=torch.uint8)
        starts = torch.linspace(0, len(held_out) - scale.context - 1, HELD_OUT_SAMPLES).long()
        self._held_out_BT = held_out[starts[:, None] + torch.arange(scale.context + 1)].long()
        self._samples = scale.samples

    def loss(self, model: ByteTransformer, seed: int, step: int, peer: int) -> torch.Tensor:
        """Return the loss on a batch that depends on seed, step and peer alone, so that it is equal for all
        setups.
        """
        self._training.start_epoch(Draw(f"convergence {seed}", step, PeerId(bytes([peer + 1]) * 32)))
        return self._training.loss(model, self._samples)

    def batch(self, seed: int, step: int, peer: int) -> torch.Tensor:
        """Return the samples of which `loss` is the loss, int64 [samples, context + 1]."""
        self._training.start_epoch(Draw(f"convergence {seed}", step, PeerId(bytes([peer + 1]) * 32)))
        return self._training.batch(self._samples)

    @torch.no_grad()
    def held_out_loss(self, model: ByteTransformer) -> float:
        """Return the loss on held-out text, in nats per byte."""
        logits_BTV = model(self._held_out_BT[:, :-1])
        return float(functional.cross_entropy(logits_BTV.flatten(0, 1), self._held_out_BT[:, 1:].flatten()))


@contextmanager
def four_nodes() -> Iterator[list[Node]]:
    """Open four connected nodes in this process."""
    with ExitStack() as stack:
        nodes: list[Node] = []
        for _ in range(PEERS):
            nodes.append(stack.enter_context(Node(nodes[0].addresses if nodes else [], "127.0.0.1:0")))
        yield nodes


def build(scale: Scale, seed: int) -> tuple[ByteTransformer, torch.optim.Optimizer]:
    model = ByteTransformer(
        width=scale.width, layers=scale.layers, heads=scale.heads, context=scale.context, seed=seed
    )
    return model, torch.optim.AdamW(
        model.parameters(), lr=scale.learning_rate, betas=_BETAS, weight_decay=0.01
    )


def set_rate(inner: torch.optim.Optimizer, scale: Scale, step: int) -> None:
    falling = 0.5 * (1.0 + math.cos(math.pi * step / scale.steps))
    for group in inner.param_groups:
        group["lr"] = scale.learning_rate * falling * min(1.0, (step + 1) / max(1, scale.rising_steps))


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """A model and its optimizer after the common steps, from which every setup of this scale and seed
    continues.
    """

    model: dict[str, Any]
    inner: dict[str, Any]

    def on(self, scale: Scale, seed: int) -> tuple[ByteTransformer, torch.optim.Optimizer]:
        """Return a new model and its optimizer in this state."""
        model, inner = build(scale, seed)
        model.load_state_dict(self.model)
        inner.load_state_dict(deepcopy(self.inner))
        return model, inner


def common_start(data: Data, scale: Scale, seed: int) -> StartingPoint:
    """Train the common steps on one machine, with the batches of all peers."""
    model, inner = build(scale, seed)
    for step in range(scale.common_steps):
        _lone_step(model, inner, data, scale, (seed, step, PEERS))
    return StartingPoint(model.state_dict(), inner.state_dict())


def _lone_step(
    model: ByteTransformer,
    inner: torch.optim.Optimizer,
    data: Data,
    scale: Scale,
    which: tuple[int, int, int],
) -> None:
    seed, step, peers = which
    model.zero_grad()
    for number in range(peers):
        (data.loss(model, seed, step, number) / peers).backward()  # type: ignore[no-untyped-call]
    set_rate(inner, scale, step)
    inner.step()


OnEvaluation = Callable[[int, float, float], None]  # step, held-out loss, bytes sent so far


def train_alone(
    data: Data, start: StartingPoint, scale: Scale, seed: int, *, peers: int, on_evaluation: OnEvaluation
) -> None:
    """Train on one machine without a swarm, in plain torch: each step takes the batches of `peers` peers."""
    model, inner = start.on(scale, seed)
    for step in range(scale.common_steps, scale.steps):
        _lone_step(model, inner, data, scale, (seed, step, peers))
        if (step + 1) % (scale.steps // scale.points) == 0:
            on_evaluation(step + 1, data.held_out_loss(model), 0.0)


@dataclass(slots=True)
class PeerHistory:
    """The training from one peer's view."""

    rounds: int = 0
    missing: float = 0.0  # missing contributions: 1 is the contribution of all four to one round
    # step, its held-out loss if evaluated, bytes sent
    curve: list[tuple[int, float | None, float]] = field(default_factory=list)


class Peer:
    """One of the four peers. Rounds wait for the others, which keeps the peers in step."""

    def __init__(self, node: Node, number: int, setup: TrainingSetup, run: str) -> None:
        self._node, self._number, self._setup, self._run = node, number, setup, run
        self._pending: RunningRound | None = None
        self._sent_bytes = 0
        self.history = PeerHistory()

    def train(
        self, data: Data, start: StartingPoint, scale: Scale, seed: int, ready: Callable[[], None]
    ) -> PeerHistory:
        """Train to the last step and return the history.

        `ready` is called when the others can find this peer, and waits for them. Raises RoundsFailed when a
        round fails in every attempt, as on a machine that is too busy.
        """
        model, inner = start.on(scale, seed)
        mode = self._setup.mode.build(ModeParts(inner=inner))
        rounds = _rounds(self._node, self._run, mode, self._setup)
        rounds.open()
        ready()
        # in other modes the losses of all peers are equal
        looks = self._number == 0 or mode.traits.overlapped or not mode.traits.canonical
        setup, every, looked = (
            self._setup,
            max(self._setup.local_steps, scale.steps // scale.points),
            scale.common_steps,
        )
        try:
            for step in range(scale.common_steps, scale.steps, setup.local_steps):
                for nth in range(setup.local_steps):
                    model.zero_grad()
                    loss = data.loss(model, seed, step + nth, self._number)
                    loss.backward()  # type: ignore[no-untyped-call]
                    set_rate(inner, scale, step + nth)
                    mode.learner.accumulate(scale.samples)
                    if nth + 1 == setup.delay_steps:
                        self._finish_round(mode, rounds)
                self._finish_round(mode, rounds)
                self._pending = rounds.begin(mode.state.epoch, lambda: False, math.inf)
                if not setup.delay_steps:
                    self._finish_round(mode, rounds)
                done = step + setup.local_steps
                if done - looked >= every or done >= scale.steps:
                    looked = done
                    self.history.curve.append(
                        (done, data.held_out_loss(model) if looks else None, float(self._sent_bytes))
                    )
            self._finish_round(mode, rounds)
        finally:
            if self._pending is not None:
                self._pending.cancel()
            rounds.close()
        return self.history

    def _finish_round(self, mode: Mode, rounds: EpochAverager) -> None:
        """Apply the round that runs in the background. In modes in which a peer may find no partner, it then
        proceeds alone.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            if self._pending is None:
                return
            self.history.rounds += attempt == 1
            result, self._pending = self._pending.result(), None
            self._sent_bytes += result.bytes_sent
            if not result.failed:
                if not mode.traits.proceeds_alone:
                    self.history.missing += 1.0 - sum(result.contributions.values()) / PEERS
                _advance(mode, list(result.gathered.values()))
                return
            mode.failed(result.reason)
            if mode.traits.proceeds_alone:
                mode.prepare(mode.state.epoch)
                _advance(mode, [])
            elif attempt == ATTEMPTS_MAX or result.reason == "passed":
                raise RoundsFailed(f"{self._setup.name}: {result.detail or result.reason}")
            else:
                time.sleep(RETRY_S)
                self._pending = rounds.begin(mode.state.epoch, lambda: False, math.inf)


# No peer is missing here, and a busy machine must not change the averages.
PATIENT = replace(
    WAN,
    query_timeout_s=SLOW_S,
    records_timeout_s=SLOW_S,
    unknown_peer_s=SLOW_S,
)


def _rounds(node: Node, run: str, mode: Mode, setup: TrainingSetup) -> EpochAverager:
    options = AveragingOptions(
        codec=setup.codec, error_feedback=setup.error_feedback, strategy=setup.strategy
    )
    # in a mode in which peers may proceed alone, a long wait for a busy partner delays both
    alone = mode.traits.proceeds_alone
    node.timings = WAN if alone else PATIENT
    patient = OptimizerConfig(group_size_max=PEERS, round_timeout_s=2 * SLOW_S)
    return EpochAverager(node, run, mode, options, OptimizerConfig() if alone else patient, None)


def _advance(mode: Mode, gathered: list[object]) -> None:
    with mode.state.lock:
        mode.apply(gathered)
        mode.state.mark_changed(mode.state.epoch + 1)


def mean_curve(histories: Sequence[PeerHistory]) -> list[tuple[int, float, float]]:
    """Return one curve of all peers: the mean of the losses that were evaluated, and of the bytes that each
    sent.
    """
    found = []
    for looks in zip(*(history.curve for history in histories), strict=True):
        losses = [loss for _, loss, _ in looks if loss is not None]
        found.append((looks[0][0], sum(losses) / len(losses), sum(sent for _, _, sent in looks) / len(looks)))
    return found


def in_threads(
    nodes: Sequence[Node], data: Data, scale: Scale
) -> Callable[[TrainingSetup, StartingPoint, int], list[PeerHistory]]:
    """Return a function that trains with four peers in this process, so that tests import torch once."""
    trained = count()

    def four(setup: TrainingSetup, start: StartingPoint, seed: int) -> list[PeerHistory]:
        together, run = threading.Barrier(PEERS), f"convergence {next(trained)}"

        def train(number: int) -> PeerHistory:
            return Peer(nodes[number], number, setup, run).train(
                data, start, scale, seed, lambda: _ready(together)
            )

        with ThreadPoolExecutor(PEERS) as pool:
            return list(pool.map(train, range(PEERS)))

    return four


def _ready(together: threading.Barrier) -> None:
    together.wait(READY_S)
