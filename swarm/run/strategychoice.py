"""The compression strategy in a run's specification: `strategy = "powersgd"`, or a table `[strategy]` with
settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swarm.run.modechoice import table_from_name

if TYPE_CHECKING:
    from averaging.reduction.lowrank import PowerSgd

RANK_MAX = 1024  # the same as in `averaging.reduction.lowrank`, which cannot be imported without torch


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


Strategy = Annotated[StrategyChoice, BeforeValidator(table_from_name)]
