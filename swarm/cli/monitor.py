"""`swarm monitor`: watch a run without training, on the terminal, as JSON, on a page, or as metrics."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.finding import given_entry, is_run_name
from swarm.cli.identity import open_entry_identity
from swarm.cli.invite import contacts_of
from swarm.cli.options import parse_host_port
from swarm.cli.paths import monitor_history
from swarm.cli.render import Output, output_kind
from swarm.cli.render.output import JsonOutput, PlainOutput, is_terminal
from swarm.cli.shutdown import Shutdown
from swarm.core.errors import NetworkError, UsageError
from swarm.core.home import user_path
from swarm.core.working import working
from swarm.run.entering import poll_running
from swarm.run.events import Notice
from swarm.run.limits import parse_duration_s

if TYPE_CHECKING:
    from swarm.cli.render.monitor import ScreenState, ViewFeed
    from swarm.monitor.alerting import AlertChannels
    from swarm.monitor.logic.view import MonitorView
    from swarm.monitor.saving import StateSavingConfig
    from swarm.monitor.watching import Watch

_FIRST_VIEW_S = 25.0  # to wait for the first view
_POLL_S = 0.25
_TREND_S = 600.0  # length of the series on a terminal
_TREND_POINTS = 40
_LOG_EVERY_S = 10.0  # interval of views in the file of --log; events are written at once
_SENTENCE_EVERY_S = 10.0  # interval of views in plain lines
_ONCE_COLUMNS = 110
_NOT_ONCE = ("web", "prometheus", "save", "log", "alert_webhook", "alert_command")  # need more than one view
_VIEWS_MAX = 8  # waiting views; the oldest is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorChoices:
    """The options of `swarm monitor`."""

    addresses: tuple[str, ...]
    run: str | None
    web: str | None
    prometheus: str | None
    experts: tuple[str, ...]
    save: Path | None
    every: str
    keep: int
    log: Path | None
    history: str | None
    alert_webhook: str | None
    alert_command: str | None
    once: bool
    as_json: bool
    exit_with_parent: bool

    @classmethod
    def of(cls, **options: Any) -> MonitorChoices:
        """Return the options as click parsed them. Raise UsageError for all that can be checked at once."""
        choices = cls(**options)
        if not any(is_run_name(one) for one in choices.addresses):
            contacts_of(choices.addresses)
        for name in ("web", "prometheus"):
            given = getattr(choices, name)
            if given is not None:
                parse_host_port(given, f"--{name}")
        for grid in choices.experts:
            from moe.protocol.names import ExpertUid

            ExpertUid.parse_prefix(grid)
        choices.alerts()
        ignored = [name for name in _NOT_ONCE if getattr(choices, name)]
        if choices.once and ignored:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
            raise UsageError(f"--once prints the state and exits: leave {names} out, or --once")
        if parse_duration_s(choices.every) <= 0:
            raise UsageError(f"--every is a time above 0, like 10m, not {choices.every!r:.40}")
        return choices

    def checkpoints(self) -> StateSavingConfig | None:
        """Return where and how often to save checkpoints of the run; None for never."""
        if self.save is None:
            return None
        from swarm.monitor.saving import StateSavingConfig

        return StateSavingConfig(
            folder=user_path(self.save), every_s=parse_duration_s(self.every), kept_max=self.keep
        )

    def alerts(self) -> AlertChannels:
        """Return where alerts go."""
        from swarm.monitor.alerting import AlertChannels

        return AlertChannels.parse(self.alert_webhook, self.alert_command)

    def history_file(self, run_id: str) -> Path | None:
        """Return the file in which the history of a run is kept; None for none."""
        if self.history == "none" or (self.once and self.history is None):
            return None
        return user_path(self.history) if self.history is not None else monitor_history(run_id)


@click.command(context_settings=options.CONTEXT)
@click.argument("addresses", metavar="ADDRESS|INVITE|RUN...", nargs=-1, required=True)
@options.run_name
@click.option("--web", metavar="HOST:PORT", default=None, help="Serve a page; port 0 picks a free one.")
@click.option(
    "--prometheus", metavar="HOST:PORT", default=None, help="Serve metrics for Prometheus (docs/metrics.md)."
)
@click.option(
    "--experts",
    metavar="GRID",
    multiple=True,
    help="Show only experts of this grid: ffn. Repeatable.",
)
@click.option(
    "--save",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="Keep checkpoints of the run in this folder.",
)
@click.option(
    "--every", type=options.TIME, default="10m", show_default=True, help="How often to save: 90s, 10m, 2h."
)
@click.option(
    "--keep",
    type=options.BoundedInteger(1, 1000),
    default=5,
    show_default=True,
    help="How many checkpoints to keep.",
)
@click.option(
    "--log",
    metavar="FILE.jsonl",
    type=click.Path(path_type=Path),
    default=None,
    help="Append events and views to a file.",
)
@click.option(
    "--history",
    metavar="FILE",
    default=None,
    help="Where to keep the history; `none` for nowhere. [default: a file for each run]",
)
@click.option(
    "--alert-webhook",
    metavar="URL",
    default=None,
    help="Send alerts there as JSON: the loss diverges, epochs stall, members drop, histories part.",
)
@click.option(
    "--alert-command",
    metavar="COMMAND",
    default=None,
    help="Pass alerts to a command as a mail with its subject: 'sendmail me@example.org'.",
)
@click.option("--once", is_flag=True, help="Print the state once and exit.")
@options.as_json
@options.exit_with_parent
def monitor(addresses: tuple[str, ...], **given: Any) -> int:
    """Watch the run at ADDRESS, as a peer that does not train and that no other peer has to trust.

    Shows progress, loss, throughput, every peer, the last rounds with the reasons of those that failed, and
    other events. Stale values are labelled. ADDRESS is that of any live peer; if this peer leaves, the
    monitor continues through the others. RUN is the name of a run in which this machine took part.

    \b
    Examples:
      swarm monitor /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm monitor bytelm
      swarm monitor ADDRESS --web 127.0.0.1:8080
      swarm monitor ADDRESS --run bytelm --prometheus 0.0.0.0:9464 --log run.jsonl
      swarm monitor ADDRESS --save checkpoints --every 30m
      swarm monitor ADDRESS --alert-command 'sendmail me@example.org'
      swarm monitor ADDRESS --once --json
    """
    choices = MonitorChoices.of(addresses=addresses, **given)
    from swarm.monitor.watching import Watch, WatchConfig

    entry = given_entry(choices.addresses, choices.run, None, (), role="observe")
    assert entry is not None
    config = WatchConfig(
        entry=entry.bootstrap,
        run=entry.run,
        history=choices.history_file,
        saving=choices.checkpoints(),
        grids=choices.experts,
    )
    with (
        Shutdown(exit_with_parent=choices.exit_with_parent) as shutdown,
        contextlib.closing(open_entry_identity(entry.identity, entry.bootstrap)) as own,
        Watch(config, own) as watch,
    ):
        _show(choices, watch, shutdown)
    return 0


def _show(choices: MonitorChoices, watch: Watch, shutdown: Shutdown) -> None:
    """Show the views of the watch until the command should end, or the first one with --once."""
    from swarm.cli.render.monitor import MonitorPresentation, ScreenState, ViewFeed

    output: Output = (
        JsonOutput(sys.stdout)
        if choices.as_json
        else PlainOutput(MonitorPresentation(), sys.stderr if choices.once else sys.stdout)
    )
    if watch.notice:
        output.emit(Notice(text=watch.notice))
    views: queue.Queue[MonitorView] = queue.Queue(maxsize=_VIEWS_MAX)
    watch.listen(lambda view: _put(views, view))
    first = _first_view(views, shutdown)
    if first is None:
        return
    if choices.once:
        _print_once(first, as_json=choices.as_json)
        return
    with contextlib.ExitStack() as stack:
        feeds = []
        if choices.log is not None:
            log = stack.enter_context(user_path(choices.log).open("a", encoding="utf-8"))
            feeds.append(ViewFeed(JsonOutput(log), _LOG_EVERY_S))
        kind, state = output_kind(as_json=choices.as_json), ScreenState()

        def tell(text: str) -> None:
            if kind == "live":  # a line would spoil the screen
                state.said = text
            else:
                output.emit(Notice(text=text))

        state.page = _start_servers(choices, watch, stack, output, tell)
        if kind == "live":
            _run_live(watch, views, state, first, shutdown, feeds)
        else:
            feed = ViewFeed(output, 0.0 if kind == "json" else _SENTENCE_EVERY_S)
            _run_lines(views, first, shutdown, [feed, *feeds])
    shutdown.begin_cleanup()


def _start_servers(
    choices: MonitorChoices,
    watch: Watch,
    stack: contextlib.ExitStack,
    output: Output,
    tell: Callable[[str], None],
) -> str:
    """Start alerts, the page and the metrics, as far as they were requested. Return the page's address."""
    from swarm.cli.render.monitor import ServerStarted

    if channels := choices.alerts():
        from swarm.monitor.alerting import Alerting

        alerting = stack.enter_context(Alerting(channels, tell))
        watch.listen(alerting.on_view)
    page = ""
    if choices.web is not None:
        from swarm.monitor.web import WebServer

        server = stack.enter_context(WebServer(watch, parse_host_port(choices.web, "--web")))
        page = server.url
        output.emit(ServerStarted(text=f"the page is at {page}", url=page))
    if choices.prometheus is not None:
        from swarm.monitor.prometheus import MetricsServer

        place = parse_host_port(choices.prometheus, "--prometheus")
        metrics = stack.enter_context(MetricsServer(watch.view, place))
        output.emit(ServerStarted(text=f"metrics are at {metrics.url}", url=metrics.url))
    return page


