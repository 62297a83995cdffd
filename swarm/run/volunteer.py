"""A volunteer: builds model, data and optimizer from the specification, downloads the state, and trains until
the run ends or the volunteer is stopped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.core.device import current_device, explained_failures, is_device_failure, usable_cores
from swarm.core.errors import NotEnoughPeers, UsageError
from swarm.core.ids import Contact
from swarm.core.standing import Founding
from swarm.core.wording import size
from swarm.core.working import working
from swarm.run import machine
from swarm.run.changes import CHANGE, FANOUT, RunFollower, differences, pause_text, restart_needed
from swarm.run.checkpoints import CheckpointWriter
from swarm.run.directory import RunDirectory
from swarm.run.estimate import RunEstimate, bytes_per_hour, estimate_run, round_bytes
from swarm.run.events import Emit, Finished, Joined, Notice, RunChanged, RunFound, StateDownloaded
from swarm.run.giving import Giving
from swarm.run.limits import Decision
from swarm.run.membership import check_invited, excluded_peers
from swarm.run.memory import MemoryEstimate, device_peak, estimate_memory, peak_bytes
from swarm.run.microbatches import MicroBatches, StepSize
from swarm.run.pausing import DECIDE_S, Pauses, ProcessorShare, Requests
from swarm.run.signed import SignedSpecification
from swarm.run.specification import RunSpecification
from swarm.run.stats import TrainingStats, ValidationSchedule
from swarm.run.task import make_task
from swarm.run.training import Training, load_state
from swarm.run.volunteer_config import VolunteerConfig
from swarm.runtime.thread import TURN_S_MAX

if TYPE_CHECKING:
    import torch

    from averaging.optim.optimizer import Optimizer
    from swarm.node import Node
    from swarm.run.task import TaskData

_VALIDATION_SHARE = 0.05  # largest fraction of the time spent on validation
_VALIDATION_S_MIN = 2.0  # smallest pause between two validations
_ASKED = "it was asked to stop"
_OTHER_PEERS_MAX = 32  # peers that may be members, to which new versions are forwarded


class Volunteer:
    """Trains one run on one peer. Use it on the trainer's thread; any thread may set `stop`."""

    def __init__(
        self,
        node: Node,
        signed: SignedSpecification,
        directory: RunDirectory,
        config: VolunteerConfig,
        emit: Emit,
        stop: threading.Event,
    ) -> None:
        """Raise UsageError if the task is not installed here or refuses the settings of the specification."""
        self.signed = signed
        self._node, self._directory, self._config, self._emit, self._stop = (
            node,
            directory,
            config,
            emit,
            stop,
        )
        chosen = self.specification.task
        self._task = make_task(chosen.name, chosen.settings, chosen.package)
        self._description = self._task.describe(self.specification.batch_size)
        self._samples_max: int | None = None  # of a micro-batch; None: a whole step
        self.training: Training | None = None  # set once `train` has joined the run
        self._writer: CheckpointWriter | None = None  # saves the epochs that a reunion would discard

    @property
    def specification(self) -> RunSpecification:
        return self.signed.training

    def _estimate(self, *, on_cuda: bool) -> MemoryEstimate:
        saves = self._config.checkpoints is not None and self._config.checkpoints.every_s > 0
        return estimate_memory(self.specification, self._description, on_cuda=on_cuda, saves=saves)

    def describe_run(self, *, created: bool) -> RunFound:
        """Return what will be trained, the memory that it needs here and the traffic to expect."""
        specification, description = self.specification, self._description
        run = RunEstimate(0, 0.0, 0)
        if not created:
            run = self._node.network.run(
                estimate_run(
                    self._node.dht.service, self.signed.run_id, self._node.peer_id, self._node.clock
                ),
                TURN_S_MAX,
            )
        on_cuda = self._config.device.startswith("cuda")
        needed = self._estimate(on_cuda=on_cuda)
        return RunFound(
            name=self.signed.name,
            run_id=self.signed.run_id,
            version=self.signed.version,
            members=specification.members,
            created=created,
            summary=specification.description or description.summary,
            sample=description.sample,
            parameters=description.parameters,
            memory_bytes=needed.host_bytes,
            memory_free_bytes=machine.free_bytes(),
            device_memory_bytes=needed.device_bytes if on_cuda else None,
            target_batch_size=specification.target_batch_size,
            batch_size=specification.batch_size,
            round_bytes=round_bytes(specification, description, run.peers + 1),
            traffic_bytes_per_hour=bytes_per_hour(specification, description, run),
            peers=run.peers,
            downloads=list(description.downloads),
            message=specification.message,
            pauses=[pause_text(one) for one in specification.pauses],
        )

    def choose_device(self) -> torch.device:
        """Return the device to train on, after checking the memory of device and machine. Imports torch.

        Raises UsageError if the device does not exist, and SwarmError if there is too little memory or the
        volunteer allows too little.
        """
        device = machine.choose_device(self._config.device, self.specification)
        on_cuda, samples = device.type == "cuda", self.specification.batch_size
        needed, free = self._estimate(on_cuda=on_cuda), machine.free_bytes(device)
        while samples > 1 and (needed.device_bytes if on_cuda else needed.host_bytes) > free:
            samples = self._samples_max = (samples + 1) // 2
            self._description = self._task.describe(samples)
            needed = self._estimate(on_cuda=on_cuda)
        machine.check_memory(needed.host_bytes, machine.free_bytes(), self.signed.name)
        self._config.limits().check(needed.host_bytes, self.signed.name)
        if device.type == "cuda":
            machine.check_memory(needed.device_bytes, free, self.signed.name, str(device))
            text = (
                f"on {device}: about {size(needed.device_bytes)} of its own memory, "
                f"of which {size(free)} are free, "
                f"and about {size(needed.host_bytes)} of the machine's"
            )
            self._emit(Notice(text=text))
        return device

    def train(self, device: torch.device, *, new: bool = False, why: Callable[[], str] = str) -> Finished:
        """Build the model, download the state unless the run is `new`, and train until the run ends or `stop`
        is set. Return the summary.

        `why` returns the reason why `stop` was set. Raises NotEnoughPeers if there are peers and none could
        send its state, and SwarmError if the device fails or has too little memory. In that case this peer
        has left the run in order and has not written a checkpoint since.
        """
        # A task may use the current device implicitly (pinned memory, streams, "cuda").
        probes = self._config.probes(device) if self._config.probes is not None else None
        giving = Giving(
            self._config.log,
            self.signed.full_name,
            traffic=lambda: self._node.traffic,
            joules=probes.joules if probes is not None else lambda: None,
            emit=self._emit,
        )
        pauses = Pauses(
            limits=self._config.limits,
            spent=giving.bytes_spent,
            requests=self._requests,
            probes=probes,
            emit=self._emit,
            stop=self._stop,
        )
        with explained_failures(device), current_device(device), pauses.watching():
            reason = pauses.wait_to_begin()
            if reason or self._stop.is_set():
                finished = Finished(reason=reason or why() or _ASKED)
                self._emit(finished)
                return finished
            return self._train(device, pauses, giving, new=new, why=why)

    def _train(
        self, device: torch.device, pauses: Pauses, giving: Giving, *, new: bool, why: Callable[[], str]
    ) -> Finished:
        from swarm.run.inner_optimizer import build_optimizer

        with working("building the model"):
            model = self._task.build_model(self.specification.seed).to(device)
        with working("loading the training data"):
            data = self._task.load_data(self._config.data, device)
        inner = build_optimizer(model, self.specification.optimizer, self._task)
        started_s = time.monotonic()
        writer = self._writer = self._checkpoint_writer(model, inner)
        if self._config.ranks is not None:
            inner = self._config.ranks.start(self.signed, inner, device)
        training = self.training = self._make_training(model, data, self._join(inner), device)
        reason = ""
        try:
            self._node.network.run(self._follow(), TURN_S_MAX)
            try:
                self._load_first_state(training, writer, new=new)
                self._emit_joined(device, data.summary)
                giving.start(training.stats)
                reason = self._loop(training, writer, pauses, giving)
            except KeyboardInterrupt:
                if not self._stop.is_set():
                    raise
            finished = self._emit_finished(training, reason or why() or _ASKED, time.monotonic() - started_s)
            giving.stop()
            if writer is not None:
                writer.close(training.optimizer, self._stop)
            return finished
        finally:
            self._leave(training)

    def _make_training(
        self, model: torch.nn.Module, data: TaskData, optimizer: Optimizer, device: torch.device
    ) -> Training:
        """Return the objects that training needs."""
        return Training(
            model=model,
            data=data,
            optimizer=optimizer,
            signed=self.signed,
            own_peer_id=self._node.peer_id,
            emit=self._emit,
            swarm_s=self._node.clock.swarm_s,
            stats=TrainingStats(),
            validation_schedule=ValidationSchedule(_VALIDATION_SHARE, _VALIDATION_S_MIN),
            micro_batches=MicroBatches(
                model=model,
                data=data,
                device=device,
                emit=self._emit,
                samples_max=self._samples_max,
                ranks=self._config.ranks,
            ),
            step_size=StepSize(emit=self._emit),
        )

    def _leave(self, training: Training) -> None:
        """Leave the run."""
        try:
            training.optimizer.close()
        except RuntimeError as error:
            # A round in the background has tensors on the device. If the device failed, the node announces
            # the departure of this peer when it closes.
            if not is_device_failure(error):
                raise

    def _join(self, inner: torch.optim.Optimizer) -> Optimizer:
        """Join the run with the current specification. Raise UsageError if it is for invited peers and this
        peer is not invited.
        """
        check_invited(self.signed, self._node.membership)
        from averaging.optim.optimizer import Optimizer, OptimizerConfig
        from swarm.run.inner_optimizer import schedule_factory

        specification = self.specification
        founding = Founding(self.signed.founder, is_invited=specification.members == "invited")
        self._node.standing.set_founding(self.signed.run_id, founding)
        self._node.standing.add_members(self.signed.run_id, [self.signed.owner])
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
        if self._writer is not None:
            optimizer.register_reunion_hook(self._writer.before_reunion)
        membership = self._node.membership
        removed = membership.admission.removed if membership is not None else frozenset()
        optimizer.ban(specification.banned_peers | removed)
        return optimizer

    def fetch_state(self, path: Path) -> Path:
        """Download the swarm's current state into a checkpoint, without training.

        Raises NotEnoughPeers if no peer can send it.
        """
        from averaging.optim.state.checkpoint import names_of, write
        from swarm.run.inner_optimizer import build_optimizer

        model = self._task.build_model(self.specification.seed)
        inner = build_optimizer(model, self.specification.optimizer, self._task)
        with contextlib.closing(self._join(inner)) as optimizer:
            result = load_state(optimizer)
            if not result.loaded:
                raise NotEnoughPeers(
                    f"the state of {self.signed.full_name} could not be downloaded: {result.reason}"
                )
            view = optimizer.state_view()
            try:
                with working("writing the state to the disk"):
                    write(view, path, names_of(model, inner))
            finally:
                view.close()
        return path

    def _checkpoint_writer(
        self, model: torch.nn.Module, inner: torch.optim.Optimizer
    ) -> CheckpointWriter | None:
        if self._config.checkpoints is None:
            return None
        from averaging.optim.state.checkpoint import names_of

        about = {"run": self.signed.full_name, "task": self.specification.task.name}
        return CheckpointWriter(self._config.checkpoints, names_of(model, inner), about, self._emit)

    def _load_first_state(self, training: Training, writer: CheckpointWriter | None, *, new: bool) -> None:
        """Start from the swarm's state; from this machine's newest checkpoint if no peer has one; or from the
        initial parameters.
        """
        epoch = None if new else self._load_state(training.optimizer)
        if epoch:
            if writer is not None:
                writer.follow(training.optimizer)
        elif writer is None or not writer.resume(training.optimizer):
            if epoch is None and not new:
                text = (
                    "no peer has a state to download: "
                    "starting with the initial parameters, which follow from the specification's seed"
                )
                self._emit(Notice(text=text))
            if writer is not None:
                writer.start_over()

    def _loop(
        self, training: Training, writer: CheckpointWriter | None, pauses: Pauses, giving: Giving
    ) -> str:
        """Train until there is a reason to end, and return it; empty if `stop` was set.

        Whether the run has ended is checked between epochs, so that all members end at the same epoch.
        """
        share = ProcessorShare(usable_cores())
        folder = self._config.checkpoints.folder if self._config.checkpoints is not None else None
        reason, decided_s = training.end_reason(), float("-inf")
        while not reason and not self._stop.is_set():
            if time.monotonic() - decided_s >= DECIDE_S:
                decision, why = pauses.decide()
                if decision is Decision.LEAVE:
                    return why
                if decision is not Decision.TRAIN:
                    giving.stop()
                    reason = pauses.pause(training, decision, why, self._join, folder)
                    # a version may have come while this peer joined again
                    self._node.network.loop.call_soon_threadsafe(self._apply_settings)
                    giving.start(training.stats)
                    continue
                share.apply(pauses.limits.processor_share)
                giving.record()
                decided_s = time.monotonic()
            began_s = time.monotonic()
            stepped = training.step()
            if stepped:
                reason = training.end_reason()
                if writer is not None:
                    writer.after_epoch(training.optimizer)
            elif self.specification.ended:
                reason = training.end_reason()
            self._stop.wait(share.rest_s(time.monotonic() - began_s))
        return reason

    def _requests(self) -> Requests:
        membership = self._node.membership
        return Requests(
            asked=self._config.asked_to_pause(),
            paused=self.specification.is_paused(self._node.clock.swarm_s()),
            ended=self.specification.ended,
            banned=self._node.peer_id in self.specification.banned_peers,
            not_invited=membership.problem() if membership is not None else "",
        )

    def _load_state(self, optimizer: Optimizer) -> int | None:
        """Download the swarm's current state and return its epoch; 0 is that of the initial parameters.
        Return None if no other peer has a state.

        Raises NotEnoughPeers if there are other peers and none could send its state.
        """
        result = load_state(optimizer)
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
        elif not result.alone:
            raise NotEnoughPeers(
                f"the state of {self.signed.full_name} could not be downloaded: {result.reason}. "
                "Try again in a while"
            )
        return result.epoch if result.loaded else None

    def _emit_joined(self, device: torch.device, data: str) -> None:
        entry = self._node.entry
        if entry and not self._node.addresses and self._node.membership is None:
            entry += f" --run {self.signed.full_name}"  # the entry peer may know several runs
        self._emit(
            Joined(
                peer_id=str(self._node.peer_id),
                run_id=self.signed.run_id,
                join_line=f"swarm join {entry}" if entry else "",
                device=str(device),
                data=data,
                start_s=machine.process_age_s(),
            )
        )

    async def _follow(self) -> None:
        """Renew the specification and follow its newer versions in the background until the node closes."""
        follower = RunFollower(
            self.signed,
            caller=self._node.channels,
            directory=self._directory,
            members=self._other_members,
            on_newer=self._apply_version,
        )
        self._apply_settings()
        self._node.handlers.unary(CHANGE, follower.on_change)
        self._node.supervisor.spawn(
            f"renewing the specification of {self.signed.full_name}", follower.run, restart=True
        )

    def _other_members(self) -> list[Contact]:
        """Return known members and, in a large run, some peers that may be members."""
        contacts = (
            {contact.peer_id: contact for contact in self.training.optimizer.contacts()}
            if self.training
            else {}
        )
        # In a large run the optimizer knows the members of one shard only; the gossip must reach the others.
        if len(contacts) >= FANOUT * 4:
            contacts |= {
                known.contact.peer_id: known.contact for known in self._node.peers()[:_OTHER_PEERS_MAX]
            }
        return list(contacts.values())

    def _apply_version(self, newer: SignedSpecification) -> None:
        """Apply a newer version of the specification. Runs on the network thread."""
        old, new = self.signed.training, newer.training
        changes = differences(self.signed, newer)
        self.signed = newer
        if self.training is not None:
            self.training.signed = newer
        self._apply_settings()
        self._emit(RunChanged(version=newer.version, changes=changes, restart=restart_needed(old, new)))

    def _apply_settings(self) -> None:
        """Bring membership and optimizer up to the present version. Runs on the network thread."""
        excluded = excluded_peers(self.signed, self._node.membership)  # also revokes them in the membership
        if self.training is None:
            return
        optimizer, target = self.training.optimizer, self.specification.target_batch_size
        optimizer.ban(excluded)
        if optimizer.target_batch_size != target:
            with contextlib.suppress(UsageError):  # closed while this peer pauses, or at the end
                optimizer.set_target(target)

    def _emit_finished(self, training: Training, reason: str, seconds: float) -> Finished:
        stats, device = training.stats, training.micro_batches.device
        needed, peak = self._estimate(on_cuda=device.type == "cuda"), device_peak(device)
        finished = Finished(
            reason=reason,
            epoch=training.optimizer.epoch,
            samples=stats.samples,
            rounds=stats.rounds,
            failed_rounds=stats.failed_rounds,
            loss_first=stats.loss_first,
            loss_last=stats.loss_last,
            validation_first=stats.validation_first,
            validation_loss=stats.validation_loss,
            seconds=seconds,
            sent_bytes=stats.sent_bytes,
            digest=stats.digest,
            digest_epoch=stats.digest_epoch,
            memory_bytes=needed.host_bytes,
            memory_peak_bytes=peak_bytes(),
            device_memory_bytes=needed.device_bytes,
            device_memory_peak_bytes=peak.allocated_bytes,
            device_memory_reserved_bytes=peak.reserved_bytes,
        )
        self._emit(finished)
        return finished
