"""`swarm monitor`: a watch on a run, and the faces that were asked for."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from swarm.cli.paths import monitor_history
from swarm.cli.render.output import is_terminal, printable
from swarm.cli.shutdown import Shutdown
from swarm.core.errors import NetworkError, UsageError
from swarm.core.ids import Contact
from swarm.run.limits import parse_duration_s

if TYPE_CHECKING:
    from swarm.monitor.logic.view import MonitorView
    from swarm.monitor.saving import StateSavingConfig
    from swarm.monitor.watching import Watch

_FIRST_LOOK_S = 25.0
_LOOK_S = 0.25
_COURSE_S = 600.0  # how far back the lines of a terminal go
_COURSE_POINTS = 40
_LOGGED_EVERY_S = 10.0  # views in a log; events go there at once
_SENTENCE_EVERY_S = 10.0
_ONCE_COLUMNS = 110
_VIEWS_MAX = 8  # that wait for whoever prints them; the oldest goes


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorChoices:
    """The command's options."""

    address: str
    run: str | None
    web: str | None
    prometheus: str | None
    experts: tuple[str, ...]
    save: Path | None
    every: str
    keep: int
    log: Path | None
    history: str | None
    once: bool
    as_json: bool
    exit_with_parent: bool

    @classmethod
    def of(cls, **options: Any) -> MonitorChoices:
        """From click's values; checks at once what can be checked before anything is started."""
        choices = cls(**options)
        Contact.parse(choices.address)
        for name in ("web", "prometheus"):
            given = getattr(choices, name)
            if given is not None:
                parse_host_port(given, f"--{name}")
        for grid in choices.experts:
            from moe.protocol.names import ExpertUid

            ExpertUid.parse_prefix(grid)
        if parse_duration_s(choices.every) <= 0:
            raise UsageError(f"--every is a time above 0, like 10m, not {choices.every!r:.40}")
        return choices

    def saving(self) -> StateSavingConfig | None:
        """What to keep of the run; None: nothing."""
        if self.save is None:
            return None
        from swarm.monitor.saving import StateSavingConfig

        return StateSavingConfig(
            folder=self.save.expanduser(), every_s=parse_duration_s(self.every), kept_max=self.keep
        )

    def history_of(self, run_id: str) -> Path | None:
        if self.history == "none" or (self.once and self.history is None):
            return None
        return Path(self.history).expanduser() if self.history is not None else monitor_history(run_id)


