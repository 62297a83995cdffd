"""Joint steps: the replicas of an expert with a target batch gather for it together, and make one step for
all of them, as in SWARM (Ryabinin and others, 2023).

Each server tells the others how many samples it has gathered before it answers a backward pass. So when a
caller has all its answers, every replica knows whether the batch is complete, and keeps later passes waiting
until the step is made: they see the new parameters, as they would in one process. The step is one round of
an `Averager` over the mean gradients, weighted by samples; each replica multiplies the result by all samples
and steps its own optimizer, which is in the same state everywhere. Samples beyond the target count for the
next step, and a round with twice the target makes two steps with half of the sum each, so the number of steps
follows from the number of samples alone.

What a replica announces only begins a round. The step is made for what its members then bring, as its
certificate says: no replica counts for more than two target batches, and one that announced more than it
brought is not counted for a while, so that its words make no step early. The only other replica is not
counted for a while either when it brings gradients that are far longer than this one's
(`moe.server.logic.others_gradients`).

A replica that missed a step takes the state of one that made it, and drops what it had gathered.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from averaging.averager import Averager
from moe.protocol import methods
from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.names import ExpertUid
from moe.server.expert import Expert, JointBatch, Tensors
from moe.server.logic.joint_counts import (
    TARGETS_PER_REPLICA_MAX,
    BatchCount,
    JointCounts,
    RoundVerdict,
    judge,
    steps_due,
)
from moe.server.logic.lineage import NAME_BYTES, VERSION_MAX, donors
from moe.server.logic.others_gradients import LONGER_MAX, OwnGradients, mean_norm, others_norm
from moe.server.replica_states import ReplicaStates
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import PeerId
from swarm.core.notify import ChangeEvent
from swarm.wire.expert_pb2 import ExpertCount

if TYPE_CHECKING:
    from averaging.result import RoundResult
    from swarm.node import Node

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_REFRESH_S = 5.0  # interval at which the directory is read
_REFRESH_S_MIN = 0.5  # lower limit, even if many unknown peers call
_READ_TIMEOUT_S = 5.0
_TELL_TIMEOUT_S = 2.0  # timeout of a replica, which is then left out until the next refresh
_HOLD_S = 15.0  # a pass waits this long for a step, then its caller may ask another replica
_ROUND_TIMEOUT_S = 10.0
_ROUNDS_MAX = 2  # failed rounds with the same replicas, after which this one steps without them
_PAUSE_S = 0.2  # pause before a replica that could not catch up tries again
_GROUP_SIZE = 32
# gradients of one step are as in one process; they are no larger than the parameters, once per step
_CODEC = "float32"
_ROUNDS_AT_ONCE_MAX = 64
_SAMPLES_MAX = 1 << 40


class JointExpert:
    """The joint steps of one expert. Lives on the network loop."""

    def __init__(
        self,
        node: Node,
        uid: ExpertUid,
        expert: Expert,
        states: ReplicaStates,
        threads: ThreadPoolExecutor,
        met_unknown: ChangeEvent,
    ) -> None:
        self._node, self._uid, self.expert = node, uid, expert
        self._states, self._threads = states, threads
        self._declared: dict[PeerId, ExpertReplica] = {}
        self._counts = JointCounts()
        self._under_way = 0  # samples of backward passes that were admitted and are not counted yet
        self._waiting: dict[asyncio.Future[None], tuple[int, bool]] = {}  # passes: samples, is_backward
        self._telling = asyncio.Lock()
        self._to_announce = self._announced = 0
        self._busy = False  # a step is being made, or a state taken over
        self._halted = False
        self._before: BatchCount | None = None  # this one's count when the round began
        self._failed_rounds = 0
        self._averager: Averager | None = None
        self._tensors: Tensors = []
        self._own_gradients = OwnGradients()
        self._met_unknown = met_unknown  # a replica has called that the directory did not have yet

    @property
    def is_busy(self) -> bool:
        """Return whether a step is being made, or a state taken over, now."""
        return self._busy

    @property
    def is_active(self) -> bool:
        """Return whether passes may have to wait: there are replicas to step with, or a step is in
        progress.
        """
        return self.expert.is_joint or self._busy

    async def refresh(self, replicas: Iterable[ExpertReplica]) -> None:
        """Update the list of replicas that other servers declare."""
        self._declared = {one.peer_id: one for one in replicas if self.expert.target_batch_size}
        for peer in self._counts.peers:
            if peer not in self._declared:
                self._counts.forget(peer)
        await self._tell(list(self._declared))
        self._look()

    async def admit(self, samples: int, *, is_backward: bool) -> None:
        """Wait until a pass may be computed: no step is due, and the batch of a backward pass is not complete
        yet. Raises TimeoutError. Call `release` afterwards.
        """
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = (samples, is_backward)
        self._admit()
        try:
            async with asyncio.timeout(_HOLD_S):
                await waiting
        except BaseException:
            if waiting.done() and not waiting.cancelled():
                self.release(samples, is_backward=is_backward)
            raise
        finally:
            self._waiting.pop(waiting, None)

    def release(self, samples: int, *, is_backward: bool) -> None:
        """Record that an admitted pass has ended."""
        self._under_way -= samples if is_backward else 0
        self._look()

    def counted(self) -> None:
        """Record that backward passes were computed, and inform the other replicas."""
        self._to_announce += 1

    async def tell(self) -> None:
        """Wait until the replicas that gather for the same step know the count so far."""
        wanted = self._to_announce
        async with self._telling:
            if self._announced >= wanted:
                return
            count = self._to_announce
            await self._tell(self._counts.peers)
            self._announced = count
        self._look()

    def hear(self, peer: PeerId, count: BatchCount) -> BatchCount:
        """Record a replica's count, and return this one's. Counts of peers that declare no replica are not
        used.
        """
        if peer in self._declared:
            self._counts.note(peer, count, self._node.clock.monotonic_s())
            self._look()
        else:
            self._met_unknown.notify()
        return self._own

    def halt(self) -> None:
        """Begin no further step, and take over no state any more. Any thread may call it."""
        self._halted = True

    def close(self) -> None:
        """Leave the group. Must not be called on the network thread."""
        if self._averager is not None:
            self._averager.close()

    @property
    def _own(self) -> BatchCount:
        """Return this replica's count. During a round it is the count from before the round, because another
        thread changes the expert.
        """
        if self._before is not None:
            return self._before
        expert = self.expert
        return BatchCount(expert.version, expert.lineage.head or b"", expert.counted)

    def _admit(self) -> None:
        """Let passes continue that may, in the order of their arrival."""
        for waiting, (samples, is_backward) in list(self._waiting.items()):
            if waiting.done() or not self._is_open(is_backward=is_backward):
                continue
            self._under_way += samples if is_backward else 0
            waiting.set_result(None)

    def _is_open(self, *, is_backward: bool) -> bool:
        if self._busy or not self.expert.is_joint:
            return not self._busy
        own = self._own
        counted = self._counts.samples(own, self.expert.target_batch_size)
        counted += self._under_way if is_backward else 0
        return counted < self.expert.target_batch_size and not self._is_behind(own)

    def _is_complete(self, own: BatchCount) -> bool:
        target = self.expert.target_batch_size
        return self._counts.samples(own, target) >= target

    def _is_behind(self, own: BatchCount) -> bool:
        return self._counts.is_behind(own, self._node.clock.monotonic_s())

    def _look(self) -> None:
        """Start the action that is due now: a step, a download or none."""
        own, expert = self._own, self.expert
        apart = self._counts.apart(own, self._node.clock.monotonic_s())
        together = self._counts.together(own)
        expert.is_joint = bool(together or apart) and expert.target_batch_size > 0
        if not self._busy and not self._halted:
            work = None
            if expert.is_joint and self._is_behind(own):
                work = self._catch_up
            elif expert.is_joint and together and self._is_complete(own):
                work = self._step
            elif not expert.is_joint and expert.target_batch_size and own.samples >= expert.target_batch_size:
                work = self._step_alone
            if work is not None:
                self._busy = True
                self._node.supervisor.spawn("a joint step of an expert", work)
        self._admit()

    async def _tell(self, peers: Sequence[PeerId]) -> None:
        """Send replicas this one's count, and record theirs. A replica that does not answer is left out."""
        own = self._own
        request = ExpertCount(
            uid=str(self._uid),
            schema_digest=self.expert.schema.digest,
            version=own.version,
            head=own.head,
            samples=own.samples,
        )

        async def tell(peer: PeerId) -> None:
            before = self._counts.last(peer)
            try:
                reply = await self._node.channels.call(
                    self._declared[peer].contact, methods.COUNT, request, timeout_s=_TELL_TIMEOUT_S
                )
                self._counts.note_answer(peer, read_count(reply), before, self._node.clock.monotonic_s())
            except (PeerError, NetworkError) as error:
                _log.info("%s steps without its replica at %s: %s", self._uid, peer.short, error)
                self._counts.forget(peer)

        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                if peer in self._declared:
                    tasks.create_task(tell(peer))

    async def _end_work(self) -> None:
        self._before = None
        await self._tell(self._counts.peers)
        self._busy = False
        self._look()

    async def _step(self) -> None:
        """Make one step with the replicas that gather for it."""
        announced = self._counts.announced(self._own)
        try:
            result, invented_by = await self._on_thread(self._run_round)
            now_s = self._node.clock.monotonic_s()
            if result is None or result.failed:
                self._failed_rounds += 1
                _log.info("%s made no joint step: %s", self._uid, result.reason if result else "closed")
                if self._failed_rounds >= _ROUNDS_MAX:
                    for peer in self._counts.together(self._own):
                        self._counts.forget(peer)
            elif invented_by:
                _log.warning(
                    "%s made no joint step: the gradients of peer %s are longer than any of this replica",
                    self._uid,
                    next(iter(invented_by)).short,
                )
                self._counts.distrust(invented_by, now_s, gravely=True)
            elif (verdict := self._judge(result, announced)).excessive or not self._completes(verdict):
                _log.warning("%s made no joint step: its replicas brought too little, or too much", self._uid)
                # a replica that is missing in one round may only be late
                self._failed_rounds += 1
                absent = verdict.unkept - set(result.peers)
                late = absent if self._failed_rounds < _ROUNDS_MAX else frozenset[PeerId]()
                self._counts.distrust((verdict.excessive | verdict.unkept) - late, now_s)
            else:
                self._failed_rounds = 0
        finally:
            await self._end_work()

    async def _step_alone(self) -> None:
        try:
            await self._on_thread(self._run_alone)
        finally:
            await self._end_work()

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        """Run `work` on a thread of the steps. Once the server has closed, the caller's task is cancelled."""
        try:
            done = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError as error:
            if not self._halted:
                raise
            raise asyncio.CancelledError from error
        return await done

    def _run_alone(self) -> None:
        with self.expert.lock:
            self.expert.step_alone()

    async def _catch_up(self) -> None:
        """Take over the state of a replica that is further ahead."""
        try:
            own, self._before = self.expert.lineage, self._own
            replicas = [self._declared[peer] for peer in self._counts.peers if peer in self._declared]
            found = (await self._states.lineages({self._uid: replicas}))[self._uid]
            theirs = {peer: one.lineage for peer, one in found.items()}
            chosen = donors(own, theirs, self._node.peer_id, is_declared=True, steps_jointly=True)
            by_peer = {one.peer_id: one for one in replicas}
            if not chosen or not await self._states.take_over(
                self._uid, self.expert, [by_peer[peer] for peer in chosen]
            ):
                await asyncio.sleep(_PAUSE_S)
        finally:
            await self._end_work()

    def _run_round(self) -> tuple[RoundResult | None, frozenset[PeerId]]:
        """Run one round. Return its result, and the peers that brought invented gradients, in which case this
        replica has made no step. Called on a thread.
        """
        expert, node = self.expert, self._node
        if self._averager is None:
            with expert.lock:
                self._tensors = expert.new_joint_tensors()
            digest = hashlib.sha256(f"joint steps of {self._uid}".encode()).hexdigest()[:40]
            try:
                self._averager = Averager(
                    node,
                    self._tensors,
                    name=f"steps-{digest}",
                    target_group_size=_GROUP_SIZE,
                    codec=_CODEC,
                    clip_to_median=LONGER_MAX,
                )
            except SwarmError as error:
                _log.info("%s makes no joint steps: %s", self._uid, error)
                return None, frozenset()
        with expert.lock:
            own = self._before = self._own
            taken = expert.take_batch(self._tensors)
        # a huge request counts at most with a replica's limit
        most = TARGETS_PER_REPLICA_MAX * expert.target_batch_size
        pending = None
        try:
            pending = self._averager.step(
                float(min(taken.samples, most)),
                _ROUND_TIMEOUT_S,
                gather=min(taken.counted, most),
                wait=False,
                round_key=f"{own.version} {own.head.hex()}",
            )
            result = pending.result(_ROUND_TIMEOUT_S + 5.0)
        except SwarmError as error:
            _log.info("%s made no joint step: %s", self._uid, error)
            if pending is not None:
                pending.cancel()
            result = None
        with expert.lock:
            if result is None or result.failed:
                expert.return_batch(taken)
                return result, frozenset()
            verdict = self._judge(result, {})
            if verdict.excessive or not self._completes(verdict):
                expert.return_batch(taken)
                return result, frozenset()
            brought = {peer: result.weights[peer] * part for peer, part in result.contributions.items()}
            if invented_by := self._invented_by(brought, taken):
                expert.return_batch(taken)
                return result, invented_by
            samples = sum(brought.values())
            steps, carried = self._steps_due(verdict.samples, result.peers[0])
            name = hashlib.blake2b(f"{result.group_id} {result.digest}".encode(), digest_size=NAME_BYTES)
            if not expert.step_jointly(self._tensors, samples, steps, carried, name.digest()):
                _log.warning("a step of %s with its replicas was refused", self._uid)
        return result, frozenset()

    def _invented_by(self, brought: Mapping[PeerId, float], taken: JointBatch) -> frozenset[PeerId]:
        """Return the only other replica that has brought samples to a round, if its gradients cannot be real:
        `self._tensors` has the average.
        """
        own = brought.get(self._node.peer_id, 0.0)
        others = {peer: one for peer, one in brought.items() if peer != self._node.peer_id and one > 0}
        self._own_gradients.note(mean_norm(taken.gradients, taken.samples), own)
        if len(others) != 1:
            return frozenset()
        ((other, samples),) = others.items()
        share = own / taken.samples if taken.samples else 0.0
        averaged = self._tensors[: self.expert.learning_count]
        norm = others_norm(averaged, own + samples, taken.gradients, share) / samples
        return frozenset() if self._own_gradients.may_be_real(norm, samples) else frozenset({other})

    def _judge(self, result: RoundResult, announced: Mapping[PeerId, int]) -> RoundVerdict:
        return judge(result.gathered, result.weights, announced, self.expert.target_batch_size)

    def _completes(self, verdict: RoundVerdict) -> bool:
        return verdict.samples >= self.expert.target_batch_size

    def _steps_due(self, samples: int, first: PeerId) -> tuple[int, int]:
        """Return how many steps a batch of this size is for, and how many samples this replica carries
        over: the first one of the group does for all.
        """
        steps, left = steps_due(samples, self.expert.target_batch_size)
        return steps, left if first == self._node.peer_id else 0


