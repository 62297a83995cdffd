"""A volunteer: builds what the specification names, fetches the state, and trains until the run ends or somebody wants it to stop."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import NotEnoughPeers
from swarm.run import machine, outlook
from swarm.run.accounts import Accounts, Pacing
from swarm.run.directory import RunDirectory
from swarm.run.events import Emit, Finished, Found, Joined, Notice, StateDownloaded
from swarm.run.specification import RunSpecification, SignedSpecification
from swarm.run.task import make_task

if TYPE_CHECKING:
    import torch

    from averaging.optimizer import Optimizer
    from swarm.node import Node
    from swarm.run.training import Training

_STATE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerConfig:
    """What the volunteer decides, as against what the run's owner does."""

    device: str = "auto"  # auto, cpu, cuda
    data: Path | None = None  # a folder of its own instead of the task's default data
    validation_share: float = 0.05  # of the time may go into measuring the loss on the held-out part
    validation_s_min: float = 2.0  # between two measurements at least


class Volunteer:
    """One peer's part in one run. Made and used on the trainer's thread; `stop` may be set from any."""

    def __init__(
        self, node: Node, signed: SignedSpecification, directory: RunDirectory, config: VolunteerConfig, emit: Emit, stop: threading.Event
    ) -> None:
        """UsageError when the task is not installed here or does not accept the specification's settings."""
        self.signed = signed
        self._node, self._directory, self._config, self._emit, self._stop = node, directory, config, emit, stop
        self._task = make_task(self.specification.task.name, self.specification.task.settings)
        self._description = self._task.describe(self.specification.batch_size)

    @property
    def specification(self) -> RunSpecification:
        return self.signed.specification

    def introduce(self, *, founded: bool) -> Found:
        """What will be trained, what it takes here, and what traffic to expect."""
        specification, description = self.specification, self._description
        seen = outlook.Outlook(0, 0.0, 0)
        if not founded:
            seen = self._node.network.run(
                outlook.look(self._node.dht.service, self.signed.run_id, self._node.peer_id, self._node.clock), 10.0
            )
        return Found(
            name=self.signed.name,
            run_id=self.signed.run_id,
            version=self.signed.version,
            founded=founded,
            summary=specification.description or description.summary,
            sample=description.sample,
            parameters=description.parameters,
            memory_bytes=machine.needed_bytes(specification, description.memory_bytes),
            memory_free_bytes=machine.free_bytes(),
            target_batch_size=specification.target_batch_size,
            batch_size=specification.batch_size,
            round_bytes=outlook.round_bytes(specification, description.parameters, seen.peers + 1),
            traffic_bytes_per_hour=outlook.bytes_per_hour(specification, description.parameters, seen),
            peers=seen.peers,
        )

    def choose_device(self) -> torch.device:
        """The device to train on, with enough memory. UsageError or SwarmError says what is missing. Waits for torch's import."""
        device = machine.choose_device(self._config.device, self.specification)
        if device.type == "cuda":
            machine.check_memory(self._description.memory_bytes, machine.free_bytes(device), self.signed.name, "the CUDA device")
        return device

    def check_memory(self) -> None:
        """SwarmError when this machine has too little."""
        machine.check_memory(
            machine.needed_bytes(self.specification, self._description.memory_bytes), machine.free_bytes(), self.signed.name
        )

    def train(self, device: torch.device, *, new: bool = False, why: Callable[[], str] = str) -> Finished:
        """Build, fetch the state (there is none if the run is `new`), train; returns when the run is over or `stop` is set.

        `why` says what set it. NotEnoughPeers: there are peers, but none could give the state.
        """
        from averaging.optimizer import Optimizer, OptimizerConfig
        from swarm.run.inner import build_optimizer, schedule_factory
        from swarm.run.training import Training

        specification = self.specification
        model = self._task.build_model(specification.seed).to(device)
        data = self._task.load_data(self._config.data, device)
        optimizer = Optimizer(
            build_optimizer(model, specification.optimizer),
            node=self._node,
            run=self.signed.run_id,
            target_batch_size=specification.target_batch_size,
            batch_size_per_step=specification.batch_size,
            mode=specification.mode.build(),
            codec=specification.codec,
            error_feedback=specification.error_feedback,
            scheduler=schedule_factory(specification.optimizer.schedule),
            state_sync_epochs=specification.state_sync_epochs,
            config=OptimizerConfig(group_size_max=specification.target_group_size),
        )
        started_s = time.monotonic()
        with contextlib.closing(optimizer):
            training = Training(
                model=model,
                data=data,
                optimizer=optimizer,
                signed=self.signed,
                own=self._node.peer_id,
                emit=self._emit,
                swarm_s=self._node.clock.swarm_s,
                accounts=Accounts(),
                pacing=Pacing(self._config.validation_share, self._config.validation_s_min),
            )
            self._node.network.run(self._keep_specification(training), 5.0)
            reason = ""
            try:
                if not new:
                    self._load_state(optimizer)
                self._joined(device, data.summary)
                reason = self._loop(training)
            except KeyboardInterrupt:
                if not self._stop.is_set():
                    raise
            return self._finished(training, reason or why() or "it was asked to stop", time.monotonic() - started_s)

    def _loop(self, training: Training) -> str:
        """Steps until there is a reason to end; empty when `stop` was it. The end is looked at between epochs, so that all end alike."""
        over = training.over()
        while not over and not self._stop.is_set():
            if training.step():
                over = training.over()
        return over

    def _load_state(self, optimizer: Optimizer) -> None:
        """The swarm's present state, if there is a swarm."""
        result = optimizer.load_state_from_peers(timeout_s=_STATE_TIMEOUT_S)
        if result.loaded:
            self._emit(
                StateDownloaded(
                    epoch=result.epoch,
                    seconds=result.seconds,
                    received_bytes=result.bytes_received,
                    donors=len(result.donors),
                    digest=result.digest or None,
                )
            )
        elif result.alone:
            self._emit(
                Notice(text="nobody has a state to give: beginning with the first parameters, which follow from the specification's seed")
            )
        else:
            raise NotEnoughPeers(f"the state of {self.signed.full_name} could not be downloaded: {result.reason}. Try again in a while")

    def _joined(self, device: torch.device, data: str) -> None:
        addresses = self._node.addresses
        self._emit(
            Joined(
                peer_id=str(self._node.peer_id),
                run_id=self.signed.run_id,
                join_line=f"swarm join {addresses[0]}" if addresses else "",
                device=str(device),
                data=data,
                start_s=machine.process_age_s(),
            )
        )

    async def _keep_specification(self, training: Training) -> None:
        """In the background, for as long as the node lives: members keep the specification, and follow the owner's newer versions."""

        async def on_newer(newer: SignedSpecification) -> None:
            if newer.specification.model_copy(update={"end": training.signed.specification.end}) == training.signed.specification:
                training.signed = newer
                self._emit(Notice(text=f"the owner changed when the run ends (version {newer.version})"))
            else:
                self._emit(Notice(text=f"the owner changed the run (version {newer.version}): start again to follow"))

        keep = functools.partial(self._directory.keep, self.signed, on_newer)
        self._node.supervisor.spawn(f"keeping the specification of {self.signed.full_name}", keep, restart=True)

    def _finished(self, training: Training, reason: str, seconds: float) -> Finished:
        accounts = training.accounts
        finished = Finished(
            reason=reason,
            epoch=training.optimizer.epoch,
            samples=accounts.samples,
            rounds=accounts.rounds,
            failed_rounds=accounts.failed_rounds,
            loss_first=accounts.loss_first,
            loss_last=accounts.loss_last,
            validation_loss=accounts.validation_loss,
            seconds=seconds,
            sent_bytes=accounts.sent_bytes,
            digest=accounts.digest,
            digest_epoch=accounts.digest_epoch,
        )
        self._emit(finished)
        return finished
