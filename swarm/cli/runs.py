"""`swarm runs`: list runs and their requirements: those of a swarm, or those that this machine remembers and
those in the catalogue of the peers that it has met; and those on the local network.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.control import Control
from swarm.cli.identity import open_entry_identity
from swarm.cli.paths import contributions_file, control_folder, specifications_folder
from swarm.cli.render import Output, make_output
from swarm.cli.render.output import Presentation, Result
from swarm.cli.render.volunteer import given
from swarm.core.errors import SwarmError
from swarm.core.wording import counted, size
from swarm.core.working import Update, working
from swarm.run.contributions import ContributionLog, Given
from swarm.run.events import Notice

if TYPE_CHECKING:
    from swarm.cli.finding import RunEntry
    from swarm.core.ids import Contact
    from swarm.node import Node
    from swarm.run.directory import RunDirectory, RunListing
    from swarm.run.estimate import RunEstimate
    from swarm.run.signed import SignedSpecification

RUNS_MAX = 100  # specifications read; of further runs only the name is listed
_READ_S = 15.0
_AT_ONCE = 8


@click.command(context_settings=options.CONTEXT)
@options.entries(required=False)
@click.option(
    "--search",
    metavar="TEXT",
    default="",
    help="Only runs with this text in their name, task or description.",
)
@click.option("--no-lan", is_flag=True, help="Do not look on the local network.")
@options.as_json
def runs(addresses: tuple[str, ...], search: str, no_lan: bool, as_json: bool) -> int:
    """List the runs of the swarm at ADDRESS, or of that of a RUN that this machine remembers: task, size,
    volunteers, pace, what they ask for, and who may join. Open runs come from the catalogue of the swarm.

    Without either, the command lists the runs in which this machine took part, with what it gave to them,
    and then those in the catalogue of the peers that it met there. The runs that others on the local network
    train follow in both cases.

    \b
    Examples:
      swarm runs
      swarm runs --search language
      swarm runs /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm runs ADDRESS --search language --json
    """
    from swarm.cli.finding import RunEntry, given_entry, nearby_runs, remembered_addresses

    with make_output(Presentation(), as_json=as_json) as output:
        entry = given_entry(addresses, None, None, (), role="observe")
        if entry is not None:
            _list_swarm(output, entry, search)
        else:
            known = _list_remembered(output, search)
            _list_catalogue(output, RunEntry(tuple(remembered_addresses()), None, None), search, known)
        if not no_lan and not nearby_runs(output, None, search):
            output.emit(Notice(text="no run was found on the local network"))
    return 0


def _list_remembered(output: Output, search: str) -> set[str]:
    """Show the runs whose specification this machine keeps, and what it gave to them. Return their full
    names.
    """
    from swarm.run.specification_store import SpecificationStore

    live = {one.run_id: one.pid for one in Control(control_folder()).running()}
    try:
        gave = ContributionLog(contributions_file()).by_run()
    except OSError as error:
        output.emit(Notice(text=f"contributions cannot be read: {error}"))
        gave = {}
    kept = {
        one.full_name: one for one in SpecificationStore(specifications_folder()).all() if not one.is_grid
    }
    names = [*gave, *(name for name in sorted(kept) if name not in gave)]
    shown = 0
    for name in names:
        signed, sums = kept.get(name), gave.get(name, Given())
        summary = _summary(signed) if signed is not None else ""
        if not _fits(search, name, summary):
            continue
        shown += 1
        run, _, run_id = name.partition("@")
        pid = live.get(run_id)
        text = f"{name}: {summary}" if summary else name
        if pid is not None:
            text += f"\n  trains now, in process {pid}"
        text += f"\n  gave {given(sums)}" if sums.samples else ""
        fields = {"run": run, "id": run_id, "summary": summary, "pid": pid, "given": asdict(sums)}
        output.emit(Result(name="remembered", fields=fields, text=text))
    if not shown:
        output.emit(
            Notice(text="this machine remembers no run" + (f" that fits {search!r}" if search else ""))
        )
    return set(names)


def _list_catalogue(output: Output, entry: RunEntry, search: str, known: set[str]) -> None:
    """Show the runs that remembered peers list, but for those that this machine remembers."""
    if not entry.bootstrap:
        output.emit(
            Notice(text="this machine remembers no peer of an open run: pass an ADDRESS to see its catalogue")
        )
        return
    try:
        found = [one for one in _read_swarm(entry) if one.listing.full_name not in known]
    except SwarmError as error:
        output.emit(Notice(text=f"the catalogue was not read: {error}"))
        return
    if not _emit(output, found, search):
        fit = f" that fits {search!r}" if search else ""
        output.emit(
            Notice(text=f"the catalogue of the peers that this machine knows has no further run{fit}")
        )


def _list_swarm(output: Output, entry: RunEntry, search: str) -> None:
    """Show the runs that the swarm lists to which this is an entry."""
    if not _emit(output, _read_swarm(entry), search):
        output.emit(Notice(text="this swarm lists no run" + (f" that fits {search!r}" if search else "")))


def _emit(output: Output, found: Sequence[_FoundRun], search: str) -> bool:
    """Show the runs that fit, those with most volunteers first. Return whether there are any."""
    fitting = [
        one
        for one in found
        if _fits(search, one.listing.full_name, _summary(one.signed) if one.signed else "")
    ]
    for one in sorted(fitting, key=_FoundRun.rank):
        output.emit(Result(name="run", fields=one.fields(), text=one.text()))
    return bool(fitting)


def _read_swarm(entry: RunEntry) -> list[_FoundRun]:
    """Return the runs that a swarm lists. Raise NetworkError if nobody answers there."""
    from swarm.node import Node
    from swarm.run.directory import RunDirectory
    from swarm.run.entering import enter

    with (
        contextlib.closing(open_entry_identity(entry.identity, entry.bootstrap)) as own,
        Node(bootstrap=entry.bootstrap, listen=None, identity=own) as node,
    ):
        enter(node, entry.bootstrap)
        directory = RunDirectory(node.dht.service, clock=node.clock)
        with working("reading the catalogue") as update:
            return node.network.run(_read(node, directory, update), RUNS_MAX * _READ_S)


@dataclass(frozen=True, slots=True)
class _FoundRun:
    """A run that a swarm lists. Without `signed`, `problem` says why its specification could not be read."""

    listing: RunListing
    signed: SignedSpecification | None
    estimate: RunEstimate | None
    asks: str = ""  # what the run requires of a volunteer
    problem: str = ""

    def rank(self) -> tuple[int, str]:
        """Sort key: runs with most volunteers first."""
        return (-(self.estimate.peers if self.estimate is not None else 0), self.listing.full_name)

    def fields(self) -> dict[str, Any]:
        signed, estimate = self.signed, self.estimate
        return {
            "run": self.listing.name,
            "id": self.listing.run_id,
            "kind": "grid" if self.listing.is_grid else "run",
            "summary": _summary(signed) if signed is not None else "",
            "task": signed.training.task.name if signed is not None and not signed.is_grid else None,
            "members": signed.specification.members if signed is not None else None,
            "ended": signed.training.ended if signed is not None and not signed.is_grid else None,
            "paused": signed.training.paused if signed is not None and not signed.is_grid else None,
            "peers": estimate.peers if estimate is not None else None,
            "samples_per_s": estimate.samples_per_s if estimate is not None else None,
            "epoch": estimate.epoch if estimate is not None else None,
            "asks": self.asks,
            "problem": self.problem,
        }

    def text(self) -> str:
        signed, estimate = self.signed, self.estimate
        if signed is None:
            return f"{self.listing.full_name}: {self.problem}"
        lines = [f"{self.listing.full_name}: {_summary(signed)}"]
        if signed.is_grid:
            return lines[0]
        training = signed.training
        needs = ", CUDA devices only" if training.requirements.device == "cuda" else ""
        lines.append(f"  task {training.task.name}, {signed.specification.members}{needs}")
        lines += [f"  asks for {self.asks}"] if self.asks else []
        if training.ended or training.paused:
            lines.append("  ended" if training.ended else "  paused by its owner")
        elif estimate is not None and estimate.peers:
            people = counted(estimate.peers, "volunteer")
            lines.append(f"  {people} at {estimate.samples_per_s:,.0f} samples/s, epoch {estimate.epoch:,}")
        else:
            lines.append("  nobody trains it at the moment")
        return "\n".join(lines)


async def _listings(node: Node, directory: RunDirectory) -> list[RunListing]:
    """Return the runs of the catalogue, then those that only the list of the swarm's members has."""
    from swarm.run.catalogue import read_catalogue
    from swarm.run.directory import RunListing

    async def answers(contact: Contact) -> bool:
        return contact.is_callable and await node.dht.service.ping(contact)

    known = {peer.contact.peer_id for peer in node.book.known()}
    catalogue = await read_catalogue(node.dht.service, answers, known)
    found = [RunListing(one.name, one.run_id) for one in catalogue]
    return list(dict.fromkeys([*found, *await directory.listings()]))


