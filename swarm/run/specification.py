"""Specification of a run: what is trained, and how. It is written as TOML, signed by the run's owner
(`swarm.run.signed`), and checked by every peer that joins.

A specification is declarative: it names a task that is installed on each machine and never contains code.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from swarm.core.wording import duration, one_line
from swarm.run.choices import Mode, ModeChoice, Strategy
from swarm.run.owned import GRID_PREFIX, OwnedSpecification, SpecificationTable

PAUSES_MAX = 8  # planned
PAUSE_S_MAX = 31 * 86400.0
MESSAGE_CHARACTERS_MAX = 280
_COARSE = ("int2", "sign", "topk")
_FINE = ("float32", "float16", "bfloat16", "adaptive")
_PACKAGE = r"^[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.+]*$"
_OPTIMIZER = r"^(adamw|adam|sgd|adafactor|muon|task:[a-z][a-z0-9-]{0,47})$"
_Count = Annotated[int, Field(ge=1, le=1 << 40)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class TaskChoice(SpecificationTable):
    """Name of an installed task and its settings, which the task checks itself."""

    name: str = Field(min_length=1, max_length=64)
    # the package that provides the task, as "NAME==VERSION"; `swarm start` fills it in. Users paste it into a
    # shell, so it contains no character with a meaning to a shell.
    package: Annotated[str, Field(max_length=128, pattern=_PACKAGE)] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


class Schedule(SpecificationTable):
    """Learning rate over epochs: linear warm-up, then constant or a cosine down to `final` times the rate."""

    name: Literal["constant", "cosine"] = "constant"
    warmup_epochs: int = Field(default=0, ge=0, le=1 << 32)
    # the epoch at which the cosine ends; required for "cosine", ignored for "constant"
    total_epochs: int | None = Field(default=None, ge=1, le=1 << 32)
    final: float = Field(default=0.1, ge=0, le=1)


class OptimizerChoice(SpecificationTable):
    """The inner optimizer, which every member builds alike."""

    # adamw, adam, sgd, adafactor, muon (for the hidden matrices, AdamW for the rest), or task:NAME, an
    # optimizer that the run's task provides
    name: Annotated[str, Field(pattern=_OPTIMIZER)] = "adamw"
    learning_rate: _Positive = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.95)  # for adam and adamw, and for muon's AdamW
    momentum: _Fraction = 0.9  # for sgd and muon; for muon 0.95 is usual
    # settings of an optimizer of the task, which checks them
    settings: dict[str, Any] = Field(default_factory=dict)
    # the swarm's averaged gradient is scaled down to this norm before the step; None: no clipping
    clip_norm: _Positive | None = None
    schedule: Schedule = Schedule()

    @property
    def own_name(self) -> str | None:
        """Return the name of an optimizer of the run's task; None for those that come with swarm."""
        _, colon, name = self.name.partition(":")
        return name if colon else None

    @property
    def statistics(self) -> int:
        """Return how many vectors of the parameters' size the optimizer keeps at most."""
        if self.name == "sgd":
            return int(self.momentum > 0)
        return 0 if self.name == "adafactor" else 2


class End(SpecificationTable):
    """End of the run, at the first condition that is met. Without conditions it ends with its last member."""

    epochs: _Count | None = None
    loss: _Positive | None = None  # validation loss, as each member measures it on its held-out part
    seconds: _Positive | None = None  # since the run was created, in swarm time


class Requirements(SpecificationTable):
    """Requirements on a machine, in addition to the memory that the task computes."""

    memory_mb: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    device: Literal["any", "cuda"] = "any"


class PlannedPause(SpecificationTable):
    """A time in which nobody trains, in swarm time (Unix seconds)."""

    starts_s: Annotated[float, Field(ge=0.0, lt=1e12)]
    ends_s: Annotated[float, Field(ge=0.0, lt=1e12)]

    @model_validator(mode="after")
    def _ends_after_it_starts(self) -> PlannedPause:
        if not self.starts_s < self.ends_s <= self.starts_s + PAUSE_S_MAX:
            raise ValueError(f"a planned pause ends after it starts, within {duration(PAUSE_S_MAX)}")
        return self


