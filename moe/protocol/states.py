"""The transfer of an expert's state from a server that hosts it: to a server that is about to host it as
well, or to a user who downloads the expert.

A state is one blob (`averaging.optim.state.snapshot`). It is not trusted: the receiver limits its size, and
checks names, shapes, dtypes and that numbers are finite before it uses any of it.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from averaging.optim.state.snapshot import Blob
from moe.protocol import methods
from moe.protocol.declarations import ExpertReplica
from moe.protocol.errors import ExpertOverloaded
from moe.protocol.names import ExpertUid
from swarm.core.backoff import Backoff
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.net.channels import Channels
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertStateReply, ExpertStateRequest

if TYPE_CHECKING:
    from swarm.node import Node

GIVE_S = 30.0  # a state is given within this, and the time that it takes at the slowest pace
PACE_BYTES_PER_S = 256 << 10
BUSY_S_MAX = 60.0  # a server that gives states to others is asked again for this long
_STATE_CONNECTION = 1  # the one for large tensors
# between two questions to a server that gives states to others. Too small: it is asked all the time; too
# large: it has nothing to do meanwhile
_PAUSE_FIRST_S, _PAUSE_S_MAX = 0.1, 2.0


def transfer_s_max(bytes_max: int) -> float:
    """Return how long the transfer of a state of this size may take."""
    return GIVE_S + bytes_max / PACE_BYTES_PER_S


class StateFetching:
    """Fetches states. A node has one instance (`node.service(StateFetching.from_node)`), on its network
    loop, since a server gives one state at a time to each peer.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._turns: defaultdict[PeerId, asyncio.Lock] = defaultdict(asyncio.Lock)

    @classmethod
    def from_node(cls, node: Node) -> StateFetching:
        """Create the instance for a node."""
        return cls(node.channels)

    async def fetch(
        self, donor: ExpertReplica, uid: ExpertUid, bytes_max: int, *, parameters_only: bool = False
    ) -> tuple[ExpertStateReply, Blob]:
        """Return a server's reply and the state that followed it, which has at most `bytes_max` bytes and is
        unchecked. `parameters_only`: the module's parameters and buffers under their own names, instead of
        all that training needs.

        Raises PeerError when the server gives none, NetworkError, or TimeoutError.
        """
        loop = asyncio.get_running_loop()
        until_s, pauses = loop.time() + BUSY_S_MAX, Backoff(_PAUSE_FIRST_S, _PAUSE_S_MAX, random)
        while True:
            try:
                async with self._turns[donor.peer_id]:
                    return await self._fetch(donor, uid, bytes_max, parameters_only=parameters_only)
            except ExpertOverloaded:
                pause_s = pauses.next_s()
                if loop.time() + pause_s > until_s:
                    raise
            finally:
                if not self._turns[donor.peer_id].locked():
                    del self._turns[donor.peer_id]
            await asyncio.sleep(pause_s)

    async def _fetch(
        self, donor: ExpertReplica, uid: ExpertUid, bytes_max: int, *, parameters_only: bool
    ) -> tuple[ExpertStateReply, Blob]:
        timeout_s = transfer_s_max(bytes_max)
        request = ExpertStateRequest(
            uid=str(uid), schema_digest=donor.schema, parameters_only=parameters_only
        ).SerializeToString()
        async with (
            asyncio.timeout(timeout_s),
            self._channels.open_stream(
                donor.contact, methods.STATE, timeout_s=timeout_s, connection=_STATE_CONNECTION
            ) as stream,
        ):
            await stream.send(request)
            try:
                reply = ExpertStateReply.FromString(await stream.receive() or b"")
            except DecodeError:
                raise PeerError(f"peer {donor.peer_id} sent no reply to a request for a state") from None
            if reply.status == expert_pb2.EXPERT_OVERLOADED:
                raise ExpertOverloaded(f"peer {donor.peer_id} is busy: {reply.reason[:200]}")
            if reply.status != expert_pb2.EXPERT_OK:
                raise PeerError(f"peer {donor.peer_id} does not give it: {reply.reason[:200]}")
            if not 0 < reply.payload_bytes <= bytes_max:
                raise PeerError(
                    f"peer {donor.peer_id} announces a state of {reply.payload_bytes} bytes: "
                    f"that of this expert has at most {bytes_max}"
                )
            payload = await methods.receive_payload(stream, reply.payload_bytes)
        return reply, memoryview(payload.numpy())  # type: ignore[arg-type, unused-ignore]
