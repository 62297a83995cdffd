"""Send a monitor's alerts: as JSON to a web address, and as a mail to a command."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import shlex
import subprocess
import threading
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType

from swarm.core.errors import UsageError
from swarm.monitor.logic.alerts import Alert, Alerts
from swarm.monitor.logic.view import MonitorView

_WAITING_MAX = 20  # unsent alerts; further ones are dropped, and the user is told so
_SEND_S = 15.0
_TRIES = 3
_PAUSE_S = 5.0  # pause after the first failure; three times as long after the second
_STOP_S = 2.0
_TEXT_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertChannels:
    """Where alerts go."""

    webhook: str | None = None  # an http or https address
    # a command with its arguments, which reads a mail's subject and text from standard input; (): none
    command: tuple[str, ...] = ()

    @classmethod
    def parse(cls, webhook: str | None, command: str | None) -> AlertChannels:
        """Return the channels of the options of `swarm monitor`. Raise UsageError when one is wrong."""
        if webhook is not None and not _is_web_address(webhook):
            raise UsageError(
                f"--alert-webhook is an address like https://example.org/hook, not {webhook!r:.80}"
            )
        try:
            words = tuple(shlex.split(command)) if command is not None else ()
        except ValueError as error:
            raise UsageError(f"--alert-command cannot be read: {error}") from None
        if command is not None and not words:
            raise UsageError("--alert-command is a command with its arguments")
        return cls(webhook=webhook, command=words)

    def __bool__(self) -> bool:
        return self.webhook is not None or bool(self.command)


class Alerting:
    """Watches views and sends alerts, from a thread of its own. A context manager."""

    def __init__(
        self, channels: AlertChannels, tell: Callable[[str], None], *, pause_s: float = _PAUSE_S
    ) -> None:
        """`tell` shows the user a sentence about each alert, including those that could not be sent."""
        self._channels, self._tell, self._pause_s = channels, tell, pause_s
        self._alerts = Alerts()
        self._waiting: queue.Queue[Alert | None] = queue.Queue(_WAITING_MAX)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sends alerts", daemon=True)

    def __enter__(self) -> Alerting:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(_STOP_S)

    def on_view(self, view: MonitorView) -> None:
        """Queue a view. Does not block."""
        for alert in self._alerts.step(view):
            try:
                self._waiting.put_nowait(alert)
            except queue.Full:
                self._tell(
                    f"an alert was dropped, because those before it are not sent yet: {_clean(alert.text)}"
                )

    def _run(self) -> None:
        while (alert := self._waiting.get()) is not None:
            self._tell(f"alert: {_clean(alert.text)}")
            if self._channels.webhook is not None:
                self._send(alert, self._post)
            if self._channels.command:
                self._send(alert, self._execute)
            if self._stopping.is_set():
                return

    def _send(self, alert: Alert, send: Callable[[Alert], None]) -> None:
        problem = ""
        for attempt in range(_TRIES):
            if attempt and self._stopping.wait(self._pause_s * 3 ** (attempt - 1)):
                break
            try:
                send(alert)
                return
            except (OSError, http.client.HTTPException, subprocess.SubprocessError, ValueError) as error:
                problem = str(error)
        self._tell(f"an alert could not be sent: {_clean(problem)}")

    def _post(self, alert: Alert) -> None:
        assert self._channels.webhook is not None
        # chat services read the sentence from different fields: Slack from "text", Discord from "content"
        body = {"event": "alert", **asdict(alert), "text": _text(alert), "content": _text(alert)}
        request = urllib.request.Request(
            self._channels.webhook,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "swarm-monitor"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=_SEND_S) as answer:
            answer.read(1024)

    def _execute(self, alert: Alert) -> None:
        subject = f"swarm: {alert.kind} of {alert.run}"
        message = f"Subject: {_clean(subject)}\n\n{_text(alert)}\n"
        done = subprocess.run(
            self._channels.command, input=message.encode(), timeout=_SEND_S, capture_output=True, check=False
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[:200]
            raise OSError(f"{self._channels.command[0]} ended with {done.returncode}: {said}")


def _is_web_address(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        has_port = parts.port != 0  # raises ValueError for what is no port
    except ValueError:
        return False
    is_one_word = text.isprintable() and " " not in text
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port and is_one_word


def _text(alert: Alert) -> str:
    more = f" ({alert.withheld} more of this kind were withheld)" if alert.withheld else ""
    return f"{_clean(alert.run)}: {_clean(alert.text)}{more}"


def _clean(text: str) -> str:
    """Return a text of other peers in one line, without control characters: it becomes part of a mail's
    header.
    """
    kept = "".join(one if unicodedata.category(one)[0] not in "CZ" or one == " " else " " for one in text)
    return kept[:_TEXT_MAX]
