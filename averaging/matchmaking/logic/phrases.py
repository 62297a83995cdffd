"""The reasons why a search found no group, as text for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from averaging.matchmaking.logic.messages import LookForGroup, PeerStatus, SearchFailed, SearchFailure

if TYPE_CHECKING:
    from averaging.matchmaking.logic.peer_table import PeerState

_NAMES_MAX = 3
_HIDDEN = (
    "neither this peer nor any other here can be called by others, and a group needs one that can: open or "
    "forward a port for one of them"
)
_CLOCK_OFF_NOTED_S = 3.0


def _count_phrase(
    peers: Sequence[PeerState], what: str, why: Callable[[PeerState], str] | None = None
) -> str:
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


def explain(
    peers: Sequence[PeerState], coming: Sequence[PeerState], query: LookForGroup, *, deadline: bool
) -> SearchFailed:
    """Describe why there is no group, for people. `coming`: the `peers` that could still be in one;
    `deadline`: the search ended at its deadline.
    """
    if not peers:
        return SearchFailed(
            reason="alone", detail="no other peer holds this averager, by the presence records in the DHT"
        )
    kinds: dict[SearchFailure, list[PeerState]] = {
        "schema": [p for p in peers if not p.failed and p.status is PeerStatus.REFUSED],
        "passed": [p for p in peers if not p.failed and p.status is PeerStatus.PASSED],
        "unreachable": [p for p in peers if p.failed],
    }
    is_impossible = not deadline or not coming
    reason: SearchFailure = "deadline"
    if is_impossible:
        order: tuple[SearchFailure, ...] = ("passed", "schema", "unreachable")
        reason = next((kind for kind in order if kinds[kind]), "few")
    return SearchFailed(reason=reason, detail=_sentence(peers, coming, kinds, query))


def _sentence(
    peers: Sequence[PeerState],
    rest: Sequence[PeerState],
    kinds: dict[SearchFailure, list[PeerState]],
    query: LookForGroup,
) -> str:
    parts = [
        _count_phrase(
            kinds["schema"],
            "has other tensors or another codec",
            lambda p: f"{p.text or 'unknown'}; here {query.schema_text or 'unknown'}",
        ),
        _count_phrase(kinds["passed"], f"has finished round {query.round_key!r} without this peer"),
        _count_phrase(kinds["unreachable"], "does not answer", lambda p: p.failed),
    ]
    idle = [p for p in rest if p.status in (None, PeerStatus.IDLE)]
    elsewhere = [p for p in rest if p.status is PeerStatus.SEARCHING and p.round_key != query.round_key]
    taken = [p for p in rest if p.status in (PeerStatus.BUSY, PeerStatus.FOLLOWING)]
    near = [p for p in rest if p.status is PeerStatus.SEARCHING and p.round_key == query.round_key]
    if not query.can_lead and not any(peer.can_lead and peer.contact.is_callable for peer in peers):
        parts.append(_HIDDEN)
    parts += [
        _count_phrase(idle, "holds this averager and is not averaging now"),
        _count_phrase(
            elsewhere,
            f"looks for another round than {query.round_key!r}",
            lambda p: repr(p.round_key),
        ),
        _count_phrase(taken, "is in a group that was full or begun"),
        _count_phrase(near, "was looking too, but no group came about in time"),
        _count_phrase(
            [p for p in peers if abs(p.clock_off_s) > _CLOCK_OFF_NOTED_S],
            "has another time",
            lambda p: f"{p.clock_off_s:+.0f} s from the time here: check the clocks",
        ),
    ]
    return "; ".join(part for part in parts if part)
