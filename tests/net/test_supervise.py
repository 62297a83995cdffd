"""Tests of the supervisor: a failure is logged and affects no other task; at close every task ends."""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarm.runtime import supervise
from swarm.runtime.supervise import Supervisor


def test_a_failure_is_logged_and_affects_no_other_task(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        supervisor, going = Supervisor(), asyncio.Event()

        async def broken() -> None:
            raise ValueError("a bug")

        async def healthy() -> None:
            going.set()
            await asyncio.Event().wait()

        await supervisor.spawn("broken service", broken)
        task = supervisor.spawn("healthy service", healthy)
        await going.wait()
        assert supervisor.running == ["healthy service"]
        await supervisor.close(1)
        assert task.cancelled()
        assert supervisor.running == []

    asyncio.run(scenario())
    assert "broken service failed" in caplog.text
    assert "a bug" in caplog.text


def test_a_failed_task_with_restart_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervise, "_BACKOFF_FIRST_S", 0.0)

    async def scenario() -> None:
        supervisor, runs = Supervisor(), 0

        async def flaky() -> None:
            nonlocal runs
            runs += 1
            if runs < 3:
                raise RuntimeError("not yet")

        await supervisor.spawn("flaky", flaky, restart=True)
        assert runs == 3

    asyncio.run(scenario())
    assert caplog.text.count("it will be started again") == 2


def test_a_task_that_ignores_its_cancellation_is_logged_and_abandoned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        supervisor, release, started = Supervisor(), asyncio.Event(), asyncio.Event()

        async def stubborn() -> None:
            started.set()
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        task = supervisor.spawn("stubborn", stubborn)
        await started.wait()
        await supervisor.close(0.01)
        release.set()
        await task

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "stubborn did not stop within" in caplog.text


def test_no_task_starts_after_close(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        supervisor, ran = Supervisor(), False

        async def late() -> None:
            nonlocal ran
            ran = True

        await supervisor.close()
        await supervisor.spawn("late", late)
        assert not ran

    asyncio.run(scenario())
    assert "late not started: the node is closing" in caplog.text
