"""The training mode in a run's specification: `mode = "diloco"`, or a table `[mode]` with settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from averaging.optim.modes import ModeSettings

_Rate = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
_Epochs = Annotated[int, Field(ge=0, le=1 << 20)]

_SETTINGS = {
    "gradients": {"delayed"},
    "local": {"carried_epochs_max"},
    "diloco": {"outer_lr", "momentum", "nesterov", "streaming", "delay_steps", "carried_epochs_max"},
    "gossip": {"outer_lr", "momentum", "consensus", "carried_epochs_max"},
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
    carried_epochs_max: _Epochs | None = None

    @model_validator(mode="after")
    def _settings_are_the_modes_own(self) -> ModeChoice:
        foreign = sorted(self.given.keys() - _SETTINGS[self.name])
        if foreign:
            known = ", ".join(sorted(_SETTINGS[self.name]))
            raise ValueError(f"mode {self.name} has no setting {foreign[0]}; it has: {known}")
        if self.delay_steps is not None and (self.streaming or 1) == 1:
            raise ValueError("delay_steps is for streaming above 1")
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The settings that the specification sets."""
        return {key: value for key, value in self.model_dump(exclude={"name"}).items() if value is not None}

    def build(self) -> ModeSettings:
        """Return the settings as `swarm.Optimizer` takes them. Imports torch."""
        from averaging.optim.modes.settings import MODES

        return MODES[self.name](**self.given)

    # The estimates of traffic and memory need the following without importing torch.

    @property
    def role(self) -> str:
        """The kind of values that a round averages, by which codec "adaptive" chooses."""
        return {"gradients": "gradient", "gossip": "parameter"}.get(self.name, "pseudo_gradient")

    @property
    def state_sync_epochs(self) -> int | None:
        """Epochs between two averages of the state if the specification sets none; None: never."""
        return {"gradients": 10, "gossip": None}.get(self.name, 100)

    @property
    def outer_statistics(self) -> int:
        """Number of vectors of the parameters' size that the mode shares: its outer momentum."""
        return int(self.name in ("diloco", "gossip") and self.momentum != 0)

    def statistics(self, optimizer: str) -> int:
        """Return how many vectors of the parameters' size are averaged together with the state."""
        if self.name == "gradients":
            return {"adamw": 2, "adam": 2, "sgd": 1}[optimizer]
        return int(self.name == "diloco")


def table_from_name(value: Any) -> Any:
    """Return a table for a bare name, and any other value unchanged."""
    return {"name": value} if isinstance(value, str) else value


Mode = Annotated[ModeChoice, BeforeValidator(table_from_name)]
