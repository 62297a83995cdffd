"""Limits on the calls, or streams of calls, that callers have open: those of each peer, of the strangers
behind one address prefix, of all strangers, and of everybody. And a limit on how many calls strangers make:
those beyond it wait.

Identities cost nothing, but addresses do: the strangers of one address prefix (/24 of IPv4, /48 of IPv6)
together get half of what all strangers get. Members are not counted with them, so that the members at a
university that share one public address do not exclude one another.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net.logic.stranger_budget import BudgetLimits, StrangerBudget

_KeyT = TypeVar("_KeyT")
# Calls of strangers, each of which costs up to 0.5 ms of processor time. A newcomer makes some dozen calls to
# a peer until it is a member. Smaller: many newcomers behind one address wait; larger: a flood costs more
STRANGER_CALLS = BudgetLimits(
    per_prefix_max=4096.0,
    per_prefix_per_s=256.0,
    all_max=6144.0,
    all_per_s=512.0,
    reserved=1024.0,
    few_max=256.0,
    few_per_s=4.0,
)
# Serving experts is what a node is for: their calls have a queue, of which strangers get half
_UNLIMITED_METHODS = "/swarm.Expert/"
_BUDGET_POLL_S = 0.1  # interval at which a call that waits looks for a token
_caller_host: ContextVar[str] = ContextVar("_caller_host", default="")


def caller_host() -> str:
    """Return the IP address that the call which is being handled came from; empty if it is not known. Few
    handlers need it, so it is not an argument of every handler.
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
    """Counts of the calls, or streams, that callers have open at this peer."""

    def __init__(
        self,
        standing: PeerStanding,
        what: str,
        open_max: int,
        per_peer_max: int,
        budget: StrangerBudget | None = None,
    ) -> None:
        """Set the limits. `what`: the plural noun for the counted things in a refusal, such as "calls".
        `budget`: how many strangers may begin; None: any number.
        """
        self._standing, self._budget = standing, budget
        self._what = what
        self._open_max, self._per_peer_max = open_max, per_peer_max
        self._by_peer: dict[PeerId, int] = {}
        self._by_prefix: dict[str, int] = {}
        self._by_caller: dict[RemoteCaller, int] = {}
        self.total = 0

    @property
    def by_peer(self) -> dict[PeerId, int]:
        """Return the number of open calls of each caller that has any."""
        return dict(self._by_peer)

    def enter(self, caller: RemoteCaller) -> str | None:
        """Count one more. Return the reason to refuse it when there are too many, else None."""
        refusal = self._refusal(caller)
        if refusal is None:
            self.total += 1
            self._by_peer[caller.peer_id] = self._by_peer.get(caller.peer_id, 0) + 1
            self._by_prefix[caller.prefix] = self._by_prefix.get(caller.prefix, 0) + 1
            self._by_caller[caller] = self._by_caller.get(caller, 0) + 1
        return refusal

    def leave(self, caller: RemoteCaller) -> None:
        """Count one less."""
        self.total -= 1
        _count_out(self._by_peer, caller.peer_id)
        _count_out(self._by_prefix, caller.prefix)
        _count_out(self._by_caller, caller)

    def may_begin(self, caller: RemoteCaller, method: str, now_s: float) -> bool:
        """Return whether a call of this method may begin now; it takes a token of strangers. Members, and
        callers of a node that knows no members, need none.
        """
        return (
            self._budget is None
            or self._standing.is_member(caller.peer_id)
            or not self._standing.has_members()
            or method.startswith(_UNLIMITED_METHODS)
            or self._budget.enter(caller.prefix, now_s)
        )

    def _refusal(self, caller: RemoteCaller) -> str | None:
        if self._by_peer.get(caller.peer_id, 0) >= self._per_peer_max:
            return f"you have {self._per_peer_max} {self._what} open here already"
        if self.total >= self._open_max:
            return f"busy: {self._open_max} {self._what} open already"
        # Whether the caller is a member, and the number of strangers, are determined only when needed: this
        # runs for every call.
        in_prefix = self._by_prefix.get(caller.prefix, 0)
        if in_prefix < self._open_max // 4 and self.total < self._open_max // 2:
            return None
        strangers_max = self._open_max // 2 if self._standing.has_members() else self._open_max
        is_much = in_prefix >= strangers_max // 2
        if not (is_much or self.total >= strangers_max) or self._standing.is_member(caller.peer_id):
            return None
        if is_much and self._strangers(caller.prefix) >= strangers_max // 2:
            return f"busy: strangers in your network have {strangers_max // 2} {self._what} open already"
        if self._strangers() >= strangers_max:
            return f"busy: strangers have {strangers_max} {self._what} open already"
        return None

    def _strangers(self, prefix: str | None = None) -> int:
        """Return how many calls strangers have open: all strangers, or those with this address prefix."""
        return sum(
            count
            for one, count in self._by_caller.items()
            if prefix in (None, one.prefix) and not self._standing.is_member(one.peer_id)
        )


@dataclass(frozen=True, slots=True)
class CallsOf:
    """The calls of one caller."""

    calls: OpenCalls
    caller: RemoteCaller

    def enter(self) -> str | None:
        """Count an open call, as `OpenCalls.enter`."""
        return self.calls.enter(self.caller)

    def leave(self) -> None:
        """Count one less."""
        self.calls.leave(self.caller)

    def may_begin(self, method: str) -> bool:
        """Return whether a call may begin now, as `OpenCalls.may_begin`."""
        return self.calls.may_begin(self.caller, method, asyncio.get_running_loop().time())

    async def wait_to_begin(self, method: str) -> None:
        """Wait until a call may begin."""
        while True:
            if self.may_begin(method):
                return
            await asyncio.sleep(_BUDGET_POLL_S)


def _count_out(counts: dict[_KeyT, int], key: _KeyT) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
