"""The renderer for a terminal: a picture of the current state below lines of past events. Imports rich."""

from __future__ import annotations

import threading
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.prompt import Confirm, IntPrompt
from rich.table import Table
from rich.text import Text

from swarm.cli.render.output import Output, Presentation, printable
from swarm.core.working import Work
from swarm.run.events import Event

_BAR_COLUMNS: Final = 24


class LiveOutput(Output):
    """Shows the picture of a `Presentation`, from the first drawn picture until `close`."""

    def __init__(self, presentation: Presentation, console: Console | None = None) -> None:
        self._presentation = presentation
        self._console = console if console is not None else Console(highlight=False)
        self._live: Live | None = None
        self._picture: RenderableType | None = None  # that of the presentation
        self._works: dict[str, Work] = {}  # shown below it
        self._lock = threading.RLock()  # work is shown from other threads

    def emit(self, event: Event) -> None:
        presentation = self._presentation
        with self._lock:
            picture = presentation.draw(event)
            if isinstance(event, presentation.final_events):
                self.close()
            if not isinstance(event, presentation.picture_events):
                self._print(presentation.sentence(event))
            if picture is not None:
                self._picture = picture
                self._show()

    def show_work(self, work: Work) -> None:
        """Show a bar below the picture while the work lasts."""
        with self._lock:
            if work.is_over:
                self._works.pop(work.what, None)
            else:
                self._works[work.what] = work
            self._show()

    def ask(self, text: str) -> bool:
        return bool(Confirm.ask(Text(text), console=self._console, default=True))

    def choose(self, text: str, count: int) -> int | None:
        numbers = [str(number) for number in range(1, count + 1)]
        return int(IntPrompt.ask(Text(text), console=self._console, choices=numbers))

    def close(self) -> None:
        with self._lock:
            self._picture = None
            self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        if text:
            # Soft wrapping keeps addresses and commands in one piece for copying.
            self._console.print(Text(printable(text)), soft_wrap=True)

    def _show(self) -> None:
        """Show the picture and the bars; without both, leave the terminal as it is."""
        parts = [] if self._picture is None else [self._picture]
        parts += [_bar(work) for work in self._works.values()]
        if not parts:
            self._stop()
        elif self._live is None:
            self._live = Live(
                Group(*parts),
                console=self._console,
                refresh_per_second=4,
                transient=not self._presentation.keeps_picture,
            )
            self._live.start()
        else:
            self._live.update(Group(*parts))


def _bar(work: Work) -> RenderableType:
    """Return a line with a bar; the bar moves to and fro where the total is not known."""
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(work.total, 1), completed=work.done, width=_BAR_COLUMNS, pulse=not work.total)
    line.add_row(bar, Text(printable(work.text), style="dim", no_wrap=True, overflow="ellipsis"))
    return line
