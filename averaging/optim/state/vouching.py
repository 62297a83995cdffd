"""The states that a newcomer may take, according to the electors of the swarm's head. Pure.

Electors answer on an authenticated connection, so that a signature would prove nothing more to the newcomer
(docs/decisions/0032). Donors that are no electors have no vote: however many there are, they can only send
the bytes of a state that electors hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from swarm.core.ids import PeerId

# electors that are asked, the most senior ones: each has to hash its state for an answer
ELECTORS_ASKED_MAX: Final = 9


def states_to_take(
    electors: Sequence[PeerId], said: Mapping[PeerId, bytes], *, waits: bool
) -> tuple[bytes, ...] | None:
    """Return the digests of the states that may be taken, the best first; empty: any state may be taken,
    since no elector can be asked; None: none may be taken until more electors have answered.

    `electors`: those that can be asked, the most senior first; `said`: the digest that each of them reported;
    `waits`: more of them may still answer.

    A state that most of them hold, or half of them with the most senior one, is the only one. States differ
    in the last bits where processors differ, until the next round over the state. So when most electors have
    answered and do not agree, the state of the most senior one comes first: a group of liars among the
    electors must not win because honest ones differ.
    """
    held = [said[peer] for peer in electors if peer in said]
    best, count = max(Counter(held).items(), key=lambda item: item[1], default=(b"", 0))
    is_half = bool(held) and 2 * count == len(electors) and said.get(electors[0]) == best
    if 2 * count > len(electors) or is_half:
        return (best,)
    missing = len(electors) - len(held)
    if waits and missing and (2 * (count + missing) >= len(electors) or electors[0] not in said):
        return None
    return tuple(dict.fromkeys(held))
