"""How commands wait for the first peer of a swarm to answer, and what they say when nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from swarm.core.errors import DeadlineExceeded, NetworkError, NotInvited
from swarm.core.working import working
from swarm.membership.invite import is_invite

if TYPE_CHECKING:
    from swarm.net.membership import RunMembership
    from swarm.node import Node
    from swarm.run.directory import RunDirectory
    from swarm.run.signed import SignedSpecification

REFUSED_S: Final = 1.5  # to wait for the first peer after every address refused the connection
SILENT_S: Final = 15.0  # the same while an address has not refused: three attempts
_POLL_S = 0.5
_FIND_TRIES, _FIND_PAUSE_S = 3, 1.0
FIND_S_MAX: Final = 100.0  # each try is two reads of 10 s, and searches on disk
_ENTRY_CHARACTERS_MAX = 120  # an address fits
_INVITE_CHARACTERS = 14
_ENTRIES_SHOWN = 3
_REACH = re.compile(r"^cannot reach peer \w+: ")


def poll_running(poll: Callable[[float], bool], limit_s: Callable[[], float]) -> bool:
    """Call `poll`, which waits for as many seconds as it is told, until it returns True, or this process has
    waited for `limit_s()` seconds. Return whether it did.

    Time in which this process did not run does not count: nobody could have answered it then.
    """
    waited_s = 0.0
    while waited_s <= limit_s():
        started_s = time.monotonic()
        # On a busy machine, loading torch's library can block everything for seconds, even this wait.
        with contextlib.suppress(DeadlineExceeded):
            if poll(_POLL_S):
                return True
        waited_s += min(time.monotonic() - started_s, 2 * _POLL_S)
    return False


def wait_for_answer(node: Node) -> bool:
    """Wait until a peer of the swarm answers. Return False if that is no longer likely."""
    with working("waiting for a peer to answer"):
        return poll_running(node.wait_joined, lambda: REFUSED_S if node.join_refused else SILENT_S)


def find_run(
    node: Node, directory: RunDirectory, wanted: str | None, *, grid: bool = False
) -> SignedSpecification:
    """Return the run, or with `grid` the grid of experts, that is wanted (`RunDirectory.find`). Without a
    name it is the one to which the node is invited, if it is. The peer that is asked may be busy: it is asked
    again a second later, three times in all. Raises UsageError, PeerError or the last NetworkError.
    """
    with working("asking for the runs of this swarm"):
        found = found_run(directory, wanted, grid=grid, membership=node.membership)
        return node.network.run(found, FIND_S_MAX)


async def found_run(
    directory: RunDirectory,
    wanted: str | None,
    *,
    grid: bool = False,
    membership: RunMembership | None = None,
) -> SignedSpecification:
    """The same, on the network thread. `membership`: that of the node, if it is invited."""
    if wanted is None and membership is not None:
        wanted = membership.run_id  # other runs may be listed in the same swarm
    for left in reversed(range(_FIND_TRIES)):
        try:
            return await directory.find(wanted, grid=grid)
        except NetworkError:
            if not left:
                raise
        await asyncio.sleep(_FIND_PAUSE_S)
    raise AssertionError


def unanswered(node: Node) -> str:
    """Return why nobody has answered yet, without the names of peers that the user has given."""
    return "; ".join(_REACH.sub("", one) for one in node.join_failures) or "no answer in time"


def enter(node: Node, entries: Sequence[str]) -> None:
    """Wait until a peer of the swarm answers. Raise NotInvited or NetworkError with the reason for which
    nobody has at these addresses or invites.
    """
    if not wait_for_answer(node):
        raise refusal(node, entries)


def refusal(node: Node, entries: Sequence[str]) -> NotInvited | NetworkError:
    """Return the error with the reason for which nobody answered at these addresses or invites."""
    if node.not_invited:
        return NotInvited(node.not_invited)
    where = " and ".join(_shown(one) for one in entries[:_ENTRIES_SHOWN])
    advice = "Ask for the address of another live peer"
    if any(map(is_invite, entries)):
        advice = (
            "Its peers are offline or have other addresses by now: try again later, or ask for a newer invite"
        )
    return NetworkError(f"nobody answers at {where}: {unanswered(node)}. {advice}")


def _shown(entry: str) -> str:
    """Return an entry for a sentence. An invite is a secret, and too long."""
    if is_invite(entry):
        return f"the invite {entry[:_INVITE_CHARACTERS]}…"
    return entry[:_ENTRY_CHARACTERS_MAX] + ("…" if len(entry) > _ENTRY_CHARACTERS_MAX else "")
