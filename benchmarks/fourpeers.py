"""Four peers of one training, each in its own process (or, for the tests, thread): the same local steps, and
rounds at the same moments.

Batches, the order of steps and the moments at which rounds are applied follow from the seed; the rounds are
those of `swarm.Optimizer`, on real sockets, with its codecs and error feedback. What is left out is who
closes an epoch when: every peer makes the same number of steps, and what is missing of somebody's values in a
round, which a busy machine may cause, is counted.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from averaging.allreduce.config import RoundConfig
from averaging.allreduce.liveness import LivenessConfig
from averaging.allreduce.pacing import PacingConfig
from averaging.averager import AveragerConfig
from averaging.matchmaking.logic.grace_period import GracePeriodConfig
from averaging.matchmaking.logic.matchmaking import MatchmakingConfig
from averaging.matchmaking.service.matchmaking_service import GroupServiceConfig
from averaging.matchmaking.service.presence import PresenceConfig
from averaging.optim.epoch_averager import AveragingOptions, BackgroundRound, EpochAverager
from averaging.optim.modes import Mode, ModeParts
from averaging.optim.optimizer import OptimizerConfig
from benchmarks.ways import Scale, Way
from swarm.core.ids import PeerId
from swarm.node import Node
from swarm.run.task import Draw
from swarm.run.tasks.bytelm_model import ByteData, ByteTransformer
from swarm.run.tasks.corpus import read_corpus

PEERS = 4
ATTEMPTS_MAX = 3
AGAIN_S = 1.0
READY_S = 60.0
SLOW_S = 60.0
HELD_OUT_SAMPLES = 512
_BETAS = (0.9, 0.95)


class RoundsFailed(Exception):
    """A round of a training on loopback failed again and again."""


class Data:
    """What is trained on, and what the loss is measured on."""

    def __init__(self, scale: Scale, folder: Path | None = None) -> None:
        """`folder`: of text; None: the Python standard library's sources."""
        corpus = read_corpus(folder, bytes_max=scale.data_bytes, sample_bytes=scale.context + 1)
        self._training = ByteData(corpus, context=scale.context, device=torch.device("cpu"))
        held_out = torch.frombuffer(corpus.held_out, dtype=torch.uint8)
        starts = torch.linspace(0, len(held_out) - scale.context - 1, HELD_OUT_SAMPLES).long()
        self._held_out_BT = held_out[starts[:, None] + torch.arange(scale.context + 1)].long()
        self._samples = scale.samples

    def loss(self, model: ByteTransformer, seed: int, step: int, peer: int) -> torch.Tensor:
        """Of the same batch for the same step of the same peer, whatever the way."""
        self._training.start_epoch(Draw(f"convergence {seed}", step, PeerId(bytes([peer + 1]) * 32)))
        return self._training.loss(model, self._samples)

    @torch.no_grad()
    def held_out_loss(self, model: ByteTransformer) -> float:
        """Nats per byte."""
        logits_BTV = model(self._held_out_BT[:, :-1])
        return float(functional.cross_entropy(logits_BTV.flatten(0, 1), self._held_out_BT[:, 1:].flatten()))


@contextmanager
def four_nodes() -> Iterator[list[Node]]:
    """Nodes that know one another, in this process."""
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
class Begun:
    """A model and its optimizer after the common steps: what every way of this scale and seed goes on from."""

    model: dict[str, Any]
    inner: dict[str, Any]

    def on(self, scale: Scale, seed: int) -> tuple[ByteTransformer, torch.optim.Optimizer]:
        model, inner = build(scale, seed)
        model.load_state_dict(self.model)
        inner.load_state_dict(deepcopy(self.inner))
        return model, inner


def begin(data: Data, scale: Scale, seed: int) -> Begun:
    model, inner = build(scale, seed)
    for step in range(scale.common_steps):
        _lone_step(model, inner, data, scale, (seed, step, PEERS))
    return Begun(model.state_dict(), inner.state_dict())


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


Look = Callable[[int, float, float], None]  # step, held-out loss, bytes sent so far


