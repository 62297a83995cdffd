"""Limits of a host's simultaneous connections, handshakes and streams: in total, per network and per peer.
Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from swarm.core.ids import PeerId
from swarm.net.scope import prefix_of

CONNECTIONS_MAX = 512  # 28 kB each
# incoming connections of strangers from one /24 (IPv6: /48), or through one relay
CONNECTIONS_PER_PREFIX_MAX = 64
CONNECTIONS_PER_PEER_MAX = 4  # two peers that dial each other, directly and through a relay, need four
HANDSHAKES_MAX = 64  # unfinished handshakes that strangers began; each costs 2 ms of processor time
HANDSHAKES_PER_PREFIX_MAX = 16
# Handshakes through a relay, which this peer has chosen, come from many networks. If it were smaller, the
# leader of a group of hidden peers would refuse members that call it at the same time.
HANDSHAKES_PER_RELAY_MAX = 32
HANDLERS_MAX = 2048  # streams of other peers in service
HANDLERS_PER_PREFIX_MAX = 512

_RELAYED = "relay "

T = TypeVar("T", str, PeerId)


def through(relay: PeerId | None) -> str:
    """Return the name under which connections through a relay are counted."""
    return f"{_RELAYED}{relay}"


class ConnectionCounts:
    """Counts of connections, handshakes and streams. A method that counts one returns the reason if a limit
    forbids it, otherwise an empty text.
    """

    def __init__(self) -> None:
        self._handshakes: Counter[str] = Counter()
        self._prefixes: Counter[str] = Counter()
        self._peers: Counter[PeerId] = Counter()
        self._handlers: Counter[str] = Counter()
        self._connections = 0
        self._handshaking = 0
        self._serving = 0

    def begin(self, host: str) -> str:
        """Count a handshake that a peer at this address begins."""
        prefix = prefix_of(host)
        if self._handshaking >= HANDSHAKES_MAX:
            return f"{HANDSHAKES_MAX} handshakes are under way"
        most = HANDSHAKES_PER_RELAY_MAX if host.startswith(_RELAYED) else HANDSHAKES_PER_PREFIX_MAX
        if self._handshakes[prefix] >= most:
            return f"{most} handshakes of {prefix} are under way"
        if self._connections >= CONNECTIONS_MAX:
            return f"{CONNECTIONS_MAX} connections are open"
        if self._prefixes[prefix] >= CONNECTIONS_PER_PREFIX_MAX:
            return f"{CONNECTIONS_PER_PREFIX_MAX} connections of {prefix} are open"
        self._handshakes[prefix] += 1
        self._handshaking += 1
        return ""

    def end(self, host: str) -> None:
        """Record the end of a handshake, successful or not."""
        _decrease(self._handshakes, prefix_of(host))
        self._handshaking -= 1

    def join(self, peer_id: PeerId, host: str, *, is_client: bool) -> str:
        """Count a connection. The limit per network does not apply to connections that this side has opened
        (`is_client`).
        """
        prefix = prefix_of(host)
        if self._connections >= CONNECTIONS_MAX:
            return f"{CONNECTIONS_MAX} connections are open"
        if self._peers[peer_id] >= CONNECTIONS_PER_PEER_MAX:
            return f"{CONNECTIONS_PER_PEER_MAX} connections of {peer_id.short} are open"
        if not is_client and self._prefixes[prefix] >= CONNECTIONS_PER_PREFIX_MAX:
            return f"{CONNECTIONS_PER_PREFIX_MAX} connections of {prefix} are open"
        self._connections += 1
        self._peers[peer_id] += 1
        if not is_client:
            self._prefixes[prefix] += 1
        return ""

    def leave(self, peer_id: PeerId, host: str, *, is_client: bool) -> None:
        """Record the end of a counted connection."""
        self._connections -= 1
        _decrease(self._peers, peer_id)
        if not is_client:
            _decrease(self._prefixes, prefix_of(host))

    def serve(self, host: str) -> str:
        """Count a stream that a peer at this address has opened."""
        prefix = prefix_of(host)
        if self._serving >= HANDLERS_MAX:
            return f"{HANDLERS_MAX} streams are being served"
        if self._handlers[prefix] >= HANDLERS_PER_PREFIX_MAX:
            return f"{HANDLERS_PER_PREFIX_MAX} streams of {prefix} are being served"
        self._handlers[prefix] += 1
        self._serving += 1
        return ""

    def served(self, host: str) -> None:
        """Record the end of a counted stream."""
        _decrease(self._handlers, prefix_of(host))
        self._serving -= 1


def _decrease(counts: Counter[T], name: T) -> None:
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
