"""Presentation of `swarm serve`: its events in words, and a table of its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from swarm.cli.render.output import Presentation
from swarm.core.wording import counted
from swarm.membership.invite import is_invite
from swarm.run.events import Event

if TYPE_CHECKING:
    from rich.console import Group

_ROWS_MAX = 20
_NAMES_SHOWN = 8
_TOTALS_EVERY = 10  # a log shows every tenth load event, if samples were computed since the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(Event):
    """The experts are declared and can be called."""

    kind: ClassVar[str] = "serving"
    experts: list[str]
    resumed: list[str]  # experts that were loaded from a checkpoint
    grid: str  # NAME@ID
    created: bool  # True: created by this command
    expert_class: str
    parameters: int  # parameters of one expert
    schema: str
    device: str
    address: str  # address or invite by which callers join
    snippet: str  # Python code that calls the first expert


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Load of one expert: counts since the start, rates since the previous event."""

    name: str
    version: int
    forward_samples: int
    backward_samples: int
    samples_per_s: float
    requests_per_batch: float
    busy: float  # fraction of the time
    refused: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoadShown(Event):
    """Load of the server and its experts."""

    kind: ClassVar[str] = "load"
    queued: int
    wait_s: float
    experts: list[ExpertLoad]


class ServePresentation(Presentation):
    """Sentences for the events of a server, and a table of its busiest experts."""

    picture_events = (ServerLoadShown,)

    def __init__(self) -> None:
        self._loads = 0
        self._samples = 0

    def is_due(self, event: Event) -> bool:
        """Show a load event now and then, and only if samples were computed since the last one."""
        if not isinstance(event, ServerLoadShown):
            return True
        self._loads += 1
        samples = sum(one.forward_samples + one.backward_samples for one in event.experts)
        if self._loads % _TOTALS_EVERY or samples == self._samples:
            return False
        self._samples = samples
        return True

    def sentence(self, event: Event) -> str:
        match event:
            case Served():
                return _served(event)
            case ServerLoadShown():
                rate = sum(one.samples_per_s for one in event.experts)
                forward = sum(one.forward_samples for one in event.experts)
                backward = sum(one.backward_samples for one in event.experts)
                return (
                    f"{forward:,} samples forward, {backward:,} backward, "
                    f"{rate:,.0f} samples/s; {_queue(event)}"
                )
        return super().sentence(event)

    def draw(self, event: Event) -> Group | None:
        return load_table(event) if isinstance(event, ServerLoadShown) else None


def _served(event: Served) -> str:
    names = ", ".join(event.experts[:_NAMES_SHOWN])
    if len(event.experts) > _NAMES_SHOWN:
        names += f" and {len(event.experts) - _NAMES_SHOWN} more"
    resumed = f"; {len(event.resumed)} resumed from a checkpoint" if event.resumed else ""
    count = counted(len(event.experts), "expert")
    return "\n".join(
        (
            f"serving {count} on {event.device}: {names}{resumed}",
            f"  each      {event.expert_class} of {event.parameters:,} parameters, {event.schema}",
            f"  grid      {event.grid}{', created here' if event.created else ''}",
            f"  {'invite ' if is_invite(event.address) else 'address'}   {event.address}",
            "call them from Python:",
            "",
            *(f"    {line}" for line in event.snippet.splitlines()),
            "",
        )
    )


def load_table(load: ServerLoadShown) -> Group:
    """Draw a table of the busiest experts."""
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


def _queue(load: ServerLoadShown) -> str:
    return f"{load.queued} requests queued, a new one waits {1000 * load.wait_s:.0f} ms"
