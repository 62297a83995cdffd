"""The settings of a round, and the names and limits of its calls."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from averaging.liveness import LivenessConfig
from averaging.robust import MEAN, Aggregation
from swarm.errors import UsageError
from swarm.ids import Contact
from swarm.net.rpc import Caller, Method, Stream, StreamMethod
from swarm.wire.reduce_pb2 import AccountReply, AccountRequest, BeatReply, BeatRequest, VoteReply, VoteRequest

MESSAGE_BYTES_MAX = 4 << 20
PART_BYTES_MAX = 3 << 20  # some codecs round a part up

EXCHANGE = StreamMethod(name="/swarm.Reduce/Exchange", message_bytes_max=MESSAGE_BYTES_MAX)
BEAT = Method(name="/swarm.Reduce/Beat", request=BeatRequest, reply=BeatReply, request_bytes_max=256, reply_bytes_max=1 << 16)
VOTE = Method(name="/swarm.Reduce/Vote", request=VoteRequest, reply=VoteReply, request_bytes_max=1 << 18, reply_bytes_max=1 << 22)
ACCOUNT = Method(
    name="/swarm.Reduce/Account",
    request=AccountRequest,
    reply=AccountReply,
    request_bytes_max=256,
    reply_bytes_max=MESSAGE_BYTES_MAX,
)

REASON_CHARACTERS_MAX = 500  # of what a peer says about itself
INLINE_BELOW_CORES = 4  # with fewer, handing work to another thread costs more than it saves: 8 % of a round's processor time on two


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Dialer(Caller, Protocol):
    """What rounds need of the network: `swarm.net.channels.Channels`, or a simulated one."""

    def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, lane: int = 0
    ) -> AbstractAsyncContextManager[Stream]:
        """See `Channels.open_stream`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """How a round runs. `part_bytes` must be the same on all members: it decides the cut, and a difference is refused."""

    part_bytes: int = 1 << 20  # of an encoded part; smaller: more messages, larger: less overlap and more memory per part in flight
    batch_parts: int = 2  # parts encoded or reduced in one hop to the pool; larger: fewer hops, later first bytes
    inline: bool | None = None  # tensor work on the event loop's own thread, not in the pool; None: where cores are too few to help
    ahead_max: int = 32  # parts of one sender that a reducer holds while others' are missing; then it reads no more of that stream
    join_s: float = 5.0  # how long a stream or vote of a round that is not known here yet waits for it to begin
    announce_s: float = 0.3  # after a failure: how long telling the others may delay its report
    aggregation: Aggregation = MEAN  # must be the same on all members: the averager sees to it by its schema
    audit: float = 0.0  # share of the parts that a second member recomputes; all members have it above 0, or none. 0.0: nothing is signed
    liveness: LivenessConfig = field(default_factory=LivenessConfig)

    def __post_init__(self) -> None:
        if not 1024 <= self.part_bytes <= PART_BYTES_MAX:
            raise UsageError(f"part_bytes is between 1024 and {PART_BYTES_MAX}, not {self.part_bytes}")
        if not 0.0 <= self.audit <= 1.0:
            raise UsageError(f"audit is a share of the parts: 0 for no audits, at most 1, not {self.audit!r}")
        if self.batch_parts < 1 or self.ahead_max < 1 or self.join_s <= 0 or self.announce_s < 0:
            raise UsageError("batch_parts and ahead_max are at least 1, join_s is positive, announce_s is not negative")
