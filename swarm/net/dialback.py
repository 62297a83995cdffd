"""Call back peers that ask whether they can be called (`/swarm.Node/DialBack`).

The asked peer connects only to the IP address from which the question came, so that it cannot be made to
connect to a third party. It checks the PeerID in the TLS handshake. The answer says only whether this
succeeded: a reason would reveal open ports to strangers.
"""

from __future__ import annotations

import asyncio

from swarm.core.errors import PeerError
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import PeerStanding
from swarm.net.callers import caller_host
from swarm.net.channels import Channels
from swarm.net.logic.request_budget import RequestBudget
from swarm.net.rpc import Handlers, Method
from swarm.net.scope import ip_of
from swarm.wire import peer_pb2

# Timeout for connecting to the asking peer. If a router drops the packets, the verdict waits for all of it.
# The system repeats a lost TCP SYN after 1 s.
DIAL_S = 1.5
_CALLS_MAX = 30  # answered questions of each kind in a minute
_GREETING = b"\x13/multistream/1.0.0\n"  # first message of both ends of a libp2p connection
DIAL_BACK = Method(
    name="/swarm.Node/DialBack",
    request=peer_pb2.DialBackRequest,
    reply=peer_pb2.DialBackReply,
    request_bytes_max=64,
    reply_bytes_max=256,
)


class DialBacks:
    """Answers peers that ask whether they can be called."""

    def __init__(self, channels: Channels, standing: PeerStanding) -> None:
        self._channels = channels
        # a budget for each kind of question, so that a relay can ask about both of its ports at once
        self._budgets = [RequestBudget(standing, _CALLS_MAX, "called back") for _ in range(2)]

    def register(self, handlers: Handlers) -> None:
        """Register the handler of the call."""
        handlers.unary(DIAL_BACK, self._answer)

    async def _answer(self, caller: PeerId, request: peer_pb2.DialBackRequest) -> peer_pb2.DialBackReply:
        host = caller_host()
        if ip_of(host) is None:
            raise PeerError("the address that you call from is not known here")
        if not 1 <= request.port <= 65535:
            raise PeerError(f"{request.port} is not a TCP port")
        refusal = self._budgets[request.relay].enter(caller, asyncio.get_running_loop().time())
        if refusal:
            raise PeerError(refusal)
        address = Address(host, request.port)
        if request.relay:
            self._channels.on_dialed(address)
            reached = await _speaks_libp2p(address)
        else:
            reached = await self._channels.reaches(Contact(caller, (address,)), DIAL_S)
        return peer_pb2.DialBackReply(reached=reached, observed=host)


async def _speaks_libp2p(address: Address) -> bool:
    """Return whether a libp2p host answers there. It is recognised by its first bytes, which need no libp2p
    at this end and prove no PeerID.
    """
    writer = None
    try:
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
            writer.write(_GREETING)
            return await reader.readexactly(len(_GREETING)) == _GREETING
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()
