"""How much averaging in the background slows down training steps.

A trainer averages with a partner that hardly computes, while one processor core is idle; and again on one
core alone, which its training shares with everything that averaging does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed
from benchmarks.results import Aim, Row, Series
from benchmarks.workers.background_averaging import FRAGMENTS, ROUND_EVERY_S, WINDOW_S

PAIRS = 8  # windows without and with averaging in turns, so that other load affects both alike
SLOWDOWN_MAX = {2: 5.0, 1: 10.0}  # per cent, by the cores that the trainer may use
_WORDS = {2: "with a spare core", 1: "on one core"}
READY_S = 90.0
LAUNCHES_MAX = 2
VARIANTS = {
    "averager": f"a round of float16 every {ROUND_EVERY_S:g} s, averager.step(wait=False)",
    "streaming": f"diloco, streaming={FRAGMENTS}, int4",
}


def rows(say: Callable[[str], None], *, pairs: int = PAIRS) -> list[Row]:
    """Return a row for each way of averaging behind a training loop."""
    return [_row(variant, cores, pairs, say) for variant in VARIANTS for cores in SLOWDOWN_MAX]


def _row(variant: str, cores: int, pairs: int, say: Callable[[str], None]) -> Row:
    found: list[dict[str, float]] = []
    reasons: list[str] = []
    while not found and len(reasons) < LAUNCHES_MAX:
        try:
            found = _measure(variant, cores, pairs)
        except LaunchFailed as failure:
            reasons.append(str(failure))
    slower = [100.0 * (pair["with_s"] / pair["without_s"] - 1.0) for pair in found if pair["rounds"]]
    note = ""
    if found:
        step_s = statistics.median(pair["without_s"] for pair in found)
        rounds_per_s = sum(pair["rounds"] for pair in found) / len(found) / WINDOW_S
        own = 100.0 * statistics.median(pair["more_cpu"] for pair in found)
        note = (
            f"a step takes {step_s * 1e3:.1f} ms without; {rounds_per_s:.1f} rounds/s with; {own:+.1f} % "
            "processor time in its thread"
        )
        slowdown = statistics.median(slower) if slower else float("nan")
        say(f"slowdown, {variant}, {_WORDS[cores]}: {slowdown:.1f} %; {note}")
    return Row(
        identifier=f"slowdown-{variant}-{cores}-core{'s' if cores > 1 else ''}",
        workload=f"training steps, model of 4 MiB, one thread, {_WORDS[cores]}: {VARIANTS[variant]}",
        quantity="how much longer a step takes than without the swarm",
        ours=Series(
            name=f"swarm {variant}: slowdown",
            unit="%",
            samples=tuple(slower),
            failed=sum(not pair["rounds"] for pair in found),
            launches_failed=len(reasons),
            reasons=tuple(reasons),
        ),
        peer=None,
        aim=Aim(of="ours", sense="at most", value=SLOWDOWN_MAX[cores]),
        limit="what the trainer's own thread does (copies, the outer step), and the interpreter lock",
        notes=(note,) if note else (),
    )


def _measure(variant: str, cores: int, pairs: int) -> list[dict[str, float]]:
    configurations = [{"variant": variant, "cores": cores, "pairs": pairs}] * 2
    with Launch(
        f"slowdown {variant}",
        python=OWN_PYTHON,
        module="benchmarks.workers.background_averaging",
        configurations=configurations,
    ) as launch:
        launch.receive("ready", READY_S)
        deadline_s = time.monotonic() + READY_S + 2 * pairs * WINDOW_S
        return [launch.workers[0].receive("pair", deadline_s) for _ in range(pairs)]
