"""How the demo shows itself: a table that moves on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm.cli.demo_state import DemoFinished, DemoState
from swarm.cli.render.live import sparkline
from swarm.cli.render.output import printable
from swarm.cli.render.plain import size

_LINE_EVERY_S = 3.0
_BAR = 30  # columns


class DemoView(Protocol):
    """A context manager that is told what comes and shows what is."""

    def __enter__(self) -> DemoView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def event(self, name: str, event: Mapping[str, Any]) -> None: ...

    def show(self, state: DemoState, elapsed_s: float) -> None: ...

    def summary(self, finished: DemoFinished) -> None: ...


class PlainView:
    """A line every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_s = 0.0
        self._page = ""  # that was told

    def __enter__(self) -> DemoView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def event(self, name: str, event: Mapping[str, Any]) -> None:
        return None

    def show(self, state: DemoState, elapsed_s: float) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _LINE_EVERY_S
        if state.page and not self._page:
            self._page = state.page
            self._print(f"watch it at {state.page}")
        self._print(
            f"{elapsed_s:4.0f} s  {headline(state)}  |  "
            + ", ".join(_short(peer) for peer in state.peers.values())
        )

    def summary(self, finished: DemoFinished) -> None:
        self._print(closing(finished))

    def _print(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)


class LiveView:
    """Rich's live display."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(Text("starting a bootstrap peer"), console=self._console, refresh_per_second=8)

    def __enter__(self) -> DemoView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def event(self, name: str, event: Mapping[str, Any]) -> None:
        return None

    def show(self, state: DemoState, elapsed_s: float) -> None:
        panel = Panel(
            self._body(state, elapsed_s), title="swarm demo", subtitle="Ctrl-C stops everything", expand=False
        )
        below = [Text(f"watch it at {state.page}")] if state.page else []
        below += [Text(f"join from another terminal:\n{state.join_line} --yes")] if state.join_line else []
        self._live.update(Group(panel, *below))

    def summary(self, finished: DemoFinished) -> None:
        self._live.stop()
        # an address must stay in one piece to be copied
        self._console.print(Text(printable(closing(finished))), soft_wrap=True)

    def _body(self, state: DemoState, elapsed_s: float) -> Group:
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
        course = state.loss_course()
        held_out = f"held out {state.validation[max(state.validation)]:.3f}" if state.validation else ""
        numbers.add_row(
            "loss", f"{course[-1]:.3f}" if course else "-", Text(sparkline(course, _BAR)), held_out
        )
        numbers.add_row(
            "swarm", f"{state.swarm_samples_per_s:.0f} samples/s", f"{size(state.sent_bytes)} sent"
        )
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
                peer.doing,
                str(peer.epoch),
                rate,
                f"{peer.samples:,}",
                size(peer.sent_bytes),
                digest,
            )
            peers.add_row(*(Text(cell) for cell in row))
        parts: list[RenderableType] = [numbers, Text(""), peers]
        return Group(*parts, *(Text(printable(problem), style="red") for problem in state.problems[-3:]))


class SilentView:
    """With `--json`: every event of every child, with `from` naming the child."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> DemoView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def event(self, name: str, event: Mapping[str, Any]) -> None:
        import json

        print(json.dumps({"from": name, **event}, ensure_ascii=False), file=self._stream, flush=True)

    def show(self, state: DemoState, elapsed_s: float) -> None:
        return None

    def summary(self, finished: DemoFinished) -> None:
        print(finished.json_line(), file=self._stream, flush=True)


def headline(state: DemoState) -> str:
    course = state.loss_course()
    loss = f"loss {course[-1]:.3f}" if course else "no epoch complete yet"
    held_out = f", held out {state.validation[max(state.validation)]:.3f}" if state.validation else ""
    return f"epoch {state.epoch}: {loss}{held_out}, {state.swarm_samples_per_s:.0f} samples/s, {size(state.sent_bytes)} sent"


def closing(finished: DemoFinished) -> str:
    """The summary in words."""
    lines = [""]
    if finished.loss_first is not None and finished.loss_last is not None:
        held_out = (
            f" (held out: {finished.validation_loss:.3f})" if finished.validation_loss is not None else ""
        )
        course = f"{finished.loss_first:.3f} -> {finished.loss_last:.3f}"
        lines.append(
            f"loss {course} nats per byte{held_out} in {finished.epochs} epochs, {finished.seconds:.0f} s"
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
            f"  {peer['name']:<12} {peer['peer_id'][-8:]}  {peer['samples']:>7,} samples ({share}) in {peer['rounds']} rounds{failed}, "
            f"sent {size(peer['sent_bytes'])}{joined}"
        )
    if finished.digests_compared:
        verdict = "equal on all peers" if finished.digests_equal else "NOT EQUAL"
        lines.append(
            f"digests of the averages: {verdict}, in each of {finished.digests_compared} epochs that two or more completed"
        )
    if finished.join_line:
        lines.append(f"while it ran, another terminal could have joined with:\n  {finished.join_line} --yes")
    lines += [f"problem: {problem}" for problem in finished.problems]
    return "\n".join(lines)


def _short(peer: Any) -> str:
    return (
        f"{peer.name} {peer.samples_per_s:.0f}/s" if peer.doing == "training" else f"{peer.name} {peer.doing}"
    )
