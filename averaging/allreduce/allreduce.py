"""Butterfly all-reduce between the members of a group: one service per node, any number of rounds side by
side.

Each member cuts the vector alike, reduces the shard that its bandwidth earns it, and sends and receives the
others' (`averaging.allreduce.round`). The result stays encoded and is handed over only when all living
members hold the same bytes (`averaging.allreduce.quorum`).
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from averaging.allreduce.auditing import Auditor
from averaging.allreduce.config import (
    ACCOUNT,
    EXCHANGE,
    FETCH,
    HEARTBEAT,
    HELD,
    OFFER,
    VOTE,
    Dialer,
    RoundConfig,
)
from averaging.allreduce.holding import ChunkInventory
from averaging.allreduce.metering import MeteredDialer, MeteredStream
from averaging.allreduce.quorum import RoundMembership
from averaging.allreduce.round import Round
from averaging.allreduce.work import ReductionKernels
from averaging.matchmaking.logic.group import GROUP_ID_BYTES, Group
from averaging.reduction.audit import Notary
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.balance import shares_of
from averaging.reduction.feedback import NO_SHARD, Feedback, FeedbackRound, Shard
from averaging.reduction.framing import unpack
from averaging.reduction.partition import chunk_bytes_for, plan_chunks
from averaging.reduction.reduce import relative_weights
from averaging.reduction.speed import Speed
from averaging.reduction.vector import FlatVector
from swarm.compression import find
from swarm.core.clock import Clock
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.net.rpc import Handlers, Stream
from swarm.wire.reduce_pb2 import (
    AccountReply,
    AccountRequest,
    FetchReply,
    FetchRequest,
    HeartbeatReply,
    HeartbeatRequest,
    HeldReply,
    HeldRequest,
    OfferReply,
    OfferRequest,
    VoteReply,
    VoteRequest,
)

_FINISHED_MAX = 16  # rounds whose end is remembered, for members that ask late
_WAITING_MAX = 256  # streams and votes of rounds that have not begun here
_WAITING_PER_PEER_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """How a round ended for this member."""

    failed: bool
    reason: str | None  # of a failure; names the peer, and what it was doing. "deadline: …" when time ran out
    # the result, the same bytes on all members. None when failed, and for an auxiliary member
    averages: Averages | None
    # who is in the average, with the fraction of the vector's elements that it is in; {} when failed
    contributions: Mapping[PeerId, float]
    # who was found to have lied as a reducer, by this member's own audit, and in what
    accused: Mapping[PeerId, str]
    left_out: Mapping[PeerId, str]  # who was left out somewhere or died, and why; our own id when it was us
    # hexadecimal, over all encoded averages in order; "" when failed, and for an auxiliary member
    digest: str
    # whose values were shortened, and in what fraction of the elements; {} when failed
    clipped: Mapping[PeerId, float]
    bytes_sent: int  # of tensors, framing included
    bytes_received: int
    # "total", "exchange" (until all was in place), "commit"; tensor work within: "encode", "reduce", "settle"
    seconds: Mapping[str, float]
    out_of_memory: bool = False  # it failed because this member had no memory left: `reason` says where

    @classmethod
    def broken(cls, reason: str, *, out_of_memory: bool = False) -> RoundOutcome:
        """A round that failed before anything was sent."""
        return cls(
            failed=True,
            reason=reason,
            averages=None,
            contributions={},
            accused={},
            left_out={},
            digest="",
            clipped={},
            bytes_sent=0,
            bytes_received=0,
            seconds={},
            out_of_memory=out_of_memory,
        )

    @property
    def vector(self) -> torch.Tensor | None:
        """Return the decoded result, flat float32, as a new tensor each time; None without averages."""
        return self.averages.decoded() if self.averages is not None else None


class AllReduce:
    """Runs rounds and serves those of others. Lives on the network loop; `own` is this node's PeerId."""

    def __init__(
        self,
        *,
        handlers: Handlers,
        channels: Dialer,
        own: PeerId,
        pool: Executor,
        clock: Clock,
        notary: Notary | None = None,
    ) -> None:
        """`notary`: for audits, with which rounds can do without it."""
        self.speed = Speed()
        self._channels = MeteredDialer(channels, self.speed, clock)
        self._own = own
        self._pool = pool
        self._notary = notary
        self._clock = clock
        self._rounds: dict[bytes, Round] = {}
        # of running and of the last finished rounds
        self._quorums: OrderedDict[bytes, RoundMembership] = OrderedDict()
        # of those of them that committed: others may come for what they hold
        self._holdings: dict[bytes, ChunkInventory] = {}
        self._begun = asyncio.Event()
        self._waiting: Counter[PeerId] = Counter()
        self._join_s = RoundConfig().join_s
        self._handlers = handlers
        _keep_freed_memory()
        handlers.stream(EXCHANGE, self._serve_exchange)
        handlers.unary(HEARTBEAT, self._serve_heartbeat)
        handlers.unary(VOTE, self._serve_vote)
        handlers.unary(ACCOUNT, self._serve_account)
        handlers.unary(HELD, self._serve_held)
        handlers.unary(FETCH, self._serve_fetch)
        handlers.unary(OFFER, self._serve_offer)

    def close(self) -> None:
        """Answer no more, and fail the rounds that run."""
        for method in (EXCHANGE, HEARTBEAT, VOTE, ACCOUNT, HELD, FETCH, OFFER):
            self._handlers.remove(method.name)
        for running in list(self._rounds.values()):
            running.quorum.fail(f"peer {self._own} was closed")

    @property
    def waiting(self) -> int:
        """How many calls of faster members wait for rounds that have not begun here."""
        return self._waiting.total()

    async def run(
        self,
        group: Group,
        vector: torch.Tensor | FlatVector,
        *,
        deadline_s: float,
        config: RoundConfig | None = None,
        result_buffer: ResultBuffer | None = None,
        feedback: Feedback | None = None,
    ) -> RoundOutcome:
        """Average `vector` with the group; returns by `deadline_s` (on the clock's `monotonic_s`).

        `vector`: flat, contiguous, float32, on any device, in one tensor or several; read until this returns,
        never written. `landing`: where the averages are kept, the same for one round after the other.
        `feedback`: what this averager's rounds leave out, for a codec that loses something; it moves on when
        this round is committed. What the network or a peer does is an outcome. UsageError: the vector is
        anything else, this group cannot be served (nobody reduces, an unknown codec), or the round runs
        already.
        """
        started_s = self._clock.monotonic_s()
        config = config or RoundConfig()
        running = self._begin(
            group,
            vector if isinstance(vector, FlatVector) else FlatVector([vector]),
            result_buffer or ResultBuffer(),
            config,
        )
        quorum = running.quorum
        kernels = running.kernels
        kernels.begin_feedback = _feedback_of(feedback, group, kernels)
        quorum.deadline_s = deadline_s
        try:
            async with asyncio.timeout(max(deadline_s - started_s, 0.0)):
                await running.conduct()
        except TimeoutError:
            quorum.fail(f"deadline: {running.missing()}")
        finally:
            quorum.fail(f"peer {self._own} gave the round up")  # without effect after any other end
            del self._rounds[group.group_id]
            self.speed.round_over()
            if quorum.verdict is not None and quorum.verdict.failure is None and not config.audit:
                self._holdings[group.group_id] = running.recovery.holding
            if quorum.verdict is None or quorum.verdict.failure is not None:
                kernels.roll_back()
        conducted_s = self._clock.monotonic_s()
        outcome = self._outcome(running, config, started_s, conducted_s)
        if not outcome.failed:
            self.speed.committed(outcome.bytes_sent, conducted_s - started_s)
            if not await running.conclude():  # the others have committed, and go on without us
                outcome = _broken(outcome, f"{quorum.name(kernels.own)} {running.out_of_memory}")
        if outcome.failed:
            kernels.roll_back()
        await quorum.announce()
        return outcome

    # ---- rounds

    def _begin(
        self, group: Group, vector: FlatVector, result_buffer: ResultBuffer, config: RoundConfig
    ) -> Round:
        own = group.index(self._own)
        if group.group_id in self._quorums:
            raise UsageError("this round has run already")
        codec = find(group.codec)
        shares = shares_of(group.members) if len(group.members) > 1 else [1.0]
        chunk_bytes = chunk_bytes_for([member.bandwidth for member in group.members], config.chunk_bytes)
        plan = plan_chunks(vector.numel, shares, codec, chunk_bytes)
        if not any(member.weight > 0 for member in group.members) and vector.numel:
            raise UsageError("nobody in this group contributes: all weights are 0")
        quorum = RoundMembership(group, own, caller=self._channels, clock=self._clock, config=config)
        kernels = ReductionKernels(
            plan, codec, own, vector, Averages(plan, codec, result_buffer), config.aggregation
        )
        kernels.weights = relative_weights([member.weight for member in group.members])
        running = Round(group, kernels, quorum, channels=self._channels, pool=self._pool, config=config)
        if config.audit:
            if self._notary is None:
                raise UsageError("audits need an identity to sign with: give this all-reduce a notary")
            running.auditor = Auditor(group, kernels, self._notary, config.audit)
        self._rounds[group.group_id] = running
        self._quorums[group.group_id] = quorum
        finished = [group_id for group_id in self._quorums if group_id not in self._rounds]
        for group_id in finished[:-_FINISHED_MAX]:
            del self._quorums[group_id]
            self._holdings.pop(group_id, None)
        self._begun.set()
        self._begun = asyncio.Event()
        return running

    def _outcome(
        self, running: Round, config: RoundConfig, started_s: float, conducted_s: float
    ) -> RoundOutcome:
        quorum, kernels, group = running.quorum, running.kernels, running.group
        own = quorum.votes.cast[kernels.own]
        failure = quorum.verdict.failure if quorum.verdict is not None else "internal error"
        fared = running.fared()
        if (
            failure is None
            and not group.members[kernels.own].auxiliary
            and fared.covered < config.min_fraction
        ):
            failure = (
                f"nobody is left who contributes to {1.0 - fared.covered:.0%} of the vector: "
                f"{'; '.join(fared.left_out.values())}"
            )
        fractions = fared.fractions if failure is None else {}
        clipped = fared.clipped if failure is None else {}
        left_out = fared.left_out
        whole = failure is None and not group.members[kernels.own].auxiliary
        exchanged_s = quorum.cast_s if quorum.cast_s is not None else conducted_s
        return RoundOutcome(
            failed=failure is not None,
            reason=failure,
            averages=kernels.averages if whole else None,
            contributions={group.members[place].peer_id: fraction for place, fraction in fractions.items()},
            accused={
                group.members[place].peer_id: lie
                for place, lie in (running.auditor.accused if running.auditor else {}).items()
            },
            left_out={group.members[place].peer_id: reason for place, reason in sorted(left_out.items())},
            digest=own.digest.hex() if whole else "",
            out_of_memory=failure is not None and bool(running.out_of_memory),
            clipped={group.members[place].peer_id: fraction for place, fraction in clipped.items()},
            bytes_sent=running.traffic.sent,
            bytes_received=running.traffic.received,
            seconds={
                "total": self._clock.monotonic_s() - started_s,
                "exchange": exchanged_s - started_s,
                "commit": conducted_s - exchanged_s,
                **kernels.seconds,
            },
        )

    # ---- calls of members

    async def _serve_exchange(self, stream: Stream) -> None:
        message = await stream.receive()
        if message is None:
            return
        header, _ = unpack(message)
        if not header.HasField("open"):
            raise PeerError("a stream of a round begins with an opening")
        quorum = await self._find(header.open.group_id, stream.peer_id)
        running = self._rounds.get(header.open.group_id)
        if running is None:
            failure = quorum.verdict.failure if quorum.verdict is not None else None
            raise PeerError(
                f"this round failed here: {failure}" if failure is not None else "this round is over"
            )
        await running.span.serve(
            _place(quorum, stream.peer_id), header.open, MeteredStream(stream, self.speed, self._clock)
        )

    async def _serve_heartbeat(self, caller: PeerId, request: HeartbeatRequest) -> HeartbeatReply:
        quorum = self._quorums.get(request.group_id)
        return (
            quorum.answer_heartbeat(_place(quorum, caller))
            if quorum is not None
            else HeartbeatReply(state=HeartbeatReply.UNKNOWN)
        )

    async def _serve_vote(self, caller: PeerId, request: VoteRequest) -> VoteReply:
        quorum = await self._find(request.group_id, caller)
        return await quorum.answer_vote(_place(quorum, caller), request)

    async def _serve_held(self, caller: PeerId, request: HeldRequest) -> HeldReply:
        quorum = await self._find(request.group_id, caller)
        place = _place(quorum, caller)
        running = self._rounds.get(request.group_id)
        if running is not None:
            return await running.recovery.answer_held(place, request)
        return self._held(request.group_id).tell(request, sealed=True)

    async def _serve_fetch(self, caller: PeerId, request: FetchRequest) -> FetchReply:
        quorum = await self._find(request.group_id, caller)
        _place(quorum, caller)
        running = self._rounds.get(request.group_id)
        if running is not None:
            return await running.recovery.answer_fetch(request)
        return self._held(request.group_id).give(request.chunk, request.digest)

    async def _serve_offer(self, caller: PeerId, request: OfferRequest) -> OfferReply:
        quorum = await self._find(request.group_id, caller)
        place = _place(quorum, caller)
        running = self._rounds.get(request.group_id)
        if running is None:
            raise PeerError("this round is over")
        return running.recovery.contributions.take_offer(place, request)

    def _held(self, group_id: bytes) -> ChunkInventory:
        """Return the averages that a finished round left in memory. Raises PeerError when the round failed
        here.
        """
        holding = self._holdings.get(group_id)
        if holding is None:
            raise PeerError("this round failed here")
        return holding

    async def _serve_account(self, caller: PeerId, request: AccountRequest) -> AccountReply:
        running = self._rounds.get(request.group_id)
        if running is None or running.auditor is None:
            raise PeerError("this peer is in no round of that name that is audited")
        return running.auditor.answer(_place(running.quorum, caller), request)

    async def _find(self, group_id: bytes, caller: PeerId) -> RoundMembership:
        """The round of this name; waits a little for one that has not begun here: a faster member may be
        first.
        """
        if len(group_id) != GROUP_ID_BYTES:
            raise PeerError(f"a round's name has {GROUP_ID_BYTES} bytes, not {len(group_id)}")
        if group_id not in self._quorums:
            if self._waiting[caller] >= _WAITING_PER_PEER_MAX or self._waiting.total() >= _WAITING_MAX:
                raise PeerError("too many calls wait here for rounds that have not begun")
            self._waiting[caller] += 1
            try:
                async with asyncio.timeout(self._join_s):
                    while group_id not in self._quorums:
                        await self._begun.wait()
            except TimeoutError:
                raise PeerError(
                    f"this peer is in no round of that name, and did not begin one within {self._join_s:g} s"
                ) from None
            finally:
                self._waiting[caller] -= 1
                if not self._waiting[caller]:
                    del self._waiting[caller]
        return self._quorums[group_id]


