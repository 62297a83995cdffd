"""Port forwarding by the router to this machine, requested with UPnP.

A home router blocks incoming connections, but many forward a port on request (Internet Gateway Device
protocol). The lease lasts half an hour. It is renewed before every check of reachability, and released when
the node closes. The router's answer proves nothing, because there may be another router behind it. As without
UPnP, other peers are asked to call back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

_logger = logging.getLogger(__name__)

LEASE_S: Final = 1800  # a check of the verdict, every 600 s at most, renews it
_PORTS_MAX = 4  # ports that are tried if other machines use the first ones
# Timeout of answers for each of the four kinds of routers, which the library searches in sequence. A search
# takes at least this long. A later answer is read during the search for the next kind.
_DISCOVER_MS = 500
# a node waits this long for a search; where no router forwards ports, a search takes two seconds
_FOUND_S = 1.2
_CALL_S = 4.0
_CLOSE_S = 0.5  # a node must close in under two seconds
_SEARCH_S = 600.0  # interval of searches for a router


def find_router() -> Any:
    """Return the `miniupnpc.UPnP` of the router of this network. This function and the methods of the result
    block, and raise Exception if no router answers or it refuses.
    """
    import miniupnpc

    router = miniupnpc.UPnP()
    router.discoverdelay = _DISCOVER_MS
    router.discover()
    router.selectigd()
    return router


class PortMapping:
    """The forwarding of one TCP port of the router to this machine. It belongs to the network thread; calls
    to the router run on another one.
    """

    def __init__(
        self,
        port: int,
        find: Callable[[], Any] = find_router,
        on_found: Callable[[], None] = lambda: None,
    ) -> None:
        """`port` is the one that the node listens on. `find` finds the router, and blocks. `on_found` is
        called if a router is found after `open` has stopped waiting; the caller should then call `open`
        again.
        """
        self._port, self._find, self._on_found = port, find, on_found
        self._router: Any = None
        self._searched_s: float | None = None
        self._searching: asyncio.Future[Any] | None = None
        self._outer: int | None = None  # the router's port, set when it is requested
        self._is_open = self._is_closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="asks-the-router")

    @property
    def is_open(self) -> bool:
        """Return whether the router forwards a port, by its own answer."""
        return self._is_open

    @property
    def is_searching(self) -> bool:
        """Return whether the search is in progress, or has found a router that was not asked yet."""
        return self._searching is not None

    @property
    def has_found_late(self) -> bool:
        """Return whether the search found a router after `open` had stopped waiting for it."""
        searching = self._searching
        return searching is not None and searching.done() and not _refusal(searching)

    @property
    def port(self) -> int:
        """Return the router's port that is forwarded here; 0 when none is known."""
        return self._outer or 0 if self._is_open else 0

    def on_moved(self) -> None:
        """Record that the addresses of this machine have changed. The next `open` searches again, because
        there may be a different router, or one that forwards to the old address.
        """
        self._router = self._searched_s = self._searching = None

    def begin(self) -> None:
        """Start the search for a router, so that `open` need not wait for all of it."""
        if self._router is None:
            self._begin_search()

    async def open(self) -> int:
        """Request the forwarding, or renew it. Return the port at which others may reach this node: its own
        one if the router does not forward any.
        """
        before = self._outer if self._is_open else None
        if self._router is None:
            self._router = await self._search()
        if self._router is None:
            self._is_open = False
            return self._port
        first = before or self._port
        for outer in range(first, min(first + _PORTS_MAX, 65536)):
            if await self._forward(self._router, outer):
                self._is_open = True
                if outer != before:
                    _logger.info("the router forwards its port %d to port %d here", outer, self._port)
                return outer
            if self._router is None:
                break
        self._is_open = False
        # the router may have been replaced; the next search finds the new one
        self._router = self._outer = None
        return self._port

    async def close(self) -> None:
        """Release the port of the router. The mapping cannot be opened again."""
        outer, self._outer, self._is_open = self._outer, None, False
        if outer is not None and self._router is not None:
            await self._ask(_CLOSE_S, self._router.deleteportmapping, outer, "TCP")
        self._is_closed = True
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _search(self) -> Any:
        """Return the router; None while none has answered."""
        searching = self._begin_search()
        if searching is None or self._searched_s is None:
            return None
        elapsed_s = asyncio.get_running_loop().time() - self._searched_s
        await asyncio.wait([searching], timeout=max(_FOUND_S - elapsed_s, 0.0))
        if not searching.done():
            searching.add_done_callback(self._found_late)
            return None
        if searching is self._searching:
            self._searching = None
        return None if _refusal(searching) else searching.result()

    def _begin_search(self) -> asyncio.Future[Any] | None:
        """Return the search in progress, or start one; None when the last search was recent."""
        loop = asyncio.get_running_loop()
        if self._searching is None:
            recently = self._searched_s is not None and loop.time() - self._searched_s < _SEARCH_S
            if recently or self._is_closed:
                return None
            self._searched_s = loop.time()
            self._searching = loop.run_in_executor(self._worker, self._find)
        return self._searching

    def _found_late(self, _: object) -> None:
        if self.has_found_late:
            self._on_found()

    async def _forward(self, router: Any, outer: int) -> bool:
        """Ask the router to forward this port, and return whether it does. Does not change a mapping of
        another machine.
        """
        here = (router.lanaddr, self._port)
        taken = await self._ask(_CALL_S, router.getspecificportmapping, outer, "TCP")
        if taken and tuple(taken[:2]) != here:
            self._outer = None  # the mapping belongs to another machine: do not delete it later
            return False
        self._outer = outer
        for lease_s in (LEASE_S, 0):  # some routers accept only permanent mappings
            arguments = (outer, "TCP", *here, "swarm", "", lease_s)
            if await self._ask(_CALL_S, router.addportmapping, *arguments):
                return True
        return bool(taken)  # some refuse to renew a mapping that exists

    async def _ask(self, timeout_s: float, call: Callable[..., Any], *arguments: object) -> Any:
        """Return the result of a call to the router; None when it refuses, or does not answer in time."""
        if self._is_closed:
            return None
        asked = asyncio.get_running_loop().run_in_executor(self._worker, call, *arguments)
        answered, _ = await asyncio.wait([asked], timeout=timeout_s)
        if not answered:
            asked.cancel()
            self._router = None  # the router does not answer, and later calls would wait for this one
            return None
        return None if _refusal(asked) else asked.result()


def _refusal(asked: asyncio.Future[Any]) -> bool:
    """Return whether the router refused the call, and log it."""
    if asked.cancelled():
        return True
    error = asked.exception()
    if error is not None:
        _logger.debug("the router refuses, or there is none: %s", error)
    return error is not None
