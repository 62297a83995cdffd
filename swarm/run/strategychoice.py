"""In what shape a run's averages travel, as its specification says it: `strategy = "powersgd"`, or a table
`[strategy]` with settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swarm.run.modechoice import by_name

if TYPE_CHECKING:
    from averaging.reduction.lowrank import PowerSgd

RANK_MAX = 1024  # `averaging.reduction.lowrank` has the same; it takes torch to import


class StrategyChoice(BaseModel):
    """A strategy's name and settings; `averaging.reduction.lowrank.PowerSgd` explains them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["powersgd"] = "powersgd"
    rank: Annotated[int, Field(ge=1, le=RANK_MAX)] = 4
    saving_min: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0

    def build(self) -> PowerSgd:
        """What `swarm.Optimizer` takes. Imports torch."""
        from averaging.reduction.lowrank import PowerSgd

        return PowerSgd(rank=self.rank, saving_min=self.saving_min)


Strategy = Annotated[StrategyChoice, BeforeValidator(by_name)]
