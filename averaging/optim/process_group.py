"""`swarm.ProcessGroupOptimizer`: several processes with one GPU each, started by `torchrun`, as one peer."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

from averaging.optim.arguments import check_arguments, check_samples
from averaging.optim.delegating import DelegatingOptimizer
from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import Gradients, ModeName
from averaging.optim.optimizer import Optimizer
from averaging.optim.ranks import (
    OrderedSteps,
    RankChannel,
    WholeParameters,
    options_of,
    set_options,
    with_whole_parameters,
)
from averaging.optim.reports import LoadResult, StepReport
from averaging.optim.state.schedule import Scheduler
from averaging.reduction.sharded import is_sharded
from swarm.core.errors import SwarmError, UsageError

if TYPE_CHECKING:
    from swarm.node import Node

_log = logging.getLogger(__name__)

_FAILED = "failed"
_REASON_CHARACTERS_MAX = 1000
_REPORT_FIELDS = ("epoch", "stepped", "samples", "accumulated", "contributed", "dropped", "reason", "alone")
_LOAD_FIELDS = ("loaded", "epoch", "reason", "alone", "digest", "canonical", "dropped", "replayed")


class RankLeader:
    """Rank 0's side: the inner optimizer that it gives to `swarm.Optimizer`, and orders to other ranks."""

    def __init__(
        self,
        channel: RankChannel,
        inner: torch.optim.Optimizer,
        settings: ModeSettings,
        *,
        scheduled: bool,
    ) -> None:
        """`scheduled`: a schedule sets the learning rates on this side, and orders carry them; else each rank
        keeps those of its own optimizer.
        """
        self.channel, self._inner, self._scheduled = channel, inner, scheduled
        self.whole = WholeParameters(channel, inner)
        self.steps_locally = not isinstance(settings, Gradients)
        self.inner: torch.optim.Optimizer = (
            OrderedSteps(self.whole, inner, self._step_everywhere, self._gather)
            if self.steps_locally
            else with_whole_parameters(inner, self.whole)
        )

    def take_options(self) -> None:
        """Take over what the program has set in its own optimizer's groups, without a schedule of swarm's."""
        if not self._scheduled and self.inner is not self._inner:
            set_options(self.inner.param_groups, options_of(self._inner.param_groups))

    def mark_gradients(self, present: list[bool], *, finite: bool) -> None:
        """Give the whole parameters of local steps gradients that stand for those of all ranks: zeros, or
        NaN where one of them is not finite. They take no memory, and only their finiteness is looked at.
        """
        if not self.steps_locally or not self.whole.is_sharded:
            return
        for tensor, own, there in zip(self.whole.tensors, self.whole.own, present, strict=True):
            if is_sharded(own):
                value = torch.tensor(
                    0.0 if finite else float("nan"), dtype=tensor.dtype, device=tensor.device
                )
                tensor.grad = value.expand(tensor.shape) if there else None

    def push_if_changed(self) -> None:
        """Send the parameters to the other ranks, if a round or a download has changed them."""
        if self.whole.have_changed:
            self.channel.tell("push")
            self.whole.push()

    def _step_everywhere(self, groups: list[dict[str, Any]]) -> None:
        options = options_of(groups) if self._scheduled else []
        self.push_if_changed()
        self.channel.tell("step", options=options)
        if options:
            set_options(self._inner.param_groups, options)
        self._inner.step()
        self.whole.stepped()

    def _gather(self) -> None:
        self.channel.tell("gather")
        self.whole.gather()
        self.whole.synchronised()


class RankFollower:
    """The side of every other rank: it does what rank 0 orders."""

    def __init__(self, channel: RankChannel, inner: torch.optim.Optimizer) -> None:
        self.channel, self._inner = channel, inner
        self.whole = WholeParameters(channel, inner)

    def follow(self) -> tuple[str, dict[str, Any]]:
        """Carry out orders until one comes that the caller must carry out, and return that one."""
        while True:
            name, contents = self.channel.hear()
            if name == "push":
                self.whole.push()
            elif name == "gather":
                self.whole.gather()
            elif name == "step":
                if contents["options"]:
                    set_options(self._inner.param_groups, contents["options"])
                self._inner.step()
            elif name == _FAILED:
                raise SwarmError(f"rank 0 of this peer has failed: {contents['reason']}")
            else:
                return name, contents


