"""A reducer can lie, and its work can be checked: what it must be able to show, and how that is judged. Pure.

With `audit=p` every sender signs each of its chunks (for this round, this part, these bytes), and a reducer
takes no chunk without. It keeps what it reduced until the round ends. A member that holds all averages draws
some parts by chance of its own, which no reducer can know before it has given its averages away; asks their
reducers for the signed chunks behind them; recomputes; and votes for the round only if the same bytes come
out. Who is at fault follows from signatures alone: a reducer can show only what its senders signed, and a
sender has nothing to say in an audit, so it cannot frame the reducer by telling the auditor something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from averaging.reduction.partition import Part, Plan

if TYPE_CHECKING:
    import random

SIGNATURE_BYTES = 64
_CONTEXT = b"swarm averaging chunk\0"  # a signature of anything else never passes for one of a chunk
_PARTS_SPARE = 4


class ChunkSigner(Protocol):
    """What is needed of `swarm.core.identity.Identity`."""

    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Notary:
    """A node's means to take part in audits."""

    identity: ChunkSigner
    rng: random.Random  # nobody else may know what it gives: `random.SystemRandom()` outside of tests


@dataclass(frozen=True, slots=True)
class Signed:
    """What one member contributed to a part, with its signature over it."""

    place: int
    payload: bytes  # encoded
    signature: bytes


def statement(group_id: bytes, part: int, digest: bytes) -> bytes:
    """What a sender signs: in this round, this is my chunk of this part. `digest`: BLAKE3 of the encoded
    values.
    """
    return _CONTEXT + group_id + part.to_bytes(4, "little") + digest


def chance(share: float, auditors: int) -> float:
    """With what probability each of so many independent auditors takes a part, so that somebody does with
    probability `share`.
    """
    return 1.0 - (1.0 - share) ** (1.0 / auditors) if auditors else 0.0


def parts_max(share: float, auditors: int, parts: int) -> int:
    """How many of its parts a reducer accounts for to one auditor: several times what chance should ask for."""
    return min(math.ceil(3.0 * chance(share, auditors) * parts) + _PARTS_SPARE, parts)


def draw(plan: Plan, own: int, share: float, auditors: int, rng: random.Random) -> list[Part]:
    """The parts of others that this member audits."""
    taking = chance(share, auditors)
    drawn = []
    for reducer in plan.reducers:
        if reducer != own:
            parts = [part for part in plan.of_reducer(reducer) if rng.random() < taking]
            drawn += parts[: parts_max(share, auditors, len(plan.of_reducer(reducer)))]
    rng.shuffle(drawn)  # the last one asked must not learn from the order how many more come
    return drawn


def fault(
    shown: Sequence[Signed],
    part: Part,
    group_id: bytes,
    digest: Callable[[bytes], bytes],
    verify: Callable[[int, bytes, bytes], bool],
) -> str:
    """What is wrong with what a reducer shows for a part; "" for nothing. `verify(place, statement,
    signature)`: is it that member's?
    """
    for item in shown:
        if len(item.signature) != SIGNATURE_BYTES or not verify(
            item.place, statement(group_id, part.index, digest(item.payload)), item.signature
        ):
            return f"what it shows as the chunk of the member at place {item.place} was not signed by that member"
    return ""
