"""What a member has of a round's result: which averages came, who is in each, and the digest of all. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable

from averaging.commit import digest_round
from averaging.partition import Part, Plan
from swarm.compression import Codec
from swarm.errors import PeerError


def encode_places(places: Iterable[int], members: int) -> bytes:
    """A bit per member, lowest first."""
    bits = sum(1 << place for place in places)
    return bits.to_bytes((members + 7) // 8, "little")


def decode_places(raw: bytes, members: int) -> tuple[int, ...]:
    """The places in a bitmap; PeerError unless it is one of `members` bits with at least one of them set."""
    bits = int.from_bytes(raw, "little")
    if len(raw) != (members + 7) // 8 or not 0 < bits < 1 << members:
        raise PeerError(f"{raw[:40].hex()} is not a set of members among {members}")
    return tuple(place for place in range(members) if bits >> place & 1)


class Assembly:
    """`announce` when an average arrives, `settle` when its values are in place; complete when every part is."""

    def __init__(self, plan: Plan, codec: Codec) -> None:
        self._plan = plan
        self._codec = codec
        self._announced: set[int] = set()
        self._settled: dict[int, tuple[bytes, bytes]] = {}  # part: (digest, contributors)
        self._outstanding = dict.fromkeys(plan.reducers, 0)
        for part in plan.parts:
            self._outstanding[part.reducer] += 1
        self._sizes = dict(self._outstanding)

    def announce(self, reducer: int, part_index: int, contributors: bytes, payload_bytes: int) -> Part:
        """An average came from `reducer`: its part. PeerError when it cannot be what it says."""
        if not 0 <= part_index < len(self._plan.parts) or self._plan.parts[part_index].reducer != reducer:
            raise PeerError(f"an average of part {part_index}, which it does not reduce")
        part = self._plan.parts[part_index]
        if part_index in self._announced:
            raise PeerError(f"a second average of part {part_index}")
        size = self._codec.encoded_bytes(part.numel)
        if payload_bytes != size:
            raise PeerError(f"an average of part {part_index} with {payload_bytes} bytes; {self._codec.name} takes {size}")
        decode_places(contributors, self._plan.members)
        self._announced.add(part_index)
        self._outstanding[reducer] -= 1
        return part

    def settle(self, part_index: int, digest: bytes, contributors: bytes) -> None:
        """The average of this part is good, and held."""
        self._settled[part_index] = (digest, contributors)

    @property
    def complete(self) -> bool:
        """Is every part settled?"""
        return len(self._settled) == len(self._plan.parts)

    def outstanding(self, reducer: int) -> int:
        """How many averages of this reducer are still to come; 0 for who reduces nothing."""
        return self._outstanding.get(reducer, 0)

    def share(self, reducer: int) -> str:
        """For sentences: "3 of 16 parts"."""
        size = self._sizes.get(reducer, 0)
        return f"{size - self.outstanding(reducer)} of {size} parts"

    def digest(self) -> bytes:
        """Of all averages and their contributors; only when complete."""
        return digest_round(self._settled[index] for index in range(len(self._plan.parts)))

    def fractions(self) -> dict[int, float]:
        """For every place that is in some settled part: the fraction of the vector's elements that it is in."""
        elements: dict[int, int] = {}
        for index, (_, contributors) in self._settled.items():
            for place in decode_places(contributors, self._plan.members):
                elements[place] = elements.get(place, 0) + self._plan.parts[index].numel
        return {place: count / self._plan.numel for place, count in sorted(elements.items())}
