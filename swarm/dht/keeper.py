"""Records that are renewed for as long as their writer lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swarm.core.backoff import backoff_s
from swarm.core.errors import SwarmError, UsageError
from swarm.core.notify import ChangeEvent

_log = logging.getLogger(__name__)


class RecordKeeper:
    """Renews a writer's records at an interval, after a failure with a back-off, and soon after a change.

    `store`: writes the records once and returns whether other peers hold them. A SwarmError that it raises
    counts as a failure. `what`: names the records in the log. `renew_s`: the interval in seconds, or a
    function that returns the next one. `retry_s`: the pause in seconds after a failure, doubled with each
    further one up to the interval. `gap_s`: the least time in seconds between two stores when the records
    change often; None: `retry_s`.
    """

    def __init__(
        self,
        store: Callable[[], Awaitable[bool]],
        what: str,
        *,
        renew_s: float | Callable[[], float],
        retry_s: float,
        gap_s: float | None = None,
    ) -> None:
        self._store, self._what, self._renew_s, self._retry_s = store, what, renew_s, retry_s
        self._gap_s = retry_s if gap_s is None else gap_s
        self._changed = ChangeEvent()
        # Set once the records have been stored, or the first attempt has failed.
        self.attempted = asyncio.Event()

    def renew_soon(self) -> None:
        """Store the records again as soon as `gap_s` allows: they changed, or were lost."""
        self._changed.notify()

    async def run(self) -> None:
        """Renew the records until cancelled."""
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            self._changed.clear()
            try:
                stored = await self._store()
            except SwarmError as error:
                level = logging.ERROR if isinstance(error, UsageError) else logging.INFO
                _log.log(
                    level,
                    "%s could not be stored in the DHT, and will be tried again: %s",
                    self._what,
                    error,
                )
                stored = False
            self.attempted.set()
            stored_s = loop.time()
            failures = 0 if stored else failures + 1
            renew_s = self._renew_s() if callable(self._renew_s) else self._renew_s
            if await self._changed.wait(backoff_s(failures, self._retry_s, renew_s) if failures else renew_s):
                await asyncio.sleep(max(stored_s + self._gap_s - loop.time(), 0.0))
