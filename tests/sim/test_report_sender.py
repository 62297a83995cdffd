"""Members are told at once, whatever strangers do; strangers are told afterwards, and few at a time."""

from __future__ import annotations

import asyncio

from averaging.optim.progress.report_sender import STRANGERS_MAX, STRANGERS_PAUSE_S, ReportSender
from swarm.core.ids import PeerId
from swarm.testing.virtual_loop import run_virtual

SILENT_S = 2.0  # until a call to an address where nobody answers ends
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(200)]


def test_a_report_to_a_member_does_not_wait_for_strangers_that_do_not_answer() -> None:
    told: list[tuple[float, PeerId]] = []

    async def report(peer: PeerId, full: bool, goodbye: bool) -> None:
        if peer != PEERS[0]:
            await asyncio.sleep(SILENT_S)
        told.append((asyncio.get_running_loop().time(), peer))

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
