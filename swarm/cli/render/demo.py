"""Presentation of the demo: a table on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm.cli.demo_state import DemoFinished, DemoPeer, DemoState
from swarm.cli.render.output import Presentation, printable
from swarm.cli.render.text import sparkline
from swarm.core.wording import size
from swarm.run.events import Event

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

_LINE_EVERY_S = 3.0
_BAR = 30  # width in columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEvent(Event):
    """An event of a child process. Only `--json` shows it, with `from` for the name of the child."""

    name: str
    fields: Mapping[str, Any]

    def json_line(self) -> str:
        return json.dumps({"from": self.name, **self.fields}, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStatus(Event):
    """The current state of the demo. `--json` does not show it."""

    state: DemoState
    elapsed_s: float

    def json_line(self) -> str:
        return ""


class DemoPresentation(Presentation):
    """The state of the demo in a line or a table, and its summary."""

    picture_events = (DemoStatus,)
    final_events = (DemoFinished,)
    keeps_picture = True

    def __init__(self) -> None:
        self._next_s = 0.0
        self._page = ""  # address of the monitor's page, once it was printed

    def is_due(self, event: Event) -> bool:
        if isinstance(event, DemoStatus):
            if time.monotonic() < self._next_s:
                return False
            self._next_s = time.monotonic() + _LINE_EVERY_S
        return True

    def sentence(self, event: Event) -> str:
        match event:
            case DemoStatus():
                state = event.state
                page = ""
                if state.page and not self._page:
                    self._page = state.page
                    page = f"watch it at {state.page}\n"
                peers = ", ".join(_short(peer) for peer in state.peers.values())
                return f"{page}{event.elapsed_s:4.0f} s  {headline(state)}  |  {peers}"
            case DemoFinished():
                return closing(event)
        return super().sentence(event)

    def draw(self, event: Event) -> Group | None:
        if not isinstance(event, DemoStatus):
            return None
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        state = event.state
        panel = Panel(
            _body(state, event.elapsed_s),
            title="swarm demo",
            subtitle="Ctrl-C stops everything",
            expand=False,
        )
        below = [Text(f"watch it at {state.page}")] if state.page else []
        below += [Text(f"join from another terminal:\n{state.join_line} --yes")] if state.join_line else []
        return Group(panel, *below)


def _body(state: DemoState, elapsed_s: float) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    numbers = Table.grid(padding=(0, 2))
    numbers.add_row(
        "time",
        f"{state.trained_s:.0f} of {state.planned_s:.0f} s",
        ProgressBar(total=state.planned_s, completed=state.trained_s, width=_BAR),
        f"started {elapsed_s:.0f} s ago",
    )
    numbers.add_row(
        "epoch",
        f"{state.epoch}",
        ProgressBar(total=max(1, state.target), completed=min(state.filled, state.target), width=_BAR),
    )
    losses = state.loss_history()
    held_out = f"held out {state.validation[max(state.validation)]:.3f}" if state.validation else ""
    numbers.add_row("loss", f"{losses[-1]:.3f}" if losses else "-", Text(sparkline(losses, _BAR)), held_out)
    numbers.add_row("swarm", f"{state.swarm_samples_per_s:.0f} samples/s", f"{size(state.sent_bytes)} sent")
    peers = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("peer", "id", "now", "epoch", "samples/s", "samples", "sent", "digest"):
        number = heading in ("epoch", "samples/s", "samples", "sent")
        peers.add_column(heading, justify="right" if number else "left", header_style="dim", no_wrap=True)
    for peer in state.peers.values():
        digest = peer.digests[max(peer.digests)][:6] if peer.digests else ""
        rate = f"{peer.samples_per_s:.0f}" if peer.samples_per_s else ""
        row = (
            peer.name,
            peer.peer_id[-8:],
            peer.status,
            str(peer.epoch),
            rate,
            f"{peer.samples:,}",
            size(peer.sent_bytes),
            digest,
        )
        peers.add_row(*(Text(cell) for cell in row))
    parts: list[RenderableType] = [numbers, Text(""), peers]
    return Group(*parts, *(Text(printable(problem), style="red") for problem in state.problems[-3:]))


def headline(state: DemoState) -> str:
    """Return the state of the demo in one line."""
    losses = state.loss_history()
    loss = f"loss {losses[-1]:.3f}" if losses else "no epoch complete yet"
    held_out = f", held out {state.validation[max(state.validation)]:.3f}" if state.validation else ""
    return (
        f"epoch {state.epoch}: {loss}{held_out}, "
        f"{state.swarm_samples_per_s:.0f} samples/s, {size(state.sent_bytes)} sent"
    )


def closing(finished: DemoFinished) -> str:
    """Return the summary in words."""
    lines = [""]
    if finished.loss_first is not None and finished.loss_last is not None:
        held_out = (
            f" (held out: {finished.validation_loss:.3f})" if finished.validation_loss is not None else ""
        )
        change = f"{finished.loss_first:.3f} -> {finished.loss_last:.3f}"
        lines.append(
            f"loss {change} nats per byte{held_out} in {finished.epochs} epochs, {finished.seconds:.0f} s"
        )
    total = sum(peer["samples"] for peer in finished.peers)
    for peer in finished.peers:
        share = f"{100 * peer['samples'] / total:.0f} %" if total else "0 %"
        joined = (
            f", contributing {peer['contributing_s']:.1f} s after its start"
            if peer["contributing_s"] is not None
            else ""
        )
        failed = f" ({peer['failed_rounds']} failed)" if peer["failed_rounds"] else ""
        lines.append(
            f"  {peer['name']:<12} {peer['peer_id'][-8:]}  {peer['samples']:>7,} samples ({share}) "
            f"in {peer['rounds']} rounds{failed}, sent {size(peer['sent_bytes'])}{joined}"
        )
    if finished.digests_compared:
        verdict = "equal on all peers" if finished.digests_equal else "NOT EQUAL"
        lines.append(
            f"digests of the averages: {verdict}, "
            f"in each of {finished.digests_compared} epochs that two or more completed"
        )
    if finished.join_line:
        lines.append(
            f"while the demo ran, another terminal could have joined with:\n  {finished.join_line} --yes"
        )
    lines += [f"problem: {problem}" for problem in finished.problems]
    return "\n".join(lines)


def _short(peer: DemoPeer) -> str:
    return (
        f"{peer.name} {peer.samples_per_s:.0f}/s"
        if peer.status == "training"
        else f"{peer.name} {peer.status}"
    )
