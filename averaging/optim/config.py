"""The settings of `swarm.Optimizer` in addition to its arguments."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Settings of `swarm.Optimizer` in addition to its arguments. Times are in seconds; those that depend on
    the links follow from the node's preset (`NodeConfig.preset`).
    """

    # peers in one round, equal on all peers. With more trainers an epoch has several rounds, through the
    # cells of a grid (docs/decisions/0030)
    group_size_max: int = 64
    # one attempt at a round, matchmaking included; must exceed a training step. Too small: slow links never
    # finish
    round_timeout_s: float = 60.0
    # timeout of a state download within `step`: size of the model and its statistics divided by the speed of
    # the link
    load_timeout_s: float = 600.0
    publish_metrics: bool = True  # False: monitors see only this peer's progress

    def __post_init__(self) -> None:
        if self.group_size_max < 2:
            raise UsageError(f"group_size_max is at least 2, not {self.group_size_max}")
        if min(self.round_timeout_s, self.load_timeout_s) <= 0:
            raise UsageError("times are positive numbers of seconds")
