"""The check that every operation with a time limit ends by it: what is an operation, and planted delays."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from swarm.testing.checkers import Deadlines, Violations
from swarm.testing.green_threads import GreenNetwork
from swarm.testing.time_limits import LimitedMethod, limited_methods, watched_time_limits
from swarm.testing.training_scenarios import TrainingFailed, TrainingScenario, run_training
from swarm.testing.virtual_loop import run_virtual

DELAY_S = 3.0  # of an operation that is late


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # each fault is a warning of many peers


class Operations:
    """Operations of every kind, which take `takes_s`."""

    def __init__(self, network: GreenNetwork) -> None:
        self._network = network

    async def coroutine(self, takes_s: float, timeout_s: float = 10.0) -> None:
        await asyncio.sleep(takes_s)

    async def until(self, takes_s: float, *, deadline_s: float) -> None:
        await asyncio.sleep(takes_s)

    @contextlib.asynccontextmanager
    async def context(self, takes_s: float, *, timeout_s: float | None) -> AsyncIterator[str]:
        yield "entered"
        await asyncio.sleep(takes_s)

    def blocking(self, takes_s: float, timeout_s: float) -> None:
        self._network.waits.event().wait(takes_s)


def lines_of(takes_s: float) -> list[str]:
    """Return the violations when each of the operations above takes this time, with a limit of 10 s."""
    violations = Violations()
    deadlines = Deadlines(violations)

    async def scenario() -> None:
        network, loop = GreenNetwork(), asyncio.get_running_loop()
        operations = Operations(network)
        await operations.coroutine(takes_s)
        await operations.coroutine(takes_s, 10.0)
        await operations.until(takes_s, deadline_s=loop.time() + 10.0)
        async with operations.context(takes_s, timeout_s=10.0) as entered:
            assert entered == "entered"
        async with operations.context(takes_s, timeout_s=None):
            pass
        await network.run_thread(lambda: operations.blocking(takes_s, 10.0))

    with watched_time_limits(deadlines, [Operations]):
        run_virtual(scenario())
    assert not deadlines.pending, "an operation that has ended is watched on"
    return [line.partition(" s: ")[2] for line in violations.lines]


def test_an_operation_of_any_kind_that_ends_late_is_detected() -> None:
    assert not lines_of(10.0)
    assert lines_of(10.0 + DELAY_S) == [
        f"Operations.{name} ended {DELAY_S:.2f} s after its deadline"
        for name in ("coroutine", "coroutine", "until", "context", "blocking")
    ]


def test_an_operation_that_does_not_end_is_reported_once() -> None:
    violations = Violations()
    deadlines = Deadlines(violations)

    async def scenario() -> None:
        operations, loop = Operations(GreenNetwork()), asyncio.get_running_loop()
        hanging = asyncio.create_task(operations.coroutine(100.0))
        await asyncio.sleep(12.0)
        deadlines.check(loop.time())
        deadlines.check(loop.time())
        await hanging

    with watched_time_limits(deadlines, [Operations]):
        run_virtual(scenario())
    assert violations.lines == ["12.0 s: Operations.coroutine has not ended 2.00 s after its deadline"]


def test_the_methods_are_as_before_when_nothing_is_watched() -> None:
    before = dict(vars(Operations))
    with watched_time_limits(Deadlines(Violations()), [Operations]):
        assert vars(Operations)["coroutine"] is not before["coroutine"]
    assert dict(vars(Operations)) == before


def test_calls_the_dht_searches_rounds_and_downloads_are_operations() -> None:
    """A renamed argument would take an operation out of the check."""
    expected = {
        *("SimulatedCaller.call", "SimulatedCaller.open_stream"),
        *("DhtService.store", "DhtService.delete", "DhtService.get", "DhtService.get_confirmed"),
        *("DhtService.store_many", "DhtService.get_many", "DhtService.get_all", "DhtService.leave"),
        *("GroupService.find", "StepRunner.run", "AllReduce.run"),
        *("Download.fetch", "CatchUp.load", "Tracker.wait_refresh", "Tracker.wait_full", "GreenNetwork.run"),
    }
    assert {method.text for method in limited_methods()} >= expected


@pytest.mark.parametrize("name", ["DhtService.get", "GroupService.find", "AllReduce.run"])
def test_a_late_operation_of_a_training_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [method] = [one for one in limited_methods() if one.text == name]
    monkeypatch.setattr(method.owner, method.name, late(method))
    scenario = TrainingScenario(seed=2, peers=3, hours=0.01, faults_s=30.0, kinds=("join",))
    with pytest.raises(TrainingFailed, match=rf"{name} (has not )?ended .* s after its deadline"):
        run_training(scenario)


def late(method: LimitedMethod) -> Any:
    """Return the method with a delay after its limit."""

    @functools.wraps(method.function)
    async def delayed(*arguments: Any, **options: Any) -> Any:
        loop = asyncio.get_running_loop()
        end_s = method.end_s(arguments, options, loop.time())
        try:
            return await method.function(*arguments, **options)
        finally:
            await asyncio.sleep(end_s + DELAY_S - loop.time())

    return delayed
