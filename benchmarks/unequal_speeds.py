"""Peers of speed 1, ½ and ¼ in one run: the share of the sum of their speeds that goes into committed rounds.

The three nodes are in this process. A training step is a pause, so that the machine's cores do not matter. A
peer's speed is what it computes between its calls of `Optimizer.step`; all time inside `step` is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from averaging.optim.modes import ModeSettings
from averaging.optim.optimizer import Diloco, Gradients, Optimizer
from benchmarks.results import Aim, Row, Series
from swarm.node import Node

STEP_S = 0.04  # of the fastest peer
SPEEDS = (1.0, 0.5, 0.25)
BATCH = 8
EPOCH_S = 4.0
EPOCHS = 5
SHARE_MIN = 90.0  # per cent
MODES: dict[str, ModeSettings] = {
    "gradients": Gradients(),
    "diloco": Diloco(),
    "diloco-streaming": Diloco(streaming=2),
}


@dataclass(slots=True)
class _Account:
    """The work of one peer in the epochs that count."""

    computed_s: float = 0.0
    computed: int = 0  # samples
    committed: int = 0
    steps: int = 0


def share(mode: ModeSettings, *, epochs: int = EPOCHS, epoch_s: float = EPOCH_S) -> tuple[float, list[int]]:
    """Return (committed samples per second over the sum of the peers' own speeds, steps of each peer).

    The first epoch is a warm-up.
    """
    target = round(sum(BATCH * speed / STEP_S for speed in SPEEDS) * epoch_s)
    accounts = [_Account() for _ in SPEEDS]
    spans: list[tuple[float, float]] = []
    with ExitStack() as stack:
        nodes: list[Node] = []
        optimizers: list[Optimizer] = []
        for _ in SPEEDS:
            nodes.append(stack.enter_context(Node(nodes[0].addresses if nodes else [], "127.0.0.1:0")))
            p = torch.nn.Parameter(torch.zeros(1000))
            p.grad = torch.ones(1000)
            inner = torch.optim.SGD([p], lr=0.01)
            optimizers.append(
                stack.enter_context(
                    Optimizer(
                        inner,
                        node=nodes[-1],
                        run="speeds",
                        target_batch_size=target,
                        batch_size_per_step=BATCH,
                        mode=mode,
                    )
                )
            )
        threads = [
            threading.Thread(
                target=lambda n: spans.append(_train(optimizers[n], SPEEDS[n], accounts[n], epochs)),
                args=(n,),
                daemon=True,
            )
            for n in range(len(SPEEDS))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    whole_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    speed = sum(account.computed / account.computed_s for account in accounts)
    return sum(account.committed for account in accounts) / whole_s / speed, [
        account.steps for account in accounts
    ]


def _train(optimizer: Optimizer, speed: float, account: _Account, epochs: int) -> tuple[float, float]:
    """Train one peer and return (end of its first epoch, end of its last)."""
    begin_s = end_s = 0.0
    done = 0
    while done <= epochs:
        began_s = time.monotonic()
        time.sleep(STEP_S / speed)
        computed_s = time.monotonic() - began_s
        report = optimizer.step()
        if done:
            account.computed_s += computed_s
            account.computed += BATCH
            account.steps += 1
            account.committed += report.contributed
        if report.stepped or (report.resynchronised is not None and report.resynchronised.loaded):
            done, end_s = done + 1, time.monotonic()
            begin_s = begin_s or end_s
    return begin_s, end_s


def rows(say: Callable[[str], None]) -> list[Row]:
    """Measure every mode and return a row for each."""
    found = []
    for name, mode in MODES.items():
        reached, steps = share(mode)
        say(f"speeds 1, ½, ¼, {name}: {reached:.1%} of their sum; steps {steps}")
        found.append(
            Row(
                identifier=f"speeds-{name}",
                workload=f"three peers of speed 1, ½, ¼, epochs of {EPOCH_S:g} s: {name}",
                quantity="samples in committed rounds a second, of the sum of their speeds",
                ours=Series(name=f"swarm {name}: share", unit="%", samples=(100.0 * reached,)),
                peer=None,
                aim=Aim(of="ours", sense="at least", value=SHARE_MIN),
                limit="the round, and the step that each peer is in when the epoch fills",
            )
        )
    return found
