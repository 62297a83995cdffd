"""Audits of reducers: the evidence that a reducer must be able to show, and its verification. Pure.

With `audit=p` every sender signs each of its contributions (for this round, this chunk, these bytes), and a
reducer accepts no unsigned one. The reducer keeps what it reduced until the round ends. A member that holds
all averages draws some chunks at random, which no reducer can predict before it has handed out its averages.
The member asks their reducers for the signed contributions, recomputes the averages, and votes for the round
only if it gets the same bytes. Signatures alone decide who is at fault: a reducer can show only what its
senders signed, and a sender takes no part in an audit, so it cannot incriminate the reducer by sending the
auditor something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from averaging.reduction.partition import Chunk, Plan
from swarm.core.identity import Signer

if TYPE_CHECKING:
    import random

SIGNATURE_BYTES = 64
_CONTEXT = b"swarm averaging chunk\0"  # a signature of anything else never passes for one of a contribution
_CHUNKS_SPARE = 4


@dataclass(frozen=True, slots=True)
class Notary:
    """A node's means to vote and to take part in audits."""

    identity: Signer
    rng: random.Random  # must be unpredictable for others: `random.SystemRandom()` outside of tests


@dataclass(frozen=True, slots=True)
class Signed:
    """One member's contribution to a chunk, with that member's signature over it."""

    place: int
    payload: bytes  # encoded
    signature: bytes


def statement(group_id: bytes, chunk: int, digest: bytes) -> bytes:
    """Return the bytes that a sender signs for its contribution to a chunk in this round. `digest`: BLAKE3 of
    the encoded values.
    """
    return _CONTEXT + group_id + chunk.to_bytes(4, "little") + digest


def chance(share: float, auditors: int) -> float:
    """Return the probability with which each of `auditors` independent auditors takes a chunk, so that at
    least one takes it with probability `share`.
    """
    return 1.0 - (1.0 - share) ** (1.0 / auditors) if auditors else 0.0


def chunks_max(share: float, auditors: int, chunks: int) -> int:
    """Return for how many of its chunks a reducer answers one auditor: several times the expected number."""
    return min(math.ceil(3.0 * chance(share, auditors) * chunks) + _CHUNKS_SPARE, chunks)


def draw(plan: Plan, own: int, share: float, auditors: int, rng: random.Random) -> list[Chunk]:
    """Draw the chunks of other reducers that this member audits, in random order."""
    taking = chance(share, auditors)
    drawn = []
    for reducer in plan.reducers:
        if reducer != own:
            chunks = [chunk for chunk in plan.shard(reducer) if rng.random() < taking]
            drawn += chunks[: chunks_max(share, auditors, len(plan.shard(reducer)))]
    rng.shuffle(drawn)  # the last one asked must not learn from the order how many more come
    return drawn


def fault(
    shown: Sequence[Signed],
    chunk: Chunk,
    group_id: bytes,
    digest: Callable[[bytes], bytes],
    verify: Callable[[int, bytes, bytes], bool],
) -> str:
    """Return the defect of the contributions that a reducer shows for a chunk; "" if there is none.

    `verify(place, statement, signature)` returns whether the signature is that member's.
    """
    for item in shown:
        if len(item.signature) != SIGNATURE_BYTES or not verify(
            item.place, statement(group_id, chunk.index, digest(item.payload)), item.signature
        ):
            return (
                f"what it shows as the contribution of the member at place {item.place} was not signed "
                "by that member"
            )
    return ""
