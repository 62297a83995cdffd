"""The peers that hold the records of a run beside the replicas: its members nearest to the key.

An identity costs nothing, so that a stranger can make seventeen that are nearer to a key than all honest
peers, and hide whatever is stored under it. Members of a run therefore write its records to the members
nearest to the key as well, and read them there from time to time, and whenever the replicas lack something
that members had. Where all peers near a key are members, these are replicas anyway, and nothing is added.

A newcomer knows no members. It asks those that it enters the swarm by, and these name members to it: the
nearest ones that they know; where they are no members themselves, the peers that have asked them about the
run for the longest time.

Declarations of experts belong to no run. The members of every run hold them for one another: who declares
experts and is a member of a run writes them to companions in it, and the other members ask those.

Pure: times are seconds of a monotonic clock.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.core.ids import Contact, Key, PeerId
from swarm.core.standing import PeerStanding
from swarm.dht.logic.records import Owner, run_of

HOLDERS: Final = 3  # members that a record is written to, beside its replicas
ASKED_AT_ONCE: Final = 2  # of them, by a read: one may be a liar
# A read asks a member at least this often. Too small: traffic; too large: what replicas hide is seen late
CHECK_INTERVAL_S: Final = 15.0
# Likewise one of the peers that this one came by, so that they know who takes part in the run
INTRODUCER_INTERVAL_S: Final = 60.0
CALLER_S: Final = 5 * INTRODUCER_INTERVAL_S  # a peer that has not asked for this long takes no part any more
NAMED_MAX: Final = 8  # contacts in one answer
_CANDIDATES_MAX: Final = 64  # members among which the nearest are found: those that certificates named last
_INTRODUCERS_MAX: Final = 8
_KEYS_MAX: Final = 512  # read lately. Too small: of the prefixes of a large grid each read asks members
_NAMING_MAX: Final = 8  # peers that are believed when they name members for a key
_RUNS_MAX: Final = 256  # that others ask about
_CALLERS_MAX: Final = 64  # of one run; those that came first stay
LISTING_KEY: Final = Key("public", "runs")  # where the members of all runs list them
_LISTING: Final = "public/runs"
_EXPERTS: Final = "experts"
_EXPERT_NAMESPACES: Final = ("experts", "expert-grids")


def circle_of(key: Key) -> str | None:
    """Return the run whose members hold the records of a key beside its replicas; None where there is none.
    The list of runs is one of its own, of which nobody knows members by certificates; declarations of experts
    are another one, to which the members of all runs belong.
    """
    if key.namespace in _EXPERT_NAMESPACES:
        return _EXPERTS
    return _LISTING if key == LISTING_KEY else run_of(key)


@dataclass(slots=True)
class _Read:
    """This is what others said about a key."""

    asked_s: float = -math.inf
    # of the records that members had when they were asked last, with the time when they expire, in µs
    owners: dict[Owner, int] = field(default_factory=dict)
    named: dict[PeerId, tuple[Contact, ...]] = field(default_factory=dict)  # members, by who named them


class Companions:
    """The companions of one peer, in all runs that it takes part in or is asked about."""

    def __init__(
        self,
        own: PeerId,
        standing: PeerStanding,
        find_contact: Callable[[PeerId], Contact | None],
    ) -> None:
        """`find_contact` returns how to call a peer; None where that is not known, or it failed lately."""
        self._own, self._standing, self._find_contact = own, standing, find_contact
        self._introducers: dict[PeerId, Contact] = {}
        self._named: dict[
            str, dict[PeerId, tuple[Contact, ...]]
        ] = {}  # by run and by the peer that named them
        self._reads: OrderedDict[Key, _Read] = OrderedDict()
        self._introducers_asked_s: dict[str, float] = {}
        # by run, who has asked about it: when last. In the order of their first questions
        self._callers: dict[str, dict[PeerId, float]] = {}
        self._pruned_s = -math.inf

    def add_introducers(self, contacts: Iterable[Contact]) -> None:
        """Remember peers by which this one enters the swarm."""
        for contact in contacts:
            if len(self._introducers) < _INTRODUCERS_MAX and contact.peer_id != self._own:
                self._introducers.setdefault(contact.peer_id, contact)

    # ---- records of this peer's runs

    def holders(self, key: Key) -> list[Contact]:
        """Return the peers, beside the replicas, that a record of a run is written to: the nearest members;
        as far as there are fewer, those that were named to this peer, and those that it came by.
        """
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
        """Return whether this peer is one of the members that hold the records of a key. Of the list of runs
        every peer is one: who lists a run keeps its own record, and those of the peers that came by it.
        """
        run = circle_of(key)
        if run == _LISTING:
            return True
        place = key.dht_id
        distance = self._own.dht_id ^ place
        return any(
            self._standing.is_member(self._own, one)
            and all(
                contact.peer_id.dht_id ^ place > distance
                for contact in self._nearest(one, place)[HOLDERS - 1 :]
            )
            for one in self._runs(run)
        )

    def to_ask(
        self, key: Key, owners: Collection[Owner], answered: Collection[PeerId], now_s: float, now_us: int
    ) -> list[Contact]:
        """Return the peers that a read of a key asks beside those that have answered; none most of the time.
        `owners`: of the records that were found.
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
                asked = self._believed(key)  # who has answered already is to name members now
            elif near and not silent:
                self.on_answer(key, {}, now_s, now_us)
        if run == _EXPERTS:
            return list(dict.fromkeys(asked))  # those by which this peer came need not take part in a run
        if now_s - self._introducers_asked_s.get(run, -math.inf) >= INTRODUCER_INTERVAL_S:
            self._introducers_asked_s[run] = now_s
            asked += self._reachable_introducers()
        return list(dict.fromkeys(asked))

    def is_due(self, key: Key, owners: Collection[Owner], now_s: float, now_us: int) -> bool:
        """Return whether an answer with the records of `owners` should be compared with that of a member."""
        if circle_of(key) is None or self.is_checked(key, owners, now_s, now_us):
            return False
        return bool(self.holders(key))

    def is_checked(self, key: Key, owners: Collection[Owner], now_s: float, now_us: int) -> bool:
        """Return whether members were asked lately, and all that they had then was found again."""
        read = self._reads.get(key)
        return (
            read is not None
            and now_s - read.asked_s < CHECK_INTERVAL_S
            and all(owner in owners for owner, expires_us in read.owners.items() if expires_us > now_us)
        )

    def on_answer(self, key: Key, owners: Mapping[Owner, int], now_s: float, now_us: int) -> None:
        """Remember what a member has under a key: the owners of its records, with their expiration in µs."""
        read = self._read(key)
        read.asked_s = now_s
        kept = {owner: expires_us for owner, expires_us in read.owners.items() if expires_us > now_us}
        read.owners = {**kept, **owners}

    def on_named(self, key: Key, by: PeerId, contacts: Sequence[Contact]) -> list[Contact]:
        """Remember the members that an introducer, or a member that one has named, names for a key. Return
        those that a newcomer should ask as well: a peer that knows members by certificates believes nobody.
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
        """Return the members of a run that these peers have named, each once, in the order of each."""
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
        """Return the runs whose members make a circle."""
        if circle is None:
            return []
        return self._standing.runs() if circle == _EXPERTS else [circle]

    def _near(self, circle: str | None, key: Key, but: PeerId | None = None) -> list[list[Contact]]:
        """Return the members nearest to a key, of each run of its circle: those of one run need not know
        those of another one.
        """
        return [self._nearest(run, key.dht_id, but) for run in self._runs(circle)]

    def _nearest(self, run: str, place: int, but: PeerId | None = None) -> list[Contact]:
        """Return the `HOLDERS` members of a run that are nearest to a place, of those that can be called."""
        members = self._standing.members(run)[:_CANDIDATES_MAX]
        members.sort(key=lambda peer: peer.dht_id ^ place)
        others = (peer for peer in members if peer not in (self._own, but))
        return list(itertools.islice(self._reachable(others), HOLDERS))

    def _believed(self, key: Key) -> list[Contact]:
        """Return the peers by which this one came, and the members that they named for a key."""
        named = self._reads[key].named.values() if key in self._reads else ()
        members = list(dict.fromkeys(one for some in named for one in some))
        members.sort(key=lambda one: one.peer_id.dht_id ^ key.dht_id)
        return [*self._reachable_introducers(), *members[: 2 * HOLDERS]]

    def _reachable_introducers(self) -> list[Contact]:
        return list(itertools.islice(self._reachable(self._introducers), ASKED_AT_ONCE))

    def _reachable(self, peers: Iterable[PeerId]) -> Iterator[Contact]:
        """Yield how to call these peers, those that can be called: as many are looked up as are taken."""
        for peer in peers:
            contact = self._find_contact(peer) or self._introducers.get(peer)
            if contact is not None and contact.addresses:
                yield contact

    # ---- questions of others

    def on_question(self, run: str, caller: PeerId, now_s: float) -> None:
        """Remember that a peer has asked about a run, which it takes part in or wants to."""
        if run not in self._callers and len(self._callers) >= _RUNS_MAX:
            if now_s - self._pruned_s < INTRODUCER_INTERVAL_S:
                return
            self._pruned_s = now_s
            self._callers = {
                name: callers
                for name, callers in self._callers.items()
                if any(now_s - asked_s < CALLER_S for asked_s in callers.values())
            }
            if len(self._callers) >= _RUNS_MAX:
                return
        callers = self._callers.setdefault(run, {})
        if caller not in callers and len(callers) >= _CALLERS_MAX:
            gone = [peer for peer, asked_s in callers.items() if now_s - asked_s >= CALLER_S]
            if not gone:
                return
            del callers[gone[0]]
        callers[caller] = now_s

    def members_for(self, key: Key, caller: PeerId, now_s: float) -> list[Contact]:
        """Return the members of a run to name to a caller: the nearest to the key, or of a peer that is no
        member and knows none, those that have asked about the run for the longest time. A member that knows
        no other one names nobody: a peer that asks it has asked all that are known.
        """
        run = circle_of(key)
        if run is None:
            return []
        members = [one for near in self._near(run, key, caller) for one in near]
        if members or run == _EXPERTS or self._standing.is_member(self._own, run):
            return members[:NAMED_MAX]
        callers = self._callers.get(run, {})
        live = [peer for peer, s in callers.items() if now_s - s < CALLER_S and peer != caller]
        return list(itertools.islice(self._reachable(live), NAMED_MAX))
