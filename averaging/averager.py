"""`swarm.Averager`: average a list of tensors with other peers that hold the same list, in groups that form
by themselves.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, overload

import torch

from averaging.allreduce.config import RoundConfig
from averaging.allreduce.twophase import TwoPhase
from averaging.config import AveragerConfig, RunAverager, without_run
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.group import Member
from averaging.matchmaking.service.matchmaking_service import GroupService
from averaging.matchmaking.service.presence import STORE_TIMEOUT_S, DhtPresence
from averaging.mixed_codecs import CodecChoice, MixedCodecs
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.devices import describe_out_of_memory
from averaging.reduction.feedback import Feedback
from averaging.reduction.layout import vector_schema
from averaging.reduction.lowrank import PowerSgd
from averaging.reduction.powersgd import LowRank
from averaging.reduction.robust import Aggregation, AggregationRule, aggregation_of
from averaging.reduction.staging import Staging
from averaging.result import PendingRound, RoundResult, check_step
from averaging.service import AveragingService
from averaging.step_runner import (
    RoundOptions,
    StepRunner,
    Strategy,
    WholeVector,
    pack_gathered,
    round_key_text,
)
from swarm.compression import find
from swarm.core.device import is_out_of_memory
from swarm.core.errors import DeadlineExceeded, NetworkError, UsageError
from swarm.core.ids import Contact
from swarm.runtime.thread import TURN_S_MAX

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["Averager", "AveragerConfig", "PendingRound", "RoundResult"]

_CLOSE_S_MAX = 2.0
DECLARE_S = 1.0  # longest time that the constructor waits until this peer is visible to others
_CANCEL_S_MAX = 2.0  # the tensor work of a cancelled round ends within this


class Averager:
    """Average tensors in place with the other peers that hold an averager of the same name and shapes.

    Groups form by themselves for every round. What the network does is reported in results; only UsageError
    is raised. A context manager: `close` tells the others that this peer leaves.

    Args:
        node: This process as a peer.
        tensors: Floating-point tensors on any device: a sequence, or a mapping such as
            `dict(model.named_parameters())`, whose names then appear in messages.
        name: Peers with the same name meet. 1 to 64 letters, digits, dots, dashes or underscores.
        target_group_size: Largest number of peers in a group, equal on all peers. More peers form several
            groups, with other members each time (`rounds_to_mix`).
        codec: Name of the encoding on the network, or a function of a tensor's name and the tensor that
            returns the name; a step then makes one all-reduce for each codec.
        min_group_size: A smaller group makes no round.
        aggregation: How contributions are combined. "mean" is weighted; a minority of hostile peers cannot
            move "trimmed_mean", "median" and "centered_clip" far, which count every peer once. An
            `Aggregation` sets the numbers of these rules.
        clip_to_median: Shorten contributions whose norm is above this many medians of the group's norms.
        audit: Share of the chunks, 0.0 to 1.0, that a second peer recomputes, to name reducers that lied.
            Above 0.0 a reducer that fails is not replaced: the round fails and is retried.
        min_fraction: A round fails when a smaller share of the vector was averaged.
        auxiliary: Only reduce for others; contribute and receive nothing.
        error_feedback: Add the error of a lossy codec to the next round. For gradients and other
            differences, not for parameters.
        strategy: `PowerSgd(rank=4)` averages matrices by factors of that rank, which travel in `codec` (16
            bits or more), with error feedback of its own; for differences only.
        config: Settings that few users change.

    On CUDA a step reads the tensors after the calls queued on the calling thread's current stream, and
    writes the result on the current stream of the thread that takes it; neither waits for the device. Other
    streams must be ordered after it, as after any call of torch. Capture CUDA graphs with
    `capture_error_mode="thread_local"`, or while no round is in progress: a round in the background
    allocates memory and waits for events, which the usual mode forbids to all threads.
    """

    def __init__(
        self,
        node: Node,
        tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        *,
        name: str | RunAverager = "default",
        target_group_size: int = 4,
        codec: str | CodecChoice = "float16",
        min_group_size: int = 2,
        aggregation: AggregationRule | Aggregation = "mean",
        clip_to_median: float | None = None,
        audit: float = 0.0,
        min_fraction: float = 1.0,
        auxiliary: bool = False,
        error_feedback: bool = False,
        strategy: PowerSgd | None = None,
        config: AveragerConfig | None = None,
    ) -> None:
        self.config = config or AveragerConfig()
        place = name if isinstance(name, RunAverager) else without_run(name)
        self._full_name, self._of_run = place.name, isinstance(name, RunAverager)
        self._waiting_share_max = place.waiting_share_max
        self._aggregation = aggregation_of(aggregation, clip_to_median)
        if not 0.0 < min_fraction <= 1.0:  # RoundConfig checks it too, but later
            raise UsageError(f"min_fraction is above 0 and at most 1, not {min_fraction!r}")
        node.network.check()
        self.node, self.name = node, place.name.averager
        self.auxiliary = auxiliary
        self.min_fraction = min_fraction
        names = tuple(tensors) if isinstance(tensors, Mapping) else ()
        values = list(tensors.values() if isinstance(tensors, Mapping) else tensors)
        self._staging = Staging(values, names=names)
        self._round = RoundConfig(aggregation=self._aggregation, audit=audit, min_fraction=min_fraction)
        self._mixed: MixedCodecs | None = None
        if not isinstance(codec, str):
            if strategy is not None or error_feedback:
                raise UsageError("PowerSGD and error feedback need one codec: give its name")
            self._mixed = MixedCodecs(names, self._staging.tensors, codec)
            codec = "float32"  # unused
        self._codec = find(codec)
        self._low_rank = self._factored(strategy, codec, audit) if strategy is not None else None
        self.feedback: Feedback | LowRank | None = self._low_rank  # to save and load its state
        if error_feedback and self._low_rank is None:
            self.feedback = self.new_feedback()
        settings = self._aggregation.compatibility_tag + (", audited" if audit else "")
        if strategy is not None:
            settings += f", {strategy.compatibility_tag}"
        settings += f", for {place.compatibility_tag}" if place.compatibility_tag else ""
        self.schema = (
            vector_schema(self._staging.layout, self._codec, settings, self._round.chunk_bytes)
            if self._mixed is None
            else self._mixed.schema(settings, self._round.chunk_bytes)
        )
        self._lock = threading.Lock()
        self._pending: PendingRound | None = None
        self._result_buffer = ResultBuffer(self._staging.queues)
        self._averages: Averages | None = None  # result of the pending round, until it is written back
        self.runner: StepRunner | None = None  # runner of the last step
        self._last_round_s, self._closed = 0.0, False
        self.met: tuple[Contact, ...] = ()  # the members of the last group that completed a round
        node.network.run(self._open(target_group_size, min_group_size), TURN_S_MAX)

    def _factored(self, strategy: PowerSgd, codec: str, audit: float) -> LowRank:
        if not isinstance(strategy, PowerSgd):
            raise UsageError(
                f"a strategy is swarm.PowerSgd(rank=…), or None for no compression by factors, "
                f"not {strategy!r:.60}"
            )
        if self._round.min_fraction < 1.0:
            raise UsageError("PowerSGD needs the whole of its factors: min_fraction is 1")
        seed = f"{self._full_name.run} {self.name}".encode()
        return LowRank(
            self._staging.tensors,
            strategy,
            find(codec),
            seed=seed,
            reduces=not audit,
            queues=self._staging.queues,
        )

    @property
    def rounds_to_mix(self) -> int:
        """Return how many rounds carry the values of all peers to all peers, in the swarm as this peer last
        saw it: 1 when it fits into one group.

        For M^d peers in groups of M this is d, and the result is the exact average when each round has a new
        `round_key` and each later `weight` is that of the result before; else the deviation shrinks.
        """
        return self._groups.cells.grid.shape.rounds_to_mix

    # --- one round

    @overload
    def step(
        self,
        weight: float = 1.0,
        timeout_s: float = 30.0,
        gather: object = None,
        wait: Literal[True] = True,
        *,
        round_key: str | int | RoundLineage | None = None,
        apply: Literal["replace", "delta"] = "replace",
        lend: bool | None = None,
    ) -> RoundResult: ...

    @overload
    def step(
        self,
        weight: float = 1.0,
        timeout_s: float = 30.0,
        gather: object = None,
        *,
        wait: Literal[False],
        round_key: str | int | RoundLineage | None = None,
        apply: Literal["replace", "delta"] = "replace",
        lend: bool | None = None,
    ) -> PendingRound: ...

    def step(
        self,
        weight: float = 1.0,
        timeout_s: float = 30.0,
        gather: object = None,
        wait: bool = True,
        *,
        round_key: str | int | RoundLineage | None = None,
        apply: Literal["replace", "delta"] = "replace",
        lend: bool | None = None,
    ) -> RoundResult | PendingRound:
        """Average once. With `wait=False` return at once; the round then runs in the background.

        Args:
            weight: This peer's weight in the average, usually a number of samples; 0 only receives.
            timeout_s: Limit of the whole step; within it a failed round is retried with the remaining peers.
            gather: A value for all members, msgpack of at most 16 KiB.
            wait: Wait for the result, or return a PendingRound.
            round_key: Only peers with equal keys meet. An optimizer passes the place in the run's history.
            apply: "delta" adds average minus snapshot, for tensors that change during the round.
            lend: True promises that the tensors do not change until the result is taken; float32 tensors on
                the host are then not copied. None: as `wait`.

        Raises:
            UsageError: For wrong arguments, a closed averager, or a step while another is in progress.
        """
        started_s = self.node.clock.monotonic_s()
        check_step(weight, timeout_s, apply)
        prefix = self._low_rank.start_digest if self._low_rank is not None else b""
        options = RoundOptions(
            weight=0.0 if self.auxiliary else float(weight),
            round_key=round_key_text(round_key.key if isinstance(round_key, RoundLineage) else round_key),
            gathered=pack_gathered(gather, prefix),
            timeout_s=timeout_s,
            history=round_key if isinstance(round_key, RoundLineage) else None,
            is_cell=self._of_run and not isinstance(round_key, RoundLineage),
        )
        member = self._member(options.weight, options.history)
        delta = apply == "delta"
        pending = PendingRound(
            functools.partial(self._write_back, delta=delta, started_s=started_s),
            self._release,
            self.node.network.waits.event(),
        )
        self._reserve(pending)
        try:
            in_place = not delta and (wait if lend is None else lend)
            strategy = self._stage(options, delta, read_in_place=in_place)
            staged_s = self.node.clock.monotonic_s() - started_s
            conducting = self._conduct(pending, member, options, strategy, staged_s)
            pending.attach(self.node.network.submit(conducting))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                self._release(pending)
                raise
            pending.end(RoundResult(failed=True).without_memory(self._untouched(error)))
        except BaseException:  # Ctrl-C: the round may have been handed over already
            pending.cancel()
            raise
        if not wait:
            return pending
        try:
            return pending.result()
        except BaseException:  # Ctrl-C: no round may continue in the background
            pending.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the step in progress, if there is one, when its caller was interrupted and no longer has the
        PendingRound.
        """
        if (pending := self._pending) is not None:
            pending.cancel()

    def new_feedback(self) -> Feedback:
        """Return a new error feedback for one sequence of rounds over these tensors, for callers that average
        several things in turn. `feedback` is the one in use.
        """
        staging = self._staging
        return Feedback(
            staging.layout.numel,
            self._codec,
            reduces=not self._round.audit,
            cut=staging.cut,
            queues=staging.queues,
        )

    def _stage(self, options: RoundOptions, delta: bool, *, read_in_place: bool) -> Strategy:
        """Take the values for the round from the tensors, in the caller's thread."""
        contributes, all_reduce = options.weight > 0.0, self._service.all_reduce
        if self._low_rank is not None:
            self._low_rank.take(gives=contributes, keeps=delta and not self.auxiliary)
            return TwoPhase(
                self._low_rank,
                all_reduce,
                self.node.peer_id,
                self.node.network.pool,
                self._round,
                options.history,
            )
        gives = contributes or (delta and not self.auxiliary)
        if self._mixed is not None:
            return self._mixed.take(
                all_reduce, self._round, options.history, gives=gives, read_in_place=read_in_place
            )
        assert not isinstance(self.feedback, LowRank)
        vector = self._staging.take(read_in_place=read_in_place) if gives else self._staging.nothing()
        return WholeVector(
            all_reduce=all_reduce,
            vector=vector,
            result_buffer=self._result_buffer,
            config=self._round,
            feedback=self.feedback,
            history=options.history,
        )

    async def _conduct(
        self,
        pending: PendingRound,
        member: Member,
        options: RoundOptions,
        strategy: Strategy,
        staged_s: float,
    ) -> None:
        if not pending.started():
            pending.end(None)
            return
        outcome = error = None
        try:
            runner = self.runner = StepRunner(self._groups, strategy, self.node.clock, self._last_round_s)
            ended = await runner.run(member, options)
            self._last_round_s, self._averages = ended.last_round_s, ended.averages
            self.met = ended.members or self.met
            outcome = replace(ended.result, seconds={"staging": staged_s, **ended.result.seconds})
        except Exception as unexpected:
            error = unexpected
            raise
        finally:
            pending.end(outcome, error)

    def _write_back(self, outcome: RoundResult, *, delta: bool, started_s: float) -> RoundResult:
        """Write the result, in the thread that takes it; on a device, queue the write on its stream."""
        begun_s = self.node.clock.monotonic_s()
        averages = self._averages
        if not outcome.failed and averages is not None:
            try:
                self._apply(averages, delta)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or (self._low_rank or self._mixed or averages).written:
                    raise
                outcome = outcome.without_memory(self._untouched(error))
        ended_s = self.node.clock.monotonic_s()
        return replace(
            outcome,
            seconds={**outcome.seconds, "write_back": ended_s - begun_s, "total": ended_s - started_s},
        )

    def _untouched(self, error: BaseException) -> str:
        problem = describe_out_of_memory(error, self._staging.queues)
        return f"this peer {problem}; its tensors are as they were"

    def _apply(self, averages: Averages, delta: bool) -> None:
        if self._low_rank is not None:
            (self._low_rank.add_difference if delta else self._low_rank.put)()
        elif self._mixed is not None:
            self._mixed.apply(delta=delta)
        elif delta:
            self._staging.add_difference(averages)
        else:
            self._staging.put(averages)

    def _member(self, weight: float, history: RoundLineage | None) -> Member:
        contact = self.node.contact
        bandwidth = self.config.bandwidth or self._service.all_reduce.speed.bytes_per_s
        cap = self.node.bandwidth.min_bytes_per_s
        is_set = self.config.bandwidth is not None or (cap is not None and cap <= bandwidth)
        bandwidth = min(bandwidth, cap or bandwidth)
        return Member(
            contact=contact,
            weight=weight,
            bandwidth=bandwidth if contact.is_callable else 0.0,
            bandwidth_is_set=is_set,
            auxiliary=self.auxiliary,
            grid_rounds=history.grid_rounds if history is not None else 0,
            new_hour=history is not None and history.new_hour,
            gone=history.gone if history is not None else 0,
            samples=history.samples if history is not None else 0,
        )

    def _reserve(self, pending: PendingRound) -> None:
        self.node.network.check()
        if (previous := self._pending) is not None:
            previous.wait_given_up(_CANCEL_S_MAX)
            if previous.abandoned:
                self._release(previous)
        with self._lock:
            if self._closed:
                raise UsageError("this averager is closed")
            if self._pending is not None:
                raise UsageError(
                    "a step of this averager is in progress: take its result, or cancel it, first"
                )
            self._pending = pending

    def _release(self, pending: PendingRound) -> None:
        with self._lock:
            if self._pending is pending:
                self._pending = self._averages = None

    # --- life

    async def _open(self, target_group_size: int, min_group_size: int) -> None:
        node = self.node
        self._service = node.service(AveragingService)
        self._presence = DhtPresence(
            dht=self.node.dht.service,
            name=self._full_name,
            own=lambda: node.contact,
            schema=self.schema,
            group_size=target_group_size,
            may_divide=self._service.exchange.ledger_of(self._full_name.run).may_divide,
        )
        self._groups = GroupService(
            exchange=self._service.exchange,
            presence=self._presence,
            name=self._full_name,
            schema=self.schema,
            rng=node.rng,
            supervisor=node.supervisor,
            target_group_size=target_group_size,
            min_group_size=min_group_size,
            grace_period=GracePeriod(
                self.config.grace_s_max,
                unknown_peer_s=node.timings.unknown_peer_s,
                waiting_share_max=self._waiting_share_max,
            ),
            timings=node.timings,
        )
        self._renewing: asyncio.Task[None] = self.node.supervisor.spawn(
            f"presence of {self.name}", self._presence.renew, restart=True
        )
        self._forget_addresses = node.at_announced(self._presence.renew_soon)
        self._service.add(self._close_on_loop)
        announcing = node.supervisor.spawn(f"announcing {self.name}", self._announce)
        await asyncio.wait([announcing], timeout=DECLARE_S)

    async def _announce(self) -> None:
        await self._presence.wait_until_declared(STORE_TIMEOUT_S)
        try:
            await self._groups.announce(self.node.contact)
        except NetworkError:
            return  # the DHT does not answer; searches will ask again

    def close(self) -> None:
        """End a step in progress, and withdraw the presence record, so that other peers do not wait for this
        one. Idempotent.
        """
        if self.node.closed or not self.node.network.is_own_process:
            self._closed = True
            return
        try:
            self.node.network.run(self._close_on_loop(), _CLOSE_S_MAX)
        except DeadlineExceeded:  # the record will expire
            return

    async def _close_on_loop(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
            pending = self._pending
        if closed:
            return
        if pending is not None:
            pending.close()
        self._renewing.cancel()
        self._forget_addresses()
        self._groups.close()
        self._service.remove(self._close_on_loop)
        await self._presence.withdraw()

    def __enter__(self) -> Averager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Averager({self.name!r}, {self.schema.text}{', closed' if self._closed else ''})"
