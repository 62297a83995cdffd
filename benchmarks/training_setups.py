"""The setups that the convergence section compares: modes and codecs to train four peers on the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from averaging.optim.modes import ModeSettings
from averaging.optim.optimizer import Diloco, Gossip, Gradients, Local
from averaging.reduction.lowrank import PowerSgd

LOCAL_STEPS = 15  # between two rounds of the same parameters
STREAMING = 3
SEEDS = (0, 1, 2)  # of the headline setups; the others use the first


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """A mode, a codec, and the number of local steps between two rounds."""

    name: str
    mode: ModeSettings
    codec: str = "float32"
    error_feedback: bool = False
    strategy: PowerSgd | None = None
    local_steps: int = LOCAL_STEPS  # local steps of each peer from one round to the next
    delay_steps: int = 0  # overlapped modes: steps after which a started round is applied
    seeds: tuple[int, ...] = (0,)
    # aim: factor by which it sends less than synchronous float32 to come within 2 % of its loss
    fewer_bytes_min: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a stored outcome must share with this setup."""
        found = {
            "mode": repr(self.mode),
            "codec": self.codec,
            "error_feedback": self.error_feedback,
            "local_steps": self.local_steps,
            "delay_steps": self.delay_steps,
        }
        return found if self.strategy is None else {**found, "strategy": self.strategy.compatibility_tag}


# As in the paper, 0.7 and 0.9, for a model that has begun to learn; an untrained one overshoots with these:
# docs/decisions/0017
OUTER = Diloco()
CAUTIOUS = Diloco(outer_lr=0.8, momentum=0.4)
# for codecs whose error feedback withholds most of every round (arXiv 2508.15706), where momentum would
# overshoot
MEAN = Diloco(outer_lr=1.0, momentum=0.0)
SYNCHRONOUS = TrainingSetup(name="synchronous float32", mode=Gradients(), local_steps=1, seeds=SEEDS)
_HEADLINES = (
    TrainingSetup(name="diloco int8", mode=OUTER, codec="int8", seeds=SEEDS, fewer_bytes_min=60.0),
    TrainingSetup(name="diloco int4", mode=OUTER, codec="int4", seeds=SEEDS, fewer_bytes_min=110.0),
    TrainingSetup(
        name="diloco int2 with error feedback",
        mode=OUTER,
        codec="int2",
        error_feedback=True,
        seeds=SEEDS,
        fewer_bytes_min=200.0,
    ),
)
_MODES = (
    TrainingSetup(
        name="gradients float32, delayed by one step",
        mode=Gradients(delayed=True),
        local_steps=1,
        delay_steps=1,
    ),
    TrainingSetup(name="local float32", mode=Local()),
    TrainingSetup(name="diloco float32", mode=OUTER),
    TrainingSetup(name="diloco float32, outer step 0.8 with momentum 0.4", mode=CAUTIOUS),
    TrainingSetup(
        name=f"diloco float32, streaming={STREAMING}",
        mode=replace(OUTER, streaming=STREAMING),
        local_steps=LOCAL_STEPS // STREAMING,
        delay_steps=2,
    ),
    TrainingSetup(name="gossip float32", mode=Gossip()),
)
_CODECS = (
    *(TrainingSetup(name=f"diloco {codec}", mode=OUTER, codec=codec) for codec in ("float16", "bfloat16")),
    *(
        TrainingSetup(
            name=f"diloco {codec} with error feedback", mode=OUTER, codec=codec, error_feedback=True
        )
        for codec in ("sign", "topk")
    ),
    *(
        TrainingSetup(
            name=f"diloco int4, a round every {local_steps} steps",
            mode=OUTER,
            codec="int4",
            local_steps=local_steps,
        )
        for local_steps in (30, 60)
    ),
    TrainingSetup(name="diloco int2 without error feedback", mode=OUTER, codec="int2"),
    TrainingSetup(
        name="diloco PowerSGD of rank 4, float16", mode=OUTER, codec="float16", strategy=PowerSgd(rank=4)
    ),
    *(
        TrainingSetup(
            name=f"diloco {codec} with error feedback, no outer momentum",
            mode=MEAN,
            codec=codec,
            error_feedback=True,
        )
        for codec in ("sign", "topk")
    ),
    TrainingSetup(
        name="diloco PowerSGD of rank 4, float16, no outer momentum",
        mode=MEAN,
        codec="float16",
        strategy=PowerSgd(rank=4),
    ),
)
SETUPS = (SYNCHRONOUS, *_HEADLINES, *_MODES, *_CODECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of the model and the length of the training, equal for all setups that are compared.

    The learning rate rises over the first steps and falls by a cosine to 0 at the last. As in the paper of
    DiLoCo (arXiv 2311.08105), where peers begin with a pretrained model, one machine makes the first steps on
    the batches of all four peers, the same for every setup.
    """

    width: int = 48
    layers: int = 1
    heads: int = 4
    context: int = 32
    samples: int = 16  # of one peer per step
    steps: int = 750  # of one peer, common steps included
    common_steps: int = 150
    rising_steps: int = 50
    learning_rate: float = 3e-3
    data_bytes: int = 4 << 20
    points: int = 30  # evaluations of the loss

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of one training. Its curve has (steps of one peer, held-out loss in nats per byte, bytes
    sent by one peer).
    """

    setup: str
    seed: int
    settings: dict[str, Any]
    parameters: int = 0
    rounds: int = 0
    # contributions of four peers that came too late for their round, on a busy machine
    missing: float = 0.0
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """The final loss: the mean of the last three evaluations, since half of a single one is noise."""
        last = [loss for _, loss, _ in self.curve[-3:]]
        return sum(last) / len(last)

    @property
    def sent_bytes(self) -> float:
        return self.curve[-1][2]

    def bytes_to(self, loss: float) -> float | None:
        """Return what one peer had sent when the loss was first reached; None when it never was."""
        return next((sent for _, reached, sent in self.curve if reached <= loss), None)


Say = Callable[[str], None]
