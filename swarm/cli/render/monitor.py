"""Presentation of `swarm monitor`: views as JSON or plain lines, and a screen for a terminal. No I/O."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from rich.text import Text

from swarm.cli.render.output import Output, Presentation
from swarm.cli.render.text import sparkline
from swarm.core.wording import counted, size
from swarm.monitor.logic.view import (
    LeaderView,
    MonitorEvent,
    MonitorView,
    PeerView,
    RelayReport,
    RoundView,
    plain,
)
from swarm.run.events import Event, Notice

SORTS: dict[str, tuple[Callable[[PeerView], Any], str]] = {
    "samples/s": (lambda peer: (not peer.fresh, -peer.samples_per_s), "pace"),
    "name": (lambda peer: (not peer.fresh, (peer.name or peer.short).lower()), "name"),
    "epoch": (lambda peer: (not peer.fresh, -peer.epoch), "epoch"),
    "given": (lambda peer: (not peer.fresh, -peer.samples_given), "samples given"),
    "drift": (lambda peer: (not peer.fresh, -(peer.drift or 0.0)), "drift"),
    "age": (lambda peer: -peer.age_s, "age"),
}
Section: TypeAlias = Literal["rounds", "events", "leaders", "experts", "relays"]
_SECTIONS: tuple[Section, ...] = get_args(Section)
_STATUS = {
    "live": ("● live", "green"),
    "joining": ("○ joining", "yellow"),
    "late": ("▲ LATE", "bold yellow"),
    "lost": ("✖ LOST", "bold red"),
}
_RUN_STATUS = {
    "ended": ("■ ended", "bold"),
    "paused": ("‖ paused by its owner", "bold yellow"),
    "empty": ("○ nobody trains", "yellow"),
}
_LEVEL = {"good": "green", "warning": "yellow", "bad": "bold red"}
_STATE = {
    "training": "green",
    "behind": "yellow",
    "idle": "yellow",
    "quiet": "yellow",
    "lost": "red",
    "left": "dim",
}
_COLUMNS = ("peer", "on", "now", "smp/s", "epoch", "gave", "sent", "got", "drift", "reach", "loss")
_LEFT = ("peer", "on", "now")
_LEFT_OUT_FIRST = ("loss", "drift", "got", "reach", "sent", "on", "gave", "epoch", "smp/s", "now")
_NAME_COLUMNS_MIN = 13
_PAGE = 8  # rows
_RELAY_SILENT_S = 15.0  # a relay that has not answered for this long is shown as silent
# texts for a column with the reach that a peer reports
_REACH = {"direct": "yes", "relay": "relay", "relays": "relay", "hidden": "out", "none": "out"}
_BAR = "█▏▎▍▌▋▊▉"
_KEYS = "q quit   ↑↓ choose   enter details   s sort   tab below   "


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStarted(Notice):
    """A page or metrics are served at `url`."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewUpdated(Event):
    """A new view of the run. Its JSON line does not repeat the events."""

    view: MonitorView

    def json_line(self) -> str:
        fields = self.view.as_dict()
        del fields["events"]
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent(Event):
    """Something that happened in the run."""

    happened: MonitorEvent

    def json_line(self) -> str:
        return json.dumps({"event": "event", **plain(dataclasses.asdict(self.happened))}, ensure_ascii=False)


class ViewFeed:
    """Emits each event of the run once, and views at most every `every_s` seconds."""

    def __init__(self, output: Output, every_s: float) -> None:
        self._output, self._every_s = output, every_s
        self._next_s = float("-inf")
        self._number = 0  # number of the last event

    def show(self, view: MonitorView) -> None:
        for event in view.events:
            if event.number > self._number:
                self._number = event.number
                self._output.emit(RunEvent(happened=event))
        if view.at_s >= self._next_s:
            self._next_s = view.at_s + self._every_s
            self._output.emit(ViewUpdated(view=view))


