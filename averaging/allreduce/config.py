"""The settings of a round, and the names and limits of its calls."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from averaging.allreduce.liveness import LivenessConfig
from averaging.allreduce.pacing import PacingConfig
from averaging.reduction.robust import MEAN, Aggregation
from swarm.core.errors import UsageError
from swarm.core.ids import Contact
from swarm.net.rpc import Caller, Method, Stream, StreamMethod
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

MESSAGE_BYTES_MAX = 4 << 20
CHUNK_BYTES_MAX = 3 << 20  # some codecs round a chunk up

EXCHANGE = StreamMethod(name="/swarm.Reduce/Exchange", message_bytes_max=MESSAGE_BYTES_MAX)
HEARTBEAT = Method(
    name="/swarm.Reduce/Heartbeat",
    request=HeartbeatRequest,
    reply=HeartbeatReply,
    request_bytes_max=256,
    reply_bytes_max=1 << 16,
)
VOTE = Method(
    name="/swarm.Reduce/Vote",
    request=VoteRequest,
    reply=VoteReply,
    request_bytes_max=1 << 18,
    reply_bytes_max=1 << 22,
)
ACCOUNT = Method(
    name="/swarm.Reduce/Account",
    request=AccountRequest,
    reply=AccountReply,
    request_bytes_max=256,
    reply_bytes_max=MESSAGE_BYTES_MAX,
)
HELD = Method(
    name="/swarm.Reduce/Held",
    request=HeldRequest,
    reply=HeldReply,
    request_bytes_max=256,
    reply_bytes_max=4 << 20,
)
FETCH = Method(
    name="/swarm.Reduce/Fetch",
    request=FetchRequest,
    reply=FetchReply,
    request_bytes_max=256,
    reply_bytes_max=MESSAGE_BYTES_MAX,
)
OFFER = Method(
    name="/swarm.Reduce/Offer",
    request=OfferRequest,
    reply=OfferReply,
    request_bytes_max=MESSAGE_BYTES_MAX,
    reply_bytes_max=256,
)

VERSIONS_MAX = 16384  # in one reply of HELD
REASON_CHARACTERS_MAX = 500  # of what a peer says about itself
# with fewer, handing work to another thread costs more than it saves: 8 % of a round's processor time on two
INLINE_BELOW_CORES = 4


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Dialer(Caller, Protocol):
    """The network as rounds need it: `swarm.net.channels.Channels`, or a simulated one."""

    def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AbstractAsyncContextManager[Stream]:
        """See `Channels.open_stream`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """How a round runs. `chunk_bytes` must be the same on all members: it decides the cut, and a difference
    is refused.
    """

    # of an encoded chunk, at most; smaller: more messages, larger: less overlap and more memory in flight
    chunk_bytes: int = 1 << 20
    # chunks encoded or reduced in one hop to the pool; larger: fewer hops, later first bytes
    batch_chunks: int = 2
    # tensor work on the event loop's own thread, not in the pool; None: where cores are too few to help
    inline: bool | None = None
    # chunks of one sender that a reducer holds while others' are missing; then it reads no more of that
    # stream
    ahead_max: int = 32
    # how long a stream or vote of a round that is not known here yet waits for it to begin
    join_s: float = 5.0
    # interval at which a reducer that waits for contributions reports this, so as not to count as idle;
    # below pacing.reducer_s
    waiting_s: float = 2.0
    announce_s: float = 0.3  # after a failure: how long telling the others may delay its report
    aggregation: Aggregation = MEAN  # must be the same on all members: the averager sees to it by its schema
    # share of the chunks that a second member recomputes; all members have it above 0, or none. 0.0: nothing
    # is signed
    audit: float = 0.0
    # after members voted more than once: how long giving the last vote to somebody may delay the report
    farewell_s: float = 2.0
    # of the vector's elements that somebody must have contributed to; below, the round counts as failed
    min_fraction: float = 1.0
    # how long a member that is asked what it holds waits for news; too small: many calls while a round is
    # repaired
    held_wait_s: float = 1.0
    fetch_s: float = 30.0  # how long one chunk may take to be fetched from a member that lives
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    pacing: PacingConfig = field(default_factory=PacingConfig)

    def __post_init__(self) -> None:
        if not 1024 <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise UsageError(f"chunk_bytes is between 1024 and {CHUNK_BYTES_MAX}, not {self.chunk_bytes}")
        if not 0.0 <= self.audit <= 1.0:
            raise UsageError(
                f"audit is a share of the chunks: 0 for no audits, at most 1, not {self.audit!r}"
            )
        if (
            self.batch_chunks < 1
            or self.ahead_max < 1
            or self.join_s <= 0
            or min(self.announce_s, self.farewell_s) < 0
        ):
            raise UsageError(
                "batch_chunks and ahead_max are at least 1, join_s is positive, announce_s and farewell_s "
                "are not negative"
            )
        if not 0.0 < self.min_fraction <= 1.0 or self.held_wait_s <= 0 or self.fetch_s <= 0:
            raise UsageError("min_fraction is above 0 and at most 1, held_wait_s and fetch_s are positive")
