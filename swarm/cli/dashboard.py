"""`swarm dashboard`: show an owner its run, with members and invites, and change the run with single keys."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from swarm.cli import options
from swarm.cli.admin import tell_members
from swarm.cli.identity import read_owner
from swarm.cli.invite import OWN_OBSERVER_S, owners_entries
from swarm.cli.paths import specifications_folder
from swarm.cli.render import make_output
from swarm.cli.render.output import Presentation, Result, is_terminal, printable
from swarm.core.errors import SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.runtime.thread import TURN_S_MAX

if TYPE_CHECKING:
    from swarm.cli.render.dashboard import Action, Dashboard, DashboardState
    from swarm.monitor.watching import Watch
    from swarm.run.changes import Change
    from swarm.run.issued_invites import IssuedInvite
    from swarm.run.signed import SignedSpecification

_POLL_S = 0.25
_FIRST_S = 5.0  # wait for members before the first screen
_READ_S = 30.0


@click.command(context_settings=options.CONTEXT)
@click.argument("run", metavar="RUN")
@options.peers_of_run
@options.owner_identity
@click.option("--once", is_flag=True, help="Print the run once and exit.")
@options.as_json
def dashboard(run: str, addresses: tuple[str, ...], identity: str | None, once: bool, as_json: bool) -> int:
    """Manage a run that you own: its members with their roles and what they gave, the invites that were made
    on this machine and how often they were used. Single keys pause the run, revoke, send volunteers a
    message, and end the run.

    RUN is a name, NAME@ID or an id. Without --from, the run is reached through a volunteer of this user on
    this machine. Keys for actions that are hard to undo must be pressed twice.

    \b
    Examples:
      swarm dashboard bytelm
      swarm dashboard bytelm --from /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm dashboard bytelm --once --json
    """
    from swarm.monitor.watching import Watch, WatchConfig

    owner = read_owner(
        identity, "the dashboard is for the owner of a run (others watch it with `swarm monitor`)"
    )
    own = Identity.generate()
    entries = tuple(owners_entries(run, addresses, owner, own.peer_id, lifetime_s=OWN_OBSERVER_S))
    is_live = not (once or as_json) and is_terminal(sys.stdout)
    if is_live:
        click.echo("looking for the members of the run")
    with contextlib.closing(own), Watch(WatchConfig(entry=entries, run=run), own) as watch:
        console = OwnerConsole(watch, owner)
        begun_s = time.monotonic()
        while not watch.view().peers and time.monotonic() - begun_s < _FIRST_S:
            time.sleep(_POLL_S)
        if is_live:
            _run_live(console)
        else:
            _print(console.look(), as_json=as_json)
    return 0


class OwnerConsole:
    """The owner's view of its run, and its changes."""

    def __init__(self, watch: Watch, owner: Identity) -> None:
        """Raise UsageError if `owner` does not own the run."""
        from swarm.run.directory import RunDirectory
        from swarm.run.specification_store import SpecificationStore

        self._watch, self._owner, node = watch, owner, watch.node
        store = SpecificationStore(specifications_folder())
        self._directory = RunDirectory(node.dht.service, clock=node.clock, store=store)
        self.signed: SignedSpecification = self._specification()
        if self.signed.owner != owner.peer_id:
            raise UsageError(
                f"{self.signed.full_name} belongs to {self.signed.owner}, and this identity is "
                f"{owner.peer_id}: watch it with `swarm monitor`"
            )

    def _specification(self) -> SignedSpecification:
        reading = self._directory.specification(self._watch.run.run_id)
        return self._watch.node.network.run(reading, _READ_S)

    def look(self) -> Dashboard:
        """Return the present state of the run."""
        from swarm.run.issued_invites import IssuedInvites

        invites = IssuedInvites(specifications_folder(), self.signed.run_id).all()
        return self._watch.node.network.run(self._look(invites), TURN_S_MAX)

    async def _look(self, invites: Sequence[IssuedInvite]) -> Dashboard:
        from swarm.cli.render.dashboard import Dashboard
        from swarm.dht.logic.blobs import version_text

        view, membership = self._watch.view_now(), self._watch.node.membership
        used = {}
        if membership is not None:
            for one in invites:
                used[one.subject] = membership.admission.uses_of(PeerId.parse(one.subject))
        roles = {peer.peer_id: self._roles(PeerId.parse(peer.peer_id)) for peer in view.peers}
        specification = self.signed.specification
        return Dashboard(
            view=view,
            roles=roles,
            given={one.peer_id: one.samples for one in view.leaders},
            invites=invites,
            used=used,
            revoked=frozenset({*specification.revoked, *specification.banned}),
            version=version_text(self.signed.version),
            is_invited=specification.members == "invited",
        )

    def _roles(self, peer: PeerId) -> str:
        node = self._watch.node
        membership = node.membership
        words = ["decides"] if peer in self._watch.deciding else []
        if peer == self.signed.owner:
            words.append("owner")
        elif membership is not None:
            words += sorted(membership.admission.roles(peer, node.clock.swarm_s()))
        return ", ".join(words)

    def change_for(self, action: Action, subject: str, message: str) -> Change:
        """Return the change that a key asks for. `subject`: that of the chosen row; `message`: the text for
        volunteers.
        """
        from swarm.run.changes import Change

        training = self.signed.training
        if action == "pause":
            return Change(paused=not training.paused)
        if action == "end":
            return Change(ended=not training.ended)
        if action == "message":
            return Change(message=message)
        if training.members == "invited":
            return Change(revoke=(subject,))
        return Change(ban=(subject,))

    def change(self, wanted: Change) -> str:
        """Publish a change. Return a sentence for the owner."""
        from swarm.run.changes import differences, sign_change

        try:
            known = self._specification()
            signed = sign_change(known, wanted, self._owner)
            asked, following = tell_members(self._watch.node, self._directory, signed)
        except SwarmError as error:
            return str(error)
        self.signed = signed
        self._watch.follow(signed)
        return f"{', '.join(differences(known, signed))}; {following} of {asked} members follow it already"


