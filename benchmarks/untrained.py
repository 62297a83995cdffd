"""The section `untrained`: loss and bytes from an untrained start, with AdamW and with Muon.

Four peers of one process train the byte-level model, in the modes of `swarm.Optimizer` and with the codecs
of real rounds (`benchmarks.rounds_in_process`): the network has no influence. Batches follow from the seed,
so a training repeats on the same machine. Finished trainings are stored in `untrained.json`, so the same
command continues an interrupted section. Trainings whose settings have changed are repeated.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from averaging.optim.modes import ModeParts, ModeSettings
from averaging.optim.muon import MuonWithAdamW
from averaging.optim.optimizer import Diloco, Gradients
from benchmarks.convergence import WITHIN, OutcomeStore, slug
from benchmarks.four_peers import PEERS, Data
from benchmarks.hostile import one_thread
from benchmarks.results import Aim, Row, Series
from benchmarks.rounds_in_process import RoundsInProcess
from benchmarks.training_setups import SEEDS, Outcome, Say, Scale
from swarm.run.tasks.bytelm_model import ByteTransformer

FEWER_BYTES_MIN = 400.0
SCALE = Scale(samples=4, steps=600, common_steps=0, rising_steps=50, points=20)
_BETAS = (0.9, 0.95)
Inner = Literal["AdamW", "Muon"]
# AdamW: the better one of 3e-3 and 6e-3 with synchronous rounds, against which all are compared
RATES: dict[Inner, float] = {"AdamW": 3e-3, "Muon": 6e-3}
# Muon: the best of (0.8, 0.4), (1.0, 0.4), (0.9, 0.5) and (1.0, 0.6) with int2 and H = 30. AdamW takes small
# outer steps: with (1.0, 0.5), float32 and H = 15 it ends 14 % above synchronous AdamW, with these 10 %.
OUTER: dict[Inner, Diloco] = {
    "AdamW": Diloco(outer_lr=0.8, momentum=0.4),
    "Muon": Diloco(outer_lr=1.0, momentum=0.6),
}


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
        """Set the learning rate of a step: it rises, then falls to 0 along a cosine."""
        falling = 0.5 * (1.0 + math.cos(math.pi * step / scale.steps))
        for group in inner.param_groups:
            group["lr"] = self.rate * falling * min(1.0, (step + 1) / max(1, scale.rising_steps))


# 30 with int2 alone: the first that sends 400 times less than synchronous float32
LOCAL_STEPS = (15, 30, 50)
_CODECS = (("float32", False), ("int8", False), ("int4", False), ("int2", True))


def _setups() -> tuple[UntrainedSetup, ...]:
    found: list[UntrainedSetup] = []
    for inner, rate in RATES.items():
        found.append(UntrainedSetup(inner=inner, rate=rate, mode=Gradients()))
        for local_steps in LOCAL_STEPS:
            found += [
                UntrainedSetup(
                    inner=inner,
                    rate=rate,
                    mode=OUTER[inner],
                    codec=codec,
                    error_feedback=feedback,
                    local_steps=local_steps,
                )
                for codec, feedback in (_CODECS if local_steps != 30 else _CODECS[-1:])
            ]
    return tuple(found)


SETUPS = _setups()


class _Together:
    """The models of all peers and seeds, whose gradients are computed in one batched pass: of models this
    small, most of the time is not arithmetic.
    """

    def __init__(self, models: Sequence[ByteTransformer]) -> None:
        self._models, self._one = models, deepcopy(models[0])
        self._names = [name for name, _ in self._one.named_parameters()]
        self._gradients = torch.func.vmap(torch.func.grad(self._loss))

    def _loss(self, parameters: dict[str, torch.Tensor], samples_BT: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(self._one, parameters, (samples_BT[:, :-1],))
        return functional.cross_entropy(logits.flatten(0, 1), samples_BT[:, 1:].flatten())

    def backward(self, samples_MBT: torch.Tensor) -> None:
        """Set `.grad` of all models, each for its samples: int64 [models, samples, context + 1]."""
        of_models = [dict(model.named_parameters()) for model in self._models]
        stacked = {name: torch.stack([one[name].detach() for one in of_models]) for name in self._names}
        with sdpa_kernel(SDPBackend.MATH):  # the only one that is batched over models
            found = self._gradients(stacked, samples_MBT)
        for number, one in enumerate(of_models):
            for name in self._names:
                one[name].grad = found[name][number]


def train(setup: UntrainedSetup, data: Data, scale: Scale, seeds: Sequence[int]) -> list[Outcome]:
    """Train with four peers, once from each seed, and return the losses of the first peers, whose models all
    others have after a round.
    """
    began_s = time.monotonic()
    built = [[setup.build(scale, seed) for _ in range(PEERS)] for seed in seeds]
    modes = [[setup.mode.build(ModeParts(inner=inner)) for _, inner in peers] for peers in built]
    numel = sum(tensor.numel() for tensor in modes[0][0].tensors())
    rounds = [RoundsInProcess(PEERS, numel, setup.codec, error_feedback=setup.error_feedback) for _ in seeds]
    settings = {**scale.settings, **setup.settings}
    outcomes = [Outcome(setup=setup.name, seed=seed, settings=settings, parameters=numel) for seed in seeds]
    together = _Together([model for peers in built for model, _ in peers])
    every, looked = scale.steps // scale.points, 0
    for step in range(scale.steps):
        together.backward(
            torch.stack([data.batch(seed, step, peer) for seed in seeds for peer in range(PEERS)])
        )
        for peers, of_seed in zip(built, modes, strict=True):
            for (_, inner), mode in zip(peers, of_seed, strict=True):
                setup.set_rate(inner, scale, step)
                mode.learner.accumulate(scale.samples)
        done = step + 1
        if done % setup.local_steps and done < scale.steps:
            continue
        for one, of_seed in zip(rounds, modes, strict=True):
            one.hold(of_seed)
        if done - looked >= every or done == scale.steps:
            looked = done
            for outcome, one, peers in zip(outcomes, rounds, built, strict=True):
                outcome.curve.append((done, data.held_out_loss(peers[0][0]), one.traffic.bytes / PEERS))
    for outcome, one in zip(outcomes, rounds, strict=True):
        outcome.rounds, outcome.seconds = one.traffic.rounds, (time.monotonic() - began_s) / len(seeds)
    return outcomes


def rows(
    say: Say,
    folder: Path | None,
    setups: Sequence[UntrainedSetup] = (),
    scale: Scale = SCALE,
    seeds: Sequence[int] = SEEDS,
) -> Iterator[list[Row]]:
    """Measure the section and yield its rows. `folder` stores the trainings; None stores nothing."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    store = OutcomeStore(None if folder is None else folder / "untrained.json")
    data, chosen = Data(scale), list(setups or SETUPS)
    found: dict[str, list[Outcome]] = {setup.name: [] for setup in chosen}
    with one_thread():
        for setup in chosen:
            settings = {**scale.settings, **setup.settings}
            lacking = [seed for seed in seeds if store.get(setup.name, seed, settings) is None]
            for outcome in train(setup, data, scale, lacking) if lacking else ():
                store.add(outcome)
                say(
                    f"untrained, {setup.name}, seed {outcome.seed}: {outcome.loss:.3f} nats per byte, "
                    f"{outcome.sent_bytes / outcome.parameters:.3g} bytes per parameter, "
                    f"{outcome.seconds:.0f} s"
                )
            stored = [store.get(setup.name, seed, settings) for seed in seeds]
            found[setup.name] = [one for one in stored if one is not None]
    reference = found[chosen[0].name]
    yield [
        *(_loss_row(setup, found[setup.name], reference, scale) for setup in chosen),
        *(_bytes_row(setup, found[setup.name], reference, scale) for setup in chosen[1:]),
        _aim_row(found, reference, scale),
    ]