def parse_host_port(text: str, option: str) -> tuple[str, int]:
    """`HOST:PORT`, as options that serve something take it."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{option} takes HOST:PORT, like 127.0.0.1:8080, not {text!r:.80}")
    return host, int(port)


def run_monitor(choices: MonitorChoices) -> int:
    """Watch until Ctrl-C, SIGTERM, the end of the parent, or `q`."""
    from swarm.monitor.watching import Watch, WatchConfig

    entry = (Contact.parse(choices.address),)
    config = WatchConfig(
        entry=entry,
        run=choices.run,
        history=choices.history_of,
        saving=choices.saving(),
        grids=choices.experts,
    )
    with Shutdown(exit_with_parent=choices.exit_with_parent) as leaving, Watch(config) as watch:
        if watch.notice:
            _tell(choices, watch.notice)
        views: queue.Queue[MonitorView] = queue.Queue(maxsize=_VIEWS_MAX)
        watch.listen(lambda view: _put(views, view))
        first = _first_view(views, leaving)
        if first is None:
            return 0
        if choices.once:
            _print_once(first, as_json=choices.as_json)
            return 0
        with contextlib.ExitStack() as faces:
            log = (
                faces.enter_context(choices.log.expanduser().open("a", encoding="utf-8"))
                if choices.log is not None
                else None
            )
            _serve(choices, watch, faces)
            if choices.as_json:
                _follow(
                    views,
                    first,
                    leaving,
                    [_Lines(sys.stdout), *([_Lines(log, _LOGGED_EVERY_S)] if log else [])],
                )
            elif is_terminal(sys.stdout):
                _live(watch, views, first, leaving, _Lines(log, _LOGGED_EVERY_S) if log else None)
            else:
                _follow(
                    views,
                    first,
                    leaving,
                    [_Sentences(sys.stdout), *([_Lines(log, _LOGGED_EVERY_S)] if log else [])],
                )
        leaving.tidy()
    return 0


def _serve(choices: MonitorChoices, watch: Watch, faces: contextlib.ExitStack) -> None:
    """The page and the metrics, where they were asked for."""
    if choices.web is not None:
        from swarm.monitor.web import WebServer

        server = faces.enter_context(WebServer(watch, parse_host_port(choices.web, "--web")))
        _tell(choices, f"the page is at {server.url}", url=server.url)
    if choices.prometheus is not None:
        from swarm.monitor.prometheus import MetricsServer

        metrics = faces.enter_context(MetricsServer(watch, parse_host_port(choices.prometheus, "--prometheus")))
        _tell(choices, f"metrics are at {metrics.url}", url=metrics.url)


def _tell(choices: MonitorChoices, text: str, **fields: str) -> None:
    if choices.as_json:
        print(json.dumps({"event": "notice", "text": text, **fields}, ensure_ascii=False), flush=True)
    else:
        print(printable(text), file=sys.stderr if choices.once else sys.stdout, flush=True)


def _put(views: queue.Queue[MonitorView], view: MonitorView) -> None:
    while True:
        try:
            views.put_nowait(view)
            return
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                views.get_nowait()


def _first_view(views: queue.Queue[MonitorView], leaving: Shutdown) -> MonitorView | None:
    """The first that somebody answered for."""
    deadline_s = time.monotonic() + _FIRST_LOOK_S
    while not leaving.requested.is_set():
        with contextlib.suppress(queue.Empty):
            view = views.get(timeout=_LOOK_S)
            if view.live:
                return view
        if time.monotonic() > deadline_s:
            raise NetworkError(
                f"nobody told anything about the run within {_FIRST_LOOK_S:.0f} s: try again, or through another peer"
            )
    return None


def _print_once(view: MonitorView, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(view.as_dict(), ensure_ascii=False), flush=True)
        return
    from rich.console import Console

    from swarm.cli.render.monitor import Course, Ui, screen

    console = Console(highlight=False, width=None if is_terminal(sys.stdout) else _ONCE_COLUMNS)
    lines = screen(
        view,
        Ui(),
        Course(),
        console.width,
        12 + len(view.peers) + min(8, len(view.rounds) + len(view.events)),
    )
    for line in lines[:-1]:
        console.print(line, soft_wrap=True)


class _Lines:
    """JSON lines: views, and events each once."""

    def __init__(self, stream: TextIO, every_s: float = 0.0) -> None:
        self._stream, self._every_s = stream, every_s
        self._next_s = float("-inf")
        self._event = 0

    def show(self, view: MonitorView) -> None:
        for value in self._values(view):
            print(json.dumps(value, ensure_ascii=False), file=self._stream, flush=True)

    def _values(self, view: MonitorView) -> Iterator[dict[str, Any]]:
        whole = view.as_dict()
        for event in whole.pop("events"):
            if event["number"] > self._event:
                self._event = event["number"]
                yield {"event": "event", **event}
        if view.at_s >= self._next_s:
            self._next_s = view.at_s + self._every_s
            yield whole


class _Sentences:
    """For pipes and logs that people read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_s = float("-inf")
        self._event = 0

    def show(self, view: MonitorView) -> None:
        for event in view.events:
            if event.number > self._event:
                self._event = event.number
                self._print(event.text)
        if view.at_s >= self._next_s:
            self._next_s = view.at_s + _SENTENCE_EVERY_S
            self._print(headline(view))

    def _print(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)


def headline(view: MonitorView) -> str:
    """A view in a sentence."""
    if not view.live:
        age = f" for {view.link.age_s:.0f} s" if view.link.age_s is not None else ""
        return f"nothing seen{age}: {view.link.text or view.link.status}"
    loss = f", loss {view.loss:.3f}" if view.loss is not None else ""
    held_out = f" (held out {view.validation_loss:.3f})" if view.validation_loss is not None else ""
    part = f" {100 * view.fraction:.0f} %" if view.fraction is not None else ""
    return f"epoch {view.epoch:,}{part}{loss}{held_out}, {view.samples_per_s:,.0f} samples/s by {view.peers_live} peers"


def _follow(
    views: queue.Queue[MonitorView], first: MonitorView, leaving: Shutdown, faces: list[_Lines | _Sentences]
) -> None:
    view: MonitorView | None = first
    while not leaving.requested.is_set():
        for face in faces if view is not None else ():
            face.show(view)  # type: ignore[arg-type]
        try:
            view = views.get(timeout=_LOOK_S)
        except queue.Empty:
            view = None


def _live(
    watch: Watch, views: queue.Queue[MonitorView], first: MonitorView, leaving: Shutdown, log: _Lines | None
) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from swarm.cli.keyboard import Keys
    from swarm.cli.render.monitor import Course, Ui, screen

    console, ui, view = Console(highlight=False), Ui(), first
    course, next_s = Course(), 0.0
    with Live(console=console, screen=True, auto_refresh=False) as live, Keys() as keys:
        while not leaving.requested.is_set() and not ui.quit:
            with contextlib.suppress(queue.Empty):
                while True:
                    view = views.get_nowait()
                    if log is not None:
                        log.show(view)
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + 1.0
                view = watch.view()  # ages move on though nothing was heard
                told = watch.history.series(view.at_s - _COURSE_S, view.at_s, _COURSE_POINTS)["series"]
                course = Course(told.get("loss", ()), told.get("samples_per_s", ()))
            columns, rows = console.size
            live.update(Group(*screen(view, ui, course, columns, rows - 1)), refresh=True)
            key = keys.next(_LOOK_S)
            while key is not None:
                ui.key(key, len(view.peers))
                key = keys.next(0.0)
