"""How a round ends: every member says what it holds, and it counts only when all who live hold the same.

A pure machine over votes. The rule of this version is unanimity of the living: a member that failed, or whose bytes differ, fails the round
for everybody, who then repeat it. The dead are not asked: what they had sent is in the digests of those who live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from swarm.errors import PeerError

DIGEST_BYTES = 32


def digest_payload(payload: bytes | memoryview) -> bytes:
    """The digest of one part's encoded average."""
    return blake3(payload).digest()


def digest_round(parts: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The digest of all averages: of every part's (digest, contributors), in order."""
    state = blake3()
    for digest, contributors in parts:
        state.update(digest)
        state.update(len(contributors).to_bytes(4, "little"))
        state.update(contributors)
    return state.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One member's vote."""

    place: int
    digest: bytes = b""  # of everything averaged; empty: an auxiliary member, which takes no result, or a failure
    failure: str | None = None
    left_out: Mapping[int, str] = field(default_factory=dict)  # by this member as a reducer, with reasons

    def __post_init__(self) -> None:
        if len(self.digest) not in (0, DIGEST_BYTES):
            raise PeerError(f"a vote has a digest of {DIGEST_BYTES} bytes or none, not {len(self.digest)}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a round for this member; `failure` is None when it committed."""

    failure: str | None


class Votes:
    """The votes of a round, as one member knows them."""

    def __init__(self, members: Iterable[int], own: int, name: Callable[[int], str]) -> None:
        self._live = set(members)
        self._own = own
        self._name = name  # of a place, for sentences
        self.cast: dict[int, Ballot] = {}

    @property
    def live(self) -> frozenset[int]:
        """Who is not known to be dead."""
        return frozenset(self._live)

    @property
    def missing(self) -> list[int]:
        """Who lives and has not voted."""
        return sorted(self._live - self.cast.keys())

    def add(self, ballot: Ballot) -> None:
        """A vote came. The first of a member counts: a second one that differs is a PeerError."""
        known = self.cast.setdefault(ballot.place, ballot)
        if (known.digest, known.failure is None) != (ballot.digest, ballot.failure is None):
            raise PeerError("a member votes once in a round")

    def bury(self, place: int) -> None:
        """This member is dead: the round goes on without its vote."""
        if place != self._own:
            self._live.discard(place)

    def verdict(self) -> Verdict | None:
        """The end, once it is known."""
        live = [ballot for place, ballot in sorted(self.cast.items()) if place in self._live]
        own = self.cast.get(self._own)
        if own is not None and own.failure is not None:
            return Verdict(own.failure)
        for ballot in live:
            if ballot.failure is not None:
                return Verdict(f"{self._name(ballot.place)} could not finish: {ballot.failure}")
        digests: dict[bytes, list[int]] = {}
        for ballot in live:
            if ballot.digest:
                digests.setdefault(ballot.digest, []).append(ballot.place)
        if len(digests) > 1:
            sides = "; ".join(f"{digest.hex()[:12]}: {', '.join(map(self._name, places))}" for digest, places in digests.items())
            return Verdict(f"members hold different averages ({sides})")
        return Verdict(None) if not self.missing else None
