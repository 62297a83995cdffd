"""A volunteer: builds what the specification names, fetches the state, and trains until the run ends or
somebody wants it to stop.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.core.device import current_device, explained_failures, is_device_failure
from swarm.core.errors import NotEnoughPeers
from swarm.core.ids import Contact
from swarm.run import machine, outlook
from swarm.run.accounts import TrainingStats, ValidationSchedule
from swarm.run.directory import RunDirectory
from swarm.run.events import (
    Emit,
    Finished,
    Joined,
    Notice,
    Paused,
    Resumed,
    RunChanged,
    RunFound,
    StateDownloaded,
)
from swarm.run.following import FANOUT, FollowerServices, RunFollower, differences, restart_needed
from swarm.run.limits import Decision, MachineStatus, VolunteerLimits, decide
from swarm.run.memory import MemoryEstimate, device_peak, estimate, peak_bytes
from swarm.run.microbatches import MicroBatches
from swarm.run.saving import CheckpointConfig, Saver
from swarm.run.specification import RunSpecification, SignedSpecification
from swarm.run.task import make_task
from swarm.run.training import STATE_TIMEOUT_S, Training

if TYPE_CHECKING:
    import torch

    from averaging.optim.optimizer import Optimizer
    from swarm.node import Node
    from swarm.run.task import TaskData

_LOOK_S = 0.5  # how often limits and wishes are looked at
_STRANGERS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerConfig:
    """What the volunteer decides, as against what the run's owner does."""

    # a name that `swarm.core.device.resolve_device` takes: auto, cpu, cuda, cuda:N or mps
    device: str = "auto"
    data: Path | None = None  # a folder of its own instead of the task's default data
    validation_share: float = 0.05  # of the time may go into measuring the loss on the held-out part
    validation_s_min: float = 2.0  # between two measurements at least
    limits: VolunteerLimits = field(default_factory=VolunteerLimits)
    asked_to_pause: Callable[[], bool] = lambda: False  # is asked about twice a second
    saving: CheckpointConfig | None = None  # None: no checkpoints


