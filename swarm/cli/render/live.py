"""The renderer for a terminal: a picture of the current state below lines of past events. Imports rich."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.live import Live
from rich.prompt import Confirm, IntPrompt
from rich.text import Text

from swarm.cli.render.output import Output, Presentation, printable
from swarm.run.events import Event


class LiveOutput(Output):
    """Shows the picture of a `Presentation`, from the first drawn picture until `close`."""

    def __init__(self, presentation: Presentation, console: Console | None = None) -> None:
        self._presentation = presentation
        self._console = console if console is not None else Console(highlight=False)
        self._live: Live | None = None

    def emit(self, event: Event) -> None:
        presentation = self._presentation
        picture = presentation.draw(event)
        if isinstance(event, presentation.final_events):
            self.close()
        if not isinstance(event, presentation.picture_events):
            self._print(presentation.sentence(event))
        if picture is not None:
            self._show(picture)

    def ask(self, text: str) -> bool:
        return bool(Confirm.ask(Text(text), console=self._console, default=True))

    def choose(self, text: str, count: int) -> int | None:
        numbers = [str(number) for number in range(1, count + 1)]
        return int(IntPrompt.ask(Text(text), console=self._console, choices=numbers))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        if text:
            # Soft wrapping keeps addresses and commands in one piece for copying.
            self._console.print(Text(printable(text)), soft_wrap=True)

    def _show(self, picture: RenderableType) -> None:
        if self._live is None:
            self._live = Live(
                picture,
                console=self._console,
                refresh_per_second=4,
                transient=not self._presentation.keeps_picture,
            )
            self._live.start()
        else:
            self._live.update(picture)