def _print(dashboard: Dashboard, *, as_json: bool) -> None:
    """Print the run, its members and its invites."""
    from swarm.cli.render.dashboard import DashboardState, render_dashboard

    if not as_json:
        for tab in ("members", "invites"):
            state = DashboardState(tab=tab, chosen=-1)
            rows = 9 + len(state.subjects(dashboard)) + len(dashboard.view.run.pauses)
            for line in render_dashboard(dashboard, state, 200, rows)[:-1]:
                if line.plain.strip():
                    print(printable(line.plain.rstrip()), flush=True)
        return
    run = dashboard.view.run
    with make_output(Presentation(), as_json=True) as output:
        fields = {
            "run": run.name,
            "id": run.run_id,
            "version": dashboard.version,
            "paused": run.paused,
            "ended": run.ended,
            "message": run.message,
            "peers": dashboard.view.peers_live,
        }
        output.emit(Result(name="run", fields=fields, text=""))
        for peer in dashboard.view.peers:
            fields = {
                "peer_id": peer.peer_id,
                "name": peer.name,
                "state": peer.state,
                "roles": dashboard.roles.get(peer.peer_id, ""),
                "samples": dashboard.given.get(peer.peer_id, 0),
                "revoked": peer.peer_id in dashboard.revoked,
            }
            output.emit(Result(name="member", fields=fields, text=""))
        for one in dashboard.invites:
            fields = {
                **asdict(one),
                "used": dashboard.used.get(one.subject, 0),
                "revoked": one.subject in dashboard.revoked,
            }
            output.emit(Result(name="invite", fields=fields, text=""))


def _run_live(console: OwnerConsole) -> None:
    """Show the run on the whole terminal until the owner presses `q`."""
    from swarm.cli.render.dashboard import DashboardState

    state = DashboardState()
    with ThreadPoolExecutor(1) as worker:
        while not state.quit:
            _screen(console, state, worker)
            if state.action == "message" and not state.quit:
                message = click.prompt(
                    "Message to volunteers, empty for none", default="", show_default=False
                )
                _begin(console, state, worker, "message", "", message)


def _begin(
    console: OwnerConsole,
    state: DashboardState,
    worker: ThreadPoolExecutor,
    action: Action,
    subject: str,
    message: str,
) -> None:
    """Begin a change in the background."""
    try:
        wanted = console.change_for(action, subject, message)
    except UsageError as error:
        state.notice = str(error)
        return
    state.notice = "publishing the change"
    future = worker.submit(console.change, wanted)
    future.add_done_callback(lambda done: state.tell(done.result()))


def _screen(console: OwnerConsole, state: DashboardState, worker: ThreadPoolExecutor) -> None:
    """Show the screen until the owner quits or is asked for a message."""
    from rich.console import Console, Group
    from rich.live import Live

    from swarm.cli.keyboard import Keys
    from swarm.cli.render.dashboard import render_dashboard

    screen, next_s, dashboard = Console(highlight=False), 0.0, console.look()
    with Live(console=screen, screen=True, auto_refresh=False) as live, Keys() as keys:
        while not state.quit:
            if time.monotonic() >= next_s:
                next_s, dashboard = time.monotonic() + 1.0, console.look()
            columns, rows = screen.size
            live.update(Group(*render_dashboard(dashboard, state, columns, rows - 1)), refresh=True)
            key = keys.next(_POLL_S)
            if key is None:
                continue
            state.key(key, dashboard)
            if state.action == "message":
                return
            if state.action is not None:
                _begin(console, state, worker, state.action, state.chosen_subject(dashboard), "")