class Volunteer:
    """One peer's part in one run. Made and used on the trainer's thread; `stop` may be set from any."""

    def __init__(
        self,
        node: Node,
        signed: SignedSpecification,
        directory: RunDirectory,
        config: VolunteerConfig,
        emit: Emit,
        stop: threading.Event,
    ) -> None:
        """UsageError when the task is not installed here or does not accept the specification's settings."""
        self.signed = signed
        self._node, self._directory, self._config, self._emit, self._stop = (
            node,
            directory,
            config,
            emit,
            stop,
        )
        self._task = make_task(self.specification.task.name, self.specification.task.settings)
        self._description = self._task.describe(self.specification.batch_size)
        self._training: Training | None = None

    @property
    def specification(self) -> RunSpecification:
        return self.signed.specification

    def _estimate(self, *, on_cuda: bool) -> MemoryEstimate:
        saves = self._config.saving is not None and self._config.saving.every_s > 0
        return estimate(self.specification, self._description, on_cuda=on_cuda, saves=saves)

    def introduce(self, *, founded: bool) -> RunFound:
        """What will be trained, what it takes here, and what traffic to expect."""
        specification, description = self.specification, self._description
        seen = outlook.RunEstimate(0, 0.0, 0)
        if not founded:
            seen = self._node.network.run(
                outlook.look(
                    self._node.dht.service, self.signed.run_id, self._node.peer_id, self._node.clock
                ),
                10.0,
            )
        on_cuda = self._config.device.startswith("cuda")
        needed = self._estimate(on_cuda=on_cuda)
        return RunFound(
            name=self.signed.name,
            run_id=self.signed.run_id,
            version=self.signed.version,
            founded=founded,
            summary=specification.description or description.summary,
            sample=description.sample,
            parameters=description.parameters,
            memory_bytes=needed.host_bytes,
            memory_free_bytes=machine.free_bytes(),
            device_memory_bytes=needed.device_bytes if on_cuda else None,
            target_batch_size=specification.target_batch_size,
            batch_size=specification.batch_size,
            round_bytes=outlook.round_bytes(specification, description, seen.peers + 1),
            traffic_bytes_per_hour=outlook.bytes_per_hour(specification, description, seen),
            peers=seen.peers,
        )

    def choose_device(self) -> torch.device:
        """Return the device to train on, which has enough memory, as has the machine. Waits for torch's
        import.

        UsageError: the device is not there. SwarmError: there is too little memory, or the volunteer allows
        too little.
        """
        device = machine.choose_device(self._config.device, self.specification)
        needed = self._estimate(on_cuda=device.type == "cuda")
        machine.check_memory(needed.host_bytes, machine.free_bytes(), self.signed.name)
        self._config.limits.check(needed.host_bytes, self.signed.name)
        if device.type == "cuda":
            free = machine.free_bytes(device)
            machine.check_memory(needed.device_bytes, free, self.signed.name, str(device))
            own = f"about {needed.device_bytes / 1e6:,.0f} MB of its own memory, of which {free / 1e6:,.0f} MB are free"
            self._emit(
                Notice(
                    text=f"on {device}: {own}, and about {needed.host_bytes / 1e6:,.0f} MB of the machine's"
                )
            )
        return device

    def train(self, device: torch.device, *, new: bool = False, why: Callable[[], str] = str) -> Finished:
        """Build, fetch the state (there is none if the run is `new`), train; returns when the run is over or
        `stop` is set.

        `why` says what set it. NotEnoughPeers: there are peers, but none could give the state. SwarmError:
        the device failed or has not enough memory; the others were told goodbye, and nothing was saved since.
        """
        # What a task does without naming a device (pinned memory, streams, "cuda") belongs to the chosen one,
        # too.
        with explained_failures(device), current_device(device):
            return self._train(device, new=new, why=why)

    def _train(self, device: torch.device, *, new: bool, why: Callable[[], str]) -> Finished:
        from swarm.run.inner import build_optimizer

        model = self._task.build_model(self.specification.seed).to(device)
        data = self._task.load_data(self._config.data, device)
        inner = build_optimizer(model, self.specification.optimizer)
        started_s = time.monotonic()
        training = self._training = self._prepared(model, data, inner, device)
        saver = self._saver(model, inner)
        reason = ""
        try:
            self._node.network.run(self._follow(training), 5.0)
            try:
                self._begin(training, saver, new=new)
                self._joined(device, data.summary)
                reason = self._loop(training, saver)
            except KeyboardInterrupt:
                if not self._stop.is_set():
                    raise
            finished = self._finished(
                training, reason or why() or "it was asked to stop", time.monotonic() - started_s
            )
            if saver is not None:
                saver.close(training.optimizer)
            return finished
        finally:
            self._leave(training)

    def _prepared(
        self, model: torch.nn.Module, data: TaskData, inner: torch.optim.Optimizer, device: torch.device
    ) -> Training:
        """Everything that training needs, and this peer in the run."""
        return Training(
            model=model,
            data=data,
            optimizer=self._open(inner),
            signed=self.signed,
            own=self._node.peer_id,
            emit=self._emit,
            swarm_s=self._node.clock.swarm_s,
            accounts=TrainingStats(),
            pacing=ValidationSchedule(self._config.validation_share, self._config.validation_s_min),
            micro_batches=MicroBatches(model=model, data=data, device=device, emit=self._emit),
        )

    def _leave(self, training: Training) -> None:
        """Say goodbye to the others."""
        try:
            training.optimizer.close()
        except RuntimeError as error:
            # A round in the background has tensors on the device. If that failed, the node says goodbye for
            # this peer when it closes.
            if not is_device_failure(error):
                raise

    def _open(self, inner: torch.optim.Optimizer) -> Optimizer:
        """Take part in the run, by the specification as it is now."""
        from averaging.optim.optimizer import Optimizer, OptimizerConfig
        from swarm.run.inner import schedule_factory

        specification = self.specification
        optimizer = Optimizer(
            inner,
            node=self._node,
            run=self.signed.run_id,
            target_batch_size=specification.target_batch_size,
            batch_size_per_step=specification.batch_size,
            mode=specification.mode.build(),
            codec=specification.codec,
            error_feedback=specification.error_feedback,
            strategy=specification.strategy.build() if specification.strategy is not None else None,
            scheduler=schedule_factory(specification.optimizer.schedule),
            state_sync_epochs=specification.state_sync_epochs,
            config=OptimizerConfig(group_size_max=specification.target_group_size),
        )
        optimizer.ban(specification.banned_peers)
        return optimizer

    def fetch_state(self, path: Path) -> Path:
        """Only download the swarm's present state, into a checkpoint. NotEnoughPeers when nobody can give it."""
        from averaging.optim.state.checkpoint import names_of, write
        from swarm.run.inner import build_optimizer

        model = self._task.build_model(self.specification.seed)
        inner = build_optimizer(model, self.specification.optimizer)
        with contextlib.closing(self._open(inner)) as optimizer:
            result = optimizer.load_state_from_peers(timeout_s=STATE_TIMEOUT_S)
            if not result.loaded:
                raise NotEnoughPeers(
                    f"the state of {self.signed.full_name} could not be downloaded: {result.reason}"
                )
            view = optimizer.state_view()
            try:
                write(view, path, names_of(model, inner))
            finally:
                view.close()
        return path

    def _saver(self, model: torch.nn.Module, inner: torch.optim.Optimizer) -> Saver | None:
        if self._config.saving is None:
            return None
        from averaging.optim.state.checkpoint import names_of

        about = {"run": self.signed.full_name, "task": self.specification.task.name}
        return Saver(self._config.saving, names_of(model, inner), about, self._emit)

    def _begin(self, training: Training, saver: Saver | None, *, new: bool) -> None:
        """From a checkpoint, from the swarm, or from the first parameters."""
        saving = self._config.saving
        if saver is not None and saving is not None and saving.resume and saver.resume(training.optimizer):
            return  # if the swarm is further, the first step fetches its state
        if (new or self._load_state(training.optimizer)) and saver is not None:
            saver.begins_anew()

    def _loop(self, training: Training, saver: Saver | None) -> str:
        """Steps until there is a reason to end; empty when `stop` was it. The end is looked at between
        epochs, so that all end alike.
        """
        over = training.over()
        looked_s = float("-inf")
        while not over and not self._stop.is_set():
            if time.monotonic() - looked_s >= _LOOK_S:
                say, why = self._decide()
                if say is Decision.LEAVE:
                    return why
                if say is not Decision.TRAIN:
                    over = self._pause(training, say, why)
                    continue
                looked_s = time.monotonic()
            if training.step():
                over = training.over()
                if saver is not None:
                    saver.after_epoch(training.optimizer)
            elif self.specification.ended:
                over = training.over()
        return over

    def _decide(self) -> tuple[Decision, str]:
        """What the volunteer's limits and the run's owner want at this moment."""
        limits = self._config.limits
        moment = MachineStatus(
            second_of_day=machine.second_of_day(),
            memory_bytes=machine.taken_bytes() if limits.memory_bytes_max is not None else 0,
            asked_to_pause=self._config.asked_to_pause(),
            run_paused=self.specification.paused,
            banned=self._node.peer_id in self.specification.banned_peers,
        )
        return decide(limits, moment)

    def _pause(self, training: Training, say: Decision, why: str) -> str:
        """Wait until training goes on; why the run is over, if that comes first.

        Who rests stays a member. Who pauses says goodbye to the others, so that nobody waits for it, and
        keeps the model in memory: when it comes back, it fetches what the swarm has reached meanwhile.
        """
        began_s, member = time.monotonic(), say is Decision.REST
        self._emit(Paused(reason=why, member=member))
        kept = None
        if member:
            training.optimizer.pause(True)
        else:
            kept = training.optimizer.state_dict()
            training.optimizer.close()
        over = training.over()
        while not over and not self._stop.wait(0.0 if member else _LOOK_S):
            report = training.optimizer.join_started_round(_LOOK_S) if member else None
            if report is not None:  # others were at the end of an epoch when the pause reached them
                training.after(report)
            now, _ = self._decide()
            if (
                now is Decision.TRAIN
                or now is Decision.LEAVE
                or (member and now is Decision.PAUSE)
                or (not member and now is Decision.REST)
            ):
                break
            over = training.over()
        if over or self._stop.is_set():
            return over
        if kept is None:
            training.optimizer.pause(False)
        else:
            training.optimizer = self._open(training.optimizer.inner)
            training.optimizer.load_state_dict(kept)
        self._emit(Resumed(seconds=time.monotonic() - began_s))
        return ""

    def _load_state(self, optimizer: Optimizer) -> bool:
        """The swarm's present state, if there is a swarm; True when there is none, and the run begins anew."""
        result = optimizer.load_state_from_peers(timeout_s=STATE_TIMEOUT_S)
        if result.loaded:
            self._emit(
                StateDownloaded(
                    epoch=result.epoch,
                    seconds=result.seconds,
                    received_bytes=result.bytes_received,
                    donors=len(result.donors),
                    digest=result.digest or None,
                    avoided={str(peer): why for peer, why in result.failures.items()},
                )
            )
        elif result.alone:
            self._emit(
                Notice(
                    text="nobody has a state to give: beginning with the first parameters, which follow from the specification's seed"
                )
            )
        else:
            raise NotEnoughPeers(
                f"the state of {self.signed.full_name} could not be downloaded: {result.reason}. Try again in a while"
            )
        return result.alone

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

    async def _follow(self, training: Training) -> None:
        """In the background, for as long as the node lives: members keep the specification, and follow the
        owner's newer versions.
        """
        services = FollowerServices(
            handlers=self._node.handlers,
            caller=self._node.channels,
            directory=self._directory,
            rng=random.Random(),
        )
        follower = RunFollower(services, self.signed, self._others, self._take_over)
        self._node.supervisor.spawn(
            f"keeping the specification of {self.signed.full_name}", follower.run, restart=True
        )

    def _others(self) -> list[Contact]:
        """Members that are known here, and peers that may be members."""
        contacts = (
            {contact.peer_id: contact for contact in self._training.optimizer.contacts()}
            if self._training
            else {}
        )
        if len(contacts) >= FANOUT * 4:  # one shard of a large run: the rumour must leave it
            contacts |= {
                known.contact.peer_id: known.contact for known in self._node.peers()[:_STRANGERS_MAX]
            }
        return list(contacts.values())

    def _take_over(self, newer: SignedSpecification) -> None:
        """A newer version of the owner's, on the network thread."""
        old, new = self.signed.specification, newer.specification
        self.signed = newer
        training = self._training
        if training is not None:
            training.signed = newer
            if new.target_batch_size != old.target_batch_size:
                training.optimizer.set_target(new.target_batch_size)
            training.optimizer.ban(new.banned_peers)
        self._emit(
            RunChanged(version=newer.version, changes=differences(old, new), restart=restart_needed(old, new))
        )

    def _finished(self, training: Training, reason: str, seconds: float) -> Finished:
        accounts, device = training.accounts, training.micro_batches.device
        needed, device_taken = self._estimate(on_cuda=device.type == "cuda"), device_peak(device)
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
            memory_bytes=needed.host_bytes,
            memory_peak_bytes=peak_bytes(),
            device_memory_bytes=needed.device_bytes,
            device_memory_peak_bytes=device_taken.allocated_bytes,
            device_memory_reserved_bytes=device_taken.reserved_bytes,
        )
        self._emit(finished)
        return finished
