"""Versions of averages, and the digests by which members compare what they hold. Pure."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from swarm.core.errors import PeerError


def digest_payload(payload: bytes | memoryview) -> bytes:
    """Return the digest of one chunk's encoded average, 32 bytes."""
    return blake3(payload).digest()


def digest_average(digest: bytes, clipped: bytes) -> bytes:
    """Return the digest of one chunk's average: of the digest of its bytes and the set of members that were
    clipped in it, which members must agree on as well.
    """
    return digest_payload(digest + clipped) if clipped else digest


def digest_round(chunks: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the digest of all averages, on which members vote: of every chunk's (digest, contributors), in
    order.
    """
    state = blake3()
    for digest, contributors in chunks:
        state.update(digest)
        state.update(len(contributors).to_bytes(4, "little"))
        state.update(contributors)
    return state.digest()


def encode_places(places: Iterable[int], members: int) -> bytes:
    """Return a set of members as a bitmap: a bit per member, the lowest first."""
    bits = sum(1 << place for place in places)
    return bits.to_bytes((members + 7) // 8, "little")


@functools.lru_cache(maxsize=256)  # the chunks of a round usually share one set
def decode_places(raw: bytes, members: int) -> tuple[int, ...]:
    """Return the places in a bitmap, perhaps none. Raise PeerError unless it is one of `members` bits."""
    bits = int.from_bytes(raw, "little")
    if len(raw) != (members + 7) // 8 or bits >= 1 << members:
        raise PeerError(f"{raw[:40].hex()} is not a set of members among {members}")
    return tuple(place for place in range(members) if bits >> place & 1)


def check_clipped(clipped: bytes, contributors: bytes, members: int) -> None:
    """Raise PeerError unless the members that were clipped in an average, if there are any, contributed to
    it.
    """
    if clipped:
        places = decode_places(clipped, members)
        if not places or not set(places) <= set(decode_places(contributors, members)):
            raise PeerError("in its average somebody was clipped who is not in it, or nobody")


@dataclass(frozen=True, slots=True)
class Version:
    """One average of a chunk. The attempt is how far after the planned reducer in group order the member
    stands that made it.
    """

    attempt: int
    contributors: bytes  # a bit per member; all zero: no contributors, and the average is empty
    digest: bytes  # digest of its bytes and of the bitmap of clipped members
    clipped: bytes = b""  # members whose values were clipped, a bit per member; empty: none

    @property
    def empty(self) -> bool:
        """Return whether nobody is in this average."""
        return not any(self.contributors)

    def same(self, other: Version) -> bool:
        """Return whether both have the same bytes, contributors and clipped members."""
        return (self.contributors, self.digest) == (other.contributors, other.digest)


def digest_table(table: Mapping[int, Version]) -> bytes:
    """Return the digest of a whole table of versions, by chunk."""
    return digest_round((table[chunk].digest, table[chunk].contributors) for chunk in sorted(table))


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
