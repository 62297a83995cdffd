"""A mixture layer over sixteen experts on four servers, forward and backward, compared with hivemind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.allreduce import HIVEMIND, Setting
from benchmarks.environments import OWN_PYTHON
from benchmarks.interleaving import Tally, interleave
from benchmarks.launched_system import LaunchedSystem
from benchmarks.measured_systems import MeasuredSystem, Round
from benchmarks.mixture_load import BATCH, COLUMNS, K_BEST, ROWS, SERVERS
from benchmarks.results import Aim, Row

TIMES_FASTER = 10.0
STEPS = {"swarm": 10, "hivemind": 2}  # in a round; a step of hivemind takes seconds
START_AHEAD_S = 0.1
READY_TIMEOUT_S = 90.0
ROUND_TIMEOUT_S = 120.0
WARM_UP = 2
LIMIT = "the experts' own arithmetic, on cores that all processes share"


class Trainer(LaunchedSystem):
    """Four servers, and a trainer process that accepts the order `steps`."""

    def __init__(self, name: str, *, python: Path, module: str, steps: int) -> None:
        super().__init__(
            name, python=python, module=module, configurations=[{}] * SERVERS, ready_timeout_s=READY_TIMEOUT_S
        )
        self._steps = steps

    def _prepare(self) -> None:
        self._trainer = self._launch.add({})
        self._trainer.receive("ready", time.monotonic() + READY_TIMEOUT_S)

    def round(self) -> Round:
        before_s = self._launch.processor_s()
        at_s = time.monotonic() + START_AHEAD_S
        self._trainer.send({"do": "steps", "count": self._steps, "at_s": at_s})
        done = self._trainer.receive("done", at_s + ROUND_TIMEOUT_S)
        reasons = list(done["reasons"])
        if done["performed"] != self._steps:
            reasons.append(f"{done['performed']} steps, not {self._steps}")
        return Round(
            ok=not reasons,
            reason="; ".join(reasons),
            wrong=any("wrong" in reason for reason in reasons),
            whole_s=(done["end_s"] - at_s) / self._steps,
            processor_s=(self._launch.processor_s() - before_s) / self._steps,
            phases={"forward": done["forward_s"] / self._steps},
        )


def rows(setting: Setting) -> list[Row]:
    """Measure the mixture layer and return its row, with notes on where its time goes."""
    makers: list[Callable[[], MeasuredSystem]] = [
        partial(Trainer, "swarm", python=OWN_PYTHON, module="swarm_mixture", steps=STEPS["swarm"])
    ]
    names = ["swarm"]
    if setting.hivemind is not None:
        names.append(HIVEMIND)
        makers.append(
            partial(
                Trainer, HIVEMIND, python=setting.hivemind, module="hivemind_mixture", steps=STEPS["hivemind"]
            )
        )
    setting.say(f"mixture layer: {', '.join(names)}")
    tallies = interleave(makers, names, replace(setting.plan, warm_up=WARM_UP), setting.say)
    peer: Tally | None = tallies[1] if len(tallies) == 2 else None
    return [
        Row(
            identifier="experts-mixture",
            workload=(
                f"mixture layer, {ROWS * COLUMNS} experts of width 256 on {SERVERS} servers, batch "
                f"{BATCH}, k_best {K_BEST}"
            ),
            quantity="a step, forward and backward",
            ours=tallies[0].series("", lambda outcome: outcome.whole_s),
            peer=None if peer is None else peer.series("", lambda outcome: outcome.whole_s),
            aim=None if peer is None else Aim(of="peer / ours", sense="at least", value=TIMES_FASTER),
            limit=LIMIT,
            notes=tuple(tally.spending() for tally in tallies),
        )
    ]
