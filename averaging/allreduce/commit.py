"""The commit of a round: every member votes with the digest of its averages, and the round counts when all
polled members hold the same.

A pure state machine over votes (decision 0010). A ballot has a number, a digest, and the members that its
voter does not poll: those that have failed for it or for another voter. It commits when every polled member
voted for the same (number, digest, exclusions); when votes differ, another ballot follows. Safety: any two
committing members either polled each other or polled disjoint sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from blake3 import blake3

from swarm.core.errors import PeerError

DIGEST_BYTES = 32
BALLOTS_MAX = 1024  # of one round; a death costs one or two, members that hold different averages as many
STUBBORN_BALLOTS = 4  # a member that differs from most after this many is no longer polled
DIFFERING_BALLOTS_MAX = 8  # then the round fails when there are no most


def digest_payload(payload: bytes | memoryview) -> bytes:
    """The digest of one chunk's encoded average."""
    return blake3(payload).digest()


def digest_average(digest: bytes, clipped: bytes) -> bytes:
    """The digest of one chunk's average, from that of its bytes and who was clipped in it: members agree on
    that, too.
    """
    return digest_payload(digest + clipped) if clipped else digest


def digest_round(chunks: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The digest of all averages: of every chunk's (digest, contributors), in order."""
    state = blake3()
    for digest, contributors in chunks:
        state.update(digest)
        state.update(len(contributors).to_bytes(4, "little"))
        state.update(contributors)
    return state.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One member's vote."""

    place: int
    number: int = 1
    # of everything averaged; empty: an auxiliary member, which takes no result, or a failure
    digest: bytes = b""
    failure: str | None = None
    excluded: frozenset[int] = frozenset()  # places that this member does not poll
    committed: bool = False  # the round has ended so for this member
    # by this member as a reducer, with reasons; once committed, by all it heard
    left_out: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.digest) not in (0, DIGEST_BYTES):
            raise PeerError(f"a vote has a digest of {DIGEST_BYTES} bytes or none, not {len(self.digest)}")
        if not 1 <= self.number <= BALLOTS_MAX:
            raise PeerError(f"a ballot's number is between 1 and {BALLOTS_MAX}, not {self.number}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a round for this member; `failure` is None when it committed."""

    failure: str | None


class Next(Enum):
    """The next action of a member that has voted."""

    WAIT = 0
    VOTE = 1  # cast another ballot, with what it holds
    RESOLVE = 2  # take the versions that most hold, then cast another ballot


class Votes:
    """The votes of a round, as one member knows them."""

    def __init__(
        self, members: Iterable[int], own: int, name: Callable[[int], str], *, unanimous: bool = False
    ) -> None:
        """Create an empty state. `unanimous`: every member that has not failed must vote equally, and a
        different vote fails the round.
        """
        self._members = frozenset(members)
        self._unanimous = unanimous
        self._own = own
        self._name = name  # of a place, for sentences
        self._dead: set[int] = set()
        self._set_aside: set[int] = set()  # alive, but no longer polled by this member
        # failed members, those excluded by our last vote, and those excluded by polled members
        self._excluded: set[int] = set()
        self._differed = 0  # ballots in which members held different averages
        # why this member must not commit when nobody else is left; None: it may
        self.lone_reason: str | None = None
        self.cast: dict[int, Ballot] = {}

    @property
    def live(self) -> frozenset[int]:
        """Return the members that have not failed for this member."""
        return self._members - self._dead

    @property
    def electorate(self) -> frozenset[int]:
        """Return the members that are polled, this one included."""
        return self._members - self._excluded

    @property
    def excluded(self) -> frozenset[int]:
        """Return the members that are not polled."""
        return frozenset(self._excluded)

    @property
    def missing(self) -> list[int]:
        """Return the polled members that have not voted in this member's ballot, or not at all while it has
        none.
        """
        own = self.cast.get(self._own)
        number = own.number if own is not None else 1
        return sorted(
            place for place in self.electorate if place not in self.cast or self.cast[place].number < number
        )

    @property
    def committed(self) -> tuple[int, ...]:
        """Return the other live members that are known to have committed."""
        return tuple(
            place
            for place, ballot in sorted(self.cast.items())
            if ballot.committed and place != self._own and place in self.live
        )

    def add(self, ballot: Ballot) -> bool:
        """A vote came; whether it tells anything new. PeerError: it differs from one with the same number, or
        follows a last word.
        """
        known = self.cast.get(ballot.place)
        if known is not None:
            if ballot.number < known.number and not ballot.committed:
                return False  # overtaken on its way
            same = (known.number, known.digest, known.failure is None, known.excluded) == (
                ballot.number,
                ballot.digest,
                ballot.failure is None,
                ballot.excluded,
            )
            if same and (known.committed or not ballot.committed):
                return False
            if known.committed and not ballot.committed and ballot.failure is None:
                return False
            final = known.committed or (known.failure is not None and ballot.failure is None)
            if final or (
                not same and ballot.number == known.number and ballot.failure is None and not ballot.committed
            ):
                raise PeerError("a member votes once in a ballot")
        self.cast[ballot.place] = ballot
        self._weigh(ballot)
        return True

    def mark_failed(self, place: int) -> None:
        """Exclude a member that has failed or left the round: the round continues without its vote."""
        if place != self._own:
            self._dead.add(place)
            self._update_excluded()

    def exclude(self, place: int) -> None:
        """This member lives, and is not asked any more."""
        if place != self._own:
            self._set_aside.add(place)
            self._update_excluded()

    def next_ballot(self, digest: bytes, left_out: Mapping[int, str]) -> Ballot:
        """Our next vote. The caller adds it."""
        known = self.cast.get(self._own)
        numbers = [
            ballot.number
            for place, ballot in self.cast.items()
            if place in self.electorate and place != self._own
        ]
        number = max([1 if known is None else known.number + 1, *numbers])
        return Ballot(
            place=self._own, number=number, digest=digest, excluded=self.excluded, left_out=dict(left_out)
        )

    def commit(self) -> None:
        """Mark this member's vote as committed. A receiver that accepts it needs no other votes: it includes
        all members that were left out, with reasons.
        """
        heard: dict[int, str] = {}
        for ballot in self.cast.values():
            heard |= ballot.left_out
        own = self.cast[self._own]
        self.cast[self._own] = replace(own, committed=True, left_out=heard | dict(own.left_out))

    def elsewhere(self) -> bytes | None:
        """The digest that more than half of the others who live have committed, when we hold another one or
        none yet.
        """
        others = [place for place in self.live if place != self._own]
        counted = Counter(self.cast[place].digest for place in self.committed if self.cast[place].digest)
        own = self.cast.get(self._own)
        for digest, count in counted.items():
            # auxiliary members have no opinion: they count on neither side
            silent = sum(
                place in self.cast and self.cast[place].committed and not self.cast[place].digest
                for place in others
            )
            if 2 * count > len(others) - silent and (own is None or own.digest != digest):
                return digest
        return None

    @property
    def overtaken(self) -> bool:
        """Have more than half of the others voted, and so hold everything, while we have not?"""
        others = self.electorate - {self._own}
        return self._own not in self.cast and 2 * sum(
            place in self.cast and bool(self.cast[place].digest) for place in others
        ) > len(others)

    def verdict(self) -> Verdict | None:
        """The end, once it is known."""
        own = self.cast.get(self._own)
        if own is None:
            return None
        if own.failure is not None:
            return Verdict(own.failure)
        if self._unanimous:
            return self._unanimity()
        # including members that have failed since
        done = [ballot for place, ballot in self.cast.items() if ballot.committed and place != self._own]
        if any(not own.digest or ballot.digest == own.digest for ballot in done):
            return Verdict(None)
        asked = [self.cast.get(place) for place in self.electorate]
        if (
            len(asked) == 1
            and len(self._members) > 1
            and (self.lone_reason is not None or len(self.live) > 1)
        ):
            # members that others exclude may still commit
            return Verdict(self.lone_reason) if len(self.live) == 1 else None
        if self._differed >= DIFFERING_BALLOTS_MAX or own.number >= BALLOTS_MAX:
            return Verdict(f"members hold different averages ({self._sides()})")
        if self._excludes_us() or own.excluded != self.excluded:
            return None
        for ballot in asked:
            if ballot is None or ballot.number != own.number or ballot.excluded != own.excluded:
                return None
        return Verdict(None) if len(self._digests()) <= 1 else None

    def _weigh(self, ballot: Ballot) -> None:
        if ballot.place not in self._excluded:
            self._excluded |= ballot.excluded - {self._own}

    def _update_excluded(self) -> None:
        """Recompute the excluded members. A member that was excluded only by a member no longer polled is
        polled again, unless this member's vote excluded it: others may rely on votes.
        """
        own = self.cast.get(self._own)
        self._excluded = self._dead | self._set_aside | (own.excluded if own is not None else frozenset())
        for ballot in self.cast.values():
            self._weigh(ballot)

    def _unanimity(self) -> Verdict | None:
        digests = {
            ballot.digest for place, ballot in self.cast.items() if place in self.live and ballot.digest
        }
        if len(digests) > 1:
            return Verdict(f"members hold different averages ({self._sides()})")
        return Verdict(None) if self.live <= self.cast.keys() else None

    def next(self) -> Next:
        """Return the next action for this member's vote while there is no verdict."""
        own = self.cast.get(self._own)
        if own is None or own.failure is not None:
            return Next.WAIT
        others = [self.cast.get(place) for place in self.electorate if place != self._own]
        known = [ballot for ballot in others if ballot is not None]
        differ = len(self._digests()) > 1
        overtaken = any(ballot.number > own.number for ballot in known)
        everybody = len(known) == len(others) and all(ballot.number >= own.number for ballot in known)
        if overtaken or own.excluded != self.excluded or (everybody and differ):
            return Next.RESOLVE if differ else Next.VOTE
        return Next.WAIT

    def differed(self) -> list[int]:
        """Members held different averages in this ballot: who is not asked any more, because it stays with
        what few hold.
        """
        self._differed += 1
        if self._differed < STUBBORN_BALLOTS:
            return []
        digests = self._digests()
        most, holders = max(digests.items(), key=lambda item: len(item[1]))
        if 2 * len(holders) <= sum(len(places) for places in digests.values()) or self._own not in holders:
            return []
        return [place for digest, places in digests.items() if digest != most for place in places]

    def _digests(self) -> dict[bytes, list[int]]:
        """Return the known digests with the polled members that hold each."""
        found: dict[bytes, list[int]] = {}
        for place in sorted(self.electorate):
            ballot = self.cast.get(place)
            if ballot is not None and ballot.digest:
                found.setdefault(ballot.digest, []).append(place)
        return found

    def _excludes_us(self) -> bool:
        return any(
            self._own in self.cast[place].excluded
            for place in self.electorate
            if place in self.cast and place != self._own
        )

    def _sides(self) -> str:
        sides = self._digests().items()
        return "; ".join(
            f"{digest.hex()[:12]}: {', '.join(map(self._name, places))}" for digest, places in sides
        )


@dataclass(frozen=True, slots=True)
class Version:
    """One average of a chunk. The attempt is how far after the planned reducer in group order the member
    stands that made it.
    """

    attempt: int
    contributors: bytes  # a bit per member; all zero: nobody is in it, and it has no bytes
    digest: bytes  # of its bytes, and of who was clipped
    clipped: bytes = b""  # whose values were shortened, a bit per member; empty: nobody's

    @property
    def empty(self) -> bool:
        return not any(self.contributors)

    def same(self, other: Version) -> bool:
        """The same bytes of the same members, the same ones of them clipped: the digest is of that, too."""
        return (self.contributors, self.digest) == (other.contributors, other.digest)


def winners(
    tables: Mapping[int, Mapping[int, Version]], chunks: Collection[int]
) -> dict[int, tuple[Version, list[int]]]:
    """Return the version of every chunk to take, with its holders: the version that most members hold; ties
    go to the lower attempt, then to the smaller digest.

    `tables`: the versions of chunks that each counted member holds. An empty version loses to every other.
    """
    chosen = {}
    for chunk in chunks:
        held: dict[tuple[bytes, bytes], list[tuple[int, Version]]] = {}
        for place, table in sorted(tables.items()):
            version = table.get(chunk)
            if version is not None:
                held.setdefault((version.contributors, version.digest), []).append((place, version))
        if held:
            best = min(
                held.values(),
                key=lambda found: (
                    found[0][1].empty,
                    -len(found),
                    min(version.attempt for _, version in found),
                    found[0][1].digest,
                ),
            )
            chosen[chunk] = (
                min((version for _, version in best), key=lambda version: version.attempt),
                [place for place, _ in best],
            )
    return chosen
