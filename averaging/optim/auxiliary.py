"""`swarm.AuxiliaryPeer`: a peer that reduces for the trainers of a run and trains nothing itself."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch

from averaging.optim.config import OptimizerConfig
from averaging.optim.epoch_averager import (
    OBSOLETE_ROUND_GRACE_S,
    AveragingOptions,
    EpochAverager,
    check_codec,
)
from averaging.optim.history import RunHistory
from averaging.optim.modes import ModeParts, ModeSettings
from averaging.optim.modes.settings import ModeName, settings_of
from averaging.optim.progress.tracker import Tracker
from averaging.reduction.robust import Aggregation, AggregationRule, aggregation_of
from averaging.result import RoundResult
from averaging.service import AveragingService
from swarm.compression import resolve
from swarm.core.errors import NetworkError, UsageError
from swarm.core.ids import open_run_id
from swarm.runtime.thread import TURN_S_MAX

if TYPE_CHECKING:
    from swarm.node import Node

_CLOSE_S_MAX = 2.0
_FIRST_LOOK_S_MAX = 5.0
_PAUSE_S = 0.5  # pause after a round that found nobody


class AveragingArguments(TypedDict, total=False):
    """The arguments of `swarm.Optimizer` that decide how an epoch is averaged, with its defaults."""

    codec: str
    aggregation: AggregationRule | Aggregation
    clip_to_median: float | None
    audit: float


class AuxiliaryPeer:
    """A peer that takes part in the rounds of a run's epochs without samples of its own.

    It adds the trainers' values for a share of the vector that follows from its bandwidth, and sends them the
    averages. A machine without a GPU but with a good link helps trainers with slow ones. It receives no
    averages, has no part in the progress of the epoch, and no state to give; rounds over the state go without
    it. A lone trainer has no rounds that it could help with.

    Args:
        inner: An optimizer with parameters of the trainers' shapes and types; their values do not matter.
        node: This process as a peer.
        run: As the trainers have it, or they do not meet.
        mode: As the trainers have it. Not "gossip", whose rounds are of two trainers.
        config: As the trainers have it.
        averaging: `codec`, `aggregation`, `clip_to_median` and `audit`, as the trainers have them. PowerSGD
            has no place for an auxiliary peer.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        node: Node,
        run: str,
        mode: ModeName | ModeSettings = "gradients",
        config: OptimizerConfig | None = None,
        **averaging: Unpack[AveragingArguments],
    ) -> None:
        """Open the run. Raises UsageError for wrong arguments."""
        settings = settings_of(mode)
        codec = averaging.get("codec", "float16")
        resolve(codec, "gradient", 0)  # raises UsageError for an unknown codec before anything is opened
        self._mode = settings.build(ModeParts(inner=inner))
        if self._mode.traits.group_size is not None:
            raise UsageError(
                f"mode {settings.name} has rounds of two trainers: an auxiliary peer has no place"
            )
        aggregate = aggregation_of(
            averaging.get("aggregation", "mean"), averaging.get("clip_to_median", 10.0)
        )
        audit = averaging.get("audit", 0.0)
        self._options = AveragingOptions(codec=codec, aggregation=aggregate, audit=audit, auxiliary=True)
        check_codec(self._options, self._mode.traits)
        self._config = config or OptimizerConfig()
        self.node, self.run_id = node, open_run_id(run)
        self._closed = False
        self._epoch: int | None = None  # epoch of the next round; None: that of the trainers
        node.network.run(self._open(), TURN_S_MAX)

    async def _open(self) -> None:
        node = self.node
        blocklist = node.service(AveragingService).exchange.blocklist_of(self.run_id)
        group_size_max = self._config.group_size_max
        self._history = RunHistory(
            node, self.run_id, node.identity.sign, group_size_max=group_size_max, introducers=node.introducers
        )
        self._tracker = Tracker(
            node,
            self.run_id,
            None,
            blocklist,
            history=self._history,
        )
        self._averager = EpochAverager(
            node, self.run_id, self._mode, self._options, self._config, self._history
        )
        self._watching = [
            node.supervisor.spawn(f"progress of run {self.run_id}", self._tracker.run, restart=True),
            node.supervisor.spawn(f"history of run {self.run_id}", self._history.run, restart=True),
        ]
        self._forget = node.at_close(self._close_on_loop)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next round."""
        return self._tracker.swarm_epoch() if self._epoch is None else self._epoch

    def step(self, timeout_s: float = 60.0) -> RoundResult:
        """Take part in the next round. Call it again and again: between two calls the trainers wait for this
        peer.

        Returns the result of the round, failed when the trainers began none within `timeout_s`. Raises
        UsageError when this peer is closed.
        """
        if not 0 < timeout_s < float("inf"):
            raise UsageError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
        end_s = self.node.clock.monotonic_s() + timeout_s
        self._tracker.wait_refresh(min(_FIRST_LOOK_S_MAX, timeout_s), first=True)
        while True:
            self.node.network.check()
            if self._closed:
                raise UsageError("this auxiliary peer is closed")
            self._history.keep_up()
            epoch = self.epoch

            def is_obsolete(epoch: int = epoch) -> bool:
                return (
                    self._closed
                    or self._tracker.swarm_epoch() > epoch
                    or self.node.clock.monotonic_s() > end_s
                )

            result = self._averager.average(epoch, is_obsolete, OBSOLETE_ROUND_GRACE_S)
            self._mode.failed(result.reason)  # there is nothing to apply
            if result.certificate is not None:
                self._history.commit(result.certificate)
            # after a round the trainers are in the next epoch, before they have reported so
            self._epoch = None if result.failed else epoch + 1
            if not result.failed or self.node.clock.monotonic_s() + _PAUSE_S > end_s:
                return result
            self.node.network.waits.event().wait(_PAUSE_S)

    def close(self) -> None:
        """Leave the run. Idempotent; the node stays open."""
        if self._closed or self.node.closed or not self.node.network.is_own_process:
            self._closed = True
            return
        with contextlib.suppress(NetworkError):  # records expire by themselves
            self.node.network.run(self._close_on_loop(), _CLOSE_S_MAX)
        self._averager.close()
        self._forget()

    async def _close_on_loop(self) -> None:
        if not self._closed:
            self._closed = True
            self.node.standing.forget_run(self.run_id)
            for task in self._watching:
                task.cancel()
            await self._tracker.close()

    def __enter__(self) -> AuxiliaryPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
