"""Checkpoints of a run by a peer that does not train: at intervals, it downloads, checks and writes the state
that the electors hold.

A single donor is not trusted. The state is the one that most electors of the swarm's head claim to hold,
every chunk is checked against its digest, and the whole must fit the model of the specification. If the entry
peers do not take part in the run and name no electors, the state that most donors hold is used. Peers with
different processors agree bit for bit only after rounds that average the state, so several attempts may be
needed then.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from averaging.optim.state.download import Download, DownloadedState
from swarm.core.clock import Clock
from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.ids import Contact
from swarm.monitor.logic.model import Model
from swarm.net.channels import Channels
from swarm.run.signed import SignedSpecification
from swarm.run.task import make_task

if TYPE_CHECKING:
    import torch

    from averaging.optim.state.checkpoint import Checkpoints
    from averaging.optim.state.training_state import TrainingState

_log = logging.getLogger(__name__)

# epochs that the donors may be ahead of this monitor, because short epochs pass between two polls. False
# claims have no effect unless most electors, or most donors, agree
_AHEAD_MAX = 200
RETRY_S = 3.0  # pause after an attempt that found donors with different states
# timeout of one download; a state that takes longer is not saved, and the monitor reports this
_FETCH_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSavingConfig:
    """Where a monitor saves checkpoints, and how often, as chosen on the command line."""

    folder: Path
    every_s: float = 600.0
    kept_max: int = 5

    def __post_init__(self) -> None:
        if self.every_s <= 0 or self.kept_max < 1:
            raise UsageError("--every is a positive time, and at least one checkpoint is kept")


@dataclass(slots=True, kw_only=True)
class StateSaver:
    """Saves the state of one run. Runs on the network loop; computation and disk access run in a thread."""

    signed: SignedSpecification
    caller: Channels
    clock: Clock
    model: Model
    donors: Callable[[], tuple[Contact, ...]]
    # returns the callable electors of the swarm's head, the most senior first
    electors: Callable[[], Awaitable[Sequence[Contact]]]
    config: StateSavingConfig
    saved: int = 0
    _epoch: int = -1  # epoch of the last checkpoint
    _last_failure: str = ""
    _state: tuple[TrainingState, list[str], Checkpoints] | None = None

    async def run(self) -> None:
        """Save at regular intervals, until cancelled."""
        while True:
            done = await self.attempt()
            await asyncio.sleep(self.config.every_s if done else min(RETRY_S, self.config.every_s))

    async def attempt(self) -> bool:
        """Download and write the state once. Return False if the attempt should be repeated soon."""
        donors = self.donors()
        if not donors or self.model.epoch <= 0:
            return False
        if self.model.epoch == self._epoch:
            return True
        loop = asyncio.get_running_loop()
        try:
            state, names, kept = await loop.run_in_executor(None, self._prepare)
            fetched = await self._fetch(donors, await self.electors(), state.bytes_max())
            if fetched.epoch > self._epoch:
                path, seconds = await loop.run_in_executor(
                    None, functools.partial(self._write, state, names, kept, fetched)
                )
                self._report_saved(fetched, path, seconds)
        except SwarmError as error:
            self._report_failure(str(error))
            return False
        return True

    async def _fetch(
        self, donors: Sequence[Contact], electors: Sequence[Contact], bytes_max: int
    ) -> DownloadedState:
        epoch = self.model.epoch
        download = Download(
            run=self.signed.run_id,
            caller=self.caller,
            bytes_max=bytes_max,
            epoch_min=max(0, epoch - 1),
            epoch_known=lambda: epoch + _AHEAD_MAX,
            electors=lambda: electors,
            waits_for_electors=True,
            majority=True,
        )
        return await download.fetch(donors, _FETCH_S)

    def _prepare(self) -> tuple[TrainingState, list[str], Checkpoints]:
        """Build the model of the specification, against which the fetched state is checked. Imports torch."""
        if self._state is None:
            from averaging.optim.state.checkpoint import Checkpoints, names_of
            from averaging.optim.state.training_state import TrainingState
            from swarm.run.inner_optimizer import build_optimizer, schedule_factory

            specification = self.signed.training
            chosen = specification.task
            task = make_task(chosen.name, chosen.settings, chosen.package)
            model: torch.nn.Module = task.build_model(specification.seed)
            inner = build_optimizer(model, specification.optimizer, task)
            schedule = schedule_factory(specification.optimizer.schedule)
            kept = Checkpoints(self.config.folder, kept_max=self.config.kept_max)
            self._state = TrainingState(inner, (), schedule(inner)), names_of(model, inner), kept
        return self._state

    def _write(
        self, state: TrainingState, names: list[str], kept: Checkpoints, fetched: DownloadedState
    ) -> tuple[Path, float]:
        began_s = time.monotonic()
        try:
            state.load(fetched.blob)
        except PeerError as error:
            raise SwarmError(f"the state of the donors does not fit the run's model: {error}") from error
        view = state.view()
        try:
            about = {
                "run": self.signed.full_name,
                "task": self.signed.training.task.name,
                "donors": str(fetched.agreed),
            }
            return kept.save(view, names, about), time.monotonic() - began_s
        finally:
            view.close()

    def _report_saved(self, fetched: DownloadedState, path: Path, seconds: float) -> None:
        self.saved, self._epoch, self._last_failure = self.saved + 1, fetched.epoch, ""
        now_s = self.clock.swarm_s()
        agreed = f"{fetched.agreed} donor{' agrees' if fetched.agreed == 1 else 's agree'}"
        self.model.checkpoint = (
            f"Saved epoch {fetched.epoch:,} as {path}: {agreed} on {fetched.digest.hex()[:12]}."
        )
        self.model.events.add(
            now_s,
            "saved",
            "good",
            f"epoch {fetched.epoch:,} saved as {path.name} in {seconds:.1f} s: {agreed}",
        )

    def _report_failure(self, reason: str) -> None:
        """Add one event for each kind of failure."""
        _log.info("no checkpoint yet: %s", reason)
        kind = reason.split("(", 1)[0]
        if kind != self._last_failure:
            self._last_failure = kind
            self.model.events.add(
                self.clock.swarm_s(), "not_saved", "warning", f"no checkpoint yet: {reason}"
            )
