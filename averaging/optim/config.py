"""Settings of `swarm.Optimizer` that rarely need a change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from averaging.averager import AveragerConfig
from averaging.matchmaking.logic.grace_period import GracePeriodConfig
from averaging.matchmaking.logic.matchmaking import MatchmakingConfig
from averaging.matchmaking.service.matchmaking_service import GroupServiceConfig
from averaging.optim.progress.logic.reports import ProgressConfig
from averaging.optim.state.download import DownloadConfig
from swarm.core.errors import UsageError
from swarm.metrics.reporter import MetricsConfig


def _averager() -> AveragerConfig:
    """Return an averager configuration that waits longer for peers than a plain averager does: peers come
    to a round only when their training step ends.
    """
    grace_period = GracePeriodConfig(unknown_peer_s=5.0, grace_s_max=30.0)
    return AveragerConfig(groups=GroupServiceConfig(matchmaking=MatchmakingConfig(grace_period=grace_period)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Settings of `swarm.Optimizer`. Times are in seconds."""

    # peers in one round. All peers should fit: beyond it an epoch averages within the cells of a grid, and
    # peers drift (docs/decisions/0013)
    group_size_max: int = 64
    # one attempt at a round, matchmaking included; must exceed a training step. Too small: slow links never
    # finish
    round_timeout_s: float = 60.0
    rounds_max: ClassVar[int] = 3  # attempts within one call of step; after that the next call tries again
    state_codec: str = "float32"  # of rounds over the state
    state_timeout_s: ClassVar[float] = 120.0  # of one round over the state
    load_timeout_s: float = 600.0  # of a download of the state within step
    load_retry_s: ClassVar[float] = 0.5  # between two attempts at downloading the state
    # while all peers are in epoch 0: how long to look for a state before concluding that there is none
    no_donor_wait_s: float = 3.0
    # epochs captured while the state is downloaded, one copy of the gradients each; beyond it the download
    # restarts
    replay_rounds_max: ClassVar[int] = 64
    # a round is cancelled this long after the others went on to the next epoch. Too small: slow links lose
    # rounds that were about to end
    obsolete_round_grace_s: ClassVar[float] = 5.0
    state_rounds_max: ClassVar[int] = 3  # attempts at averaging the state in its epoch
    # a download that ends sooner takes no part in rounds; this is the longest that others wait for this peer
    capture_after_s: ClassVar[float] = 0.5
    # how long to wait for a round in progress when the download has ended. Too small: the round fails for the
    # others, too
    capture_grace_s: ClassVar[float] = 3.0
    # longest wait in the first step for the first read of the others' progress
    first_refresh_timeout_s: float = 5.0
    # a peer steps alone only if its latest read of the others' progress is not older than this
    alone_check_age_s_max: ClassVar[float] = 4.0
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    download: DownloadConfig = field(default_factory=DownloadConfig)
    averager: AveragerConfig = field(default_factory=_averager)
    serve_state: bool = True  # False: peers that join download nothing from this one
    # what this peer publishes about itself
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        if self.group_size_max < 2:
            raise UsageError(f"group_size_max is at least 2, not {self.group_size_max}")
        times = (self.round_timeout_s, self.load_timeout_s, self.first_refresh_timeout_s)
        if min(times) <= 0 or self.no_donor_wait_s < 0:
            raise UsageError("times are positive numbers of seconds")

    def of_run(self, run_id: str) -> AveragerConfig:
        """Return the averagers' settings for a run."""
        return replace(self.averager, run=run_id)