class RunSpecification(OwnedSpecification):
    """All settings of a run, as in the TOML file. docs/decisions/0006 explains the names of the fields."""

    OTHER_KIND = ("experts", "a grid of experts", "swarm serve")
    OWNERS_KEYS: ClassVar[tuple[str, ...]] = (
        "paused",
        "pauses",
        "message",
        *OwnedSpecification.OWNERS_KEYS,
    )

    mode: Mode = ModeChoice()
    codec: Literal["float32", "float16", "bfloat16", "int8", "int4", "int2", "sign", "topk", "adaptive"] = (
        "float16"
    )
    # add the quantization error of a round to the next round; the three coarsest codecs require it
    error_feedback: bool = False
    # powersgd: matrices are sent as low-rank factors, encoded with the codec; it has its own error feedback
    strategy: Strategy | None = None
    target_batch_size: _Count  # samples of the whole swarm in one epoch
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)]  # samples of one step of one volunteer
    target_group_size: Annotated[int, Field(ge=2, le=256)] = 64
    state_sync_epochs: Annotated[int, Field(ge=1, le=1 << 20)] | None = None  # None: the mode's default
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0  # seed of the initial parameters
    task: TaskChoice
    optimizer: OptimizerChoice = OptimizerChoice()
    end: End = End()
    requirements: Requirements = Requirements()
    # set by the owner with `swarm change`: no peer trains; members stay and keep the state
    paused: bool = False
    pauses: tuple[PlannedPause, ...] = Field(default=(), max_length=PAUSES_MAX)  # likewise, by the clock
    # the owner's message to volunteers, one line; likewise
    message: str = Field(default="", max_length=MESSAGE_CHARACTERS_MAX)

    def is_paused(self, now_s: float) -> bool:
        """Return whether the owner has paused the run at this swarm time, by hand or by plan."""
        return self.paused or any(one.starts_s <= now_s < one.ends_s for one in self.pauses)

    @field_validator("message")
    @classmethod
    def _message_is_a_line(cls, value: str) -> str:
        return one_line("a message", value)

    @model_validator(mode="after")
    def _settings_are_those_of_the_task(self) -> RunSpecification:
        if self.optimizer.settings and self.optimizer.own_name is None:
            raise ValueError("optimizer.settings are for an optimizer of the task, of a name task:NAME")
        return self

    @field_validator("name")
    @classmethod
    def _name_is_not_of_a_grid(cls, value: str) -> str:
        if value.startswith(GRID_PREFIX):
            raise ValueError(f"names that begin with {GRID_PREFIX!r} are reserved for grids of experts")
        return value

    @model_validator(mode="after")
    def _codec_fits(self) -> RunSpecification:
        if self.codec in _COARSE and not self.error_feedback:
            raise ValueError(f"codec {self.codec} needs error_feedback = true")
        if self.mode.role == "parameter" and self.codec not in _FINE:
            raise ValueError(
                f"mode {self.mode.name} averages parameters themselves: "
                f"its codec is one of {', '.join(_FINE)}"
            )
        return self

    @model_validator(mode="after")
    def _strategy_fits(self) -> RunSpecification:
        if self.strategy is None:
            return self
        if self.mode.role == "parameter":
            raise ValueError(
                f"mode {self.mode.name} averages parameters themselves: "
                "strategy powersgd is for gradients and differences"
            )
        if (self.mode.streaming or 1) > 1 or (self.mode.delayed and self.mode.name == "diloco"):
            raise ValueError(
                "strategy powersgd needs whole matrices, and a mode with streaming or delayed rounds has "
                "parameters end to end"
            )
        if self.codec not in _FINE:
            raise ValueError(
                "the factors of strategy powersgd are small and need precision: its codec is one of "
                f"{', '.join(_FINE)}"
            )
        return self

    @field_validator("optimizer")
    @classmethod
    def _cosine_knows_its_end(cls, value: OptimizerChoice) -> OptimizerChoice:
        schedule = value.schedule
        if schedule.name == "cosine" and (
            schedule.total_epochs is None or schedule.total_epochs <= schedule.warmup_epochs
        ):
            raise ValueError(
                "schedule.total_epochs must be given for a cosine, and be more than warmup_epochs"
            )
        return value

    @property
    def wire_format(self) -> str:
        """Return the encoding of averaged values, as a text for users."""
        return (
            self.codec
            if self.strategy is None
            else f"{self.strategy.name} of rank {self.strategy.rank} in {self.codec}"
        )
