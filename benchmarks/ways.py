"""Ways of training four peers on the same text: what the convergence section compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from averaging.optim.modes import ModeSettings
from averaging.optim.optimizer import Diloco, Gossip, Gradients, Local
from averaging.reduction.lowrank import PowerSgd

LOCAL_STEPS = 15  # between two rounds of the same parameters
STREAMING = 3
SEEDS = (0, 1, 2)  # of the headline ways; the others take the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way: a mode, a codec, and how many local steps lie between two rounds."""

    name: str
    mode: ModeSettings
    codec: str = "float32"
    error_feedback: bool = False
    strategy: PowerSgd | None = None
    span: int = LOCAL_STEPS  # local steps of each peer from one round to the next
    land_after: int = 0  # of an overlapped mode: steps after which the round that was begun is applied
    seeds: tuple[int, ...] = (0,)
    # the aim: by what factor less is sent than in synchronous float32 to come within 2 % of its loss
    fewer_bytes_min: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What a kept outcome must have in common with this way."""
        found = {
            "mode": repr(self.mode),
            "codec": self.codec,
            "feedback": self.error_feedback,
            "span": self.span,
            "land": self.land_after,
        }
        return found if self.strategy is None else {**found, "strategy": self.strategy.compatibility_tag}


# As in the paper: 0.7 and 0.9, from a model that has begun to learn. From an untrained one that goes too far:
# docs/decisions/0017
OUTER = Diloco()
CAUTIOUS = Diloco(outer_lr=0.8, momentum=0.4)
# For codecs whose error feedback holds most of every round back (arXiv 2508.15706): momentum on top of that
# goes too far
MEAN = Diloco(outer_lr=1.0, momentum=0.0)
SYNCHRONOUS = Way(name="synchronous float32", mode=Gradients(), span=1, seeds=SEEDS)
_HEADLINES = (
    Way(name="diloco int8", mode=OUTER, codec="int8", seeds=SEEDS, fewer_bytes_min=60.0),
    Way(name="diloco int4", mode=OUTER, codec="int4", seeds=SEEDS, fewer_bytes_min=110.0),
    Way(
        name="diloco int2 with error feedback",
        mode=OUTER,
        codec="int2",
        error_feedback=True,
        seeds=SEEDS,
        fewer_bytes_min=200.0,
    ),
)
_MODES = (
    Way(name="gradients float32, delayed by one step", mode=Gradients(delayed=True), span=1, land_after=1),
    Way(name="local float32", mode=Local()),
    Way(name="diloco float32", mode=OUTER),
    Way(name="diloco float32, outer step 0.8 with momentum 0.4", mode=CAUTIOUS),
    Way(
        name=f"diloco float32, streaming={STREAMING}",
        mode=replace(OUTER, streaming=STREAMING),
        span=LOCAL_STEPS // STREAMING,
        land_after=2,
    ),
    Way(name="gossip float32", mode=Gossip()),
)
_CODECS = (
    *(Way(name=f"diloco {codec}", mode=OUTER, codec=codec) for codec in ("float16", "bfloat16")),
    *(
        Way(name=f"diloco {codec} with error feedback", mode=OUTER, codec=codec, error_feedback=True)
        for codec in ("sign", "topk")
    ),
    *(
        Way(name=f"diloco int4, a round every {span} steps", mode=OUTER, codec="int4", span=span)
        for span in (30, 60)
    ),
    Way(name="diloco int2 without error feedback", mode=OUTER, codec="int2"),
    Way(name="diloco PowerSGD of rank 4, float16", mode=OUTER, codec="float16", strategy=PowerSgd(rank=4)),
    *(
        Way(
            name=f"diloco {codec} with error feedback, no outer momentum",
            mode=MEAN,
            codec=codec,
            error_feedback=True,
        )
        for codec in ("sign", "topk")
    ),
    Way(
        name="diloco PowerSGD of rank 4, float16, no outer momentum",
        mode=MEAN,
        codec="float16",
        strategy=PowerSgd(rank=4),
    ),
)
WAYS = (SYNCHRONOUS, *_HEADLINES, *_MODES, *_CODECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the model and how long the training is; equal for all ways that are compared.

    The learning rate rises over the first steps and falls by a cosine to 0 at the last. As in the paper of
    DiLoCo (arXiv 2311.08105), where a pretrained model is what peers begin with, the first steps are one
    machine's, on the batches of all four: the same for every way.
    """

    width: int = 48
    layers: int = 1
    heads: int = 4
    context: int = 32
    samples: int = 16  # of one peer in one step
    steps: int = 750  # of one peer, the common ones included
    common_steps: int = 150
    rising_steps: int = 50
    learning_rate: float = 3e-3
    data_bytes: int = 4 << 20
    points: int = 30  # at which the loss is looked at

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One training: its course, in steps of one peer, held-out loss (nats per byte), bytes that one peer has
    sent.
    """

    way: str
    seed: int
    settings: dict[str, Any]
    parameters: int = 0
    rounds: int = 0
    # of what four peers give to one round: values that came too late for theirs, on a busy machine
    missing: float = 0.0
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """At the end: the mean of the last three looks, since one of them is half noise."""
        last = [loss for _, loss, _ in self.curve[-3:]]
        return sum(last) / len(last)

    @property
    def sent_bytes(self) -> float:
        return self.curve[-1][2]

    def bytes_to(self, loss: float) -> float | None:
        """What one peer had sent when the loss was reached first; None: it was not."""
        return next((sent for _, reached, sent in self.curve if reached <= loss), None)


Say = Callable[[str], None]
