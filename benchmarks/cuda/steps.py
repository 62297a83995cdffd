"""Training steps: torch alone, accumulating for the swarm, and during a round. The work is equal on both
sides.

Torch alone adds up gradients over as many steps as an epoch has, and makes one AdamW step at its end, as mode
"gradients" does; for mode "diloco", which makes a local step each time, it makes an AdamW step each time.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from averaging.optim.optimizer import Optimizer
from benchmarks.cuda.companion import HERE, LOCAL, MODES, RUN, companions, trainer
from benchmarks.cuda.device import finish, forget_peak, peak_bytes, pinned_bytes
from benchmarks.cuda.model import Size, Training
from swarm.node import Node

_WARM_UP = 3


@dataclass(slots=True)
class Steps:
    """Seconds of training steps, each until the device was done, by what else happened."""

    parameters: int
    undisturbed_s: list[float] = field(default_factory=list)  # no round, no optimizer step of the swarm
    # a round was in the background before and after the step
    during_s: list[float] = field(default_factory=list)
    landing_s: list[float] = field(default_factory=list)  # with the optimizer step of the swarm
    # of those: how long the trainer's thread was held up in `step`
    landing_blocked_s: list[float] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of rounds
    peak_bytes: int = 0  # on the device
    pinned_bytes: int = 0


def torch_alone(size: Size, device: torch.device, *, each_step: bool = False) -> Steps:
    """Plain torch for one epoch: an AdamW step at its end, or with `each_step` after every backward pass."""
    training = Training(size, device)
    found = Steps(training.parameters)
    forget_peak(device)
    for number in range(1, size.epoch_steps + _WARM_UP + 1):
        last = each_step or number == size.epoch_steps + _WARM_UP
        finish(device)
        started_s = time.perf_counter()
        training.backward()
        if last:
            training.inner.step()
            training.inner.zero_grad()
        finish(device)
        taken = found.undisturbed_s if each_step or not last else found.landing_s
        if number > _WARM_UP:
            taken.append(time.perf_counter() - started_s)
    found.peak_bytes = peak_bytes(device)
    return found


def in_a_swarm_of_one(size: Size, device: torch.device) -> Steps:
    """`swarm.Optimizer` in mode "gradients" without another peer, for one epoch: what accumulating for the
    swarm costs.
    """
    with Node(listen=HERE, config=LOCAL) as node:
        training = Training(size, device)
        found = Steps(training.parameters)
        with _optimizer(training, node, size, "gradients", {"codec": "int8"}) as optimizer:
            _train(training, optimizer, device, found, epochs=1, deadline_s=time.monotonic() + 40.0)
        return found


def with_a_companion(
    size: Size, device: torch.device, mode: str, *, deadline_s: float, **options: Any
) -> Steps:
    """In `mode` with another peer, a process of its own on the host, for `size.epochs` epochs; the first
    steps come before it.

    It does not use the device: a trainer's peers are other machines, and two processes would take turns on
    one GPU. `deadline_s`: seconds after which there is no further step. `options`: of `swarm.Optimizer`; the
    codec is int8 unless they say.
    """
    options = {"codec": "int8", **options}
    with Node(listen=HERE, config=LOCAL) as node:
        training = Training(size, device)
        found = Steps(training.parameters)
        shapes = [tuple(p.shape) for p in training.model.parameters()]
        other = trainer(
            node.addresses[0],
            torch.device("cpu"),
            shapes,
            dtype="bfloat16",
            mode=mode,
            codec=options["codec"],
            target_batch_size=size.batch * size.epoch_steps,
        )
        with (
            _optimizer(training, node, size, MODES[mode], options) as optimizer,
            contextlib.ExitStack() as stack,
        ):
            _train(
                training,
                optimizer,
                device,
                found,
                epochs=1,
                steps_max=size.epoch_steps // 3,
                deadline_s=time.monotonic() + deadline_s,
            )
            stack.enter_context(companions([other]))
            _train(
                training,
                optimizer,
                device,
                found,
                epochs=size.epochs,
                deadline_s=time.monotonic() + deadline_s,
            )
        return found


def _optimizer(training: Training, node: Node, size: Size, mode: Any, options: dict[str, Any]) -> Optimizer:
    return Optimizer(
        training.inner,
        node=node,
        run=RUN,
        target_batch_size=size.batch * size.epoch_steps,
        batch_size_per_step=size.batch,
        mode=mode,
        state_sync_epochs=0,
        **options,
    )


def _train(
    training: Training,
    optimizer: Optimizer,
    device: torch.device,
    found: Steps,
    *,
    epochs: int,
    deadline_s: float,
    steps_max: int | None = None,
) -> None:
    """Steps until the optimizer has reached `epochs`, or `steps_max` are made, or it is `deadline_s` on the
    monotonic clock.
    """
    for _ in range(_WARM_UP):
        training.backward()
    optimizer.step()
    forget_peak(device)
    made = 0
    while optimizer.epoch < epochs and made != steps_max and time.monotonic() < deadline_s:
        made += 1
        before = optimizer.has_background_round
        optimizer.zero_grad()
        finish(device)
        started_s = time.perf_counter()
        training.backward()
        finish(device)
        stepping_s = time.perf_counter()
        report = optimizer.step()
        stepped_s = time.perf_counter()
        finish(device)
        seconds = time.perf_counter() - started_s
        if report.reason:
            found.failures.append(report.reason)
        if report.stepped:
            found.landing_s.append(seconds)
            found.landing_blocked_s.append(stepped_s - stepping_s)
            if report.round is not None:
                found.round_s.append(report.round.seconds.get("total", 0.0))
        elif before and optimizer.has_background_round:
            found.during_s.append(seconds)
        elif not before and not optimizer.has_background_round:
            found.undisturbed_s.append(seconds)
    found.peak_bytes, found.pinned_bytes = max(found.peak_bytes, peak_bytes(device)), pinned_bytes()
