"""Records that are renewed for as long as their writer lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swarm.core.backoff import Backoff
from swarm.core.errors import SwarmError

_log = logging.getLogger(__name__)


class RecordKeeper:
    """Renew a writer's records every `renew_s`, and after a failure with a back-off that starts at `retry_s`
    and grows to `renew_s`.

    `store` writes the records once and returns whether other peers hold them; `what` names them in the log.
    """

    def __init__(
        self, store: Callable[[], Awaitable[bool]], what: str, *, renew_s: float, retry_s: float
    ) -> None:
        self._store, self._what, self._renew_s, self._retry_s = store, what, renew_s, retry_s
        self._backoff = Backoff(retry_s, renew_s)
        self._due = asyncio.Event()
        # Set once the records have been stored, or the first attempt has failed.
        self.attempted = asyncio.Event()

    def renew_soon(self) -> None:
        """Store the records again as soon as possible, at most once every `retry_s`."""
        self._due.set()

    async def run(self) -> None:
        """Renew the records until cancelled."""
        while True:
            self._due.clear()
            try:
                stored = await self._store()
            except SwarmError as error:
                _log.info("%s could not be stored in the DHT, and will be tried again: %s", self._what, error)
                stored = False
            self.attempted.set()
            if stored:
                self._backoff.reset()
            pause_s = self._renew_s if stored else self._backoff.next_s()
            try:
                async with asyncio.timeout(pause_s):
                    await self._due.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(self._retry_s)
