"""Settings of `swarm.Optimizer` that rarely need a change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from averaging.averager import AveragerConfig
from averaging.matchmaking.logic.grace_period import PatienceConfig
from averaging.matchmaking.logic.matchmaking import MatchmakingConfig
from averaging.matchmaking.service.matchmaking_service import GroupServiceConfig
from averaging.optim.progress.logic.reports import ProgressConfig
from averaging.optim.state.donor import DonorConfig
from averaging.optim.state.download import DownloadConfig
from swarm.core.errors import UsageError
from swarm.metrics.reporter import MetricsConfig


def _averager() -> AveragerConfig:
    """Return an averager configuration that waits longer for peers than a plain averager does: peers come
    to a round only when their training step ends.
    """
    patience = PatienceConfig(first_s=5.0, max_s=30.0)
    return AveragerConfig(groups=GroupServiceConfig(matchmaking=MatchmakingConfig(patience=patience)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Settings of `swarm.Optimizer`. Times are in seconds."""

    # peers in one round; all should fit: beyond it an epoch averages within the cells of a grid, and peers
    # drift (docs/decisions/0013)
    group_size_max: int = 64
    # one attempt at a round, matchmaking included. Too small: slow links never finish; must exceed a training
    # step
    round_timeout_s: float = 60.0
    rounds_max: int = 3  # attempts within one call of step; then it returns and tries again at the next one
    state_codec: str = "float32"  # of the rounds that make the state canonical
    state_timeout_s: float = 120.0  # of such a round
    load_timeout_s: float = 600.0  # of a resynchronisation within step
    load_retry_s: float = 0.5  # between two attempts at fetching the state
    # how long peers that all are in epoch 0 are asked for a state before there is taken to be none
    no_donor_s: float = 3.0
    # epochs captured while the state is downloaded, one copy of the gradients each; beyond it the download
    # starts anew
    replay_rounds_max: int = 64
    # a round is left when the others have been further for so long. Too small: slow links lose rounds that
    # were ending
    give_up_s: float = 5.0
    state_rounds_max: int = 3  # attempts at making the state canonical in its epoch
    # a download that is over sooner takes no part in rounds; others wait that long for us at most
    capture_after_s: float = 0.5
    # a round in progress when the download ends is waited for so long. Too small: it breaks for the others,
    # too
    capture_grace_s: float = 3.0
    first_look_s: float = 5.0  # the first step waits this long at most to learn who else trains
    lonely_look_s: float = 4.0  # before stepping alone, a look at the swarm must not be older than this
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    donor: DonorConfig = field(default_factory=DonorConfig)
    download: DownloadConfig = field(default_factory=DownloadConfig)
    averager: AveragerConfig = field(default_factory=_averager)
    # what this peer tells about itself to those who watch
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        if self.group_size_max < 2 or self.rounds_max < 1 or self.replay_rounds_max < 1:
            raise UsageError("group_size_max is at least 2, rounds_max and replay_rounds_max at least 1")
        times = (
            self.round_timeout_s,
            self.state_timeout_s,
            self.load_timeout_s,
            self.load_retry_s,
            self.first_look_s,
            self.lonely_look_s,
        )
        if min(times) <= 0 or self.no_donor_s < 0:
            raise UsageError("times are positive numbers of seconds")

    def of_run(self, run_id: str) -> AveragerConfig:
        """Return the averagers' settings for a run."""
        return replace(self.averager, run=run_id)
