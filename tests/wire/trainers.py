"""Peers on real sockets that train one small model, each from a thread of one process, and one machine that
does the same in sequence.
"""

from __future__ import annotations

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


@dataclass
class Peer:
    number: int
    node: Node
    net: torch.nn.Module
    opt: Optimizer
    taken: list[tuple[int, int]] = field(default_factory=list)  # (epoch, seed of the batch)
    reports: list[StepReport] = field(default_factory=list)
    steps: int = 0

    def train_once(self) -> StepReport:
        seed = 1000 * self.number + self.steps
        self.steps += 1
        before = self.opt.epoch
        self.opt.zero_grad()
        backward(self.net, batch(seed))
        report = self.opt.step()
        if report.samples:
            self.taken.append((before, seed))
        # on a busy machine a round may go on without a peer: what it had for that epoch was not used
        if report.dropped:
            self.taken = [one for one in self.taken if one[0] != before]
        self.reports.append(report)
        return report

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
        Optimizer(adam(net), node=node, run=run, batch_size_per_step=BATCH, **options) as opt,
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


def oracle(epochs: int, taken: list[tuple[int, int]]) -> torch.nn.Module:
    """Train one machine on the union of the batches that all peers contributed."""
    net = build()
    inner = adam(net)
    scheduler = halving(inner)
    for epoch in range(epochs):
        seeds = sorted(seed for at, seed in taken if at == epoch)
        inner.zero_grad()
        for seed in seeds:
            loss = (net(batch(seed)[0]) - batch(seed)[1]).square().mean() / len(seeds)
            loss.backward()
        inner.step()
        scheduler.step()
    return net


def assert_close(one: torch.nn.Module, other: torch.nn.Module, tolerance: float = 1e-5) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
