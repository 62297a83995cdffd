"""The same training loop twice: in plain torch, and in a swarm of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from averaging.optim.optimizer import Diloco, Gossip, Gradients, Local, Optimizer, StepReport
from swarm.node import Node
from tests.wire.trainers import QUICK

BATCH, TARGET, STEPS = 4, 12, 14  # three steps an epoch; it ends in the middle of one
MODES: dict[str, Any] = {
    "gradients": Gradients(),
    "delayed": Gradients(delayed=True),
    "local": Local(),
    "diloco": Diloco(),
    "streaming": Diloco(streaming=3),
    "gossip": Gossip(),
}
CLOSE = {"rtol": 2e-6, "atol": 2e-6}
_runs = itertools.count()

Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def next_run() -> str:
    """A run that nobody else is in."""
    return f"contract {next(_runs)}"


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))


def batch(seed: int, samples: int = BATCH) -> Batch:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).sin()


def loss_of(net: torch.nn.Module, data: Batch) -> torch.Tensor:
    return (net(data[0]).float() - data[1]).square().mean()


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


class Plain:
    """The work of a mode on one machine, with torch's own optimizers."""

    def __init__(
        self, mode: str, inner: torch.optim.Optimizer, on_epoch: Callable[[], object] = lambda: None
    ) -> None:
        self.mode, self.inner, self.on_epoch = mode, inner, on_epoch
        self.parameters = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
        self.base = self.vector()
        self.momentum = torch.zeros_like(self.base)
        self.sums: list[torch.Tensor | None] = [None for _ in self.parameters]
        self.samples = self.epoch = 0

    def vector(self) -> torch.Tensor:
        return torch.cat([p.detach().double().flatten() for p in self.parameters])

    def put(self, values: torch.Tensor) -> None:
        at = 0
        for p in self.parameters:
            p.data.copy_(values[at : at + p.numel()].view(p.shape))
            at += p.numel()

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values as the parameters hold them, in their own dtypes."""
        parts = values.split([p.numel() for p in self.parameters])
        return torch.cat([part.to(p.dtype).double() for part, p in zip(parts, self.parameters, strict=True)])

    def step(self, samples: int = BATCH) -> None:
        self.samples += samples
        if self.mode in ("gradients", "delayed"):  # alone there is no round that anything could be delayed by
            for place, p in enumerate(self.parameters):
                if p.grad is not None:
                    last = self.sums[place]
                    self.sums[place] = (0 if last is None else last) + samples * p.grad.float()
        else:
            self.inner.step()
        if self.samples < TARGET:
            return
        if self.mode in ("gradients", "delayed"):
            for place, p in enumerate(self.parameters):
                total = self.sums[place]
                p.grad = None if total is None else (total / self.samples).to(p.dtype)
                self.sums[place] = None
            self.inner.step()
        else:
            self.outer()
        self.on_epoch()
        self.samples, self.epoch = 0, self.epoch + 1

    def outer(self) -> None:
        delta, where = self.rounded(self.base) - self.vector(), slice(None)
        if self.mode == "streaming":
            numel, part = delta.numel(), self.epoch % 3
            where = slice(numel * part // 3, numel * (part + 1) // 3)
        if self.mode == "local":
            self.base -= delta
        elif self.mode == "gossip":
            self.momentum = 0.5 * self.momentum - 0.7 * delta
            self.base += self.momentum
        else:
            self.momentum[where] = 0.9 * self.momentum[where] + delta[where]
            self.base[where] -= 0.7 * (delta[where] + 0.9 * self.momentum[where])
        moved = self.vector()
        moved[where] = self.base[where]
        self.put(moved)


class Both:
    """The same model twice: in plain torch, and in a swarm of one."""

    def __init__(
        self,
        node: Node,
        mode: str,
        make: Make = adamw,
        model: Callable[[], torch.nn.Module] = build,
        **options: Any,
    ) -> None:
        self.plain_net, self.net = model(), model()
        scheduler = options.get("scheduler")
        inner = make(self.plain_net)
        schedule = scheduler(inner) if scheduler is not None else None
        self.plain = Plain(mode, inner, schedule.step if schedule is not None else lambda: None)
        options = {"codec": "float32", "config": QUICK, "state_sync_epochs": 0, **options}
        self.opt = Optimizer(
            make(self.net),
            node=node,
            run=next_run(),
            target_batch_size=TARGET,
            batch_size_per_step=BATCH,
            mode=MODES[mode],
            **options,
        )

    def __enter__(self) -> Both:
        return self

    def __exit__(self, *_: object) -> None:
        self.opt.close()

    def check(self, tolerance: float = 2e-6) -> None:
        for ours, theirs in zip(self.net.parameters(), self.plain_net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert self.opt.epoch == self.plain.epoch

    def train(
        self,
        steps: int = STEPS,
        before_step: Callable[[torch.nn.Module], object] = lambda net: None,
        start: int = 0,
    ) -> list[StepReport]:
        """Make the same steps on both sides, and compare them after each. Return the reports of the swarm."""
        reports = []
        for seed in range(start, start + steps):
            for net, step in ((self.plain_net, self.plain.step), (self.net, self.opt.step)):
                net.zero_grad()
                loss_of(net, batch(seed)).backward()
                before_step(net)
                report = step()
            assert report is not None
            reports.append(report)
            self.check()
        return reports
