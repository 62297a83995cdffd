"""The settings of a round, and the names and limits of its calls."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from averaging.reduction.robust import MEAN, Aggregation
from swarm.core.errors import UsageError
from swarm.core.ids import Contact
from swarm.net.rpc import UNARY_BYTES_MAX, Caller, Method, Stream, StreamMethod
from swarm.wire import reduce_pb2

MESSAGE_BYTES_MAX = 4 << 20
CHUNK_BYTES_MAX = 3 << 19  # some codecs round a chunk up; a chunk must fit into a unary message

EXCHANGE = StreamMethod(name="/swarm.Reduce/Exchange", message_bytes_max=MESSAGE_BYTES_MAX)
HEARTBEAT = Method(
    name="/swarm.Reduce/Heartbeat",
    request=reduce_pb2.HeartbeatRequest,
    reply=reduce_pb2.HeartbeatReply,
    request_bytes_max=256,
    reply_bytes_max=1 << 16,
)
VOTE = Method(
    name="/swarm.Reduce/Vote",
    request=reduce_pb2.VoteRequest,
    reply=reduce_pb2.VoteReply,
    request_bytes_max=1 << 18,
    reply_bytes_max=1 << 18,
)
ENDORSE = Method(
    name="/swarm.Reduce/Endorse",
    request=reduce_pb2.EndorseRequest,
    reply=reduce_pb2.EndorseReply,
    request_bytes_max=1 << 16,
    reply_bytes_max=1 << 12,
)
ACCOUNT = Method(
    name="/swarm.Reduce/Account",
    request=reduce_pb2.AccountRequest,
    reply=reduce_pb2.AccountReply,
    request_bytes_max=256,
    reply_bytes_max=UNARY_BYTES_MAX,
)
INVENTORY = Method(
    name="/swarm.Reduce/Inventory",
    request=reduce_pb2.InventoryRequest,
    reply=reduce_pb2.InventoryReply,
    request_bytes_max=256,
    reply_bytes_max=UNARY_BYTES_MAX,
)
FETCH = Method(
    name="/swarm.Reduce/Fetch",
    request=reduce_pb2.FetchRequest,
    reply=reduce_pb2.FetchReply,
    request_bytes_max=256,
    reply_bytes_max=UNARY_BYTES_MAX,
)
OFFER = Method(
    name="/swarm.Reduce/Offer",
    request=reduce_pb2.OfferRequest,
    reply=reduce_pb2.OfferReply,
    request_bytes_max=UNARY_BYTES_MAX,
    reply_bytes_max=256,
)
METHODS = (EXCHANGE, HEARTBEAT, VOTE, ACCOUNT, INVENTORY, FETCH, OFFER, ENDORSE)  # all methods of a round

VERSIONS_MAX = 16384  # versions in one reply of INVENTORY, at most 112 bytes each
REASON_CHARACTERS_MAX = 500  # length of a reason that a peer gives


class Dialer(Caller, Protocol):
    """The network as rounds need it: `swarm.net.channels.Channels`, or a simulated one."""

    def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AbstractAsyncContextManager[Stream]:
        """See `Channels.open_stream`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """The settings of a round that its user chooses. `chunk_bytes`, `aggregation` and whether rounds are
    audited must be the same on all members, and a difference is refused: averagers compare them before they
    form a group.
    """

    # largest size of an encoded chunk; smaller: more messages, larger: less overlap and more memory in flight
    chunk_bytes: int = 1 << 20
    aggregation: Aggregation = MEAN
    # share of the chunks that a second member recomputes; it is above 0 for all members or for none. 0.0:
    # contributions are not signed
    audit: float = 0.0
    # fraction of the vector's elements that need a contribution; below it, the round fails
    min_fraction: float = 1.0

    def __post_init__(self) -> None:
        if not 1024 <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise UsageError(f"chunk_bytes is between 1024 and {CHUNK_BYTES_MAX}, not {self.chunk_bytes}")
        if not 0.0 <= self.audit <= 1.0:
            raise UsageError(
                f"audit is a share of the chunks: 0 for no audits, at most 1, not {self.audit!r}"
            )
        if not 0.0 < self.min_fraction <= 1.0:
            raise UsageError(f"min_fraction is above 0 and at most 1, not {self.min_fraction!r}")