def alone(data: Data, begun: Begun, scale: Scale, seed: int, *, peers: int, look: Look) -> None:
    """One machine without a swarm: each step on the batches of so many peers together, in plain torch."""
    model, inner = begun.on(scale, seed)
    for step in range(scale.common_steps, scale.steps):
        _lone_step(model, inner, data, scale, (seed, step, peers))
        if (step + 1) % (scale.steps // scale.points) == 0:
            look(step + 1, data.held_out_loss(model), 0.0)


@dataclass(slots=True)
class Course:
    """What one peer saw of its training."""

    rounds: int = 0
    missing: float = 0.0  # of the four's contributions: 1 is what all four give to one round
    # step, its held-out loss if it looked, bytes sent
    curve: list[tuple[int, float | None, float]] = field(default_factory=list)


class Peer:
    """One of the four. Rounds wait for the others, which keeps them in step."""

    def __init__(self, node: Node, number: int, way: Way, run: str) -> None:
        self._node, self._number, self._way, self._run = node, number, way, run
        self._flight: BackgroundRound | None = None
        self._sent_bytes = 0
        self.course = Course()

    def train(self, data: Data, begun: Begun, scale: Scale, seed: int, ready: Callable[[], None]) -> Course:
        """`ready` is called once the others can find this peer, and waits for them. RoundsFailed: this
        machine is too busy for it.
        """
        model, inner = begun.on(scale, seed)
        mode = self._way.mode.build(ModeParts(inner=inner))
        rounds = _rounds(self._node, self._run, mode, self._way)
        rounds.open()
        ready()
        # elsewhere the peers' losses are the same
        looks = self._number == 0 or mode.traits.overlapped or not mode.traits.canonical
        way, every, looked = self._way, max(self._way.span, scale.steps // scale.points), scale.common_steps
        try:
            for step in range(scale.common_steps, scale.steps, way.span):
                for nth in range(way.span):
                    model.zero_grad()
                    data.loss(model, seed, step + nth, self._number).backward()  # type: ignore[no-untyped-call]
                    set_rate(inner, scale, step + nth)
                    mode.learner.accumulate(scale.samples)
                    if nth + 1 == way.land_after:
                        self._land(mode, rounds)
                self._land(mode, rounds)
                self._flight = rounds.begin(mode.state.epoch, lambda: False, math.inf)
                if not way.land_after:
                    self._land(mode, rounds)
                done = step + way.span
                if done - looked >= every or done >= scale.steps:
                    looked = done
                    self.course.curve.append(
                        (done, data.held_out_loss(model) if looks else None, float(self._sent_bytes))
                    )
            self._land(mode, rounds)
        finally:
            if self._flight is not None:
                self._flight.cancel()
            rounds.close()
        return self.course

    def _land(self, mode: Mode, rounds: EpochAverager) -> None:
        """Take what the round in the background brought; who found nobody in a mode where that may be goes on
        alone.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            if self._flight is None:
                return
            self.course.rounds += attempt == 1
            result, self._flight = self._flight.result(), None
            self._sent_bytes += result.bytes_sent
            if not result.failed:
                if not mode.traits.proceeds_alone:
                    self.course.missing += 1.0 - sum(result.contributions.values()) / PEERS
                _advance(mode, list(result.gathered.values()))
                return
            mode.failed(result.reason)
            if mode.traits.proceeds_alone:
                mode.prepare(mode.state.epoch)
                _advance(mode, [])
            elif attempt == ATTEMPTS_MAX or result.reason == "passed":
                raise RoundsFailed(f"{self._way.name}: {result.detail or result.reason}")
            else:
                time.sleep(AGAIN_S)
                self._flight = rounds.begin(mode.state.epoch, lambda: False, math.inf)


def _unhurried() -> OptimizerConfig:
    """Nobody is missing here, only slow: a machine that is busy with other things must not change what is
    averaged.
    """
    grace_period = GracePeriodConfig(unknown_peer_s=SLOW_S, margin_s=SLOW_S, grace_s_max=SLOW_S)
    groups = GroupServiceConfig(
        query_timeout_s=SLOW_S,
        records_timeout_s=SLOW_S,
        matchmaking=MatchmakingConfig(grace_period=grace_period, leader_ping_interval_s=5.0),
    )
    presence = PresenceConfig(ttl_s=4 * SLOW_S, store_timeout_s=SLOW_S)
    liveness = LivenessConfig(probe_s=SLOW_S, first_s=SLOW_S, timeout_s_max=SLOW_S)
    pacing = PacingConfig(sender_s=SLOW_S, reducer_s=SLOW_S, voter_s=SLOW_S, first_s=SLOW_S)
    rounds = RoundConfig(join_s=SLOW_S, liveness=liveness, pacing=pacing)
    return OptimizerConfig(
        group_size_max=PEERS,
        round_timeout_s=2 * SLOW_S,
        averager=AveragerConfig(groups=groups, presence=presence, round=rounds, declare_s=READY_S),
    )


def _rounds(node: Node, run: str, mode: Mode, way: Way) -> EpochAverager:
    manner = AveragingOptions(codec=way.codec, error_feedback=way.error_feedback, strategy=way.strategy)
    # where nobody need come, who waits long for a partner that has found another holds both up
    return EpochAverager(
        node, run, mode, manner, OptimizerConfig() if mode.traits.proceeds_alone else _unhurried()
    )


def _advance(mode: Mode, told: list[object]) -> None:
    with mode.state.lock:
        mode.apply(told)
        mode.state.mark_changed(mode.state.epoch + 1)


def together(courses: Sequence[Course]) -> list[tuple[int, float, float]]:
    """One curve of all peers: the mean of the losses of those who looked, and of the bytes that each sent."""
    found = []
    for looks in zip(*(course.curve for course in courses), strict=True):
        losses = [loss for _, loss, _ in looks if loss is not None]
        found.append((looks[0][0], sum(losses) / len(losses), sum(sent for _, _, sent in looks) / len(looks)))
    return found


def in_threads(nodes: Sequence[Node], data: Data, scale: Scale) -> Callable[[Way, Begun, int], list[Course]]:
    """Makes four peers of this process train: for the tests, since four processes would import torch four
    times.
    """
    trained = count()

    def four(way: Way, begun: Begun, seed: int) -> list[Course]:
        together, run = threading.Barrier(PEERS), f"convergence {next(trained)}"

        def train(number: int) -> Course:
            return Peer(nodes[number], number, way, run).train(
                data, begun, scale, seed, lambda: _ready(together)
            )

        with ThreadPoolExecutor(PEERS) as pool:
            return list(pool.map(train, range(PEERS)))

    return four


def _ready(together: threading.Barrier) -> None:
    together.wait(READY_S)
