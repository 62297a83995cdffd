"""How many calls, or streams of calls, callers may have open: each peer, the strangers behind one address
prefix, all strangers, and everybody.

Identities are free and addresses are not: strangers with addresses of one prefix (/24 of IPv4, /48 of IPv6)
together get half of what strangers get. Members are not counted with them: a university whose machines have
one public address has room for all that take part.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding

_KeyT = TypeVar("_KeyT")
_caller_host: ContextVar[str] = ContextVar("_caller_host", default="")


def caller_host() -> str:
    """Return the IP address that the call which is being handled came from; empty when that is not known.
    Only few handlers need it, so it is no argument of all of them.
    """
    return _caller_host.get()


def set_caller_host(host: str) -> None:
    """Set what `caller_host` returns in this task, and in those that it starts."""
    _caller_host.set(host)


class RemoteCaller(NamedTuple):
    """A peer whose PeerID is proven, and the address prefix that it calls from."""

    peer_id: PeerId
    prefix: str


class OpenCalls:
    """Counts of what callers have open here."""

    def __init__(self, standing: PeerStanding, what: str, open_max: int, per_peer_max: int) -> None:
        """`what` is counted, as it is called in a refusal: "calls"."""
        self._standing = standing
        self._what = what
        self._open_max, self._per_peer_max = open_max, per_peer_max
        self._by_peer: dict[PeerId, int] = {}
        self._by_prefix: dict[str, int] = {}
        self._by_caller: dict[RemoteCaller, int] = {}
        self.total = 0

    @property
    def by_peer(self) -> dict[PeerId, int]:
        """Return the number of each caller that has any."""
        return dict(self._by_peer)

    def enter(self, caller: RemoteCaller) -> str | None:
        """Count one in. Return the reason to refuse it when there are too many, else None."""
        refusal = self._refusal(caller)
        if refusal is None:
            self.total += 1
            self._by_peer[caller.peer_id] = self._by_peer.get(caller.peer_id, 0) + 1
            self._by_prefix[caller.prefix] = self._by_prefix.get(caller.prefix, 0) + 1
            self._by_caller[caller] = self._by_caller.get(caller, 0) + 1
        return refusal

    def leave(self, caller: RemoteCaller) -> None:
        """Count one out."""
        self.total -= 1
        _count_out(self._by_peer, caller.peer_id)
        _count_out(self._by_prefix, caller.prefix)
        _count_out(self._by_caller, caller)

    def _refusal(self, caller: RemoteCaller) -> str | None:
        if self._by_peer.get(caller.peer_id, 0) >= self._per_peer_max:
            return f"you have {self._per_peer_max} {self._what} open here already"
        if self.total >= self._open_max:
            return f"busy: {self._open_max} {self._what} open already"
        # A member is looked for, and strangers are counted, only when it matters: this runs for every call.
        strangers_max = self._open_max // 2 if self._standing.has_members() else self._open_max
        is_much = self._by_prefix.get(caller.prefix, 0) >= strangers_max // 2
        if not (is_much or self.total >= strangers_max) or self._standing.is_member(caller.peer_id):
            return None
        if is_much and self._strangers(caller.prefix) >= strangers_max // 2:
            return f"busy: strangers in your network have {strangers_max // 2} {self._what} open already"
        if self._strangers() >= strangers_max:
            return f"busy: strangers have {strangers_max} {self._what} open already"
        return None

    def _strangers(self, prefix: str | None = None) -> int:
        """Return how many strangers have open, all of them or those with this address prefix."""
        return sum(
            count
            for one, count in self._by_caller.items()
            if prefix in (None, one.prefix) and not self._standing.is_member(one.peer_id)
        )


def _count_out(counts: dict[_KeyT, int], key: _KeyT) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