def _broken(outcome: RoundOutcome, reason: str) -> RoundOutcome:
    """The outcome of a committed round that this member had no memory to end."""
    return replace(
        outcome,
        failed=True,
        reason=reason,
        averages=None,
        contributions={},
        digest="",
        clipped={},
        out_of_memory=True,
    )


def _feedback_of(
    feedback: Feedback | None, group: Group, kernels: ReductionKernels
) -> Callable[[], FeedbackRound] | None:
    """Return the function that begins this round of error feedback; None without error feedback."""
    if feedback is None:
        return None
    own = kernels.plan.shard(kernels.own)
    members = b"".join(member.peer_id.public_key for member in group.members)
    return functools.partial(
        feedback.begin, Shard(start=own[0].start, stop=own[-1].stop, members=members) if own else NO_SHARD
    )


def _keep_freed_memory() -> None:
    """Make glibc keep freed blocks of a megabyte, which this process uses again and again.

    Its malloc maps such blocks for each allocation, until one of them has been freed: then it keeps blocks up
    to that size, and twice that at the end of its heap. A round makes and drops a message for every megabyte;
    mapping them each time took ten times the page faults and 5 to 10 % of the processor time. One block of
    almost the largest size that counts, never touched, costs nothing; other allocators ignore this.
    """
    bytes(31 << 20)


def _place(quorum: RoundMembership, caller: PeerId) -> int:
    try:
        return quorum.group.index(caller)
    except UsageError:
        raise PeerError(f"{caller} is not a member of this round") from None
