"""What `swarm serve` shows: JSON lines, plain lines, or a live table of its experts, for the same events."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, TextIO

from swarm.cli.render.output import JsonOutput, Output, is_terminal, printable
from swarm.run.events import Event, Listening, Notice

if TYPE_CHECKING:
    from rich.console import Group

_ROWS_MAX = 20
_NAMES_SHOWN = 8
_TOTALS_EVERY = 10  # loads between lines of a log, unless something was computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(Event):
    """The experts can be called."""

    kind: ClassVar[str] = "serving"
    experts: list[str]
    resumed: list[str]  # those that went on from a checkpoint
    expert_class: str
    parameters: int  # of one expert
    schema: str
    device: str
    address: str  # by which callers join
    snippet: str  # Python that calls the first of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """One expert: counts since the start, rates since the event before."""

    name: str
    version: int
    forward_samples: int
    backward_samples: int
    samples_per_s: float
    requests_per_batch: float
    busy: float  # share of the time
    refused: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad(Event):
    """How busy the server is."""

    kind: ClassVar[str] = "load"
    queued: int
    wait_s: float
    experts: list[ExpertLoad]


def make_view(*, as_json: bool) -> Output:
    """JSON when asked for, a live view on a terminal, plain lines otherwise."""
    if as_json:
        return JsonOutput(sys.stdout)
    return _LiveView() if is_terminal(sys.stdout) else _PlainView(sys.stdout)


class _PlainView:
    """A line per event; of loads one in a while, and only when something was computed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._loads = 0
        self._samples = 0

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def emit(self, event: Event) -> None:
        if isinstance(event, ServerLoad):
            self._loads += 1
            samples = sum(one.forward_samples + one.backward_samples for one in event.experts)
            if self._loads % _TOTALS_EVERY or samples == self._samples:
                return
            self._samples = samples
        text = _sentence(event)
        if text:
            print(printable(text), file=self._stream, flush=True)

    def question(self, text: str) -> bool:
        return False


class _LiveView:
    """Rich's live display: the busiest experts in a table, everything else above it."""

    def __init__(self) -> None:
        from swarm.cli.render.screen import Screen

        self._screen = Screen()

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._screen.stop()

    def question(self, text: str) -> bool:
        return False

    def emit(self, event: Event) -> None:
        if isinstance(event, ServerLoad):
            self._screen.show(_table(event))
        else:
            self._screen.say(_sentence(event))


def _table(load: ServerLoad) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "expert",
        "version",
        "forward",
        "backward",
        "samples/s",
        "requests/batch",
        "busy",
        "refused",
        "failed",
        box=None,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    busiest = sorted(load.experts, key=lambda one: (-one.busy, -one.forward_samples, one.name))
    for one in busiest[:_ROWS_MAX]:
        table.add_row(
            one.name,
            f"{one.version:,}",
            f"{one.forward_samples:,}",
            f"{one.backward_samples:,}",
            f"{one.samples_per_s:,.0f}",
            f"{one.requests_per_batch:.1f}",
            f"{100 * one.busy:.0f} %",
            f"{one.refused:,}",
            f"{one.failed:,}",
        )
    left = len(load.experts) - _ROWS_MAX
    more = f"and {left} that are less busy; " if left > 0 else ""
    return Group(
        table, Text(f"{more}{_queue(load)}. Ctrl-C finishes what is being computed and leaves.", style="dim")
    )


def _sentence(event: Event) -> str:
    match event:
        case Listening():
            return (
                f"peer {event.peer_id} listens at {event.addresses[0]}"
                if event.addresses
                else f"peer {event.peer_id} takes no calls"
            )
        case Served():
            names = ", ".join(event.experts[:_NAMES_SHOWN])
            names += (
                f" and {len(event.experts) - _NAMES_SHOWN} more" if len(event.experts) > _NAMES_SHOWN else ""
            )
            resumed = f"; {len(event.resumed)} resumed from a checkpoint" if event.resumed else ""
            return "\n".join(
                (
                    f"serving {len(event.experts)} expert{'s' if len(event.experts) != 1 else ''} on {event.device}: {names}{resumed}",
                    f"  each      {event.expert_class} of {event.parameters:,} parameters, {event.schema}",
                    f"  address   {event.address}",
                    "call them from Python:",
                    "",
                    *(f"    {line}" for line in event.snippet.splitlines()),
                    "",
                )
            )
        case ServerLoad():
            rate = sum(one.samples_per_s for one in event.experts)
            forward, backward = (
                sum(one.forward_samples for one in event.experts),
                sum(one.backward_samples for one in event.experts),
            )
            return (
                f"{forward:,} samples forward, {backward:,} backward, {rate:,.0f} samples/s; {_queue(event)}"
            )
        case Notice():
            return event.text
    return ""


def _queue(load: ServerLoad) -> str:
    return f"{load.queued} requests queued, a new one waits {1000 * load.wait_s:.0f} ms"
