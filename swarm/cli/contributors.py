"""`swarm contributors`: list how much each peer has given to a run, according to totals that its members
sign.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from averaging.history.receipts import CREDIT_RATIO_MAX
from swarm.cli import options
from swarm.cli.finding import given_entry
from swarm.cli.identity import open_entry_identity, own_peers
from swarm.cli.paths import contributions_file
from swarm.cli.render import make_output
from swarm.cli.render.output import Presentation, Result, printable
from swarm.cli.render.volunteer import given
from swarm.core.errors import UsageError
from swarm.core.wording import counted
from swarm.core.working import working
from swarm.run.contributions import ContributionLog
from swarm.run.events import Notice

if TYPE_CHECKING:
    from averaging.history.receipts import Totals
    from swarm.node import Node
    from swarm.run.contributors import Contributor, RunTotals
    from swarm.run.signed import SignedSpecification

SHOWN_MAX = 1000
_READ_S = 60.0


@click.command(context_settings=options.CONTEXT)
@click.argument("entries", metavar="ADDRESS|INVITE|RUN...", nargs=-1, required=True)
@options.run_name
@options.observer_identity
@click.option(
    "--top",
    type=options.BoundedInteger(1, SHOWN_MAX),
    default=20,
    show_default=True,
    help="Number of contributors to list.",
)
@options.as_json
def contributors(
    entries: tuple[str, ...], run: str | None, identity: str | None, top: int, as_json: bool
) -> int:
    """List how many samples each peer has given to a run since it began.

    The members of a run sign these totals: see docs/decisions/0064. What limits them is said below the list.
    Names are chosen by the peers and need not be unique; PeerIDs are. RUN is the name of a run in which this
    machine took part.

    \b
    Examples:
      swarm contributors bytelm
      swarm contributors /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW... --top 100
      swarm contributors swarm1... --json
    """
    from swarm.node import Node
    from swarm.run.directory import RunDirectory
    from swarm.run.entering import enter, find_run
    from swarm.run.membership import check_invited

    entry = given_entry(entries, run, identity, (), role="observe")
    assert entry is not None
    with (
        make_output(Presentation(), as_json=as_json) as output,
        contextlib.closing(open_entry_identity(entry.identity, entry.bootstrap)) as own,
        Node(bootstrap=entry.bootstrap, listen=None, identity=own) as node,
    ):
        enter(node, entry.bootstrap)
        directory = RunDirectory(node.dht.service, clock=node.clock)
        signed = find_run(node, directory, entry.run)
        if signed.is_grid:
            raise UsageError(
                f"{signed.full_name} is a grid of experts: contributions to grids are not signed"
            )
        check_invited(signed, node.membership)
        if signed.training.mode.name == "gossip":
            output.emit(Notice(text=_of_gossip(signed)))
            return 0
        with working("asking members what everybody gave"):
            read, found = node.network.run(_read(node, signed), _READ_S)
        totals = read.totals
        mine = own_peers()
        for place, one in enumerate(found, 1):
            is_own = one.peer_id in mine
            if place <= top or is_own:  # a volunteer always sees its own line
                fields, text = _fields(one, place, is_own=is_own), _line(one, place, totals, is_own=is_own)
                output.emit(Result(name="contributor", fields=fields, text=text))
        output.emit(Notice(text=_summary(totals, len(found), top)))
        for text in _limits(read) if found else ():
            output.emit(Notice(text=text))
    return 0


async def _read(node: Node, signed: SignedSpecification) -> tuple[RunTotals, list[Contributor]]:
    """Ask the peers by which the user entered, then members that the run lists."""
    from swarm.run.contributors import fetch_totals, ranked, read_names
    from swarm.run.estimate import read_members

    members = await read_members(node.dht.service, signed.run_id, node.clock)
    members.sort(key=lambda contact: contact.peer_id not in node.introducers)
    read = await fetch_totals(node.channels, signed.run_id, members)
    names = await read_names(node.dht.service, signed.run_id, read.totals.by_peer)
    return read, ranked(read.totals, names)


def _fields(one: Contributor, place: int, *, is_own: bool) -> dict[str, object]:
    return {
        "place": place,
        "peer_id": str(one.peer_id),
        "name": one.name,
        "samples": one.samples,
        "rounds": one.rounds,
        "own": is_own,
    }


def _line(one: Contributor, place: int, totals: Totals, *, is_own: bool) -> str:
    share = 100 * one.samples / totals.samples if totals.samples else 0.0
    name = printable(f"{one.name} ({one.peer_id.short})" if one.name else one.peer_id.short)
    name += ", you" if is_own else ""
    return f"{place:>4}  {one.samples:>15,} samples {share:>5.1f} %  {one.rounds:>9,} rounds  {name}"


def _summary(totals: Totals, count: int, top: int) -> str:
    if not count:
        return "nobody has given anything to this run yet that other peers have witnessed"
    more = f", of which {top:,} are listed" if count > top else ""
    return f"{totals.samples:,} samples in {totals.certificates:,} rounds by {counted(count, 'peer')}{more}"


def _limits(read: RunTotals) -> Iterator[str]:
    """Yield what the totals leave out."""
    yield (
        f"in each round a peer counts for at most {CREDIT_RATIO_MAX} times the median of those that decide "
        "it, and one that is alone for at most the mean of the rounds of several: nobody can check what "
        "others have computed"
    )
    if read.is_partial:
        yield (
            "this run has more peers than one group holds: an epoch counts for the peers that decide it, and "
            "not for the others that took part"
        )


def _of_gossip(signed: SignedSpecification) -> str:
    """Return why a run of this mode has no totals, and what this machine has counted itself."""
    text = f"peers of {signed.full_name} average in pairs (mode gossip), so nobody signs what they gave"
    try:
        own = ContributionLog(contributions_file()).total(run=signed.full_name)
    except OSError as error:
        return f"{text}. This machine's own count cannot be read: {error}"
    return f"{text}. This machine's own count: {given(own)}" if own.samples else text
