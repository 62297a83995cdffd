"""Members are told at once, whatever strangers do; strangers are told afterwards, and few at a time."""

from __future__ import annotations

import asyncio

from averaging.optim.progress.logic.standing import ReportStanding
from averaging.optim.progress.telling import _STRANGERS_MAX, _STRANGERS_PAUSE_S, Telling
from swarm.core.ids import PeerId
from swarm.testing.virtual_loop import run_virtual
from tests.averaging.optim.progress_dht import contact, entry
from tests.averaging.optim.test_tracker import ONE, THREE, TWO, Bench

SILENT_S = 2.0  # until a call to an address where nobody answers ends
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(200)]


def test_a_report_to_a_member_does_not_wait_for_strangers_that_do_not_answer() -> None:
    told: list[tuple[float, PeerId]] = []

    async def report(peer: PeerId, full: bool, goodbye: bool) -> None:
        if peer != PEERS[0]:
            await asyncio.sleep(SILENT_S)
        told.append((asyncio.get_running_loop().time(), peer))

    async def scenario() -> None:
        telling, loop = Telling(report), asyncio.get_running_loop()
        running = loop.create_task(telling.run())
        began_s = loop.time()
        for number in range(40):
            telling.tell_strangers(PEERS[1:101])
            asked_s = loop.time()
            await telling.tell([PEERS[0]])
            assert (loop.time(), told[-1][1]) == (asked_s, PEERS[0]), number
            await asyncio.sleep(0.25)
        running.cancel()
        strangers = [peer for _, peer in told if peer != PEERS[0]]
        batches = (loop.time() - began_s) / (SILENT_S + _STRANGERS_PAUSE_S)
        assert 0 < len(strangers) <= (batches + 1) * _STRANGERS_MAX

    run_virtual(scenario())


def test_a_member_is_told_that_the_epoch_is_full_among_a_hundred_strangers() -> None:
    """Before, news went to the peers 1, 2, 4, … places further on of all, whom a crowd surrounds."""

    async def scenario() -> None:
        bench = Bench()
        assert bench.dht.found is not None
        bench.dht.found |= {str(n): entry(n, epoch=0, samples=10) for n in range(10, 110)}
        bench.tracker._progress.standing = ReportStanding(
            ONE, (ONE, TWO, THREE), frozenset({TWO, THREE}).__contains__
        )
        await bench.tracker._refresh()
        bench.calls.sent.clear()
        announcing = asyncio.create_task(bench.tracker._announce_loop())
        telling = asyncio.create_task(bench.tracker._telling.run())
        assert bench.tracker.update_own(100, 10.0)
        for _ in range(50):
            await asyncio.sleep(0)
        announcing.cancel()
        telling.cancel()
        assert set(bench.calls.sent[:2]) == {(TWO, True, False), (THREE, True, False)}
        strangers = [peer for peer, _, _ in bench.calls.sent[2:]]
        assert 0 < len(strangers) <= 8
        assert set(strangers) <= {contact(n).peer_id for n in range(10, 110)}

    asyncio.run(asyncio.wait_for(scenario(), 30.0))
