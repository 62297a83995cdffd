"""Specification of a grid of experts, which `swarm serve` hosts. Volunteers need not copy options, and all
replicas have the same shapes, optimizer and initial parameters.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from moe.protocol.names import ExpertGrid
from swarm.core.errors import UsageError
from swarm.run.owned import GRID_PREFIX, OwnedSpecification, SpecificationTable

_HASH = r"^[0-9a-f]{64}$"
_Size = Annotated[int, Field(ge=1, le=1 << 20)]


# bounds of a step if strangers may train and the specification gives none
_STRANGERS_CLIP_NORM = 1.0
_STRANGERS_UPDATE_NORM_MAX = 0.1


class GridOptimizer(SpecificationTable):
    """The optimizer of every expert, with its schedule in steps of the expert: a linear warm-up, then, if
    `training_steps` is given, a linear decay to zero at that step.
    """

    name: Literal["adam", "adamw", "sgd", "none"] = "adam"  # none: the experts are frozen
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-3
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # largest change of an expert's parameters in one step, as a fraction of their norm; None: unlimited
    update_norm_max: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # samples of one step of an expert, over all its servers; 0: one for each batch of requests
    target_batch_size: Annotated[int, Field(ge=0, le=1 << 32)] = 0
    warmup_steps: int = Field(default=0, ge=0, le=1 << 40)
    training_steps: int | None = Field(default=None, ge=1, le=1 << 40)

    @model_validator(mode="after")
    def _falls_after_the_warm_up(self) -> GridOptimizer:
        if self.training_steps is not None and self.training_steps <= self.warmup_steps:
            raise ValueError("training_steps are counted from the start, so they must exceed warmup_steps")
        return self


class GridCodecs(SpecificationTable):
    """Default codecs of tensors between the grid's callers and its servers. Without a codec tensors are sent
    uncompressed.
    """

    inputs: str | None = Field(default=None, max_length=64)  # activations sent to an expert
    outputs: str | None = Field(default=None, max_length=64)  # activations that it returns
    gradients: str | None = Field(default=None, max_length=64)  # gradients of outputs, sent to it
    input_gradients: str | None = Field(default=None, max_length=64)  # gradients that it returns

    @field_validator("inputs", "outputs", "gradients", "input_gradients")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                from swarm.compression import find  # imports torch

                find(value)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return value


class GridSpecification(OwnedSpecification):
    """All settings of a grid that its servers must have in common, as in the TOML file."""

    OTHER_KIND = ("task", "a run", "swarm start")

    # permissions of peers without an invite in an invited grid: "none", "call" (forward passes, and backward
    # passes of frozen experts) or "train"
    guests: Literal["none", "call", "train"] = "call"
    # patterns of the experts' names: "ffn.[0:4].[0:4]"; a single pattern needs no list
    experts: tuple[Annotated[str, Field(max_length=200)], ...] = Field(min_length=1, max_length=64)
    expert_class: str = Field(default="ffn", min_length=1, max_length=64)
    # SHA-256 of the file that defines the class, if it is given with `--module`; every server needs the same
    # file
    module: str | None = Field(default=None, pattern=_HASH)
    hidden_dim: _Size = 1024
    sequence_length: _Size = 128  # the largest, of classes that take sequences
    # experts take and return codes of this many numbers instead of vectors of hidden_dim; 0: the vectors
    activation_rank: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # together with the expert's name, determines the initial parameters
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    # seconds between two averages of replicas; 0: never
    average_s: Annotated[float, Field(ge=0, le=86400.0, allow_inf_nan=False)] = 60.0
    optimizer: GridOptimizer = GridOptimizer()
    codecs: GridCodecs = GridCodecs()

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_experts(cls, table: Any) -> Any:
        """Add the name, if none is given: "grid.ffn" for "ffn.[0:4]"."""
        if not isinstance(table, dict):
            return table
        experts = table.get("experts")
        patterns = [experts] if isinstance(experts, str) else experts
        if not isinstance(patterns, list | tuple) or not all(isinstance(one, str) for one in patterns):
            return table
        named = {"name": GRID_PREFIX + patterns[0].partition(".")[0].lower()} if patterns else {}
        return {**named, **table, "experts": tuple(patterns)}

    @model_validator(mode="after")
    def _rank_is_within_the_width(self) -> GridSpecification:
        if self.activation_rank > self.hidden_dim:
            raise ValueError("activation_rank is at most hidden_dim")
        return self

    @field_validator("experts")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(str(ExpertGrid.parse(one)) for one in value)
        except UsageError as error:
            raise ValueError(str(error)) from error

    @field_validator("name")
    @classmethod
    def _name_is_of_a_grid(cls, value: str) -> str:
        if not value.startswith(GRID_PREFIX):
            raise ValueError(f"the name of a grid begins with {GRID_PREFIX!r}")
        return value

    @property
    def step_bounds(self) -> tuple[float | None, float | None]:
        """Return two bounds of a step: the largest gradient norm and the largest relative change of the
        parameters. Where strangers train both exist, whatever the specification leaves out.
        """
        clip_norm, update_norm_max = self.optimizer.clip_norm, self.optimizer.update_norm_max
        if self.members == "open" or self.guests == "train":
            clip_norm = _STRANGERS_CLIP_NORM if clip_norm is None else clip_norm
            update_norm_max = _STRANGERS_UPDATE_NORM_MAX if update_norm_max is None else update_norm_max
        return clip_norm, update_norm_max

    @property
    def patterns(self) -> list[ExpertGrid]:
        """Return the patterns of the experts' names."""
        return [ExpertGrid.parse(one) for one in self.experts]

    def has(self, pattern: ExpertGrid) -> bool:
        """Return whether all experts that match a pattern belong to this grid."""
        return any(own.covers(pattern) for own in self.patterns)