def _put(views: queue.Queue[MonitorView], view: MonitorView) -> None:
    """Add a view to the queue. Drop the oldest one if the queue is full."""
    while True:
        try:
            views.put_nowait(view)
            return
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                views.get_nowait()


def _first_view(views: queue.Queue[MonitorView], shutdown: Shutdown) -> MonitorView | None:
    """Wait for the first view with an answer of a peer. Return None if the command should end."""
    first: list[MonitorView] = []

    def poll(timeout_s: float) -> bool:
        with contextlib.suppress(queue.Empty):
            view = views.get(timeout=min(timeout_s, _POLL_S))
            if view.live:
                first.append(view)
        return bool(first) or shutdown.requested.is_set()

    with working("waiting for the first reports of the run"):
        is_seen = poll_running(poll, lambda: _FIRST_VIEW_S)
    if not is_seen:
        raise NetworkError(
            f"no peer reported anything about the run within {_FIRST_VIEW_S:.0f} s: "
            "try again, or through another peer"
        )
    return first[0] if first else None


def _print_once(view: MonitorView, *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(view.as_dict(), ensure_ascii=False), flush=True)
        return
    from rich.console import Console

    from swarm.cli.render.monitor import ScreenState, Trends, render_screen

    console = Console(highlight=False, width=None if is_terminal(sys.stdout) else _ONCE_COLUMNS)
    rows = 12 + len(view.peers) + min(8, len(view.rounds) + len(view.events))
    for line in render_screen(view, ScreenState(), Trends(), console.width, rows)[:-1]:
        console.print(line, soft_wrap=True)