def _workload(scale: Scale) -> str:
    return f"byte-level model, untrained, {PEERS} peers, {scale.steps} steps of {scale.samples} samples each"


def _loss_row(
    setup: UntrainedSetup, found: Sequence[Outcome], reference: Sequence[Outcome], scale: Scale
) -> Row:
    points = zip(*(one.curve for one in found), strict=True)
    curve = tuple(
        (
            sum(sent for _, _, sent in same) / len(same) / found[0].parameters,
            sum(loss for _, loss, _ in same) / len(same),
        )
        for same in points
    )
    return Row(
        identifier=f"untrained-loss-{slug(setup.name)}",
        workload=f"{_workload(scale)}: {setup.name}",
        quantity="held-out loss at the end",
        ours=Series(name=setup.name, unit="nats/byte", samples=tuple(one.loss for one in found)),
        peer=_of_reference(reference, tuple(one.loss for one in reference), "nats/byte"),
        aim=None,
        shown="ours / peer",
        limit=f"{setup.mode!r}, learning rate {setup.rate:g}",
        curve=curve,
    )


def _bytes_row(
    setup: UntrainedSetup, found: Sequence[Outcome], reference: Sequence[Outcome], scale: Scale
) -> Row:
    return Row(
        identifier=f"untrained-bytes-{slug(setup.name)}",
        workload=f"{_workload(scale)}: {setup.name}",
        quantity="bytes per parameter that one peer sends, and receives, in the whole training",
        ours=Series(name=setup.name, unit="bytes/parameter", samples=tuple(map(_per_parameter, found))),
        peer=_of_reference(reference, tuple(map(_per_parameter, reference)), "bytes/parameter"),
        aim=None,
        shown="peer / ours",
    )


def _aim_row(found: dict[str, list[Outcome]], reference: Sequence[Outcome], scale: Scale) -> Row:
    """Return the row of the way with the fewest bytes that is within `WITHIN` of the reference."""
    loss_max = WITHIN * statistics.median(one.loss for one in reference)
    near = {
        name: outcomes
        for name, outcomes in found.items()
        if statistics.median(one.loss for one in outcomes) <= loss_max
    }
    best = min(near, key=lambda name: _per_parameter(near[name][0]))
    return Row(
        identifier="untrained-fewest-bytes",
        workload=_workload(scale),
        quantity="bytes per parameter of the cheapest way within 2 % of synchronous AdamW",
        ours=Series(name=best, unit="bytes/parameter", samples=tuple(map(_per_parameter, near[best]))),
        peer=_of_reference(reference, tuple(map(_per_parameter, reference)), "bytes/parameter"),
        aim=Aim(of="peer / ours", sense="at least", value=FEWER_BYTES_MIN),
        shown="peer / ours",
        notes=(f"the cheapest way within 2 %: {best}",),
    )


def _per_parameter(outcome: Outcome) -> float:
    return outcome.sent_bytes / outcome.parameters


def _of_reference(reference: Sequence[Outcome], samples: tuple[float, ...], unit: str) -> Series:
    return Series(name=reference[0].setup, unit=unit, samples=samples)
