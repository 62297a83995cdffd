"""`swarm.Optimizer`: a torch optimizer whose steps are made by the whole swarm."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from averaging.history.chain import Chain
from averaging.history.encoding import chain_text, read_chain_text
from averaging.optim import arguments
from averaging.optim.catchup import CatchUp
from averaging.optim.config import OptimizerConfig
from averaging.optim.delegating import DelegatingOptimizer
from averaging.optim.endorsing import Endorser
from averaging.optim.epoch_averager import AveragingOptions, EpochAverager, check_codec, check_extra_tensors
from averaging.optim.epochs import EpochLoop
from averaging.optim.exchange import RunExchange
from averaging.optim.gathering import wait_for_peers
from averaging.optim.history import RunHistory
from averaging.optim.hyperparameters import HyperparameterWatch
from averaging.optim.metering import Meter, Pace, device_name
from averaging.optim.modes import ModeParts, ModeSettings
from averaging.optim.modes.settings import MODES, Diloco, Gossip, Gradients, Local, ModeName
from averaging.optim.peer_node import reach_of
from averaging.optim.progress.logic.view import ProgressView
from averaging.optim.progress.tracker import Tracker
from averaging.optim.receipts import Receipts
from averaging.optim.reports import LoadResult, StepReport
from averaging.optim.state.donor import Donor
from averaging.optim.state.schedule import Scheduler
from averaging.optim.state.snapshot import read_header
from averaging.optim.state.training_state import past_of_header
from averaging.optim.state.view import StateView
from averaging.reduction.lowrank import PowerSgd
from averaging.reduction.robust import Aggregation, AggregationRule, aggregation_of
from averaging.service import AveragingService
from swarm.compression import resolve
from swarm.core.errors import NetworkError, UsageError
from swarm.core.ids import Contact, PeerId, open_run_id
from swarm.metrics.reporter import Reporter
from swarm.runtime.thread import TURN_S_MAX

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = [
    "MODES",
    "Diloco",
    "Gossip",
    "Gradients",
    "LoadResult",
    "Local",
    "Optimizer",
    "OptimizerConfig",
    "StepReport",
]

_log = logging.getLogger(__name__)

_CLOSE_S_MAX = 2.0


class Optimizer(DelegatingOptimizer):
    """A torch optimizer that trains one model together with the peers that have one for the same run.

    Parameters change only inside `step`; in mode "gradients" when an epoch is full. A peer that joins a swarm
    that is ahead loads its state in its first `step`, or before it in `load_state_from_peers`. Events on the
    network are in reports; UsageError is the caller's mistake. A context manager.

    Args:
        inner: The optimizer that makes the steps. Its parameters are the model's.
        node: This process as a peer.
        run: A name that all peers use, or a run's id.
        target_batch_size: Samples of the whole swarm in one epoch.
        batch_size_per_step: Samples behind one call of `step` that does not give their number.
        mode: "gradients" (one large batch, one step an epoch), "local" (a step in each call, parameters
            averaged once an epoch), "diloco" (the same with an outer step), "gossip" (exchanges in pairs), or
            settings such as `swarm.Diloco(…)`.
        codec: Encoding on the network: a name of `swarm.compression`, or "adaptive" to choose by the kind
            of tensor.
        aggregation: As in `swarm.Averager`.
        clip_to_median: As in `swarm.Averager`; by default contributions above ten medians are shortened.
        audit: As in `swarm.Averager`.
        error_feedback: Add what the codec left out of one epoch to the next, as `int2`, `sign` and `topk`
            need it.
        strategy: `PowerSgd(rank=4)` sends matrices as factors of that rank, in two all-reduces an epoch, with
            error feedback.
        scheduler: A function such as `lambda inner: StepLR(inner, 10)`. The scheduler is stepped once an
            epoch and belongs to the state.
        state_sync_epochs: Epochs between two averages of the shared state, which keep peers with
            different processors equal. 0: never; None: as the mode needs it.
        extra_tensors: Further tensors to share, for instance `model.buffers()`. Peers average them, and take
            the median of whole numbers.
        offload: Keep accumulators, base and outer momentum on the host. For a model on CUDA they are copied
            through pinned memory of the model's size.
        config: Settings that few users change.

    With `torch.amp.GradScaler` call `scaler.unscale_(opt)`, `opt.step(…)`, `scaler.update()`; the report says
    what an overflow dropped. `scaler.step(opt)` works too: it returns None for a step that it skips, and
    waits for the device each time. On CUDA a step does not wait to learn whether its gradients are finite: a
    later report says so.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        node: Node,
        run: str,
        target_batch_size: int,
        batch_size_per_step: int | None = None,
        mode: ModeName | ModeSettings = "gradients",
        codec: str = "float16",
        aggregation: AggregationRule | Aggregation = "mean",
        clip_to_median: float | None = 10.0,
        audit: float = 0.0,
        error_feedback: bool = False,
        strategy: PowerSgd | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Scheduler] | None = None,
        state_sync_epochs: int | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        offload: bool = False,
        config: OptimizerConfig | None = None,
    ) -> None:
        # torch's __init__ is not called: groups, state and hooks are those of `inner`, by delegation.
        settings = arguments.check_arguments(inner, mode, batch_size_per_step, state_sync_epochs)
        resolve(codec, "gradient", 0)  # raises UsageError for an unknown codec before anything is opened
        aggregate = aggregation_of(aggregation, clip_to_median)
        options = AveragingOptions(
            codec=codec, aggregation=aggregate, audit=audit, error_feedback=error_feedback, strategy=strategy
        )
        config, extras = arguments.check_config(config), arguments.check_extras(extra_tensors)
        self.inner, self.node, self.run_id = inner, arguments.check_node(node), open_run_id(run)
        self.target_batch_size = arguments.check_samples(target_batch_size)
        self.batch_size_per_step = batch_size_per_step
        self.mode = settings.name
        self._closed = False
        schedule = arguments.make_scheduler(scheduler, inner)
        parts = ModeParts(inner=inner, extras=extras, scheduler=schedule, offload=offload)
        self._mode = settings.build(parts)
        self._trained = arguments.TrainedParameters(inner)
        self._hyperparameters = HyperparameterWatch(inner, scheduled=scheduler is not None)
        self._state, traits = self._mode.state, self._mode.traits
        check_codec(options, traits)
        sync_epochs = traits.state_sync_epochs if state_sync_epochs is None else state_sync_epochs
        check_extra_tensors(self._state, are_averaged=traits.canonical and sync_epochs > 0)
        options = replace(options, state_sync_epochs=sync_epochs)
        node.network.run(self._open(options, config), TURN_S_MAX)

    async def _open(self, options: AveragingOptions, config: OptimizerConfig) -> None:
        node, mode = self.node, self._mode
        service = node.service(AveragingService)
        self._blocklist = service.exchange.blocklist_of(self.run_id)
        ledger = self._ledger = service.exchange.ledger_of(self.run_id)
        self._donor = Donor(
            node, self.run_id, self._state, self._blocklist, shard=lambda: self._tracker.tree.shard_name
        )
        sign, size = node.identity.sign, config.group_size_max
        # a mode without a common state has no history
        self._history: RunHistory | None = None
        if mode.traits.canonical:
            self._history = RunHistory(
                node, self.run_id, sign, group_size_max=size, introducers=node.introducers, ledger=ledger
            )
        self._tracker = Tracker(
            node,
            self.run_id,
            self.target_batch_size,
            self._blocklist,
            on_full=self._donor.on_round_begin,
            history=self._history,
        )
        self._averager = EpochAverager(node, self.run_id, mode, options, config, self._history)
        self._catch_up = CatchUp(node, mode, self._tracker, self._averager, self._blocklist, self._history)
        self._loop = EpochLoop(
            mode, self._tracker, self._donor, self._averager, self._catch_up, config.load_timeout_s
        )
        history, contact = self._history, self._tracker.contact
        receipts = Receipts(node, self.run_id, history, contact, sign) if history is not None else None
        node.service(RunExchange.from_node).add(self.run_id, self._tracker, self._donor, history, receipts)
        if self._history is not None:
            service.all_reduce.serve_history(self.run_id, Endorser(self._history, sign).endorse)
        name, device = node.config.name, device_name(self._state.parameters)
        self._meter = Meter(node.clock.swarm_s(), name=name, device=device, agent=node.agent)
        self._reporter = Reporter(
            dht=node.dht.service,
            clock=node.clock,
            own=node.peer_id,
            run_id=self.run_id,
            source=lambda: self._meter.metrics(self._pace(), node.clock.swarm_s(), reach=reach_of(node)),
            peers=lambda: self._tracker.view().peers_total,
            publish=config.publish_metrics,
            every_s=node.timings.metrics_every_s,
            rng=node.rng,
        )
        services: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "progress": self._tracker.run,
            "state": self._donor.run,
            "metrics": self._reporter.run,
        }
        if history is not None and receipts is not None:
            services |= {"history": history.run, "receipts": receipts.run}
        self._tasks = [
            node.supervisor.spawn(f"{name} of run {self.run_id}", run, restart=True)
            for name, run in services.items()
        ]
        self._forget = node.at_close(self._close_on_loop)

    # --- training

    def step(  # type: ignore[override]
        self, batch_size: int | Callable[[], Any] | None = None, closure: Callable[[], Any] | None = None
    ) -> StepReport:
        """Take the gradients in `.grad`. The parameters change when the swarm's batch is full.

        Until then a call costs no network; then it makes a round with the other peers, in this thread.

        Args:
            batch_size: Samples whose mean the gradients are; None: `batch_size_per_step`.
            closure: Called first, with gradients enabled; also accepted as the first argument, as in torch.

        Raises UsageError when a torch scheduler that is not the run's has changed the learning rate, or when
        a parameter that was not trained when this optimizer was made has a gradient.
        """
        if callable(batch_size):
            batch_size, closure = None, batch_size
        self._check_open()
        samples = arguments.check_samples(batch_size if batch_size is not None else self.batch_size_per_step)
        complaint = self._hyperparameters.complaint(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._check_open()
        self._trained.check()
        with self._meter.stepping(self.node.clock.swarm_s):
            report = self._loop.step(samples)
        self._hyperparameters.record()
        if complaint:
            _log.warning("run %s: %s", self.run_id, complaint)
        if ended := report.stepped or report.rounds_failed or report.resynchronised is not None:
            self._ledger.save()
        problems = (self.node.dht.clock_problem if ended else None, self.node.dht.identity_problem)
        if complaint or any(problems):
            reason = "; ".join(filter(None, (complaint, report.reason, *problems)))
            report = replace(report, reason=reason)
        self._meter.on_step(report, self.node.clock.swarm_s())
        return report if loss is None else replace(report, loss=loss)

    def wait_for_peers(self, count: int) -> None:
        """Wait until `count` peers, this one included, are ready to train: they wait here, too, or have
        made a step. Returns at once in a run that has begun. Meanwhile others can load this peer's state.
        Each change of their number is logged.
        """
        self._check_open()
        arguments.check_peers(count)
        if self.epoch == 0:
            self._donor.start()
            wait_for_peers(self._tracker, count, lambda: self._closed)
            self._check_open()

    def load_state_from_peers(
        self,
        timeout_s: float = 600.0,
        on_progress: Callable[[int, int], None] | None = None,
        codec: str = "float32",
    ) -> LoadResult:
        """Download the swarm's state: parameters, statistics, counters and epoch.

        Samples accumulated before count in the loaded epoch if they are not too old: one epoch in mode
        "gradients", a few with local steps. `dropped` of the result says how many were. When no other peer
        takes part, the result has `alone=True`; that is not an error.

        Args:
            timeout_s: Limit of the whole download.
            on_progress: Called with the bytes loaded and their total, on the network's thread.
            codec: Type of the values on the network. "float32" is exact; "float16" and "bfloat16" are half as
                large and round what is loaded, until the next round over the state.
        """
        self._check_open()
        may_round = not self._mode.traits.canonical or bool(self._averager.state_sync_epochs)
        arguments.check_load(timeout_s, codec, may_round=may_round)
        result = self._loop.load(timeout_s, codec, on_progress)
        self._hyperparameters.record()
        self._meter.on_load(result)
        return result

    def report(self, **metrics: Any) -> None:
        """Publish metrics to the viewers of the run: `opt.report(loss=loss.item(), validation_loss=…,
        accuracy=0.9)`, at any rate.

        `loss` and `validation_loss` are charted as the run's, others (16 at most, single numbers) under
        their names. The last value of each is published every few seconds, signed, for anybody to read;
        values that are not finite are marked as such. Raises UsageError for a value that is not a number.
        """
        self._check_open()
        self._meter.set_user_metrics(metrics)

    def _pace(self) -> Pace:
        mine = self._tracker.view().peers[self.node.peer_id]
        return Pace(
            epoch=mine.epoch, samples_per_s=mine.samples_per_s, head=self.history_head, line=self.line
        )

    @property
    def epoch(self) -> int:
        """Return the number of epochs that the parameters have completed."""
        return self._state.epoch

    @property
    def history_head(self) -> str:
        """Return the head of the history of this peer's state (hex): peers with equal heads have been
        through the same rounds. Empty in modes without a common state.
        """
        return self._history.head.hex() if self._history is not None else ""

    @property
    def line(self) -> str:
        """Return the name of the line of history that the state belongs to, in hexadecimal: states of
        different lines are different models, and checkpoints of them are kept apart. Empty before the first
        break of a run, and in modes without a common state.
        """
        return self._history.root.root_line.hex() if self._history is not None else ""

    @property
    def has_background_round(self) -> bool:
        """Return whether a round runs in the background, in a mode that continues training meanwhile."""
        return self._loop.has_background_round

    @property
    def progress(self) -> ProgressView:
        """Return how far the swarm is within the epoch, and each peer's training rate."""
        return self._tracker.view()

    @property
    def scheduler(self) -> Scheduler | None:
        """Return the scheduler that the factory made, or None."""
        return self._state.scheduler

    def state_digest(self) -> tuple[int, str]:
        """Return the epoch and the digest of the state (hex), equal on peers whose states are equal bit for
        bit, whatever history led to them. Copies the state.
        """
        snapshot = self._state.snapshot(with_history=False)
        return snapshot.epoch, snapshot.digest.hex()

    def state_view(self) -> StateView:
        """Return a view of the present state, to be written while training continues
        (`averaging.optim.state.checkpoint`). Close it afterwards.
        """
        return self._state.view(past=self._history.past() if self._history is not None else None)

    def load_state(self, blob: bytearray) -> None:
        """Continue from the state of a checkpoint; what was accumulated is dropped. Raise PeerError, with
        nothing changed, when it does not fit.
        """
        self._check_open()
        past = past_of_header(read_header(blob)[0])
        with self._loop.turn():
            self._state.load(blob)
            self._loop.close()  # a round in the background belongs to another state
            with self._state.lock:
                self._mode.learner.loaded()
            self._resumed(past)

    # --- settings that the run's owner may change during the run

    def set_target(self, target_batch_size: int) -> None:
        """Set the number of samples in an epoch from now on."""
        self._check_open()
        self.target_batch_size = arguments.check_samples(target_batch_size)
        self._tracker.set_target(self.target_batch_size)

    def ban(self, peers: Iterable[PeerId]) -> None:
        """Refuse exactly these peers from now on: in groups, in progress, as donors and as joiners."""
        self._blocklist.ban(peers)
        self._tracker.forget(self._blocklist.banned)
        if self._history is not None:
            self._history.removed = self._blocklist.banned

    def pause(self, paused: bool) -> None:
        """Stop training but stay in the run and serve the state; with False, continue."""
        self._tracker.pause(self._mode.learner.samples, paused)

    def join_started_round(self, timeout_s: float) -> StepReport | None:
        """Take part in the round of this epoch while paused, if others begin it within `timeout_s`, so that
        they need not wait. Return None when there was none.
        """
        self._check_open()
        report = self._loop.join_started_round(timeout_s)
        self._hyperparameters.record()
        return report

    def contacts(self) -> list[Contact]:
        """Return the peers in this run that can be called."""
        return self._tracker.contacts()

    # --- a torch optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict with one more key, "swarm": epoch, schedule, accumulated
        samples, and error feedback.
        """
        swarm: dict[str, Any] = {
            "epoch": self._state.epoch,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "accumulated": self._mode.state_dict(),
        }
        swarm["feedback"] = self._averager.feedback_state()
        if self._history is not None:
            swarm["history"] = chain_text(self._history.past())
        return {**self.inner.state_dict(), "swarm": swarm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()`, or from the inner optimizer's own, which keeps the present epoch.
        Load the model's parameters separately, before this: from now on this peer gives its state to others.
        """
        self._check_open()
        plain = {key: value for key, value in state_dict.items() if key != "swarm"}
        swarm = state_dict.get("swarm")
        past = read_chain_text(swarm["history"]) if swarm is not None and "history" in swarm else None
        with self._loop.turn():
            self._loop.close()  # a round in the background belongs to another history
            with self._state.lock:
                if swarm is not None:  # first, because the mode refuses what was saved in another one
                    self._mode.load_state_dict(swarm["accumulated"])
                    self._averager.load_feedback(swarm["feedback"])
                self.inner.load_state_dict(plain)
                if swarm is None:
                    self._mode.learner.restart()
                elif self._state.scheduler is not None and swarm["scheduler"] is not None:
                    self._state.scheduler.load_state_dict(swarm["scheduler"])
                epoch = self._state.epoch if swarm is None else int(swarm["epoch"])
                self._state.mark_changed(epoch, root=None if past is None else past.end)
            self._resumed(past, keeps_samples=swarm is None)

    def _resumed(self, past: Chain | None, *, keeps_samples: bool = False) -> None:
        """Continue from a state that has just been loaded, in the history that a checkpoint names."""
        if self._history is not None and past is not None:
            self._history.restore(past)
        self._hyperparameters.record()
        self._loop.resumed(keeps_samples=keeps_samples)

    def register_reunion_hook(self, hook: Callable[[Optimizer], None]) -> RemovableHandle:
        """Call `hook(optimizer)` on the trainer's thread when this peer was cut off, continued by itself, and
        is about to give that up for the state of the others: save a checkpoint in it to keep what it made.
        """
        handle = RemovableHandle(self._loop.reunion_hooks)
        self._loop.reunion_hooks[handle.id] = lambda: hook(self)
        return handle

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        about = f"run {self.run_id}, mode {self.mode}, epoch {self.epoch}{closed}"
        return f"swarm.Optimizer({self.inner!r}, {about})"

    # --- closing

    def close(self) -> None:
        """Leave the run, so that the others stop counting on this peer. Idempotent; the node stays open."""
        if self._closed or self.node.closed or not self.node.network.is_own_process:
            self._closed = True
            return
        self._loop.close()
        with contextlib.suppress(NetworkError):  # records expire by themselves
            self.node.network.run(self._close_on_loop(), _CLOSE_S_MAX)
        self._averager.close()
        self._forget()

    async def _close_on_loop(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.node.service(RunExchange.from_node).remove(self.run_id)
        self.node.standing.forget_run(self.run_id)
        self.node.service(AveragingService).all_reduce.serve_history(self.run_id, None)
        for task in self._tasks:
            task.cancel()
        await self._tracker.close()
        await self._reporter.close()
        await self._donor.close()
        self._ledger.save(now=True)

    def _check_open(self) -> None:
        self.node.network.check()
        if self._closed:
            raise UsageError("this optimizer is closed")

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