class ProcessGroupOptimizer(DelegatingOptimizer):
    """A `swarm.Optimizer` for a program that `torchrun` starts as several processes, which form one peer.

    The processes train one model, with DistributedDataParallel or in shards of FSDP2's `fully_shard`. Without
    either only rank 0's gradients would count: a warning says so when ranks differ in the first step. Every
    rank creates this optimizer after `init_process_group` and the model, and calls the same methods in the
    same order. In mode "gradients" rank 0 makes the step of the inner optimizer, on whole parameters, which
    it keeps on its host if the model is sharded. In modes with local steps each rank steps its own shards,
    and rank 0 gathers them once an epoch. What peers share, serve and save does not depend on the number of
    ranks.

    When a process ends, rank 0 leaves the run, and every rank raises SwarmError.

    Args:
        inner: This rank's optimizer over the model's parameters.
        node: This peer's node on rank 0; None on the other ranks.
        batch_size_per_step: Samples of this rank in each step, equal on all ranks; None: given to `step`.
        mode: As of `swarm.Optimizer`.
        scheduler: As of `swarm.Optimizer`.
        options: Further arguments of `swarm.Optimizer` (`run`, `target_batch_size`, `codec`, …), with which
            rank 0 creates it.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        node: Node | None,
        batch_size_per_step: int | None = None,
        mode: ModeName | ModeSettings = "gradients",
        scheduler: Callable[[torch.optim.Optimizer], Scheduler] | None = None,
        **options: Any,
    ) -> None:
        settings = check_arguments(inner, mode, batch_size_per_step, options.get("state_sync_epochs"))
        self.inner, self.batch_size_per_step = inner, batch_size_per_step
        self._channel = RankChannel()
        if (node is not None) != self._channel.is_leader:
            raise UsageError(
                "rank 0 has a node and no other rank has: swarm.Node(…) if torch.distributed.get_rank() == 0 "
                "else None"
            )
        self._extras = list(options.get("extra_tensors", ()))
        self._leader: RankLeader | None = None
        self._swarm: Optimizer | None = None
        self._follower: RankFollower | None = None
        self._epoch = 0
        self._has_compared = False  # whether the gradients of all ranks were compared
        if node is None:
            self._follower = RankFollower(self._channel, inner)
            self._follower.whole.gather()
            self._epoch = int(self._follow("open")["epoch"])
            return
        self._leader = RankLeader(self._channel, inner, settings, scheduled=scheduler is not None)
        self._leader.whole.gather()

        def join() -> Optimizer:
            assert self._leader is not None
            return Optimizer(
                self._leader.inner,
                node=node,
                mode=settings,
                scheduler=scheduler,
                **options,
            )

        self._swarm = self._lead(join)
        self._leader.push_if_changed()
        self._channel.tell("open", epoch=self._swarm.epoch)

    def step(  # type: ignore[override]
        self, batch_size: int | None = None
    ) -> StepReport:
        """Take the gradients in `.grad`, which are means over `batch_size` samples of every rank, as
        `swarm.Optimizer.step` does. Returns its report; on other ranks than 0 with what they need of it.
        """
        own = check_samples(batch_size if batch_size is not None else self.batch_size_per_step)
        whole = self._whole
        has = [int(p.grad is not None) for p in whole.own]
        defects = sum(p.grad is not None and not _is_finite(p.grad) for p in whole.own)
        mark = 0 if self._has_compared or whole.is_sharded else _mark_of_gradients(whole.own)
        samples, defects, marks, *found = self._channel.sum([own, defects, mark, *has])
        present = [bool(count) for count in found]
        if self._leader is not None and marks != self._channel.size * mark:
            _log.warning(
                "the ranks of this peer have different gradients, and only those of rank 0 count: wrap the "
                "model in DistributedDataParallel, or shard it with fully_shard"
            )
        # norms that are not finite are equal where gradients are not
        self._has_compared = self._has_compared or (any(present) and not defects)
        if self._leader is None:
            if self._follow("gradients")["whole"]:
                whole.gather_gradients(present)
            return self._hear_report()
        leader, swarm = self._leader, self._joined
        self._channel.tell("gradients", whole=not leader.steps_locally)
        if not leader.steps_locally:
            whole.gather_gradients(present)
        leader.mark_gradients(present, finite=not defects)
        leader.take_options()
        report: StepReport = self._lead(lambda: swarm.step(samples))
        self._tell_report("report", report, _REPORT_FIELDS)
        return report

    def load_state_from_peers(self, timeout_s: float = 600.0, **options: Any) -> LoadResult:
        """Download the swarm's state, as `swarm.Optimizer.load_state_from_peers` does, onto all ranks."""
        if self._leader is None:
            return LoadResult(**self._followed("load"))
        swarm = self._joined
        result: LoadResult = self._lead(lambda: swarm.load_state_from_peers(timeout_s, **options))
        self._tell_report("load", result, _LOAD_FIELDS)
        return result

    def load_state(self, blob: bytearray) -> None:
        """Continue from the state of a checkpoint, which rank 0 passes; other ranks pass anything."""
        if self._leader is None:
            self._followed("loaded")
            return
        swarm = self._joined
        self._lead(lambda: swarm.load_state(blob))
        self._tell_report("loaded", None, ())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: each rank saves and loads its own."""
        if self._leader is None:
            return {**self.inner.state_dict(), "swarm": None}
        saved = self._joined.state_dict()
        if self._leader.steps_locally:
            return {**self.inner.state_dict(), "swarm": saved["swarm"]}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from this rank's `state_dict()`, made with as many ranks. Load the model's parameters
        separately, before this.
        """
        plain = {key: value for key, value in state_dict.items() if key != "swarm"}
        self._whole.gather()
        if self._leader is None:
            self.inner.load_state_dict(plain)
            self._followed("loaded")
            return
        leader, swarm = self._leader, self._joined

        def load() -> None:
            if leader.steps_locally:
                self.inner.load_state_dict(plain)
                swarm.load_state_dict({**leader.inner.state_dict(), "swarm": state_dict["swarm"]})
            else:
                swarm.load_state_dict(state_dict)

        self._lead(load)
        self._tell_report("loaded", None, ())

    @property
    def epoch(self) -> int:
        """Return the number of epochs that the parameters have completed."""
        return self._swarm.epoch if self._swarm is not None else self._epoch

    @property
    def swarm(self) -> Optimizer | None:
        """Return rank 0's `swarm.Optimizer`, for progress, metrics and checkpoints; None on other ranks."""
        return self._swarm

    def close(self) -> None:
        """Leave the run, on rank 0; other ranks have nothing to close. Idempotent."""
        if self._swarm is not None:
            self._swarm.close()

    # --- the two sides

    @property
    def _whole(self) -> WholeParameters:
        side = self._leader or self._follower
        assert side is not None
        return side.whole

    @property
    def _joined(self) -> Optimizer:
        assert self._swarm is not None
        return self._swarm

    def _lead(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, rank 0's own. If it fails, tell the others, which wait for it."""
        try:
            return work()
        except BaseException as error:
            self.close()
            with contextlib.suppress(SwarmError):  # they have ended: that may be why it failed
                self._channel.tell(
                    _FAILED, reason=f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS_MAX]
                )
            raise

    def _tell_report(self, order: str, report: Any, fields: tuple[str, ...]) -> None:
        """Bring the other ranks up to date, and tell them what came of the call that they wait in."""
        assert self._leader is not None

        def bring() -> None:
            assert self._leader is not None
            self._leader.push_if_changed()
            for tensor in self._extras if report is None or getattr(report, "stepped", True) else ():
                self._channel.tell("extras")
                self._channel.broadcast(tensor)
            field_values = {name: getattr(report, name) for name in fields}
            self._channel.tell(order, report=field_values, epoch=self.epoch)

        self._lead(bring)

    def _hear_report(self) -> StepReport:
        return StepReport(**self._followed("report"))

    def _followed(self, wanted: str) -> dict[str, Any]:
        contents = self._follow(wanted)
        self._epoch = int(contents["epoch"])
        field_values: dict[str, Any] = contents["report"]
        return field_values

    def _follow(self, wanted: str) -> dict[str, Any]:
        """Carry out orders until the one with this name, and return its contents."""
        assert self._follower is not None
        extras = iter(self._extras)
        while True:
            name, contents = self._follower.follow()
            if name == wanted:
                return contents
            if name != "extras":
                raise SwarmError(
                    f"rank {self._channel.rank} called another method than rank 0, which is at {name!r}: "
                    "all ranks make the same calls"
                )
            self._channel.broadcast(next(extras))

    def __repr__(self) -> str:
        return (
            f"swarm.ProcessGroupOptimizer({self.inner!r}, rank {self._channel.rank} of {self._channel.size})"
        )

    def __enter__(self) -> ProcessGroupOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mark_of_gradients(parameters: Sequence[torch.Tensor]) -> int:
    """Return a number that differs between ranks, but for a tiny chance, where a norm of a gradient does."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(one._values() if one.is_sparse else one) for one in gradients]
    if not norms:
        return 0
    found = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).tolist()
    return int.from_bytes(blake3(struct.pack(f"<{len(found)}d", *found)).digest(4), "little")


def _is_finite(gradient: torch.Tensor) -> bool:
    """Return whether this rank's shard of a gradient is finite."""
    local = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
    return bool(local.isfinite().all()) if not local.is_sparse else bool(local._values().isfinite().all())
