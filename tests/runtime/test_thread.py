"""The network thread runs coroutines for other threads, which wait for them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator

import pytest

from swarm.core.errors import DeadlineExceeded, UsageError
from swarm.runtime.thread import NetworkThread


@pytest.fixture
def network() -> Iterator[NetworkThread]:
    thread = NetworkThread()
    yield thread
    thread.stop()


def test_run_returns_the_result_and_raises_the_error_of_its_coroutine(network: NetworkThread) -> None:
    async def give(what: object) -> object:
        await asyncio.sleep(0)
        if isinstance(what, BaseException):
            raise what
        return what

    assert network.run(give(3), 10.0) == 3
    assert network.run(give(None)) is None
    for error in (ValueError("wrong"), TimeoutError("its own"), UsageError("used wrongly")):
        with pytest.raises(type(error)) as caught:
            network.run(give(error), 10.0)
        assert caught.value is error
    assert network.run(give(4), 10.0) == 4


def test_a_coroutine_that_takes_too_long_is_cancelled(network: NetworkThread) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        network.run(hang(), 0.05)
    assert cancelled.wait(10.0)


def test_run_ends_when_the_thread_is_stopped(network: NetworkThread) -> None:
    begun = threading.Event()
    errors: list[BaseException] = []

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            network.run(hang())
        except UsageError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(10.0)
    network.stop()
    waiting.join(10.0)
    assert [str(error) for error in errors] == ["the node was closed while this call was waiting"]
    with pytest.raises(UsageError, match="this node is closed"):
        network.run(hang())


def test_the_network_thread_keeps_no_result(network: NetworkThread) -> None:
    go_on = threading.Event()

    async def make() -> set[int]:
        network.loop.call_soon(
            go_on.wait, 10.0
        )  # the loop has not cleaned up yet when the result is looked at
        return {1}

    kept = weakref.ref(network.run(make(), 10.0))
    assert kept() is None
    go_on.set()
