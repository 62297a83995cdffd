"""Peers on real sockets that train one small model, each from a thread of one process, and one machine that
does the same in sequence.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from averaging.optim.optimizer import Optimizer, OptimizerConfig, StepReport
from swarm.node import Node, NodeConfig

FEATURES, TARGET, BATCH = 6, 48, 4


LOCAL = NodeConfig(preset="local")
QUICK = OptimizerConfig(round_timeout_s=30.0)


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batch(seed: int, samples: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def backward(net: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss = (net(data[0]) - data[1]).square().mean()
    loss.backward()
    return loss


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def halving(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)


@dataclass(frozen=True, order=True)
class Batch:
    """A batch whose gradient was computed in epoch `computed`, with the parameters of that time, and is in
    the average of epoch `epoch`: of the same one, or of the next one if its peer missed a round.
    """

    epoch: int
    seed: int
    computed: int
    weight: float = BATCH  # in the average


@dataclass
class Peer:
    number: int
    node: Node
    net: torch.nn.Module
    opt: Optimizer
    taken: list[Batch] = field(default_factory=list)  # batches that are in averages, as the reports say
    reports: list[StepReport] = field(default_factory=list)
    steps: int = 0
    # (epoch, seed) of those that were neither averaged nor dropped
    _pending: list[tuple[int, int]] = field(default_factory=list)

    def train_once(self) -> StepReport:
        seed = 1000 * self.number + self.steps
        self.steps += 1
        before = self.opt.epoch
        self.opt.zero_grad()
        backward(self.net, batch(seed))
        report = self.opt.step()
        self._pending.append((before, seed))
        self._account(report)
        self.reports.append(report)
        return report

    def _account(self, report: StepReport) -> None:
        """Follow the batches that have not been averaged yet: each is contributed, carried or dropped, and
        the report says how many are.
        """
        contributed, dropped = report.contributed // BATCH, report.dropped // BATCH
        if contributed:
            asked = float(report.contributed)
            counted = report.round.weights[self.node.peer_id] if report.round and not report.alone else asked
            weight = BATCH * counted / asked
            epoch = report.epoch - 1
            self.taken += [
                Batch(epoch, seed, computed, weight) for computed, seed in self._pending[:contributed]
            ]
        del self._pending[: contributed + dropped]

    def train_to(self, epoch: int) -> None:
        while self.opt.epoch < epoch:
            self.train_once()


@contextmanager
def swarm_of(count: int, run: str, **options: Any) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        peers: list[Peer] = []
        for number in range(count):
            peers.append(stack.enter_context(one_more(peers, run, number, **options)))
        yield peers


@contextmanager
def one_more(
    peers: list[Peer],
    run: str,
    number: int,
    seed: int = 0,
    make: Callable[[int], torch.nn.Module] = build,
    inner: Callable[[torch.nn.Module], torch.optim.Optimizer] = adam,
    **options: Any,
) -> Iterator[Peer]:
    net = make(seed)
    options = {"extra_tensors": tuple(net.buffers()), **options}
    options = {
        "codec": "float32",
        "config": QUICK,
        "scheduler": halving,
        "state_sync_epochs": 0,
        "target_batch_size": TARGET,
        **options,
    }
    bootstrap = [address for peer in peers[:1] for address in peer.node.addresses]
    with (
        Node(bootstrap, "127.0.0.1:0", config=LOCAL) as node,
        Optimizer(inner(net), node=node, run=run, batch_size_per_step=BATCH, **options) as opt,
    ):
        yield Peer(number, node, net, opt)


def together(work: list[Callable[[], Any]], timeout_s: float = 90.0) -> None:
    """Run all functions in their own threads and raise the first error of any."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], Any]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a trainer hangs"


def oracle(epochs: int, taken: list[Batch]) -> torch.nn.Module:
    """Train one machine on the union of the batches that all peers contributed. The gradient of each is that
    of the parameters with which its peer computed it.
    """
    net = build()
    inner = adam(net)
    scheduler = halving(inner)
    began: list[torch.nn.Module] = []  # the net as it was when each epoch began
    for epoch in range(epochs):
        began.append(copy.deepcopy(net))
        given = sorted(one for one in taken if one.epoch == epoch)
        whole = sum(one.weight for one in given)
        inner.zero_grad()
        for one in given:
            held = began[one.computed]
            loss = (held(batch(one.seed)[0]) - batch(one.seed)[1]).square().mean() * (one.weight / whole)
            gradients = torch.autograd.grad(loss, list(held.parameters()))
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = gradient if p.grad is None else p.grad + gradient
        inner.step()
        scheduler.step()
    return net


def assert_close(one: torch.nn.Module, other: torch.nn.Module, tolerance: float = 1e-5) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
