"""`swarm demo`: a swarm of processes on this machine. This process only watches them, and imports neither
torch nor gRPC.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from swarm.cli import options
from swarm.cli.children import Children
from swarm.cli.demo_state import DemoState
from swarm.cli.options import parse_host_port
from swarm.cli.render import make_output
from swarm.cli.render.demo import ChildEvent, DemoPresentation, DemoStatus
from swarm.cli.shutdown import Shutdown

# If the start takes longer than this, the training is shortened, at most by half, to keep the demo short.
_START_S = 25.0
_START_S_MAX = 120.0  # until all volunteers train, including several imports of torch on a slow machine
_LEAVE_S_MAX = 10.0  # for the last round, once all volunteers were asked to leave
_POLL_S = 0.1
_CLEANUP_S_MAX = 2.3  # after Ctrl-C; more than `Children.close` takes
_BOOTSTRAP = "bootstrap"
_MONITOR = "monitor"
_LOOPBACK = ("--listen", "127.0.0.1:0", "--identity", "new")
_TRAINING = (*_LOOPBACK, "--device", "cpu", "--preset", "local")


@click.command(context_settings=options.CONTEXT)
@click.option(
    "--volunteers",
    type=options.BoundedInteger(1, 16),
    default=3,
    show_default=True,
    help="How many volunteers train, including the one that creates the run.",
)
@click.option(
    "--seconds",
    type=options.BoundedInteger(5, 3600),
    default=60,
    show_default=True,
    help="How long they train together.",
)
@click.option(
    "--web",
    metavar="HOST:PORT",
    default=None,
    help="Also start a monitor that serves its page there; port 0 picks a free one.",
)
@options.as_json
@options.exit_with_parent
def demo(volunteers: int, seconds: int, web: str | None, as_json: bool, exit_with_parent: bool) -> int:
    """Train a small language model with several peers on this machine.

    A bootstrap peer and some volunteers, each a process of its own, learn the Python standard library's
    sources byte by byte. Nothing leaves this machine, and nothing is left running.

    \b
    Examples:
      swarm demo
      swarm demo --volunteers 5 --seconds 120
      swarm demo --web 127.0.0.1:8080
      swarm demo --json > demo.jsonl
    """
    if web is not None:
        parse_host_port(web, "--web")
    names = ["founder", *(f"volunteer {number}" for number in range(2, volunteers + 1))]
    state = DemoState(names, seconds)
    started_s = time.monotonic()
    with (
        Shutdown(exit_with_parent=exit_with_parent, interrupt_s=_CLEANUP_S_MAX) as shutdown,
        make_output(DemoPresentation(), as_json=as_json) as output,
    ):
        with Children() as children:
            running = _Demo(children, state, seconds, web)
            running.start()
            while running.goes_on() and not shutdown.requested.is_set():
                line = children.next_line(_POLL_S)
                if line is not None:
                    name, event = line
                    running.on_event(name, event)
                    if event is not None and (name != _MONITOR or event.get("url")):
                        output.emit(ChildEvent(name=name, fields=event))
                output.emit(DemoStatus(state=state, elapsed_s=time.monotonic() - started_s))
        summary = state.summary(time.monotonic() - started_s)
        output.emit(summary)
    if shutdown.requested.is_set():
        return 0
    learned = (
        summary.loss_first is not None
        and summary.loss_last is not None
        and summary.loss_last < summary.loss_first
    )
    return 0 if learned and not summary.problems and (summary.digests_equal or volunteers == 1) else 1


class _Demo:
    """Starts and stops the children, and decides when the demo ends."""

    def __init__(self, children: Children, state: DemoState, seconds: float, web: str | None = None) -> None:
        self._children = children
        self._web = web
        self._state = state
        self._seconds = seconds
        self._address = ""
        self._ended: set[str] = set()
        self._started_s = time.monotonic()
        self._leave_s: float | None = None
        self._asked_to_leave = False

    def start(self) -> None:
        self._children.start(_BOOTSTRAP, "bootstrap", *_LOOPBACK)

    def goes_on(self) -> bool:
        """Return whether a volunteer is still running. Ask all of them to leave when the time is over."""
        now_s = time.monotonic()
        volunteers = self._children.named(self._state.peers)
        if self._ended and not volunteers and not self._unread():
            return False
        if self._leave_s is None:
            return self._wait_for_start(now_s)
        self._state.trained_s = min(self._seconds, now_s - self._leave_s + self._seconds)
        if now_s > self._leave_s and not self._asked_to_leave:
            self._asked_to_leave = True
            for child in volunteers:
                child.terminate()
        if now_s > self._leave_s + _LEAVE_S_MAX:
            self._state.problems.append("not all volunteers left when asked to, and the rest were stopped")
            return False
        return True

    def _wait_for_start(self, now_s: float) -> bool:
        waited_for = [
            peer
            for peer in self._state.peers.values()
            if peer.contributing_s is None and peer.name not in self._ended
        ]
        if not waited_for:
            late_s = max(0.0, now_s - self._started_s - _START_S)
            self._seconds = max(self._seconds / 2, self._seconds - late_s)
            self._state.planned_s = self._seconds
            self._leave_s = now_s + self._seconds
        elif now_s > self._started_s + _START_S_MAX:
            slow = ", ".join(f"{peer.name} ({peer.status})" for peer in waited_for)
            self._state.problems.append(f"not all volunteers trained within {_START_S_MAX:.0f} s: {slow}")
            return False
        return True

    def _unread(self) -> bool:
        """Return whether the output of a volunteer has not ended yet."""
        return any(name not in self._ended for name in self._state.peers if name in self._children)

    def _on_monitor_event(self, event: Mapping[str, Any] | None) -> None:
        if event is None and not self._asked_to_leave and not self._children[_MONITOR].alive:
            self._state.problems.append(f"the monitor ended: {self._children[_MONITOR].error_text()}")
        elif event is not None and event.get("event") == "notice" and event.get("url"):
            self._state.page = event["url"]

    def on_event(self, name: str, event: Mapping[str, Any] | None) -> None:
        if name == _MONITOR:
            self._on_monitor_event(event)
            return
        if event is None:
            child = self._children[name]
            child.process.wait(5.0)  # its output has ended, so the process is about to end
            self._ended.add(name)
            self._state.ended(name, child.error_text() if child.process.returncode else None)
            return
        self._state.apply(name, event)
        if name == _BOOTSTRAP and event.get("event") == "listening":
            self._address = event["addresses"][0]
            self._children.start(
                "founder",
                "start",
                str(Path(__file__).with_name("demo.toml")),
                "--bootstrap",
                self._address,
                *_TRAINING,
                "--name",
                "founder",
            )
        if name == "founder" and event.get("event") == "run":
            for other in self._state.peers:
                if other != "founder":
                    self._children.start(
                        other,
                        "join",
                        self._state.invite,
                        "--yes",
                        *_TRAINING,
                        "--name",
                        other,
                    )
            if self._web is not None:
                self._children.start(
                    _MONITOR,
                    "monitor",
                    self._state.invite,
                    "--run",
                    "demo",
                    "--web",
                    self._web,
                    "--history",
                    "none",
                )
