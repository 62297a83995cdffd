"""Two fast peers and a much slower one: the contribution of the slow peer, and its cost to the others.

The three nodes are in this process. A training step is a pause, so that the machine's cores do not matter. A
peer's speed is what it computes between its calls of `Optimizer.step`. The slow peer picks the samples of a
step as `swarm join` does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from averaging.optim.modes import ModeSettings
from averaging.optim.optimizer import Diloco, Gradients, Optimizer, OptimizerConfig
from benchmarks.results import Aim, Row, Series
from swarm.node import Node, NodeConfig
from swarm.run.microbatches import StepSize

STEP_S = 0.05  # of a fast peer
BATCH = 8  # samples of such a step
FAST = 2
SLOW_SPEEDS = (1 / 4, 1 / 20, 1 / 100)  # of a fast peer
EPOCH_S = 2.0
EPOCHS_BEFORE = 6  # until the slow peer is known
EPOCHS = 20
SHARE_MIN = 90.0  # per cent
WAITING_MAX = 10.0  # per cent
MODES: dict[str, ModeSettings] = {"gradients": Gradients(), "diloco": Diloco()}


@dataclass(slots=True, kw_only=True)
class Work:
    """Times and samples of one peer in the epochs that count."""

    seconds: float = 0.0
    computed_s: float = 0.0
    in_step_s: float = 0.0
    computed: int = 0  # samples
    # computed samples, without those accumulated at the end and with those accumulated at the beginning
    trained: int = 0
    contributed: int = 0
    dropped: int = 0
    epochs: int = 0
    loads: int = 0  # downloads of the state

    @property
    def waiting(self) -> float:
        """Return the share of the time that the peer spent in `Optimizer.step`."""
        return self.in_step_s / self.seconds

    @property
    def speed(self) -> float:
        """Return the samples per second of computing time."""
        return self.computed / self.computed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: the speeds of the peers, fast ones first, and how long it lasts."""

    speeds: tuple[float, ...]
    epoch_s: float = EPOCH_S
    epochs_before: int = EPOCHS_BEFORE
    epochs: int = EPOCHS
    adapts: bool = True  # a slow peer makes smaller steps
    config: OptimizerConfig | None = None

    @property
    def samples_per_s(self) -> float:
        """Return the sum of the peers' speeds."""
        return BATCH / STEP_S * sum(self.speeds)


def measure(mode: ModeSettings, plan: Plan) -> list[Work]:
    """Train, and return what each peer did in `plan.epochs` epochs of the fast peers."""
    works = [Work() for _ in plan.speeds]
    with ExitStack() as stack:
        nodes: list[Node] = []
        optimizers: list[Optimizer] = []
        for _ in plan.speeds:
            nodes.append(
                stack.enter_context(
                    Node(
                        nodes[0].addresses if nodes else [], "127.0.0.1:0", config=NodeConfig(preset="local")
                    )
                )
            )
            p = torch.nn.Parameter(torch.zeros(1000))
            p.grad = torch.ones(1000)
            optimizer = Optimizer(
                torch.optim.SGD([p], lr=0.01),
                node=nodes[-1],
                run="slow peers",
                target_batch_size=round(plan.samples_per_s * plan.epoch_s),
                mode=mode,
                config=plan.config,
            )
            optimizers.append(stack.enter_context(optimizer))
        over = threading.Event()
        threads = [
            threading.Thread(target=_train, args=(*one, plan, over), daemon=True)
            for one in zip(optimizers, plan.speeds, works, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return works


def _train(optimizer: Optimizer, speed: float, work: Work, plan: Plan, over: threading.Event) -> None:
    """Train one peer until a fast one has seen enough epochs; count from epoch `plan.epochs_before` on."""
    size = StepSize(emit=lambda event: None)
    last, began_s = plan.epochs_before + plan.epochs, 0.0
    accumulated = 0
    while not over.is_set():
        if not began_s and optimizer.epoch >= plan.epochs_before:
            began_s = time.monotonic()
            work.trained = accumulated  # they are contributed or dropped later
        samples = size.next(BATCH, optimizer.progress, optimizer.node.peer_id) if plan.adapts else BATCH
        begins_s = time.monotonic()
        if over.wait(STEP_S / speed * samples / BATCH):
            break
        called_s = time.monotonic()
        report = optimizer.step(samples)
        accumulated = report.accumulated
        if began_s:
            work.seconds = time.monotonic() - began_s
            work.computed_s += called_s - begins_s
            work.in_step_s += time.monotonic() - called_s
            work.computed += samples
            work.trained += samples
            work.contributed += report.contributed
            work.dropped += report.dropped
            work.epochs += report.stepped
            work.loads += report.resynchronised is not None
        if speed == 1.0 and optimizer.epoch >= last:
            over.set()
    work.trained -= accumulated  # of the epoch that was not completed
    optimizer.close()  # the others do not wait for this peer any more


def rows(say: Callable[[str], None]) -> list[Row]:
    """Measure every mode with every slow peer, and return two rows for each."""
    found = []
    for name, mode in MODES.items():
        alone = measure(mode, Plan(speeds=(1.0,) * FAST))
        say(f"{FAST} fast peers, {name}: {alone[0].waiting:.1%} of their time in step")
        for speed in SLOW_SPEEDS:
            plan = Plan(speeds=(*(1.0,) * FAST, speed))
            works = measure(mode, plan)
            found += _rows(name, plan, works, alone)
            say(
                f"with one of {speed:g} of their speed: {found[-2].ours.median:.1f} % of the sum of the "
                f"speeds, at a cost of {found[-1].ours.median:.1f} % of the fast peers' time; "
                f"{found[-1].notes[0]}"
            )
    return found


def _rows(mode: str, plan: Plan, works: list[Work], alone: list[Work]) -> list[Row]:
    slow = works[-1]
    name = f"1/{round(1 / plan.speeds[-1])}"
    per_s = sum(work.contributed / work.seconds for work in works)
    waiting, waiting_alone = (sum(work.waiting for work in some[:FAST]) / FAST for some in (works, alone))
    notes = (
        f"the slow peer trained {slow.trained} samples, of which {slow.contributed} counted and "
        f"{slow.dropped} were dropped, and downloaded the state {slow.loads} times",
        f"the fast peers spend {waiting:.1%} of their time in step, without the slow one {waiting_alone:.1%}",
    )

    def row(kind: str, quantity: str, share: float, aim: Aim, limit: str) -> Row:
        return Row(
            identifier=f"speeds-slow-{mode}-{name.replace('/', '-')}-{kind}",
            workload=f"two peers and one of {name} of their speed, epochs of {plan.epoch_s:g} s: {mode}",
            quantity=quantity,
            ours=Series(name=f"swarm {mode}, {name}: {kind}", unit="%", samples=(100.0 * share,)),
            peer=None,
            aim=aim,
            limit=limit,
            notes=notes,
        )

    return [
        row(
            "share",
            "samples in committed rounds a second, of the sum of their speeds",
            per_s / sum(work.speed for work in works),
            Aim(of="ours", sense="at least", value=SHARE_MIN),
            "the round, and the pauses of the slow peer, which waits for rounds that its step would miss",
        ),
        row(
            "waiting",
            "share of the time that the fast peers spend in step, beyond that without the slow one",
            waiting - waiting_alone,
            Aim(of="ours", sense="at most", value=WAITING_MAX),
            "the budget for waiting",
        ),
    ]
