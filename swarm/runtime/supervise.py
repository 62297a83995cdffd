"""The parent of every background task of a node: it reports failures, restarts tasks if requested, and ends
all tasks at close.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from swarm.core.backoff import Backoff

_logger = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.5
_BACKOFF_MAX_S = 30.0
_TASKS_MAX = 10_000


class Supervisor:
    """Supervise background tasks on one event loop. One task's exception is logged and affects no other
    task.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def spawn(
        self, name: str, function: Callable[[], Awaitable[None]], *, restart: bool = False
    ) -> asyncio.Task[None]:
        """Run `function()` in the background and return its task. A failure is logged under `name`.

        With `restart`, a function that fails is called again after 0.5 s; the pause doubles up to 30 s. A
        function that returns is not called again. The task may be cancelled and awaited; awaiting it never
        raises the function's exception.
        """
        if self._closed or len(self._tasks) >= _TASKS_MAX:
            _logger.warning(
                "%s not started: %s",
                name,
                "the node is closing" if self._closed else f"{_TASKS_MAX} background tasks already",
            )
            return asyncio.get_running_loop().create_task(_nothing(), name=name)
        task = asyncio.get_running_loop().create_task(_watch(name, function, restart), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def running(self) -> list[str]:
        """Return the names of the tasks that have not ended."""
        return sorted(task.get_name() for task in self._tasks)

    async def close(self, timeout_s: float = 1.0) -> None:
        """Cancel every task and wait for them, at most `timeout_s`: a task that ignores its cancellation is
        named in the log and abandoned.
        """
        self._closed = True
        current = asyncio.current_task()
        tasks = {task for task in self._tasks if task is not current}
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=timeout_s)
            for task in stuck:
                _logger.warning(
                    "%s did not stop within %.1f s of being cancelled", task.get_name(), timeout_s
                )


async def _nothing() -> None:
    return None


async def _watch(name: str, function: Callable[[], Awaitable[None]], restart: bool) -> None:
    backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S, random)
    while True:
        started_s = time.monotonic()
        try:
            await function()
            return
        except Exception:  # the supervisor is one of the two places that catch everything
            _logger.exception("%s failed%s", name, "; it will be started again" if restart else "")
        if not restart:
            return
        if time.monotonic() - started_s > _BACKOFF_MAX_S:
            backoff.reset()
        await asyncio.sleep(backoff.next_s())