class JointSteps:
    """The joint steps of a server's experts. Lives on the network loop."""

    def __init__(self, node: Node, experts: Mapping[ExpertUid, Expert]) -> None:
        self._node, self._directory = node, Directory(node.dht.service)
        states = ReplicaStates(node)
        self._threads = ThreadPoolExecutor(_ROUNDS_AT_ONCE_MAX, thread_name_prefix="swarm-joint-steps")
        self._changed = ChangeEvent()
        self.experts = {
            uid: JointExpert(node, uid, expert, states, self._threads, self._changed)
            for uid, expert in experts.items()
            if not expert.frozen
        }

    async def run(self) -> None:
        """Keep the lists of replicas up to date, for as long as the server runs."""
        while True:
            try:
                await self.refresh()
            except SwarmError as error:
                _log.info("replicas of this server's experts were not found: %s", error)
            await asyncio.sleep(_REFRESH_S_MIN)
            await self._changed.wait(_REFRESH_S)

    async def refresh(self) -> None:
        """Look for replicas of the experts that have a target batch."""
        uids = [uid for uid, one in self.experts.items() if one.expert.target_batch_size or one.is_active]
        if not uids:
            return
        found = await self._directory.replicas(uids, timeout_s=_READ_TIMEOUT_S, max_age_s=_REFRESH_S_MIN)

        async def refresh(uid: ExpertUid) -> None:
            one = self.experts[uid]
            digest = one.expert.schema.digest
            await one.refresh(
                replica
                for replica in found.get(uid, ())
                if replica.peer_id != self._node.peer_id and replica.schema == digest
            )

        async with asyncio.TaskGroup() as tasks:
            for uid in uids:
                tasks.create_task(refresh(uid))

    def close(self) -> None:
        """Leave all groups. Must not be called on the network thread."""
        for one in self.experts.values():
            one.halt()  # a step that is due would be begun again and again, without a thread to make it
        self._threads.shutdown(wait=False, cancel_futures=True)
        for one in self.experts.values():
            one.close()


def read_count(message: ExpertCount) -> BatchCount:
    """Return a count that a peer sent. Raises PeerError when it is malformed."""
    if (
        message.version >= VERSION_MAX
        or len(message.head) not in (0, NAME_BYTES)
        or message.samples > _SAMPLES_MAX
    ):
        raise PeerError("the count of a replica is malformed")
    return BatchCount(message.version, message.head, message.samples)


def wire_count(count: BatchCount) -> ExpertCount:
    """Return a count as it is sent in an answer."""
    return ExpertCount(version=count.version, head=count.head, samples=count.samples)
