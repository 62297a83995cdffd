"""`swarm demo`: a swarm of processes on this machine, watched by this one, which imports neither torch nor
gRPC.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.cli.children import Children
from swarm.cli.demo_state import DemoState
from swarm.cli.monitor import parse_host_port
from swarm.cli.render.output import is_terminal
from swarm.cli.shutdown import Shutdown

# a start that takes longer is taken off the training, down to half of it: nobody wants to wait for a demo
_START_S = 25.0
_START_S_MAX = 120.0  # until everybody trains; several imports of torch on a slow or busy machine included
_GOODBYE_S_MAX = 10.0  # for the last round, once everybody was asked to leave
_LOOK_S = 0.1
_TIDY_S_MAX = 2.3  # after Ctrl-C; above what Children.close takes
_BOOTSTRAP = "bootstrap"
_MONITOR = "monitor"
_LOOPBACK = ("--listen", "127.0.0.1:0", "--identity", "new")


def run_demo(*, volunteers: int, seconds: int, web: str | None, as_json: bool, exit_with_parent: bool) -> int:
    """Start the peers, show what they do, sum up. 0 when the loss went down and every peer left as it should.

    `web`: where a monitor, a further process, serves its page.
    """
    if web is not None:
        parse_host_port(web, "--web")
    names = ["founder", *(f"volunteer {number}" for number in range(2, volunteers + 1))]
    state = DemoState(names, seconds)
    started_s = time.monotonic()
    with (
        Shutdown(exit_with_parent=exit_with_parent, interrupt_s=_TIDY_S_MAX) as leaving,
        _view(as_json) as view,
    ):
        with Children() as children:
            demo = _Demo(children, state, seconds, web)
            demo.begin()
            while demo.going() and not leaving.requested.is_set():
                line = children.next_line(_LOOK_S)
                if line is not None:
                    name, event = line
                    demo.take(name, event)
                    if event is not None and (name != _MONITOR or event.get("url")):
                        view.event(name, event)
                view.show(state, time.monotonic() - started_s)
        summary = state.summary(time.monotonic() - started_s)
        view.summary(summary)
    if leaving.requested.is_set():
        return 0
    better = (
        summary.loss_first is not None
        and summary.loss_last is not None
        and summary.loss_last < summary.loss_first
    )
    return 0 if better and not summary.problems and (summary.digests_equal or volunteers == 1) else 1


class _Demo:
    """Which child is started when, and whether there is anything left to wait for."""

    def __init__(self, children: Children, state: DemoState, seconds: float, web: str | None = None) -> None:
        self._children = children
        self._web = web
        self._state = state
        self._seconds = seconds
        self._address = ""
        self._over: set[str] = set()
        self._begun_s = time.monotonic()
        self._leave_s: float | None = None
        self._asked = False

    def begin(self) -> None:
        self._children.start(_BOOTSTRAP, "bootstrap", *_LOOPBACK)

    def going(self) -> bool:
        """Until every volunteer has ended; asks them to, once they have trained together for as long as was
        asked for.
        """
        now_s = time.monotonic()
        volunteers = self._children.named(self._state.peers)
        if self._over and not volunteers and not self._unread():
            return False
        if self._leave_s is None:
            return self._starting(now_s)
        self._state.trained_s = min(self._seconds, now_s - self._leave_s + self._seconds)
        if now_s > self._leave_s and not self._asked:
            self._asked = True
            for child in volunteers:
                child.terminate()
        if now_s > self._leave_s + _GOODBYE_S_MAX:
            self._state.problems.append("not everybody left when asked to, and was stopped")
            return False
        return True

    def _starting(self, now_s: float) -> bool:
        waited_for = [
            peer
            for peer in self._state.peers.values()
            if peer.contributing_s is None and peer.name not in self._over
        ]
        if not waited_for:
            late_s = max(0.0, now_s - self._begun_s - _START_S)
            self._seconds = max(self._seconds / 2, self._seconds - late_s)
            self._state.planned_s = self._seconds
            self._leave_s = now_s + self._seconds
        elif now_s > self._begun_s + _START_S_MAX:
            slow = ", ".join(f"{peer.name} ({peer.doing})" for peer in waited_for)
            self._state.problems.append(f"not everybody trained within {_START_S_MAX:.0f} s: {slow}")
            return False
        return True

    def _unread(self) -> bool:
        """Whether a volunteer that was started has not yet told its last."""
        return any(name not in self._over for name in self._state.peers if name in self._children)

    def _monitor(self, event: Mapping[str, Any] | None) -> None:
        if event is None and not self._asked and not self._children[_MONITOR].alive:
            self._state.problems.append(f"the monitor ended: {self._children[_MONITOR].error_text()}")
        elif event is not None and event.get("event") == "notice" and event.get("url"):
            self._state.page = event["url"]

    def take(self, name: str, event: Mapping[str, Any] | None) -> None:
        if name == _MONITOR:
            self._monitor(event)
            return
        if event is None:
            child = self._children[name]
            child.process.wait(5.0)  # its output has ended, so it is about to
            self._over.add(name)
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
                "--device",
                "cpu",
                *_LOOPBACK,
                *_named("founder"),
            )
        if name == "founder" and event.get("event") == "run":
            for other in self._state.peers:
                if other != "founder":
                    self._children.start(
                        other, "join", self._address, "--yes", "--device", "cpu", *_LOOPBACK, *_named(other)
                    )
            if self._web is not None:
                self._children.start(
                    _MONITOR,
                    "monitor",
                    self._address,
                    "--run",
                    "demo",
                    "--web",
                    self._web,
                    "--history",
                    "none",
                )


def _named(name: str) -> tuple[str, str]:
    return "--name", name


def _view(as_json: bool) -> Any:
    from swarm.cli.render.demo import LiveView, PlainView, SilentView

    if as_json:
        return SilentView(sys.stdout)
    return LiveView() if is_terminal(sys.stdout) else PlainView(sys.stdout)
