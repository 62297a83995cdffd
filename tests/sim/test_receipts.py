"""Receipts of a run whose members restart, leave and lie: `swarm/testing/receipt_play.py`."""

from __future__ import annotations

import asyncio

import pytest

from averaging.history.receipts import CREDIT_RATIO_MAX, RECEIPT_INTERVAL, Totals
from averaging.optim.exchange import fetch_receipt
from averaging.optim.reports import StepReport
from swarm.core.ids import PeerId
from swarm.run.contributors import fetch_totals
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.receipt_play import CLAIM, ReceiptPlay, ReceiptPlayConfig
from swarm.testing.training_swarm import RUN, TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual


@pytest.mark.parametrize("seed", range(4))
def test_members_agree_on_what_everybody_gave_although_some_restart_leave_and_lie(seed: int) -> None:
    play = ReceiptPlay(ReceiptPlayConfig(seed=seed))
    play.run()
    honest = play.honest()
    first = honest[0].book
    assert first.totals is not None
    assert first.newest is not None
    assert first.totals.certificates > 256, "the first certificates are not kept any more"
    for member in honest:
        assert member.book.totals == first.totals
        assert member.book.newest is not None
        assert member.book.newest.totals == first.newest.totals
    assert first.totals.certificates - first.newest.totals.certificates < 2 * RECEIPT_INTERVAL
    # no peer lost samples, including those that left or restarted
    for member in [*honest, *[one for one in play.left if not one.colludes]]:
        assert first.totals.by_peer[member.peer_id].samples == member.given
    assert play.forged


@pytest.mark.parametrize("seed", range(4))
def test_colluders_get_at_most_ten_times_the_samples_of_other_members(seed: int) -> None:
    """They claim 2^39 samples in each round, and sign totals with as many."""
    play = ReceiptPlay(ReceiptPlayConfig(seed=seed))
    play.run()
    totals = play.honest()[0].book.totals
    assert totals is not None
    for peer, most in play.largest.items():
        assert totals.by_peer[peer].samples <= CREDIT_RATIO_MAX * most < CLAIM


def test_colluders_that_are_a_quorum_get_what_they_claim() -> None:
    """The limit of the promise: without it the tests above might show that lying never works."""
    play = ReceiptPlay(ReceiptPlayConfig(seed=1, honest=2, colluders=4, later=0, rounds=64))
    play.run()
    totals = play.honest()[0].book.totals
    assert totals is not None
    assert max(credit.samples for credit in totals.by_peer.values()) >= CLAIM


def test_a_reader_gets_the_totals_of_trainers_of_which_one_has_left_and_one_came_later() -> None:
    given: dict[PeerId, int] = {}
    counted: dict[PeerId, int] = {}

    def on_step(one: TrainingPeer, report: StepReport, took_s: float) -> None:
        given[one.peer.peer_id] = given.get(one.peer.peer_id, 0) + one.batch
        if report.stepped:
            counted[one.peer.peer_id] = given[one.peer.peer_id]

    async def play() -> tuple[Totals, list[PeerId], bool]:
        async with asyncio.TaskGroup() as group:
            network = SimulatedNetwork(7, LinkConfig(delay_s=0.01, jitter=0.5))
            swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=48), on_step, group)
            peers = [await swarm.add(), await swarm.add(), await swarm.add()]
            await asyncio.sleep(150.0)
            peers[1].leaving = True
            peers.append(await swarm.add())
            await asyncio.sleep(250.0)
            reader = network.peer()
            contacts = [one.peer.contact for one in peers[2:]]
            totals = (await fetch_totals(reader.caller, RUN, contacts)).totals
            receipt = await fetch_receipt(reader.caller, RUN, contacts[1])
            await swarm.close()
        return totals, [one.peer.peer_id for one in peers], receipt is not None

    totals, peers, has_receipt = run_virtual(play())
    assert has_receipt, "the peer that came later has a receipt"
    assert totals.certificates > 20
    assert {*totals.by_peer} == {*peers}
    for peer in peers:
        assert totals.by_peer[peer].samples == pytest.approx(counted[peer], abs=48)