class MonitorPresentation(Presentation):
    """Views and events in words."""

    def sentence(self, event: Event) -> str:
        match event:
            case RunEvent():
                return event.happened.text
            case ViewUpdated():
                return headline(event.view)
        return super().sentence(event)


def headline(view: MonitorView) -> str:
    """Return a view in one sentence."""
    if not view.live:
        age = f" for {view.link.age_s:.0f} s" if view.link.age_s is not None else ""
        return f"nothing seen{age}: {view.link.text or view.link.status}"
    if view.standing != "live":
        state = {"ended": "the run has ended", "paused": "the owner has paused the run"}.get(view.standing)
        return f"epoch {view.epoch:,}: {state or 'nobody trains this run at the moment'}"
    loss = f", loss {view.loss:.3f}" if view.loss is not None else ""
    held_out = f" (held out {view.validation_loss:.3f})" if view.validation_loss is not None else ""
    part = f", {100 * view.fraction:.0f} % of the next" if view.fraction is not None else ""
    people = counted(view.peers_live, "peer")
    return (
        f"epoch {view.epoch:,}{part}{loss}{held_out}, "
        f"{view.samples_per_s:,.0f} samples/s by {people}{_divided(view)}"
    )


def _divided(view: MonitorView) -> str:
    """Return the number of peers in each history; empty if there is only one."""
    if len(view.histories) < 2:
        return ""
    parts = ", ".join(f"{one.peers} in {one.head[:8]}" for one in view.histories)
    return f"; {len(view.histories)} histories: {parts}"


def moved(chosen: int, key: str, rows: int) -> int:
    """Return the chosen row of a table after a key; the same one where the key does not move."""
    steps = {
        "up": -1,
        "k": -1,
        "down": 1,
        "j": 1,
        "page up": -_PAGE,
        "page down": _PAGE,
        "home": -rows,
        "end": rows,
    }
    return min(max(0, chosen + steps[key]), max(0, rows - 1)) if key in steps else chosen


@dataclass(slots=True)
class ScreenState:
    """The user's selection on the screen."""

    sort: str = "samples/s"
    chosen: int = 0
    details: bool = False
    section: Section = "rounds"
    quit: bool = False
    page: str = ""  # where the page is served; "": nowhere
    said: str = ""  # the last alert, or why it could not be sent

    def key(self, name: str, peers: int) -> None:
        """React to a key."""
        if name == "q" or (name == "escape" and not self.details):
            self.quit = name == "q"
        elif name in ("escape", "back"):
            self.details = False
        elif name in ("enter", "d"):
            self.details = not self.details
        elif name == "s":
            names = list(SORTS)
            self.sort = names[(names.index(self.sort) + 1) % len(names)]
        elif name == "tab":
            self.section = _SECTIONS[(_SECTIONS.index(self.section) + 1) % len(_SECTIONS)]
        else:
            self.chosen = moved(self.chosen, name, peers)


@dataclass(frozen=True, slots=True)
class Trends:
    """Recent values of the loss and the throughput; None where there is no value."""

    loss: Sequence[float | None] = ()
    samples_per_s: Sequence[float | None] = ()


