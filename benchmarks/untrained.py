"""The section `untrained`: loss and bytes from an untrained start, with AdamW and with Muon.

Four peers of one process train the byte-level model, in the modes of `swarm.Optimizer` and with the codecs
of real rounds (`benchmarks.rounds_in_process`): nothing of it is about the network. Batches follow from the
seed, so a training repeats on the same machine. Finished trainings are stored in `untrained.json`; an
interrupted section continues with the same command, and is repeated where settings have changed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from averaging.optim.modes import ModeParts, ModeSettings
from averaging.optim.muon import MuonWithAdamW
from benchmarks.four_peers import PEERS, Data
from benchmarks.rounds_in_process import RoundsInProcess
from benchmarks.training_setups import Outcome, Scale
from swarm.run.tasks.bytelm_model import ByteTransformer

FEWER_BYTES_MIN = 400.0
SCALE = Scale(steps=1500, common_steps=0, rising_steps=100, points=30)
_BETAS = (0.9, 0.95)
Inner = Literal["AdamW", "Muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedSetup:
    """An inner optimizer with its learning rate, a mode, a codec, and the local steps between two rounds."""

    inner: Inner
    rate: float
    mode: ModeSettings
    codec: str = "float32"
    error_feedback: bool = False
    local_steps: int = 1

    @property
    def name(self) -> str:
        if self.local_steps == 1:
            return f"{self.inner}, synchronous {self.codec}"
        feedback = " with error feedback" if self.error_feedback else ""
        return f"{self.inner}, diloco {self.codec}{feedback}, H = {self.local_steps}"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a stored outcome must share with this setup."""
        return {name: repr(getattr(self, name)) for name in self.__dataclass_fields__}

    def build(self, scale: Scale, seed: int) -> tuple[ByteTransformer, torch.optim.Optimizer]:
        """Return an untrained model and its inner optimizer."""
        model = ByteTransformer(
            width=scale.width, layers=scale.layers, heads=scale.heads, context=scale.context, seed=seed
        )
        if self.inner == "Muon":
            return model, MuonWithAdamW(model, lr=self.rate, weight_decay=0.01, betas=_BETAS)
        return model, torch.optim.AdamW(model.parameters(), lr=self.rate, betas=_BETAS, weight_decay=0.01)

    def set_rate(self, inner: torch.optim.Optimizer, scale: Scale, step: int) -> None:
        """Set the learning rate of a step: it rises, then falls by a cosine to 0."""
        falling = 0.5 * (1.0 + math.cos(math.pi * step / scale.steps))
        for group in inner.param_groups:
            group["lr"] = self.rate * falling * min(1.0, (step + 1) / max(1, scale.rising_steps))


def train(setup: UntrainedSetup, data: Data, scale: Scale, seed: int) -> Outcome:
    """Train with four peers and return the losses of the first one, which all share after a round."""
    began_s = time.monotonic()
    built = [setup.build(scale, seed) for _ in range(PEERS)]
    modes = [setup.mode.build(ModeParts(inner=inner)) for _, inner in built]
    numel = sum(tensor.numel() for tensor in modes[0].tensors())
    rounds = RoundsInProcess(PEERS, numel, setup.codec, error_feedback=setup.error_feedback)
    outcome = Outcome(
        setup=setup.name, seed=seed, settings={**scale.settings, **setup.settings}, parameters=numel
    )
    every, looked = scale.steps // scale.points, 0
    for step in range(scale.steps):
        for number, (model, inner) in enumerate(built):
            model.zero_grad()
            data.loss(model, seed, step, number).backward()  # type: ignore[no-untyped-call]
            setup.set_rate(inner, scale, step)
            modes[number].learner.accumulate(scale.samples)
        done = step + 1
        if done % setup.local_steps == 0 or done == scale.steps:
            rounds.hold(modes)
            if done - looked >= every or done == scale.steps:
                looked = done
                sent = rounds.traffic.bytes / PEERS
                outcome.curve.append((done, data.held_out_loss(built[0][0]), sent))
    outcome.rounds, outcome.seconds = rounds.traffic.rounds, time.monotonic() - began_s
    return outcome
