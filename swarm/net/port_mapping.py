"""A port of the router that passes connections on to this machine, opened with UPnP.

The router of a home lets nobody in, but many forward a port for a program that asks (the protocol of Internet
Gateway Devices). The router lends the
forwarding for half an hour; it is renewed before every check of the verdict, and given back when the node
closes. The router's answer proves nothing, because another router may stand before it: whether others get
through is found out by asking them to call, as without UPnP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

_logger = logging.getLogger(__name__)
T = TypeVar("T")

LEASE_S: Final = 1800  # a check of the verdict, every 600 s at most, renews it
_PORTS_MAX = 4  # that are tried, where other machines have the first ones
_DISCOVER_MS = 2000  # to wait for routers that answer: they may take as long as that
_OPEN_S = 6.0
_CLOSE_S = 0.5  # a node closes in under two seconds
_SEARCH_S = 600.0  # between two searches for a router


class Router(Protocol):
    """What is used of `miniupnpc.UPnP`, whose calls block and raise plain exceptions."""

    lanaddr: str

    def addportmapping(
        self, outer: int, protocol: str, host: str, inner: int, name: str, remote: str, lease_s: int, /
    ) -> bool: ...

    def getspecificportmapping(self, outer: int, protocol: str, /) -> tuple[Any, ...] | None: ...

    def deleteportmapping(self, outer: int, protocol: str, /) -> bool: ...


def find_router() -> Router | None:
    """Return the router of this network that forwards ports by UPnP; None when there is none."""
    import miniupnpc

    router = miniupnpc.UPnP()
    router.discoverdelay = _DISCOVER_MS
    _attempt(router.discover)
    return router if _attempt(router.selectigd) else None


class PortMapping:
    """The forwarding of one TCP port of the router to this machine. It belongs to the network thread; what
    blocks runs on a thread of its own.
    """

    def __init__(self, port: int, find: Callable[[], Router | None] = find_router) -> None:
        """`port` is the one that the node listens on. `find` blocks."""
        self._port, self._find = port, find
        self._router: Router | None = None
        self._searched_s: float | None = None
        self._outer: int | None = None  # the router's port
        self._is_busy = False  # a thread is at work, perhaps for longer than anybody waits

    @property
    def is_open(self) -> bool:
        """Return whether the router has said that it forwards a port."""
        return self._outer is not None

    async def open(self) -> int:
        """Open the port of the router, or renew that. Return the port at which others may get through: this
        node's own if the router does not forward one.
        """
        now_s = asyncio.get_running_loop().time()
        is_due = self._searched_s is None or now_s - self._searched_s >= _SEARCH_S
        if not self._is_busy and (self._router is not None or is_due):
            if self._router is None:
                self._searched_s = now_s
            await self._in_thread(self._open, _OPEN_S)
        return self._outer or self._port

    async def close(self) -> None:
        """Give the port of the router back."""
        router, outer = self._router, self._outer
        if router is not None and outer is not None and not self._is_busy:
            self._outer = None
            await self._in_thread(lambda: _attempt(router.deleteportmapping, outer, "TCP"), _CLOSE_S)

    def _open(self) -> None:
        """Find the router, if it is not known, and a port of it. Blocks."""
        self._router = router = self._router or self._find()
        before, self._outer = self._outer, None
        if router is None:
            return
        first = before or self._port
        for outer in range(first, min(first + _PORTS_MAX, 65536)):
            if self._forward(router, outer):
                self._outer = outer
                if outer != before:
                    _logger.info("the router forwards its port %d to port %d here", outer, self._port)
                return
        self._router = None  # it may have been replaced; the next search finds the new one

    def _forward(self, router: Router, outer: int) -> bool:
        """Return whether the router forwards this port here now. It overwrites no other machine's port."""
        taken = _attempt(router.getspecificportmapping, outer, "TCP")
        here = (router.lanaddr, self._port)
        if taken and tuple(taken[:2]) != here:
            return False
        # some routers lend for ever only
        return any(
            _attempt(router.addportmapping, outer, "TCP", *here, "swarm", "", lease_s)
            for lease_s in (LEASE_S, 0)
        )

    async def _in_thread(self, work: Callable[[], object], timeout_s: float) -> None:
        """Wait until this is done, but no longer than that: a thread is left alone with a router that does
        not answer.
        """
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        self._is_busy = True

        def finish() -> None:
            self._is_busy = False
            done.set()

        def run() -> None:
            try:
                work()
            finally:
                try:
                    loop.call_soon_threadsafe(finish)
                except RuntimeError:
                    _logger.debug("the router answered after this node had closed")

        threading.Thread(target=run, name="asks the router for a port", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), timeout_s)
        except TimeoutError:
            _logger.debug("the router has not answered within %g s", timeout_s)


def _attempt(call: Callable[..., T], *arguments: object) -> T | None:
    """Return the result of a call to the router; None when it refuses, or does not answer."""
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001 -- the library has no exceptions of its own
        _logger.debug("the router refuses: %s", error)
        return None
