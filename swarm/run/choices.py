"""How a run averages, in its specification: the training mode (`mode = "diloco"`, or a table `[mode]` with
settings) and the compression strategy (`strategy = "powersgd"`, or a table `[strategy]`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from averaging.optim.modes import ModeSettings
    from averaging.reduction.lowrank import PowerSgd
    from swarm.compression.adaptive import Role

RANK_MAX = 1024  # equal to the value in `averaging.reduction.lowrank`, whose import would load torch
_Rate = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
_Epochs = Annotated[int, Field(ge=0, le=1 << 20)]

_SETTINGS: dict[str, set[str]] = {
    "gradients": {"delayed"},
    "local": set(),
    "diloco": {"outer_lr", "momentum", "nesterov", "streaming", "delayed", "delay_steps"},
    "gossip": {"outer_lr", "momentum", "consensus"},
}


class ModeChoice(BaseModel):
    """Name of a mode and the settings that differ from its defaults.

    `averaging.optim.modes.settings` explains the settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["gradients", "local", "diloco", "gossip"] = "gradients"
    delayed: bool | None = None
    outer_lr: _Rate | None = None
    momentum: _Fraction | None = None
    nesterov: bool | None = None
    streaming: Annotated[int, Field(ge=1, le=1024)] | None = None
    delay_steps: _Epochs | None = None
    consensus: Annotated[float, Field(ge=0, lt=2, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _settings_are_the_modes_own(self) -> ModeChoice:
        foreign = sorted(self.given.keys() - _SETTINGS[self.name])
        if foreign:
            known = ", ".join(sorted(_SETTINGS[self.name])) or "none"
            raise ValueError(f"mode {self.name} has no setting {foreign[0]}; it has: {known}")
        if self.delay_steps is not None and (self.streaming or 1) == 1 and not self.delayed:
            raise ValueError("delay_steps is for streaming above 1, or delayed = true")
        if self.delayed and (self.streaming or 1) > 1:
            raise ValueError("rounds of fragments are always delayed: leave delayed or streaming out")
        return self

    @property
    def given(self) -> dict[str, Any]:
        """Return the settings that the specification sets."""
        return {key: value for key, value in self.model_dump(exclude={"name"}).items() if value is not None}

    def build(self) -> ModeSettings:
        """Return the settings as `swarm.Optimizer` takes them. Imports torch."""
        from averaging.optim.modes.settings import MODES

        return MODES[self.name](**self.given)

    # The estimates of traffic and memory need the following without importing torch.

    @property
    def role(self) -> Role:
        """Return the kind of values that a round averages. The codec "adaptive" chooses by it."""
        roles: dict[str, Role] = {"gradients": "gradient", "gossip": "parameter"}
        return roles.get(self.name, "pseudo_gradient")

    @property
    def state_sync_epochs(self) -> int | None:
        """Epochs between two averages of the state if the specification sets none; None: never."""
        return {"gradients": 10, "gossip": None}.get(self.name, 100)

    @property
    def outer_statistics(self) -> int:
        """Number of vectors of the parameters' size that the mode shares: its outer momentum."""
        return int(self.name in ("diloco", "gossip") and self.momentum != 0)

    def statistics(self, of_optimizer: int) -> int:
        """Return how many vectors of the parameters' size are averaged together with the state.
        `of_optimizer`: how many of them the inner optimizer keeps.
        """
        if self.name == "gradients":
            return of_optimizer
        return int(self.name == "diloco")


class StrategyChoice(BaseModel):
    """Name and settings of a strategy. `averaging.reduction.lowrank.PowerSgd` explains the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["powersgd"] = "powersgd"
    rank: Annotated[int, Field(ge=1, le=RANK_MAX)] = 4
    saving_min: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0

    def build(self) -> PowerSgd:
        """Return the strategy as `swarm.Optimizer` takes it. Imports torch."""
        from averaging.reduction.lowrank import PowerSgd

        return PowerSgd(rank=self.rank, saving_min=self.saving_min)


def table_from_name(value: Any) -> Any:
    """Return a table for a bare name, and any other value unchanged."""
    return {"name": value} if isinstance(value, str) else value


Mode = Annotated[ModeChoice, BeforeValidator(table_from_name)]
Strategy = Annotated[StrategyChoice, BeforeValidator(table_from_name)]
