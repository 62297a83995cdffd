"""The settings of `swarm.Averager` in addition to its arguments, and its place in a run."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from averaging.matchmaking.logic.grace_period import GRACE_S_MAX
from averaging.matchmaking.logic.messages import AveragerName
from swarm.core.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerConfig:
    """Settings of `swarm.Averager` in addition to its arguments. Times that depend on the links follow from
    the node's preset (`NodeConfig.preset`).
    """

    # Upload bandwidth in bytes/s; a peer with more reduces more. None: as measured in the rounds before.
    bandwidth: float | None = None
    # Longest time in seconds that a group waits for a peer that is late. Peers that compute between two
    # rounds need as long as their computations differ.
    grace_s_max: float = GRACE_S_MAX

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not 0.0 < self.bandwidth < float("inf"):
            raise UsageError(
                f"bandwidth must be a positive number of bytes per second, not {self.bandwidth!r}"
            )
        if not 0.0 <= self.grace_s_max < float("inf"):
            raise UsageError(f"grace_s_max is a number of seconds, not {self.grace_s_max!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAverager:
    """The place of an optimizer's averager in its run, instead of a name of the user's. Not a setting: it
    follows from the run.
    """

    name: AveragerName
    # Additional text that must be equal on all peers; compared before a group forms, like shapes and codec.
    compatibility_tag: str
    # Average share of the time that may be spent on waiting for one late peer. Too small: peers with long
    # steps are left out of rounds. None: no limit.
    waiting_share_max: float | None


def without_run(name: str) -> RunAverager:
    """Return the place of an averager that a user named and that belongs to no run.

    Raise UsageError for a name with other characters or of another length than records take.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"an averager's name has 1 to 64 letters, digits, dots, dashes or underscores, not {name[:100]!r}"
        )
    run = hashlib.sha256(f"open averager {name}".encode()).hexdigest()[:20]
    return RunAverager(
        name=AveragerName(run=run, averager=name), compatibility_tag="", waiting_share_max=None
    )
