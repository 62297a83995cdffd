"""Determine whether other peers can call this one, from their answers after they have tried.

The addresses of a peer behind a router work in its own network only. If it announced them, others would dial
in vain, and rounds would wait for its shard. On the internet a peer is therefore a client peer without
addresses until another peer has called it back. Pure: times are seconds of a monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from swarm.core.ids import Address, Contact, PeerId
from swarm.net.scope import Scope, ip_of, network_of, scope_of

Verdict: TypeAlias = Literal["direct", "hidden", "unknown"]
# as reported to the user; "none": the node does not listen
NodeReach: TypeAlias = Literal["direct", "relayed", "hidden", "unknown", "none"]

ASKED_MAX: Final = 3  # peers in one check, each in another network
FAILURES_MIN: Final = 3  # consecutive failures after which a callable peer considers itself hidden
# peers that must report the same new address: a single one may be wrong, or lie
WITNESSES_OF_A_MOVE: Final = 2
CHECK_S: Final = (
    600.0  # interval of checks of a verdict. Smaller: more traffic; larger: a lost port is noticed late
)
# Pause until the next check while the verdict is uncertain; other peers answer a peer at most every 10 s.
RETRY_S: Final = 15.0
_MOVES_MAX = 16


@dataclass(frozen=True, slots=True)
class DialedBack:
    """The answer of a peer that was asked to call this one back. `observed`: the IP address that it was asked
    from, and called. `reached`: the call arrived from the internet; False: calling failed.
    """

    peer: PeerId
    observed: str
    reached: bool


@dataclass(frozen=True, slots=True)
class Reach:
    """A verdict: the addresses at which this peer can be called, the time of the verdict, and the peers whose
    answers support it. `by` is empty for addresses that were not tried.
    """

    verdict: Verdict
    since_s: float
    addresses: tuple[Address, ...] = ()
    by: tuple[PeerId, ...] = ()


class Reachability:
    """The verdict about one port of this peer."""

    def __init__(
        self, port: int, now_s: float, presumed: Sequence[Address] = (), *, is_closed: bool = False
    ) -> None:
        """`presumed`: addresses that are announced until calls to them have failed; the first peer of a swarm
        has nobody to ask. `is_closed`: this peer listens on loopback only, so it is hidden and asks nobody.
        """
        # the port that others are asked to call: this peer's own, or one that a router forwards
        self.port = port
        self.reach = Reach("direct" if presumed else "unknown", now_s, tuple(presumed))
        self.due_s = now_s  # time of the next check
        if is_closed:
            self.reach, self.due_s = Reach("hidden", now_s), math.inf
        self._checked_s = now_s - RETRY_S
        self._was_answered = False  # whether any peer answered in the last check
        # since the last success: the peers that failed, and the number of failures
        self._failed: dict[PeerId, None] = {}
        self._failures = 0
        self._observed: dict[str, set[PeerId]] = {}  # other observed addresses of this peer -> observers

    def choose(self, candidates: Iterable[Contact]) -> list[Contact]:
        """Return the peers to ask in one check: the first candidate of every network, preferring peers that
        have not failed to call this one.
        """
        found: list[Contact] = []
        networks: set[str] = set()
        for contact in sorted(candidates, key=lambda one: one.peer_id in self._failed):
            own = {network_of(address.host) for address in contact.addresses}
            if len(found) < ASKED_MAX and not own & networks:
                found.append(contact)
                networks |= own
        return found

    def on_answers(self, answers: Iterable[DialedBack], askable: int, now_s: float) -> None:
        """Process the answers of one check. `askable`: how many peers could have been asked; with fewer than
        three, the answers of all of them decide. When the peers saw this one at different addresses, only the
        answers with the most frequent address count, so that one liar cannot make it announce a third party's
        address.
        """
        self._checked_s = now_s
        counted = _in_agreement([one for one in answers if scope_of(one.observed) is Scope.INTERNET])
        reached = [one for one in counted if one.reached]
        self._was_answered = bool(counted)
        if reached:
            self._failed.clear()
            self._observed.clear()
            self._failures = 0
            self._settle("direct", self._proven(reached), tuple(one.peer for one in reached), now_s)
        for one in counted if not reached else ():
            self._failed[one.peer] = None
            self._failures += 1
            self.on_observed(one.peer, one.observed, now_s)
        if not reached and len(self._failed) >= min(FAILURES_MIN, max(askable, 1)):
            was_direct = self.reach.verdict == "direct"
            if not was_direct or self._failures >= FAILURES_MIN:
                self._settle("hidden", (), tuple(self._failed), now_s)
        # One failure may be a lost packet. If few can be asked, they are asked again before the verdict
        # changes.
        has_failed = self.reach.verdict == "hidden" and self._failures >= FAILURES_MIN
        is_certain = bool(reached) or has_failed
        self.due_s = now_s + (CHECK_S if is_certain else RETRY_S)

    def on_candidate(self, now_s: float) -> None:
        """Record that a peer can be asked. The next check is now if nobody has answered yet, for instance
        because the network came up after this peer.
        """
        if self.reach.verdict == "unknown" and not self._was_answered:
            self.due_s = min(self.due_s, now_s)

    def on_interfaces(self, public: Sequence[Address], gone: Iterable[str], now_s: float) -> None:
        """Record that the addresses of this machine have changed: `public` are its internet addresses, `gone`
        the hosts that it no longer has. Earlier answers become void.
        """
        lost = set(gone)
        kept = tuple(one for one in self.reach.addresses if one.host not in lost)
        if self.reach.verdict == "direct" and not self.reach.by:
            kept = tuple(public)
        if kept != self.reach.addresses:
            self._settle("direct" if kept else "unknown", kept, self.reach.by if kept else (), now_s)
        self._failed.clear()
        self._observed.clear()
        self._failures = 0
        self.due_s = min(self.due_s, max(now_s, self._checked_s + RETRY_S))

    def on_router(self, now_s: float) -> None:
        """Record that a router may now forward the port, so that calls which failed before may succeed."""
        if self.reach.verdict != "direct":
            self.due_s = min(self.due_s, max(now_s, self._checked_s + RETRY_S))

    def on_observed(self, peer: PeerId, host: str, now_s: float) -> None:
        """Process the address at which a peer observes this one. A new address triggers a check. Once two
        peers have observed it, the verdict is void.
        """
        if self.reach.verdict != "direct" or scope_of(host) is not Scope.INTERNET:
            return
        known, seen = [ip_of(address.host) for address in self.reach.addresses], ip_of(host)
        if seen in known or not any(one and seen and one.version == seen.version for one in known):
            return
        if len(self._observed) < _MOVES_MAX or host in self._observed:
            self._observed.setdefault(host, set()).add(peer)
        self.due_s = min(self.due_s, max(now_s, self._checked_s + RETRY_S))
        if len(self._observed.get(host, ())) >= WITNESSES_OF_A_MOVE:
            self._observed.clear()
            self._settle("unknown", (), (), now_s)

    def _proven(self, reached: Sequence[DialedBack]) -> tuple[Address, ...]:
        """Return the addresses that were called now, and those of the other IP version from earlier
        checks.
        """
        now = dict.fromkeys(Address(one.observed, self.port) for one in reached)
        versions = {_version(address.host) for address in now}
        before = [one for one in self.reach.addresses if _version(one.host) not in versions]
        return (*now, *(before if self.reach.by else ()))

    def _settle(
        self, verdict: Verdict, addresses: tuple[Address, ...], by: tuple[PeerId, ...], now_s: float
    ) -> None:
        same = (verdict, addresses) == (self.reach.verdict, self.reach.addresses)
        self.reach = Reach(verdict, self.reach.since_s if same else now_s, addresses, by)


def _in_agreement(answers: Sequence[DialedBack]) -> list[DialedBack]:
    """Return, for each IP version, the answers with the most frequent address of this peer; the first address
    wins a tie.
    """
    frequent: dict[int, str] = {}
    for version in (4, 6):
        hosts = [one.observed for one in answers if _version(one.observed) == version]
        if hosts:
            frequent[version] = max(hosts, key=hosts.count)
    return [one for one in answers if one.observed in frequent.values()]


def _version(host: str) -> int:
    ip = ip_of(host)
    return ip.version if ip is not None else 0
