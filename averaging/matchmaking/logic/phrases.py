"""Phrases about peers, for the sentences that explain why a search ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from averaging.matchmaking.logic.peer_table import PeerState

_NAMES_MAX = 3


def count_phrase(peers: Sequence[PeerState], what: str, why: Callable[[PeerState], str] | None = None) -> str:
    """Return `2 peers (…abcd, …efgh) do something (reasons)`, or "" for an empty list. `what` is in the
    singular.
    """
    if not peers:
        return ""
    names = ", ".join(peer.contact.peer_id.short for peer in peers[:_NAMES_MAX]) + (
        ", …" if len(peers) > _NAMES_MAX else ""
    )
    reasons = sorted({why(peer) for peer in peers[:_NAMES_MAX]}) if why is not None else []
    number = "1 peer" if len(peers) == 1 else f"{len(peers)} peers"
    return f"{number} ({names}) {what if len(peers) == 1 else _plural(what)}" + (
        f" ({', '.join(reasons)})" if reasons else ""
    )


def _plural(what: str) -> str:
    verb, _, rest = what.partition(" ")
    verbs = {"has": "have", "does": "do", "holds": "hold", "looks": "look", "is": "are", "was": "were"}
    return f"{verbs[verb]} {rest}".replace("and is not", "and are not")
