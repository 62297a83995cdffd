"""Web page of a monitor: static files of the package, history as JSON, and updates as server-sent events. The
page loads nothing from other hosts.

Runs on the node's network loop, which has no other work in a monitor. All routes only read, so cross-site
request forgery has no target.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import ipaddress
import json
import mimetypes
import socket
import urllib.parse
from collections.abc import AsyncIterator
from importlib import resources
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.core.errors import UsageError
from swarm.core.notify import ChangeEvent
from swarm.monitor.logic.view import MonitorEvent, MonitorView, PeerView, plain
from swarm.monitor.watching import Watch

_CLIENTS_MAX = 64
# a page receives a message at least this often, which shows that the monitor is alive and the age of the
# values
_HEARTBEAT_S = 3.0
_SHARED_S = 0.5
_START_S = 10.0
_STOP_S = 1.5
_POINTS = 600
_SPAN_S_MAX = 10 * 365 * 86400.0
_FILES = (
    "index.html",
    "style.css",
    "page.js",
    "charts.js",
    "format.js",
    "tables.js",
    "icon.svg",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css",
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclasses.dataclass(slots=True, eq=False)
class Client:
    """One open page, and the data that was sent to it."""

    changed: ChangeEvent
    sent: dict[str, int] = dataclasses.field(default_factory=dict)  # PeerID -> hash of its row
    event: int = 0


class EventStream:
    """Updates for the open pages; each page receives only changes."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._clients: set[Client] = set()
        self._closed = False
        self._page_state: tuple[float, PageState] | None = None
        watch.listen(self._on_view)

    def _on_view(self, view: MonitorView) -> None:
        self._page_state = None
        for client in self._clients:
            client.changed.notify()

    def close(self) -> None:
        self._closed = True
        for client in self._clients:
            client.changed.notify()

    def _latest(self) -> PageState:
        """Return the current state. It is computed once for all pages that ask within half a second, because
        it is slow for a thousand peers.
        """
        now_s = asyncio.get_running_loop().time()
        if self._page_state is None or now_s - self._page_state[0] > _SHARED_S:
            self._page_state = now_s, PageState.of(self._watch.view_now())
        return self._page_state[1]

    @property
    def full(self) -> bool:
        return len(self._clients) >= _CLIENTS_MAX

    async def messages(self) -> AsyncIterator[str]:
        """Yield server-sent events for one page until it closes or the monitor does."""
        client = Client(ChangeEvent())
        self._clients.add(client)
        try:
            yield "retry: 1000\n\n"
            while not self._closed:
                update = json.dumps(update_for(client, self._latest()), ensure_ascii=False)
                yield f"event: view\ndata: {update}\n\n"
                await client.changed.wait(_HEARTBEAT_S)
        finally:
            self._clients.discard(client)


@dataclasses.dataclass(frozen=True, slots=True)
class PageState:
    """A view in the form that is sent to pages."""

    sums: dict[str, Any]
    rows: dict[str, tuple[int, dict[str, Any]]]  # PeerID -> (hash of the row, row)
    events: tuple[MonitorEvent, ...]

    @classmethod
    def of(cls, view: MonitorView) -> PageState:
        whole = {
            field.name: getattr(view, field.name)
            for field in dataclasses.fields(view)
            if field.name not in ("peers", "events")
        }
        rows = {peer.peer_id: row_of(peer, view.at_s) for peer in view.peers}
        marked = {peer_id: (hash(json.dumps(row)), row) for peer_id, row in rows.items()}
        return cls(plain({name: _plain(value) for name, value in whole.items()}), marked, view.events)


def update_for(client: Client, page_state: PageState) -> dict[str, Any]:
    """Return the update for a page (sums, changed rows of peers, and new events), and record it as sent."""
    changed = [row for peer_id, (mark, row) in page_state.rows.items() if client.sent.get(peer_id) != mark]
    gone = [peer_id for peer_id in client.sent if peer_id not in page_state.rows]
    client.sent = {peer_id: mark for peer_id, (mark, _) in page_state.rows.items()}
    events = [event for event in page_state.events if event.number > client.event]
    client.event = max([client.event, *(event.number for event in events)])
    return page_state.sums | {
        "peers": changed,
        "gone": gone,
        "events": plain([dataclasses.asdict(event) for event in events]),
    }


