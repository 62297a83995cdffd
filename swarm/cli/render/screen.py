"""A terminal with a picture of what happens now, and above it lines of what has happened. Imports rich."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from swarm.cli.render.output import printable


class Screen:
    """The picture appears when it is first shown, and is gone after `stop`."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._live: Live | None = None

    @property
    def shown(self) -> bool:
        """Whether there is a picture now."""
        return self._live is not None

    def show(self, picture: RenderableType) -> None:
        if self._live is None:
            self._live = Live(picture, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._live.update(picture)

    def say(self, text: str) -> None:
        """A line above the picture; nothing for an empty one."""
        if text:
            # what is to be copied must stay in one piece
            self.console.print(Text(printable(text)), soft_wrap=True)

    def stop(self) -> None:
        """Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None
