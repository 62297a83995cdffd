"""Several codecs in one averager: small tensors in 16 bits, for instance, and large ones in 8.

The tensors of each codec are a vector of their own, and a step makes one all-reduce for each, one after the
other, with one group. Only the last one decides: if it or one before fails for this peer, its tensors are as
they were. The last one is that of the most elements. Clipping and robust rules treat each vector by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from blake3 import blake3

from averaging.allreduce.allreduce import AllReduce, RoundMemory
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.group import GROUP_ID_BYTES, Group
from averaging.matchmaking.logic.messages import VectorSchema
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.layout import vector_schema
from averaging.reduction.staging import Staging
from averaging.reduction.vector import FlatVector
from swarm.compression import Codec, find
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

# takes a tensor's name (its index as text if it has none) and the tensor; returns the name of its codec
CodecChoice = Callable[[str, torch.Tensor], str]
_CODECS_MAX = 8


@dataclass(slots=True)
class _Part:
    """The tensors that share a codec. `averages`: those of the last round, until they are written."""

    codec: Codec
    places: list[int]  # in the averager's list of tensors
    staging: Staging
    result_buffer: ResultBuffer
    averages: Averages | None = None


class MixedCodecs:
    """The tensors of an averager by codec."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], choose: CodecChoice) -> None:
        """`names`: the tensors' names; empty when they have none. Raises UsageError for a codec that does not
        exist, or too many different ones.
        """
        places: dict[str, list[int]] = {}
        for place, tensor in enumerate(tensors):
            chosen = choose(names[place] if names else str(place), tensor)
            if not isinstance(chosen, str):
                raise UsageError(f"codec(name, tensor) returns the name of a codec, not {chosen!r:.60}")
            places.setdefault(find(chosen).name, []).append(place)
        if len(places) > _CODECS_MAX:
            raise UsageError(f"an averager has at most {_CODECS_MAX} codecs, not {len(places)}")
        self._parts = [
            self._part(codec, of_codec, names, tensors) for codec, of_codec in sorted(places.items())
        ]
        self._parts.sort(key=lambda part: part.staging.layout.numel)

    @staticmethod
    def _part(codec: str, places: list[int], names: Sequence[str], tensors: Sequence[torch.Tensor]) -> _Part:
        staging = Staging(
            [tensors[place] for place in places],
            names=[names[place] if names else str(place) for place in places],
        )
        return _Part(
            codec=find(codec),
            places=places,
            staging=staging,
            result_buffer=ResultBuffer(staging.queues),
        )

    def schema(self, settings: str, chunk_bytes: int) -> VectorSchema:
        """Return the schema that peers compare before they meet, as `vector_schema` does for one codec."""
        digest, texts = hashlib.sha256(), []
        for part in self._parts:
            one = vector_schema(part.staging.layout, part.codec, settings, chunk_bytes)
            digest.update(one.digest + str(part.places).encode())
            texts.append(f"{len(part.places)} tensors in {part.codec.name}")
        whole = digest.digest()
        return VectorSchema(
            digest=whole,
            text=f"{', '.join(texts)}, {settings} (#{whole.hex()[:8]})",
            codec="+".join(part.codec.name for part in self._parts),
        )

    def take(
        self,
        all_reduce: AllReduce,
        config: RoundConfig,
        history: RoundLineage | None,
        *,
        gives: bool,
        read_in_place: bool,
    ) -> InTurn:
        """Take the values that go into the next round, in the caller's thread, and return the round, which
        extends `history` if there is one. Without `gives` the tensors are not read.
        """
        vectors = []
        for part in self._parts:
            part.averages = None
            take = part.staging.take
            vectors.append(take(read_in_place=read_in_place) if gives else part.staging.nothing())
        return InTurn(all_reduce, config, history, self._parts, vectors)

    @property
    def written(self) -> bool:
        """Return whether a tensor was written since the last round."""
        return any(part.averages is not None and part.averages.written for part in self._parts)

    def apply(self, *, delta: bool) -> None:
        """Write the averages of the last round into the tensors; with `delta` add the averages minus the
        values that were taken.
        """
        for part in self._parts:
            if part.averages is not None:
                (part.staging.add_difference if delta else part.staging.put)(part.averages)


@dataclass(slots=True)
class InTurn:
    """The strategy of one step: an all-reduce for each part, one after the other."""

    all_reduce: AllReduce
    config: RoundConfig
    history: RoundLineage | None
    parts: Sequence[_Part]
    vectors: Sequence[FlatVector]
    gathered_prefix_bytes: int = field(default=0)

    async def run(self, group: Group, deadline_s: float) -> RoundOutcome:
        """Make one round with this group. Its outcome is that of the last all-reduce, with what the others
        cost and the members that they lost. Only the last one extends the history: an elector votes once.
        """
        outcomes: list[RoundOutcome] = []
        for nth, (part, vector) in enumerate(zip(self.parts, self.vectors, strict=True)):
            decides = part is self.parts[-1]
            outcome = await self.all_reduce.run(
                replace(group, codec=part.codec.name, group_id=_group_id(group, nth)),
                vector,
                deadline_s=deadline_s,
                config=self.config,
                memory=RoundMemory(part.result_buffer),
                history=replace(self.history, extends=decides) if self.history is not None else None,
            )
            outcomes.append(outcome)
            if outcome.failed:
                break
            part.averages = outcome.averages
        return _merged(outcomes, [part.staging.layout.numel for part in self.parts])


def _group_id(group: Group, nth: int) -> bytes:
    """Return the name of an all-reduce of the group, so that no message of one is taken for another's."""
    return blake3(b"codec %d" % nth + group.group_id).digest()[:GROUP_ID_BYTES]


def _merged(outcomes: Sequence[RoundOutcome], numels: Sequence[int]) -> RoundOutcome:
    last = outcomes[-1]
    seconds: dict[str, float] = {}
    left_out: dict[PeerId, str] = {}
    accused: dict[PeerId, str] = {}
    faults: dict[PeerId, str] = {}
    clipped: dict[PeerId, float] = {}
    for outcome in outcomes:
        left_out |= outcome.left_out
        accused |= outcome.accused
        faults |= outcome.faults
        for phase, spent_s in outcome.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent_s
        for peer, fraction in outcome.clipped.items():
            clipped[peer] = max(clipped.get(peer, 0.0), fraction)
    merged = replace(
        last,
        left_out=left_out,
        accused=accused,
        faults=faults,
        seconds=seconds,
        bytes_sent=sum(outcome.bytes_sent for outcome in outcomes),
        bytes_received=sum(outcome.bytes_received for outcome in outcomes),
    )
    if last.failed:
        return replace(merged, reason=f"{last.reason} (all-reduce {len(outcomes)} of {len(numels)})")
    digests = b"".join(bytes.fromhex(outcome.digest) for outcome in outcomes)
    return replace(
        merged,
        clipped=clipped,
        contributions=_contributions(outcomes, numels),
        digest=blake3(digests).hexdigest() if digests else "",
    )


def _contributions(outcomes: Sequence[RoundOutcome], numels: Sequence[int]) -> dict[PeerId, float]:
    """Return for each member the fraction of all elements that its values are in."""
    whole = sum(numels)
    found: dict[PeerId, float] = {}
    for outcome, numel in zip(outcomes, numels, strict=True):
        for peer, fraction in outcome.contributions.items():
            found[peer] = found.get(peer, 0.0) + fraction * numel
    # exactly 1.0 if nothing is missing
    return {peer: 1.0 if share == whole else share / whole for peer, share in found.items()}