def render_screen(
    view: MonitorView, state: ScreenState, trends: Trends, columns: int, rows: int
) -> list[Text]:
    """Return at most `rows` lines of at most `columns` columns."""
    lines = [*_head(view, columns, state), *_numbers(view, trends, columns), Text("")]
    peers = sorted(view.peers, key=SORTS[state.sort][0])
    state.chosen = min(state.chosen, max(0, len(peers) - 1))
    free = rows - len(lines) - 1  # the last line shows the keys
    if state.details and peers:
        lines += _details(peers[state.chosen], view.at_s)[:free]
    else:
        below = max(4, free // 3)
        shown = max(1, min(len(peers), free - below - 1))
        first = min(max(0, state.chosen - shown // 2), max(0, len(peers) - shown))
        lines += _peer_table(peers[first : first + shown], state.chosen - first, columns)
        if not peers:
            lines.append(Text("  no peer takes part at the moment", style="dim"))
        lines += _below(view, state.section, rows - len(lines) - 1)
    lines += [Text("")] * (rows - len(lines) - 1)
    lines.append(Text(f"{_KEYS}{len(peers)} peers by {SORTS[state.sort][1]}", style="dim"))
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
        if not view.live and line is not lines[0]:
            line.stylize("dim")
    return lines[:rows]


def _head(view: MonitorView, columns: int, state: ScreenState) -> list[Text]:
    run, (text, style) = view.run, _STATUS.get(view.link.status, ("?", ""))
    if view.live and view.standing != "live":
        text, style = _RUN_STATUS[view.standing]
    name = run.full_name if len(run.full_name) + 40 < columns else run.name or run.run_id
    title = Text.assemble((f" {name} ", "bold reverse"), "  ", (text, style))
    if view.link.age_s is not None and view.link.status != "live":
        title.append(f"  seen {_ago(view.link.age_s)} ago", style=style)
    elif view.link.entry_answers is False:
        title.append("  the entry peer is gone", style="yellow")
    title.append(f"  {counted(view.peers_live, 'peer')}")
    if view.peers_quiet:
        title.append(f", {view.peers_quiet} silent", style="yellow")
    if view.strangers:
        title.append(f", {counted(view.strangers, 'stranger')}", style="dim")
    about = [run.description, f"{run.parameters:,} parameters" if run.parameters else "", run.mode, run.codec]
    text = view.link.text or " · ".join(filter(None, about))
    lines = [title, Text(f" {text}", style="yellow" if view.link.text else "dim")]
    if state.page:
        lines.append(Text(f" the page is at {state.page}", style="dim"))
    if state.said:
        lines.append(Text(f" {state.said}", style="yellow"))
    if run.message:
        lines.append(Text(f" its owner says: {run.message}"))
    return lines


def _numbers(view: MonitorView, trends: Trends, columns: int) -> list[Text]:
    width = max(10, min(40, columns - 50))
    target = f" of {view.run.target:,}" if view.run.target else ""
    eta = f"  {_ago(view.eta_s)} to go" if view.eta_s is not None and view.eta_s > 2 else ""
    lines = [
        Text.assemble(
            (f" epoch    {view.epoch:>10,}  ", "bold"),
            (bar(view.fraction or 0.0, width), "cyan"),
            f" {view.samples:,.0f}{target}{eta}",
        ),
        Text.assemble(
            (f" loss     {_number(view.loss):>10}  ", "bold"),
            (_spark(trends.loss, width), "magenta"),
            f" held out {_number(view.validation_loss)}" if view.validation_loss is not None else "",
            f"  drift {view.drift:.1e}" if view.drift is not None else "",
        ),
        Text.assemble(
            (f" samples/s{view.samples_per_s:>10,.0f}  ", "bold"),
            (_spark(trends.samples_per_s, width), "green"),
            f" sending {size(view.bytes_per_s)}/s" if view.bytes_per_s else "",
        ),
    ]
    if view.own:
        own = "   ".join(f"{name} {_number(value.median)}" for name, value in view.own.items())
        lines.append(Text(f" {own}"))
    if divided := _divided(view):
        lines.append(Text(f" {divided.removeprefix('; ')}", style="yellow"))
    if view.checkpoint:
        lines.append(Text(f" {view.checkpoint}", style="dim"))
    return lines


def _peer_table(peers: Sequence[PeerView], chosen: int, columns: int) -> list[Text]:
    """Return a heading and a line for each peer. Where not everything fits, columns are left out, and names
    are shortened last.
    """
    cells = [_cells(peer) for peer in peers]
    widths = {name: max([len(name), *(len(row[name]) for row in cells)]) for name in _COLUMNS}
    for name in _LEFT_OUT_FIRST:
        if sum(widths.values()) + len(widths) <= columns:
            break
        del widths[name]
    widths["peer"] -= max(sum(widths.values()) + len(widths) - columns, 0)
    widths["peer"] = max(widths["peer"], _NAME_COLUMNS_MIN)
    head = " ".join(_fit(name, width, left=name in _LEFT) for name, width in widths.items())
    lines = [Text(f" {head}", style="dim")]
    for place, (peer, row) in enumerate(zip(peers, cells, strict=True)):
        line = Text("›" if place == chosen else " ", style="bold" if place == chosen else "")
        for name, width in widths.items():
            style = _STATE.get(peer.state, "") if name == "now" else "" if peer.fresh else "dim"
            line.append(_fit(row[name], width, left=name in _LEFT), style=style)
            line.append(" ")
        if place == chosen:
            line.stylize("reverse")
        if peer.accused_by:
            line.stylize("red")
        lines.append(line)
    return lines


def _cells(peer: PeerView) -> dict[str, str]:
    return {
        "peer": f"{peer.name} {peer.short[-5:]}" if peer.name else peer.short,
        "on": peer.device.split(" ")[0],
        "now": peer.state if peer.fresh or peer.state in ("left", "lost") else f"{_ago(peer.age_s)} ago",
        "smp/s": (f"{peer.samples_per_s:,.0f}" + ("!" if peer.capped else "")) if peer.fresh else "-",
        "epoch": f"{peer.epoch:,}",
        "gave": _ago(peer.contributed_ago_s) if peer.contributed_ago_s is not None else "-",
        "sent": size(peer.up_bytes),
        "got": size(peer.down_bytes),
        "drift": f"{peer.drift:.1e}" if peer.drift is not None else "-",
        "reach": _reach(peer),
        "loss": _number(peer.loss),
    }


def _reach(peer: PeerView) -> str:
    """Return how a peer is reached: whether it answers this monitor, else its own report."""
    said = _REACH.get(peer.reach.partition(" ")[0], "?")
    if peer.reached is not None and said != "relay":
        return "yes" if peer.reached else "no"
    return said if said != "yes" else "?"


def _details(peer: PeerView, now_s: float) -> list[Text]:
    reached = {None: "not called yet", True: "answers this monitor", False: "does not answer this monitor"}[
        peer.reached
    ]
    state = peer.state if peer.idle_s is None else f"idle: it has not trained for {_ago(peer.idle_s)}"
    rows = {
        "peer": peer.peer_id,
        "name": peer.name or "-",
        "state": f"{state}; reported {_ago(peer.age_s)} ago"
        + (f"; here for {_ago(now_s - peer.since_s)}" if peer.since_s else ""),
        "device": f"{peer.device or '-'}   {peer.agent}",
        "reachable": f"{peer.reach or 'does not say'}; {reached}",
        "pace": f"{peer.samples_per_s:,.1f} samples/s"
        + ("; claims more than is believed" if peer.capped else ""),
        "epoch": f"{peer.epoch:,}; {peer.samples:,} samples in it so far",
        "contributed": f"{peer.samples_given:,} samples; "
        f"the last {_ago(peer.contributed_ago_s)} ago in epoch {peer.contributed_epoch}"
        if peer.contributed_ago_s is not None
        else "nothing yet",
        "loss": f"{_number(peer.loss)}; held out {_number(peer.validation_loss)}",
        "sent": f"{size(peer.up_bytes)} ({size(peer.up_bytes_per_s)}/s)",
        "got": f"{size(peer.down_bytes)} ({size(peer.down_bytes_per_s)}/s)",
        "rounds": f"{peer.rounds_done:,}, {peer.rounds_failed:,} failed",
        "drift": f"{peer.drift:.3e}" if peer.drift is not None else "-",
        "history": f"{peer.head[:8] or '-'}; gave up {peer.epochs_given_up:,} epochs",
    }
    rows |= {name: _number(value) for name, value in peer.own.items()}
    if peer.broken:
        rows["not finite"] = ", ".join(peer.broken)
    if peer.accused_by:
        rows["accused"] = f"of lying as a reducer, by {peer.accused_by} peers"
    return [Text.assemble((f" {name:<13}", "dim"), value) for name, value in rows.items()]


def _below(view: MonitorView, section: Section, rows: int) -> list[Text]:
    if rows < 2:
        return []
    title = "   ".join(f"[{name}]" if name == section else name for name in _SECTIONS)
    lines = [Text(f" {title}", style="dim")]
    if section == "rounds":
        half = max(1, (rows - 1) // 2)
        lines += [_round_line(one) for one in view.rounds[:half]]
        lines += (
            [_event_line(one) for one in view.events[-(rows - len(lines)) :]] if rows > len(lines) else []
        )
    elif section == "events":
        lines += [_event_line(one) for one in view.events[-(rows - 1) :]]
    elif section == "leaders":
        lines += [_leader_line(one, place) for place, one in enumerate(view.leaders[: rows - 1], 1)] or [
            Text("  nobody has given anything yet that other peers have witnessed", style="dim")
        ]
    elif section == "relays":
        lines += [_relay_line(relay) for relay in view.relays[: rows - 1]] or [
            Text("  no relay has answered this monitor", style="dim")
        ]
    elif view.experts:
        for expert in view.experts[: rows - 1]:
            load = f"  load {_number(expert.load)}" if expert.load is not None else ""
            lines.append(Text(f" {expert.uid:<24} {counted(expert.servers, 'server')}{load}  {expert.text}"))
    else:
        lines.append(Text("  no experts are declared", style="dim"))
    return lines[:rows]


def _round_line(one: RoundView) -> Text:
    what = "round" if one.kind == "epoch" else one.kind
    members = f"{one.members:>3} peers" if one.members else "  nobody"
    line = Text(
        f" {_clock(one.at_s)} {what:<6}{one.epoch:>7,} {members} {one.seconds:>6.2f} s {size(one.bytes):>8} "
    )
    if one.failed:
        line.append(f"failed: {one.detail or one.reason}", style="yellow")
    elif one.digests > 1:
        line.append("members hold different averages", style="bold red")
    elif one.left or one.failed_for:
        without = (
            ", ".join(f"{peer[-6:]} {why}" for peer, why in one.left.items())
            or f"{one.failed_for} members failed"
        )
        line.append(f"without {without}", style="yellow")
    else:
        line.append(one.digest[:8], style="dim")
    return line


def _leader_line(leader: LeaderView, place: int) -> Text:
    name = f"{leader.name} {leader.short[-5:]}" if leader.name else leader.short
    return Text(f" {place:>3}  {leader.samples:>15,} samples  {leader.rounds:>8,} rounds  {name}")


def _relay_line(relay: RelayReport) -> Text:
    return Text(
        f" {relay.short} {relay.reservations} reservations, {relay.circuits} circuits, "
        f"{size(relay.carried_bytes)} carried, {relay.refused:,} refused"
        + (f"  {_ago(relay.age_s)} ago" if relay.age_s > _RELAY_SILENT_S else "")
    )


def _event_line(event: MonitorEvent) -> Text:
    return Text.assemble((f" {_clock(event.at_s)} ", "dim"), (event.text, _LEVEL.get(event.level, "")))


def bar(fraction: float, width: int) -> str:
    """Draw a bar with a resolution of an eighth of a column."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BAR[rest] if rest else "")).ljust(width, "░")[:width]


def _spark(values: Sequence[float | None], width: int) -> str:
    return sparkline([value for value in values if value is not None], width).ljust(width)


def _fit(text: str, width: int, *, left: bool) -> str:
    text = text if len(text) <= width else text[: width - 1] + "…"
    return text.ljust(width) if left else text.rjust(width)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}" if unit != "min" else f"{seconds / length:.0f} m"
    return f"{seconds:.0f} s"
