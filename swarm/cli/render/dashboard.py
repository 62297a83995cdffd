"""Presentation of `swarm dashboard`: members, invites and the state of a run, for its owner. No I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rich.text import Text

from swarm.cli.render.monitor import headline, moved
from swarm.cli.render.output import printable
from swarm.core.wording import duration
from swarm.monitor.logic.view import MonitorView, PeerView
from swarm.run.issued_invites import IssuedInvite

Tab: TypeAlias = Literal["members", "invites"]
# the action of a key; "message": ask the owner for its message to volunteers
Action: TypeAlias = Literal["pause", "end", "revoke", "message"]
_KEYS = "q quit  ↑↓ choose  tab members/invites  p pause  r revoke  m message  e end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """The state of a run at one moment, for its owner."""

    view: MonitorView
    roles: Mapping[str, str]  # in words, by PeerID
    given: Mapping[str, int]  # samples by PeerID, from totals that members have signed
    invites: Sequence[IssuedInvite]
    used: Mapping[str, int]  # by an invite's subject: peers that joined with it, as far as this process knows
    revoked: frozenset[str]  # PeerIDs and subjects of invites
    version: str
    is_invited: bool


@dataclass(slots=True)
class DashboardState:
    """The owner's selection on the screen."""

    tab: Tab = "members"
    chosen: int = 0
    quit: bool = False
    notice: str = ""
    action: Action | None = None  # the action of the last key
    # the key to press again, and the subject of its row
    _to_confirm: tuple[str, str] | None = field(default=None)

    def key(self, name: str, dashboard: Dashboard) -> None:
        """React to a key. Keys for actions that are hard to undo must be pressed twice."""
        subjects = self.subjects(dashboard)
        count, confirm, self.action = len(subjects), self._to_confirm, None
        self._to_confirm = None
        subject = subjects[self.chosen] if self.chosen < count else ""
        if name == "q":
            self.quit = True
        elif name == "tab":
            self.tab, self.chosen = ("invites" if self.tab == "members" else "members"), 0
        elif name == "p":
            self.action = "pause"
        elif name == "m":
            self.action = "message"
        elif name == "e" or (name == "r" and subject):
            about = subject if name == "r" else ""
            if confirm == (name, about):
                self.action = "revoke" if name == "r" else "end"
                return
            self._to_confirm = name, about
            what = "end or reopen the run" if name == "e" else f"revoke {self.name_of(dashboard, subject)}"
            self.notice = f"press {name} again to {what}"
            return
        else:
            self.chosen = moved(self.chosen, name, count)
        self.notice = ""

    def tell(self, text: str) -> None:
        """Show a sentence until the next key."""
        self.notice = printable(text)

    def subjects(self, dashboard: Dashboard) -> list[str]:
        """Return the PeerIDs, or subjects of invites, of the rows of the present tab."""
        if self.tab == "invites":
            return [one.subject for one in dashboard.invites]
        return [peer.peer_id for peer in dashboard.view.peers]

    def chosen_subject(self, dashboard: Dashboard) -> str:
        """Return the subject of the chosen row; "" where there is none."""
        subjects = self.subjects(dashboard)
        return subjects[self.chosen] if self.chosen < len(subjects) else ""

    def name_of(self, dashboard: Dashboard, subject: str) -> str:
        """Return the name of a row for use in a sentence."""
        if self.tab == "invites":
            return f"the invite {subject[-8:]} and all that joined by it"
        peer = next((one for one in dashboard.view.peers if one.peer_id == subject), None)
        return printable(peer.name or peer.short) if peer is not None else subject[-8:]


def render_dashboard(dashboard: Dashboard, state: DashboardState, columns: int, rows: int) -> list[Text]:
    """Return at most `rows` lines of at most `columns` columns."""
    state.chosen = min(state.chosen, max(0, len(state.subjects(dashboard)) - 1))
    lines = [*_head(dashboard), Text("")]
    free = max(1, rows - len(lines) - 3)
    table = _members(dashboard) if state.tab == "members" else _invites(dashboard)
    first = min(max(0, state.chosen - free // 2), max(0, len(table) - 1 - free))
    title = "   ".join(f"[{tab}]" if tab == state.tab else tab for tab in ("members", "invites"))
    lines += [Text(f" {title}", style="dim"), table[0]]
    for place, line in enumerate(table[1:][first : first + free], first):
        if place == state.chosen:
            line.stylize("reverse")
        lines.append(line)
    lines = lines[: rows - 1]
    lines += [Text("")] * (rows - 1 - len(lines))
    lines.append(Text(state.notice, style="yellow") if state.notice else Text(_KEYS, style="dim"))
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines


def _head(dashboard: Dashboard) -> list[Text]:
    view, run = dashboard.view, dashboard.view.run
    state, style = (
        ("ended", "bold") if run.ended else ("paused", "yellow") if run.paused else ("open", "green")
    )
    lines = [
        Text.assemble(
            (f" {run.full_name} ", "bold reverse"), f"  version {dashboard.version}  ", (state, style)
        ),
        Text(f" {headline(view)}"),
        Text(f" to volunteers: {run.message or 'nothing (press m)'}", style="" if run.message else "dim"),
    ]
    for starts_s, ends_s in run.pauses:
        if ends_s > view.at_s:
            lines.append(Text(f" planned pause: {_clock(starts_s)} to {_clock(ends_s)}", style="yellow"))
    return lines


def _members(dashboard: Dashboard) -> list[Text]:
    lines = [Text(f"  {'member':<24} {'now':<9} {'samples/s':>9} {'gave':>14}  roles", style="dim")]
    lines += [_member(peer, dashboard) for peer in dashboard.view.peers]
    return lines if len(lines) > 1 else [*lines, Text("  nobody takes part at the moment", style="dim")]


def _member(peer: PeerView, dashboard: Dashboard) -> Text:
    name = printable(f"{peer.name} {peer.short[-5:]}" if peer.name else peer.short)
    roles = "revoked" if peer.peer_id in dashboard.revoked else dashboard.roles.get(peer.peer_id, "")
    given = dashboard.given.get(peer.peer_id, 0)
    pace = f"{peer.samples_per_s:,.0f}" if peer.fresh else "-"
    return Text(f"  {name[:24]:<24} {peer.state:<9} {pace:>9} {given:>14,}  {roles}")


def _invites(dashboard: Dashboard) -> list[Text]:
    if not dashboard.is_invited:
        return [Text("  this run is open: it needs no invites", style="dim")]
    lines = [Text(f"  {'invite':<10} {'made':<17} {'used':>9}  {'valid for':<10} roles", style="dim")]
    for one in dashboard.invites:
        left_s = one.expires_s - dashboard.view.at_s
        valid = (
            "revoked" if one.subject in dashboard.revoked else duration(left_s) if left_s > 0 else "expired"
        )
        used = f"{dashboard.used.get(one.subject, 0)} of {one.uses}"
        row = f"  {one.subject[-8:]:<10} {_clock(one.made_s):<17} {used:>9}  {valid:<10} "
        lines.append(Text(row + ", ".join(one.roles)))
    return lines if len(lines) > 1 else [*lines, Text("  none was made on this machine", style="dim")]


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
