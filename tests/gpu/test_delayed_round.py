"""A delayed round costs the trainer almost nothing, during its steps and when its average is applied."""

from __future__ import annotations

import statistics

import torch

from benchmarks.cuda.device import Figure
from benchmarks.cuda.model import Size
from benchmarks.cuda.steps import with_a_companion


def test_steps_beside_a_delayed_round_and_its_landing_are_not_held_up(
    size: Size, device: torch.device, figure: Figure
) -> None:
    """A vector of more than 1 GB, in int8, with a second peer in a process of its own on the host."""
    steps = with_a_companion(size, device, "delayed", deadline_s=30.0)
    assert not steps.failures, steps.failures
    assert steps.round_s, "no round came about"
    figure("round in the background", max(steps.round_s), "s")
    undisturbed_s = statistics.median(steps.undisturbed_s)
    figure("training step, undisturbed", 1e3 * undisturbed_s, "ms")
    if steps.during_s:  # at small sizes a round is over before the next step
        figure(
            "training step during a round, over undisturbed",
            statistics.median(steps.during_s) / undisturbed_s,
            "×",
            at_most=1.1,
        )
    figure("steps that began and ended during a round", len(steps.during_s), "steps", at_least=3)
    figure("trainer held up when a round lands", 1e3 * max(steps.landing_blocked_s), "ms", at_most=20.0)
    figure("device memory at most", steps.peak_bytes / 1e9, "GB")
    figure("pinned memory", steps.pinned_bytes / 1e9, "GB", at_most=1.2 * 4 * steps.parameters / 1e9)
