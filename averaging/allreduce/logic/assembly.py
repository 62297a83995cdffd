"""Bookkeeping of the averages that a member has in a round: which ones came, who contributed to each, and the
digest of all. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from averaging.allreduce.logic.versions import Version, check_clipped, decode_places, digest_table
from averaging.history.certificate import make_result
from averaging.reduction.partition import Chunk, Plan
from swarm.compression import Codec
from swarm.core.errors import PeerError


class Assembly:
    """`announce` when an average arrives on a stream, `settle` when its values are in place; complete when
    every chunk is.
    """

    def __init__(self, plan: Plan, codec: Codec, contributors: Sequence[int] = ()) -> None:
        """`contributors`: places of the members that contribute, in group order."""
        self._plan, self._contributors = plan, tuple(contributors)
        self._codec = codec
        self._announced: set[int] = set()
        self._settled: dict[int, Version] = {}
        self._outstanding = dict.fromkeys(plan.reducers, 0)
        for chunk in plan.chunks:
            self._outstanding[chunk.reducer] += 1
        self._sizes = dict(self._outstanding)
        self._arriving = dict.fromkeys(plan.reducers, 0)
        # whether every chunk is settled; cached, because it is needed after every event
        self.complete = not plan.chunks

    def announce(
        self, reducer: int, chunk_index: int, contributors: bytes, payload_bytes: int, clipped: bytes = b""
    ) -> Chunk:
        """Record an average that arrives from `reducer`, and return its chunk. Raise PeerError when it
        contradicts its header.
        """
        if not 0 <= chunk_index < len(self._plan.chunks) or self._plan.chunks[chunk_index].reducer != reducer:
            raise PeerError(f"an average of chunk {chunk_index}, which it does not reduce")
        chunk = self._plan.chunks[chunk_index]
        if chunk_index in self._announced or chunk_index in self._settled:
            raise PeerError(f"a second average of chunk {chunk_index}")
        self.check(chunk_index, contributors, payload_bytes)
        check_clipped(clipped, contributors, self._plan.members)
        self._announced.add(chunk_index)
        self._outstanding[reducer] -= 1
        self._arriving[reducer] += 1
        return chunk

    def check(self, chunk_index: int, contributors: bytes, payload_bytes: int) -> None:
        """Raise PeerError unless an average of this chunk by these contributors has this many bytes. Without
        contributors it has none.
        """
        places = decode_places(contributors, self._plan.members)
        size = self._codec.encoded_bytes(self._plan.chunks[chunk_index].numel) if places else 0
        if payload_bytes != size:
            raise PeerError(
                f"an average of chunk {chunk_index} with {payload_bytes} bytes; {self._codec.name} takes "
                f"{size}"
            )

    def settle(self, chunk_index: int, version: Version) -> None:
        """Record that the average of this chunk is valid and held; another version of it is dropped."""
        reducer = self._plan.chunks[chunk_index].reducer
        if chunk_index in self._announced:
            self._announced.discard(chunk_index)
            self._arriving[reducer] -= 1
        elif chunk_index not in self._settled:
            self._outstanding[reducer] -= 1
        self._settled[chunk_index] = version
        self.complete = len(self._settled) == len(self._plan.chunks)

    def forget(self, chunk_index: int) -> None:
        """Drop an announced average that is invalid. Another one may arrive, but not on its reducer's
        stream.
        """
        reducer = self._plan.chunks[chunk_index].reducer
        self._announced.discard(chunk_index)
        self._arriving[reducer] -= 1
        self._outstanding[reducer] += 1

    @property
    def held(self) -> Mapping[int, Version]:
        """Return the settled chunks."""
        return self._settled

    def arriving(self, reducer: int) -> int:
        """Return how many averages came from this reducer's stream and are not settled yet."""
        return self._arriving.get(reducer, 0)

    def outstanding(self, reducer: int) -> int:
        """Return how many averages of this reducer are still to come; 0 for a member that reduces nothing."""
        return self._outstanding.get(reducer, 0)

    def count(self, reducer: int) -> int:
        """Return how many averages of this reducer's shard are settled."""
        return sum(chunk.index in self._settled for chunk in self._plan.shard(reducer))

    def lacking(self, reducer: int) -> list[int]:
        """Return the chunks of this reducer that are neither settled nor arriving."""
        mine = (chunk.index for chunk in self._plan.shard(reducer))
        return [index for index in mine if index not in self._settled and index not in self._announced]

    def share(self, reducer: int) -> str:
        """Return a phrase for messages: "3 of 16 chunks"."""
        size = self._sizes.get(reducer, 0)
        return f"{size - self.outstanding(reducer)} of {size} chunks"

    def digest(self) -> bytes:
        """Return the digest of all averages and their contributors; only when complete."""
        return digest_table(self._settled)

    def result(self, versions: Mapping[int, Version] | None = None) -> bytes:
        """Return the result that members vote on (`make_result`), for these versions of all averages; None:
        for the settled versions.
        """
        table = self._settled if versions is None else versions
        found = self._elements({index: version.contributors for index, version in table.items()})
        idle = [
            nth for nth, place in enumerate(self._contributors) if 2 * found.get(place, 0) < self._plan.numel
        ]
        return make_result(digest_table(table), idle, len(self._contributors))

    def fractions(self) -> dict[int, float]:
        """Return for every place that is in some settled chunk the fraction of the vector's elements that it
        is in.
        """
        return self._fractions({index: version.contributors for index, version in self._settled.items()})

    def clipped(self) -> dict[int, float]:
        """Return for every place that was clipped the fraction of the vector's elements in which it was."""
        return self._fractions(
            {index: version.clipped for index, version in self._settled.items() if version.clipped}
        )

    def _fractions(self, places: Mapping[int, bytes]) -> dict[int, float]:
        elements = self._elements(places)
        return {place: count / self._plan.numel for place, count in sorted(elements.items())}

    def _elements(self, places: Mapping[int, bytes]) -> dict[int, int]:
        """Return for every place that is in some of these bitmaps, by chunk, how many elements it is in."""
        by_bitmap: dict[bytes, int] = {}  # usually all chunks share one bitmap
        for index, raw in places.items():
            by_bitmap[raw] = by_bitmap.get(raw, 0) + self._plan.chunks[index].numel
        elements: dict[int, int] = {}
        for raw, count in by_bitmap.items():
            for place in decode_places(raw, self._plan.members):
                elements[place] = elements.get(place, 0) + count
        return elements

    def covered(self) -> float:
        """Return the fraction of the elements that anybody contributed to; 1.0 for an empty vector."""
        averaged = sum(
            self._plan.chunks[index].numel for index, version in self._settled.items() if not version.empty
        )
        return averaged / self._plan.numel if self._plan.numel else 1.0
