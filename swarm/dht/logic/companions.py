"""The peers that hold the records of a run in addition to the replicas: its members nearest to the key.

Identities are free: a stranger can make seventeen that are nearer to a key than all honest peers, and hide
whatever is stored under it. Members of a run therefore also write its records to the members nearest to the
key. They read there from time to time, and whenever the replicas lack something that members had. Where all
peers near a key are members, these members are the replicas, and nothing is added.

A newcomer knows no members. It asks the peers by which it enters the swarm. These name the nearest members
that they know; a peer that is no member names the peers that have asked it about the run for the longest
time.

Declarations of experts belong to no run. The members of every run hold them for one another: a member that
declares experts writes them to companions in its run, and the other members ask those.

Pure: times are seconds of a monotonic clock.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.core.ids import Contact, Key, PeerId
from swarm.core.standing import PeerStanding
from swarm.dht.logic.records import Owner, run_of

HOLDERS: Final = 3  # members that a record is written to, in addition to its replicas
ASKED_AT_ONCE: Final = 2  # members that one read asks: one may be a liar
# A read asks a member at least this often. Too small: traffic; too large: what replicas hide is seen late.
CHECK_INTERVAL_S: Final = 15.0
# A read asks an introducer at least this often, so that introducers know who takes part in the run.
INTRODUCER_INTERVAL_S: Final = 60.0
CALLER_S: Final = 5 * INTRODUCER_INTERVAL_S  # a peer that is silent for longer has left the run
NAMED_MAX: Final = 8  # contacts in one answer
_CANDIDATES_MAX: Final = 64  # members considered for a key: those that certificates named last
_INTRODUCERS_MAX: Final = 8
# Keys whose last reads are remembered. Too small: each read of a large grid's prefixes asks members.
_KEYS_MAX: Final = 512
# Too small: processor time; too large: records are written to members that have left or moved
_HOLDERS_S: Final = 5.0
_NAMING_MAX: Final = 8  # peers that are believed when they name members for a key
_RUNS_MAX: Final = 256  # runs whose callers are remembered
_CALLERS_MAX: Final = 64  # callers remembered for each run; the first ones stay
# A prefix gets at most one of this many equal shares of the places, so that as many networks of an attacker
# are needed to fill them. Smaller: fewer are; larger: of newcomers behind one address fewer are named
_SHARES: Final = 4
LISTING_KEY: Final = Key("public", "runs")  # where the members of all runs list them
_LISTING: Final = "public/runs"
_EXPERTS: Final = "experts"
_EXPERT_NAMESPACES: Final = ("experts", "expert-grids")


def circle_of(key: Key) -> str | None:
    """Return the run whose members hold the records of a key in addition to its replicas; None where there is
    none.

    The list of runs counts as a run of its own, whose members no certificate names. Declarations of experts
    count as a run to which the members of all runs belong.
    """
    if key.namespace == LISTING_KEY.namespace:
        return _LISTING if key == LISTING_KEY else None
    return _circle_of_namespace(key.namespace)


@functools.lru_cache(1024)  # every read asks, several times
def _circle_of_namespace(namespace: str) -> str | None:
    run = run_of(namespace)
    return _EXPERTS if run is None and namespace in _EXPERT_NAMESPACES else run


@dataclass(slots=True)
class _Read:
    """The last answers of members about a key."""

    asked_s: float = -math.inf
    # owners of the records that members had when asked last, with the expiration in µs
    owners: dict[Owner, int] = field(default_factory=dict)
    named: dict[PeerId, tuple[Contact, ...]] = field(default_factory=dict)  # by the peer that named them
    holders: list[Contact] = field(default_factory=list)  # to which records of the key are written
    holders_until_s: float = -math.inf  # until when they are not looked up again


@dataclass(frozen=True, slots=True)
class _Caller:
    """When a peer asked about a run last, and the address prefix that it called from."""

    asked_s: float
    prefix: str


class Companions:
    """The companions of one peer, in all runs that it takes part in or is asked about."""

    def __init__(
        self,
        own: PeerId,
        standing: PeerStanding,
        find_contact: Callable[[PeerId], Contact | None],
    ) -> None:
        """Create an empty memory. `find_contact` returns a peer's contact, or None when it is unknown or the
        peer failed recently.
        """
        self._own, self._standing, self._find_contact = own, standing, find_contact
        self._introducers: dict[PeerId, Contact] = {}
        self._reads: OrderedDict[Key, _Read] = OrderedDict()
        # by run and place: its members when they were sorted last, and the others of them by their distance
        self._sorted: OrderedDict[tuple[str, int], tuple[tuple[PeerId, ...], list[PeerId]]] = OrderedDict()
        self._introducers_asked_s: dict[str, float] = {}
        # by run: the peers that asked about it, in order of their first question
        self._callers: dict[str, dict[PeerId, _Caller]] = {}
        self._pruned_s = -math.inf

    def add_introducers(self, contacts: Iterable[Contact]) -> None:
        """Remember peers by which this one enters the swarm."""
        for contact in contacts:
            if len(self._introducers) < _INTRODUCERS_MAX and contact.peer_id != self._own:
                self._introducers.setdefault(contact.peer_id, contact)

    # ---- records of this peer's runs

    def holders(self, key: Key, now_s: float) -> list[Contact]:
        """Return the peers, other than the replicas, to which a record of a run is written: the nearest
        members. When fewer than `HOLDERS` are known, introducers and the members that they named are added.
        They are looked up again after `_HOLDERS_S`: a run writes its records every second.
        """
        read = self._reads.get(key)
        if read is not None and now_s < read.holders_until_s:
            return read.holders
        found = self._find_holders(key)
        if len(found) >= HOLDERS:
            read = self._read(key)
            read.holders, read.holders_until_s = found, now_s + _HOLDERS_S
        return found

    def _find_holders(self, key: Key) -> list[Contact]:
        run = circle_of(key)
        if run is None:
            return []
        near = self._near(run, key)
        found = near[0] if len(near) == 1 else list(dict.fromkeys(itertools.chain(*near)))
        if len(found) < HOLDERS and run != _EXPERTS:
            known = {one.peer_id for one in found}
            found += [one for one in self._believed(key) if one.peer_id not in known]
        return found

    def is_holder(self, key: Key) -> bool:
        """Return whether this peer is one of the members that hold the records of a key. Every peer holds the
        list of runs: its own record there, and those of the peers that entered the swarm through it.
        """
        run = circle_of(key)
        if run == _LISTING:
            return True
        return any(
            self._standing.is_member(self._own, one) and self._is_among_nearest(one, key.dht_id)
            for one in self._runs(run)
        )

    def to_ask(
        self, key: Key, owners: Collection[Owner], answered: Collection[PeerId], now_s: float, now_us: int
    ) -> list[Contact]:
        """Return further peers that a read of a key must ask; usually none.

        `owners`: the owners of the records found so far. `answered`: the peers that have answered.
        """
        run = circle_of(key)
        if run is None:
            return []
        asked: list[Contact] = []
        if not self.is_checked(key, owners, now_s, now_us):
            near = [members for members in self._near(run, key) if members]
            silent = [members for members in near if not any(one.peer_id in answered for one in members)]
            asked = [one for members in silent for one in members[:ASKED_AT_ONCE]]
            if not near and run != _EXPERTS:
                asked = self._believed(key)  # also peers that have answered: they name members now
            elif near and not silent:
                self.on_answer(key, {}, now_s, now_us)
        if run == _EXPERTS:
            return list(dict.fromkeys(asked))  # introducers need not take part in any run
        if now_s - self._introducers_asked_s.get(run, -math.inf) >= INTRODUCER_INTERVAL_S:
            self._introducers_asked_s[run] = now_s
            asked += self._reachable_introducers()
        return list(dict.fromkeys(asked))

    def is_due(self, key: Key, owners: Collection[Owner], now_s: float, now_us: int) -> bool:
        """Return whether an answer with the records of `owners` should be compared with that of a member."""
        if circle_of(key) is None or self.is_checked(key, owners, now_s, now_us):
            return False
        return bool(self.holders(key, now_s))

    def is_checked(self, key: Key, owners: Collection[Owner], now_s: float, now_us: int) -> bool:
        """Return whether members were asked recently, and everything that they had then was found again."""
        read = self._reads.get(key)
        if read is None or now_s - read.asked_s >= CHECK_INTERVAL_S:
            return False
        for owner, expires_us in read.owners.items():  # no generator: every read asks
            if expires_us > now_us and owner not in owners:
                return False
        return True

    def on_answer(self, key: Key, owners: Mapping[Owner, int], now_s: float, now_us: int) -> None:
        """Remember what a member has under a key: the owners of its records, with their expiration in µs."""
        read = self._read(key)
        read.asked_s = now_s
        kept = {owner: expires_us for owner, expires_us in read.owners.items() if expires_us > now_us}
        read.owners = {**kept, **owners}

    def on_named(self, key: Key, by: PeerId, contacts: Sequence[Contact]) -> list[Contact]:
        """Remember the members that peer `by` names for a key, if `by` is an introducer or was named by one.
        Return those that a newcomer should ask as well; a peer that knows members from certificates ignores
        them.
        """
        run, read = circle_of(key), self._read(key)
        believed = {one.peer_id for named in read.named.values() for one in named} | self._introducers.keys()
        if run is None or by not in believed or (by not in read.named and len(read.named) >= _NAMING_MAX):
            return []
        found = [one for one in contacts[:NAMED_MAX] if one.addresses and one.peer_id != self._own]
        if found:
            read.named[by] = tuple(found)
        return [] if any(self._near(run, key)) else found[:HOLDERS]

    def named_by(self, run: str, introducers: Iterable[PeerId]) -> list[PeerId]:
        """Return the members of a run that these peers have named, without repetitions, in their order."""
        reads = [read for key, read in self._reads.items() if circle_of(key) == run]
        lists = [read.named.get(peer, ()) for peer in introducers for read in reads]
        return list(dict.fromkeys(one.peer_id for named in lists for one in named))

    def _read(self, key: Key) -> _Read:
        read = self._reads.setdefault(key, _Read())
        self._reads.move_to_end(key)
        if len(self._reads) > _KEYS_MAX:
            self._reads.popitem(last=False)
        return read

    def _runs(self, circle: str | None) -> list[str]:
        """Return the runs that a circle consists of: one, or all of this peer's runs."""
        if circle is None:
            return []
        return self._standing.runs() if circle == _EXPERTS else [circle]

    def _near(self, circle: str | None, key: Key, but: PeerId | None = None) -> list[list[Contact]]:
        """Return the members nearest to a key for each run of its circle. Members of different runs need not
        know one another.
        """
        return [self._nearest(run, key.dht_id, but) for run in self._runs(circle)]

    def _nearest(self, run: str, place: int, but: PeerId | None = None) -> list[Contact]:
        """Return the `HOLDERS` callable members of a run that are nearest to a place."""
        others = (peer for peer in self._by_distance(run, place) if peer != but)
        return list(itertools.islice(self._reachable(others), HOLDERS))

    def _is_among_nearest(self, run: str, place: int) -> bool:
        """Return whether fewer than `HOLDERS` callable members of a run are nearer to a place than this
        peer.
        """
        distance = self._own.dht_id ^ place
        nearer = [peer for peer in self._by_distance(run, place) if peer.dht_id ^ place < distance]
        return (
            len(nearer) < HOLDERS or len(list(itertools.islice(self._reachable(nearer), HOLDERS))) < HOLDERS
        )

    def _by_distance(self, run: str, place: int) -> list[PeerId]:
        """Return the other members of a run that are considered for a place, the nearest first. They are
        sorted again only when other members are named: each write and most reads ask for them.
        """
        members = self._standing.members(run, _CANDIDATES_MAX)
        known = self._sorted.get((run, place))
        if known is None or known[0] != members:
            others = (peer for peer in members if peer != self._own)
            known = members, sorted(others, key=lambda peer: peer.dht_id ^ place)
            self._sorted[run, place] = known
            if len(self._sorted) > _KEYS_MAX:
                self._sorted.popitem(last=False)
        return known[1]

    def _believed(self, key: Key) -> list[Contact]:
        """Return this peer's introducers, and the members that they named for a key."""
        named = self._reads[key].named.values() if key in self._reads else ()
        members = list(dict.fromkeys(one for some in named for one in some))
        members.sort(key=lambda one: one.peer_id.dht_id ^ key.dht_id)
        return [*self._reachable_introducers(), *members[: 2 * HOLDERS]]

    def _reachable_introducers(self) -> list[Contact]:
        return list(itertools.islice(self._reachable(self._introducers), ASKED_AT_ONCE))

    def _reachable(self, peers: Iterable[PeerId]) -> Iterator[Contact]:
        """Yield the contacts of those of these peers that can be called. Looks up no more than the caller
        consumes.
        """
        for peer in peers:
            contact = self._find_contact(peer) or self._introducers.get(peer)
            if contact is not None and contact.addresses:
                yield contact

    # ---- questions of others

    def on_question(self, run: str, caller: PeerId, now_s: float, prefix: str = "") -> None:
        """Remember that a peer has asked about a run: it takes part in it, or wants to. Peers of one address
        prefix are remembered as a quarter of the callers of a run, and for a quarter of the runs.
        """
        if run not in self._callers and self._has_no_place_for_a_run(prefix):
            if now_s - self._pruned_s < INTRODUCER_INTERVAL_S:
                return
            self._pruned_s = now_s
            live = {name: _live(callers, now_s) for name, callers in self._callers.items()}
            self._callers = {name: callers for name, callers in live.items() if callers}
            if self._has_no_place_for_a_run(prefix):
                return
        callers = self._callers.get(run, {})
        if caller not in callers and _is_full([one.prefix for one in callers.values()], _CALLERS_MAX, prefix):
            callers = _live(callers, now_s)
            if _is_full([one.prefix for one in callers.values()], _CALLERS_MAX, prefix):
                return
        callers[caller] = _Caller(now_s, prefix)
        self._callers[run] = callers

    def _has_no_place_for_a_run(self, prefix: str) -> bool:
        first = [next(iter(callers.values())).prefix for callers in self._callers.values()]
        return _is_full(first, _RUNS_MAX, prefix)

    def members_for(self, key: Key, caller: PeerId, now_s: float) -> list[Contact]:
        """Return the members of a run to name to a caller: those nearest to the key. A peer that is no member
        and knows none names the peers that have asked about the run for the longest time, of each address
        prefix in turn. A member that knows no other member names nobody.
        """
        run = circle_of(key)
        if run is None:
            return []
        members = [one for near in self._near(run, key, caller) for one in near]
        if members or run == _EXPERTS or self._standing.is_member(self._own, run):
            return members[:NAMED_MAX]
        live = _live(self._callers.get(run, {}), now_s)
        live.pop(caller, None)
        return list(itertools.islice(self._reachable(_in_turns(live)), NAMED_MAX))


def _live(callers: Mapping[PeerId, _Caller], now_s: float) -> dict[PeerId, _Caller]:
    """Return the callers that have not left the run, in their order."""
    return {peer: one for peer, one in callers.items() if now_s - one.asked_s < CALLER_S}


def _in_turns(callers: Mapping[PeerId, _Caller]) -> list[PeerId]:
    """Return the callers with the first one of each address prefix first, then the second ones, and so on."""
    counts: Counter[str] = Counter()
    places = {}
    for peer, one in callers.items():
        places[peer] = counts[one.prefix]
        counts[one.prefix] += 1
    return sorted(places, key=lambda peer: places[peer])


def _is_full(prefixes: Sequence[str], places: int, prefix: str) -> bool:
    """Return whether no place is left, or none for a prefix, by the prefixes that have the others."""
    return len(prefixes) >= places or prefixes.count(prefix) >= places // _SHARES