def row_of(peer: PeerView, now_s: float) -> dict[str, Any]:
    """Return the row of a peer. It contains times instead of ages, so that it changes only when the peer
    publishes.
    """
    row = {
        name: value
        for name, value in dataclasses.asdict(peer).items()
        if name not in ("age_s", "contributed_ago_s")
    }
    row["updated_s"] = round(now_s - peer.age_s, 1)
    row["contributed_s"] = (
        round(now_s - peer.contributed_ago_s, 1) if peer.contributed_ago_s is not None else None
    )
    plain_row: dict[str, Any] = plain(row)
    return plain_row


def make_app(watch: Watch, stream: EventStream) -> Starlette:
    """Return the application with its routes. All of them accept GET only."""
    files = {name: _file(name) for name in _FILES}

    async def static(request: Request) -> Response:
        found = files.get(request.path_params.get("path") or "index.html")
        if found is None:
            return PlainTextResponse("there is no such page", 404, headers=_HEADERS)
        return Response(found[0], media_type=found[1], headers=_HEADERS)

    async def view(request: Request) -> Response:
        return JSONResponse(watch.view_now().as_dict(), headers=_HEADERS)

    async def history(request: Request) -> Response:
        asked = request.query_params
        until_s = _number(asked.get("until"), watch.node.clock.swarm_s())
        span_s = min(max(_number(asked.get("span"), 3600.0), 10.0), _SPAN_S_MAX)
        since_s = _number(asked.get("since"), until_s - span_s)
        points = int(min(max(_number(asked.get("points"), _POINTS), 2), 4000))
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            None, functools.partial(watch.history.series, since_s, until_s, points)
        )
        found["began"] = await loop.run_in_executor(None, watch.history.began_s)
        return JSONResponse(plain(found), headers=_HEADERS)

    async def events(request: Request) -> Response:
        if stream.full:
            return PlainTextResponse(f"{_CLIENTS_MAX} pages are open already", 503, headers=_HEADERS)
        return StreamingResponse(
            stream.messages(), media_type="text/event-stream", headers=_HEADERS | {"X-Accel-Buffering": "no"}
        )

    return Starlette(
        routes=[
            Route("/api/view", view),
            Route("/api/history", history),
            Route("/api/events", events),
            Route("/", static),
            Route("/{path:path}", static),
        ]
    )


def names_this_machine(host: str) -> bool:
    """Return whether a request's Host header is an address, or a name of this machine. Any other name
    indicates DNS rebinding: a foreign site pointed its name at this machine to read the page through a
    browser.
    """
    own = socket.gethostname().lower()
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", own, f"{own.split('.')[0]}.local") or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class HostCheck:
    """Wraps the application; forwards only requests whose Host header names this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not names_this_machine(Headers(scope=scope).get("host", "")):
            refusal = PlainTextResponse("this page is not served under that name", 421, headers=_HEADERS)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


class WebServer:
    """Server of the page at host:port, as a context manager. Raise UsageError when the port cannot be
    used.
    """

    def __init__(self, watch: Watch, address: tuple[str, int]) -> None:
        self._watch = watch
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(128)
            self._socket.setblocking(False)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise UsageError(f"--web {address[0]}:{address[1]} cannot be served: {error}") from None
        shown = (
            "127.0.0.1" if address[0] == "0.0.0.0" else f"[{address[0]}]" if ":" in address[0] else address[0]
        )
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/"

    def __enter__(self) -> WebServer:
        self._watch.node.network.run(self._start(), _START_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(TimeoutError):
            self._watch.node.network.run(self._stop(), _STOP_S)
        self._socket.close()

    async def _start(self) -> None:
        self._stream = EventStream(self._watch)
        config = uvicorn.Config(
            HostCheck(make_app(self._watch, self._stream)),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
            limit_concurrency=4 * _CLIENTS_MAX,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._task = self._watch.node.supervisor.spawn(
            "the monitor's page", lambda: self._server.serve(sockets=[self._socket])
        )

    async def _stop(self) -> None:
        self._stream.close()
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=_STOP_S - 0.3)


def _file(name: str) -> tuple[bytes, str]:
    found = resources.files("swarm.monitor").joinpath("static").joinpath(name)
    return found.read_bytes(), mimetypes.guess_type(name)[0] or "application/octet-stream"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _number(text: str | None, default: float) -> float:
    """Return the finite number in a query parameter, or `default` for anything else."""
    try:
        value = float(text) if text is not None else default
    except ValueError:
        return default
    return value if abs(value) < 1e12 else default
