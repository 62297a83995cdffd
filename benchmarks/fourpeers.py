"""Four peers of one training: four nodes on loopback in this process, whose local steps are taken in turn, by one thread.

Batches, the order of steps and the moments at which rounds are applied follow from the seed; the rounds are those of `swarm.Optimizer`, on
real sockets, with its codecs and error feedback. What is left out is who closes an epoch when: every peer makes the same number of steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

import torch

from averaging.averager import AveragerConfig
from averaging.groups.matchmaking import MatchmakingConfig
from averaging.groups.patience import PatienceConfig
from averaging.groups.service import GroupServiceConfig
from averaging.optimizer import OptimizerConfig
from averaging.training.averagers import Flight, Manner, Rounds
from averaging.training.modes import Mode, ModeParts
from benchmarks.ways import Outcome, Scale, Way
from swarm.ids import PeerId
from swarm.node import Node
from swarm.run.task import Draw
from swarm.run.tasks.bytelm_model import ByteData, ByteTransformer
from swarm.run.tasks.corpus import read_corpus

PEERS = 4
ATTEMPTS_MAX = 3
FINAL_RATE = 0.1  # of the learning rate, at the end
_BETAS = (0.9, 0.95)
_runs = count()


class RoundsFailed(Exception):
    """A round of a training on loopback failed again and again."""


@contextmanager
def four_nodes() -> Iterator[list[Node]]:
    """Nodes that know one another."""
    with ExitStack() as stack:
        nodes: list[Node] = []
        for _ in range(PEERS):
            nodes.append(stack.enter_context(Node(nodes[0].addresses if nodes else [], "127.0.0.1:0")))
        yield nodes


def data_of(scale: Scale) -> ByteData:
    corpus = read_corpus(None, bytes_max=scale.data_bytes, sample_bytes=scale.context + 1)
    return ByteData(corpus, context=scale.context, device=torch.device("cpu"))


def build(scale: Scale, seed: int) -> tuple[ByteTransformer, torch.optim.Optimizer]:
    model = ByteTransformer(width=scale.width, layers=scale.layers, heads=scale.heads, context=scale.context, seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=scale.learning_rate, betas=_BETAS, weight_decay=0.01)


@dataclass(slots=True)
class Peer:
    number: int
    model: ByteTransformer
    inner: torch.optim.Optimizer
    mode: Mode
    rounds: Rounds
    flight: Flight | None = None
    sent_bytes: int = 0

    def step(self, data: ByteData, seed: int, step: int, scale: Scale) -> None:
        draw_batch(data, seed, step, self.number)
        self.model.zero_grad()
        data.loss(self.model, scale.samples).backward()  # type: ignore[no-untyped-call]
        set_rate(self.inner, scale, step)
        self.mode.learner.accumulate(scale.samples)


def set_rate(inner: torch.optim.Optimizer, scale: Scale, step: int) -> None:
    """A cosine from the learning rate down to a tenth of it."""
    falling = 0.5 * (1.0 + math.cos(math.pi * step / scale.steps))
    for group in inner.param_groups:
        group["lr"] = scale.learning_rate * (FINAL_RATE + (1.0 - FINAL_RATE) * falling)


def draw_batch(data: ByteData, seed: int, step: int, peer: int) -> None:
    """The same batch for the same step of the same peer, whatever the way."""
    data.start_epoch(Draw(f"convergence {seed}", step, PeerId(bytes([peer + 1]) * 32)))


def _peers(nodes: Sequence[Node], way: Way, scale: Scale, seed: int) -> list[Peer]:
    patience = PatienceConfig(first_s=30.0, floor_s=30.0, max_s=30.0)  # nobody is missing here, only slow on a busy machine
    groups = GroupServiceConfig(ping_timeout_s=5.0, matchmaking=MatchmakingConfig(patience=patience))
    config = OptimizerConfig(group_size_max=PEERS, averager=AveragerConfig(groups=groups))
    manner, run, found = Manner(codec=way.codec, error_feedback=way.error_feedback), f"convergence {next(_runs)}", []
    for number, node in enumerate(nodes):
        model, inner = build(scale, seed)
        mode = way.mode.build(ModeParts(inner=inner))
        found.append(Peer(number, model, inner, mode, Rounds(node, run, mode, mode.state, manner, config)))
    for peer in found:
        peer.rounds.open()
    return found


def train(nodes: Sequence[Node], data: ByteData, way: Way, scale: Scale, seed: int) -> Outcome:
    """RoundsFailed: this machine is too busy for it."""
    began_s = time.monotonic()
    peers = _peers(nodes, way, scale, seed)
    outcome = Outcome(way=way.name, seed=seed, settings={**scale.settings, **way.settings})
    outcome.parameters = sum(p.numel() for p in peers[0].model.parameters())
    every = max(way.span, scale.steps // scale.points)
    looked = 0
    try:
        for step in range(0, scale.steps, way.span):
            for nth in range(way.span):
                for peer in peers:
                    peer.step(data, seed, step + nth, scale)
                if nth + 1 == way.land_after:
                    _land(peers, outcome)
            _land(peers, outcome)
            _begin(peers)
            if not way.land_after:
                _land(peers, outcome)
            if (step + way.span) // every > looked or step + way.span >= scale.steps:
                looked = (step + way.span) // every
                outcome.curve.append((step + way.span, _loss(peers, data), sum(peer.sent_bytes for peer in peers) / PEERS))
        _land(peers, outcome)
    finally:
        for peer in peers:
            if peer.flight is not None:
                peer.flight.cancel()
            peer.rounds.close()
    outcome.seconds = time.monotonic() - began_s
    return outcome


def alone(data: ByteData, scale: Scale, seed: int, *, peers: int, tell: Callable[[int, float], None]) -> None:
    """One machine without a swarm: each step on the batches of so many peers together, in plain torch."""
    model, inner = build(scale, seed)
    every = scale.steps // scale.points
    for step in range(scale.steps):
        model.zero_grad()
        for number in range(peers):
            draw_batch(data, seed, step, number)
            (data.loss(model, scale.samples) / peers).backward()  # type: ignore[no-untyped-call]
        set_rate(inner, scale, step)
        inner.step()
        if (step + 1) % every == 0:
            tell(step + 1, data.validation_loss(model))


def _begin(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.flight = peer.rounds.begin(peer.mode.state.epoch, lambda: False, math.inf)


def _land(peers: Sequence[Peer], outcome: Outcome) -> None:
    """Take what the rounds in the background brought; those who found nobody in a mode where that may be go on alone."""
    if peers[0].flight is None:
        return
    outcome.rounds += 1
    for attempt in range(1, ATTEMPTS_MAX + 1):
        late = [peer for peer in peers if peer.flight is not None]
        for peer in late:
            assert peer.flight is not None
            result, peer.flight = peer.flight.result(), None
            peer.sent_bytes += result.bytes_sent
            if not result.failed:
                _advance(peer, list(result.gathered.values()))
                continue
            peer.mode.failed(result.reason)
            if peer.mode.traits.lone:
                peer.mode.prepare(peer.mode.state.epoch)
                _advance(peer, [])
            elif attempt == ATTEMPTS_MAX or len({one.mode.state.epoch for one in peers}) > 1:
                raise RoundsFailed(f"{outcome.way}: {result.detail or result.reason}")
            else:
                peer.flight = peer.rounds.begin(peer.mode.state.epoch, lambda: False, math.inf)
        if all(peer.flight is None for peer in peers):
            return


def _advance(peer: Peer, told: list[object]) -> None:
    with peer.mode.state.lock:
        peer.mode.apply(told)
        peer.mode.state.moved(peer.mode.state.epoch + 1)


def _loss(peers: Sequence[Peer], data: ByteData) -> float:
    """Held-out loss; of all peers on average where they differ."""
    asked = peers if peers[0].mode.traits.overlapped or not peers[0].mode.traits.canonical else peers[:1]
    return sum(data.validation_loss(peer.model) for peer in asked) / len(asked)
