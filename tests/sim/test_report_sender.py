"""Members are told at once, whatever strangers do; strangers are told afterwards, and few at a time."""

from __future__ import annotations

import asyncio

import pytest

from averaging.optim.progress.report_sender import (
    SILENT_PAUSE_S_MAX,
    STRANGERS_MAX,
    STRANGERS_PAUSE_S,
    ReportSender,
)
from swarm.core.ids import PeerId
from swarm.testing.virtual_loop import run_virtual

SILENT_S = 2.0  # until a call to an address where nobody answers ends
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(200)]


def test_a_report_to_a_member_does_not_wait_for_strangers_that_do_not_answer() -> None:
    told: list[tuple[float, PeerId]] = []

    async def report(peer: PeerId, full: bool, goodbye: bool) -> bool:
        if peer != PEERS[0]:
            await asyncio.sleep(SILENT_S)
        told.append((asyncio.get_running_loop().time(), peer))
        return peer == PEERS[0]

    async def scenario() -> None:
        sender, loop = ReportSender(report), asyncio.get_running_loop()
        running = loop.create_task(sender.run())
        began_s = loop.time()
        for number in range(40):
            sender.send_to_strangers(PEERS[1:101])
            asked_s = loop.time()
            await sender.send([PEERS[0]])
            assert (loop.time(), told[-1][1]) == (asked_s, PEERS[0]), number
            await asyncio.sleep(0.25)
        running.cancel()
        strangers = [peer for _, peer in told if peer != PEERS[0]]
        batches = (loop.time() - began_s) / (SILENT_S + STRANGERS_PAUSE_S)
        assert 0 < len(strangers) <= (batches + 1) * STRANGERS_MAX

    run_virtual(scenario())


@pytest.mark.parametrize(("answering", "calls_per_minute_max"), [(0, 6 * STRANGERS_MAX), (100, 4000)])
def test_strangers_that_do_not_answer_are_called_ever_less_often(
    answering: int, calls_per_minute_max: int
) -> None:
    """Each call to an identity that names another peer's address costs both ends a TLS handshake."""
    calls = 0

    async def report(peer: PeerId, full: bool, goodbye: bool) -> bool:
        nonlocal calls
        calls += 1
        return peer in PEERS[:answering]

    async def scenario() -> None:
        nonlocal calls
        sender = ReportSender(report)
        running = asyncio.get_running_loop().create_task(sender.run())
        for second in range(120):
            if second == 60:
                calls = 0
            sender.send_to_strangers(PEERS[:100])
            await asyncio.sleep(1.0)
        assert 0 < calls <= calls_per_minute_max
        if answering:
            assert calls >= 55 * STRANGERS_MAX, "honest newcomers are told every second"
        running.cancel()

    run_virtual(scenario())


def test_newcomers_that_answer_are_told_soon_again_after_a_crowd_that_did_not() -> None:
    told_s: list[float] = []

    async def report(peer: PeerId, full: bool, goodbye: bool) -> bool:
        if peer in PEERS[:4]:
            told_s.append(asyncio.get_running_loop().time())
        return peer in PEERS[:4]

    async def scenario() -> None:
        sender, loop = ReportSender(report), asyncio.get_running_loop()
        running = loop.create_task(sender.run())
        for _ in range(60):
            sender.send_to_strangers(PEERS[100:150])
            await asyncio.sleep(1.0)
        began_s = loop.time()
        for _ in range(30):
            sender.send_to_strangers(PEERS[:4])
            await asyncio.sleep(1.0)
        assert told_s[0] - began_s <= SILENT_PAUSE_S_MAX
        assert len(told_s) >= 4 * (30 - SILENT_PAUSE_S_MAX - 1)
        running.cancel()

    run_virtual(scenario())