async def _read(node: Node, directory: RunDirectory, update: Update) -> list[_FoundRun]:
    """Read the specifications and the progress of the listed runs, some at a time. `update` is told how many
    were read.
    """
    from swarm.run.estimate import estimate_run

    listings, loop = await _listings(node, directory), asyncio.get_running_loop()
    places, done = asyncio.Semaphore(_AT_ONCE), itertools.count(1)

    async def read(listing: RunListing) -> _FoundRun:
        found = await read_one(listing)
        update(next(done), len(listings[:RUNS_MAX]))
        return found

    async def read_one(listing: RunListing) -> _FoundRun:
        async with places:
            try:
                async with asyncio.timeout(_READ_S):
                    signed = await directory.specification(listing.run_id, from_disk=False)
                    estimate = None
                    if not signed.is_grid:
                        estimate = await estimate_run(
                            node.dht.service, listing.run_id, node.peer_id, node.clock
                        )
                    asks = await loop.run_in_executor(None, _asks, signed, estimate)
                    return _FoundRun(listing, signed, estimate, asks)
            except (SwarmError, TimeoutError) as error:
                return _FoundRun(listing, None, None, problem=str(error) or "no answer in time")

    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(read(one)) for one in listings[:RUNS_MAX]]
    return [
        *(task.result() for task in reading),
        *(_FoundRun(one, None, None, problem="not read: too many") for one in listings[RUNS_MAX:]),
    ]


def _asks(signed: SignedSpecification, estimate: RunEstimate | None) -> str:
    """Return what a run asks of a volunteer: memory and traffic, where its task is installed here."""
    from swarm.run.estimate import bytes_per_hour
    from swarm.run.memory import estimate_memory
    from swarm.run.task import make_task

    if signed.is_grid:
        return ""
    training = signed.training
    chosen = training.task
    try:
        described = make_task(chosen.name, chosen.settings, chosen.package).describe(training.batch_size)
    except SwarmError as error:
        return f"a task that is not here: {error}"
    needed = estimate_memory(training, described, on_cuda=False, saves=False).host_bytes
    text = f"about {size(needed)} of memory for {described.parameters:,} parameters"
    hourly = bytes_per_hour(training, described, estimate) if estimate is not None else None
    return text if hourly is None else f"{text}, {size(hourly)} an hour each way at the others' pace"


def _summary(signed: SignedSpecification) -> str:
    """Return the owner's description of the run, else its task."""
    if signed.specification.description:
        return signed.specification.description
    return "a grid of experts" if signed.is_grid else f"the task {signed.training.task.name}"


def _fits(search: str, *texts: str) -> bool:
    return search.casefold() in " ".join(texts).casefold()
