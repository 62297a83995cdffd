"""The view of a volunteer on a terminal: what happened as lines, what happens now below them."""

from __future__ import annotations

from types import TracebackType

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from swarm.cli.render.output import Output
from swarm.cli.render.plain import sentence, size
from swarm.cli.render.screen import Screen
from swarm.run import events

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY_MAX = 10_000


def sparkline(values: list[float], width: int) -> str:
    """The course of a number in one line of text, the newest at the right; each column is a mean."""
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    columns = []
    for place in range(min(width, len(values))):
        part = values[int(place * step) : max(int((place + 1) * step), int(place * step) + 1)]
        columns.append(sum(part) / len(part))
    low, high = min(columns), max(columns)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in columns)


class LiveOutput:
    """Rich's live display; epochs update it, everything else is printed above."""

    def __init__(self) -> None:
        self._screen = Screen()
        self._losses: list[float] = []
        self._validation: float | None = None
        self._last: events.EpochDone | None = None
        self._now: events.TrainingProgress | None = None
        self._target = 0
        self._sent = 0

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._screen.stop()

    def question(self, text: str) -> bool:
        return bool(Confirm.ask(Text(text), console=self._screen.console, default=True))

    def emit(self, event: events.Event) -> None:
        match event:
            case events.RunFound():
                self._target = event.target_batch_size
                self._print(event)
            case events.Joined():
                self._print(event)
                self._screen.show(self._view())
            case events.TrainingProgress():
                self._now = event
            case events.EpochDone():
                self._last, self._now = event, None
                self._losses = [*self._losses[-_HISTORY_MAX:], event.loss]
                self._validation = (
                    event.validation_loss if event.validation_loss is not None else self._validation
                )
                self._sent += event.sent_bytes
            case events.Finished():
                self._screen.stop()
                self._print(event)
            case _:
                self._print(event)
        if self._screen.shown:
            self._screen.show(self._view())

    def _print(self, event: events.Event) -> None:
        self._screen.say(sentence(event))

    def _view(self) -> Group:
        last, now = self._last, self._now
        if last is None and now is None:
            return Group(Text("waiting for the first epoch"))
        table = Table.grid(padding=(0, 2))
        epoch = now.epoch if now is not None else last.epoch if last is not None else 0
        rate, swarm_rate = (now.samples_per_s, now.swarm_samples_per_s) if now is not None else (0.0, 0.0)
        if now is None and last is not None:
            rate, swarm_rate = last.samples_per_s, last.swarm_samples_per_s
        filled = now.swarm_samples if now is not None else 0
        table.add_row(
            "epoch", f"{epoch:,}", ProgressBar(total=max(1, self._target), completed=filled, width=30)
        )
        loss = f"{self._losses[-1]:.3f}" if self._losses else "-"
        held_out = f"held out {self._validation:.3f}" if self._validation is not None else ""
        table.add_row("loss", loss, Text(sparkline(self._losses, 30)), held_out)
        peers = now.peers if now is not None else last.peers if last is not None else 0
        table.add_row(
            "samples/s", f"{rate:.0f}", f"{swarm_rate:.0f} by {peers} peer{'s' if peers != 1 else ''}"
        )
        table.add_row(
            "sent", size(self._sent), f"last round {last.round_s:.2f} s" if last is not None else ""
        )
        return Group(table, Text("Ctrl-C leaves; the others go on.", style="dim"))