def _run_lines(
    views: queue.Queue[MonitorView], first: MonitorView, shutdown: Shutdown, feeds: list[ViewFeed]
) -> None:
    """Print views as lines until the command should end."""
    view: MonitorView | None = first
    while not shutdown.requested.is_set():
        if view is not None:
            for feed in feeds:
                feed.show(view)
        try:
            view = views.get(timeout=_POLL_S)
        except queue.Empty:
            view = None


def _run_live(
    watch: Watch,
    views: queue.Queue[MonitorView],
    state: ScreenState,
    first: MonitorView,
    shutdown: Shutdown,
    feeds: list[ViewFeed],
) -> None:
    """Show views on the whole terminal until the command should end or the user presses `q`."""
    from rich.console import Console, Group
    from rich.live import Live

    from swarm.cli.keyboard import Keys
    from swarm.cli.render.monitor import Trends, render_screen

    console, view = Console(highlight=False), first
    trends, next_s = Trends(), 0.0
    with Live(console=console, screen=True, auto_refresh=False) as live, Keys() as keys:
        while not shutdown.requested.is_set() and not state.quit:
            with contextlib.suppress(queue.Empty):
                while True:
                    view = views.get_nowait()
                    for feed in feeds:
                        feed.show(view)
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + 1.0
                view = watch.view()  # ages increase even if no peer reports anything
                series = watch.history.series(view.at_s - _TREND_S, view.at_s, _TREND_POINTS)["series"]
                trends = Trends(series.get("loss", ()), series.get("samples_per_s", ()))
            columns, rows = console.size
            live.update(Group(*render_screen(view, state, trends, columns, rows - 1)), refresh=True)
            key = keys.next(_POLL_S)
            while key is not None:
                state.key(key, len(view.peers))
                key = keys.next(0.0)
