"""The tracker of one peer: which announcements it believes, which peers it informs, and when its trainer
learns that an epoch is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from averaging.blocklist import PeerBlocklist
from averaging.optim.progress.logic.relays import PROBED_MAX
from averaging.optim.progress.logic.reports import ProgressReport
from averaging.optim.progress.logic.standing import ReportStanding
from averaging.optim.progress.tracker import Tracker
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import Contact, PeerId
from swarm.testing.simulated_node import SimulatedNode
from swarm.wire import state_pb2
from tests.averaging.optim.progress_dht import Dht, contact, entry

ONE, TWO, THREE = (contact(number).peer_id for number in (1, 2, 3))


class Calls:
    """Receiver of reports: every peer answers with its own report, except those that are gone."""

    def __init__(self) -> None:
        self.sent: list[tuple[PeerId, bool, bool]] = []
        self.gone: set[PeerId] = set()
        self.at_s = 1000.0  # when the others reported
        self.meanwhile: Callable[[PeerId], None] = lambda peer: None  # happens before a peer's answer comes

    async def call(
        self, peer: Contact, method: object, request: state_pb2.ReportRequest, timeout_s: float
    ) -> state_pb2.ReportReply:
        self.sent.append((peer.peer_id, request.full, request.goodbye))
        if peer.peer_id in self.gone:
            raise NetworkError("nobody answers")
        self.meanwhile(peer.peer_id)
        return state_pb2.ReportReply(claim=wire_report(samples=10, at_s=self.at_s))


def wire_report(epoch: int = 0, samples: int = 10, at_s: float = 1000.0) -> state_pb2.Claim:
    return state_pb2.Claim(epoch=epoch, samples=samples, samples_per_s=10.0, at_s=at_s, since_s=990.0)


class Bench:
    """Peer 1 in epoch 0 of a run of 100 samples. In the DHT are peers 2 and 3, with 10 samples each."""

    def __init__(self, banned: Iterable[PeerId] = ()) -> None:
        self.dht, self.calls = Dht(), Calls()
        self.dht.found = {str(number): entry(number, epoch=0, samples=10) for number in (2, 3)}
        node = SimulatedNode(lambda: contact(1), self.dht, self.dht, channels=self.calls)
        blocklist = PeerBlocklist(ONE, self.dht)
        blocklist.ban(banned)
        self.tracker, self.blocklist = Tracker(node, "run", 100, blocklist), blocklist
        self.dht.now_s += 10.0  # in which it may have computed what it reports

    async def receives(
        self, peer: PeerId, *, samples: int = 10, full: bool = False, goodbye: bool = False
    ) -> bool:
        request = state_pb2.ReportRequest(
            run="run", claim=wire_report(samples=samples), full=full, goodbye=goodbye
        )
        return (await self.tracker.on_report(peer, request)).believed


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30.0))


def test_a_newcomer_in_the_records_receives_one_report() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.tracker._refresh()
        assert sorted(bench.calls.sent) == sorted([(TWO, False, False), (THREE, False, False)])
        await bench.tracker._refresh()
        assert len(bench.calls.sent) == 2
        assert bench.tracker.others().keys() == {TWO, THREE}

    play(scenario)


def test_a_peer_that_cannot_be_reached_does_not_count() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.calls.gone = {THREE}
        await bench.tracker._refresh()
        assert bench.tracker.others().keys() == {TWO}

    play(scenario)


def test_a_peer_that_says_goodbye_is_removed_at_once() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.tracker._refresh()
        await bench.receives(TWO, goodbye=True)
        assert bench.tracker.others().keys() == {THREE}

    play(scenario)


def test_reports_of_strangers_without_a_record_cause_no_read() -> None:
    """Before, a crowd that only reported made members read all records without a pause."""

    async def scenario() -> None:
        bench, asked = Bench(), list[PeerId]()
        bench.tracker._keeper.renew_soon = lambda: asked.append(ONE)  # type: ignore[method-assign]
        await bench.receives(contact(10).peer_id)
        assert asked, "before there are electors everybody counts"
        asked.clear()
        bench.tracker._progress.standing = ReportStanding(ONE, (ONE, TWO), {THREE}.__contains__)
        await bench.receives(contact(11).peer_id)
        assert not asked
        await bench.receives(THREE)
        assert asked

    play(scenario)


def test_a_member_is_told_that_the_epoch_is_full_among_a_hundred_strangers() -> None:
    """Before, news went to the peers 1, 2, 4, … places further along a ring that a crowd can fill."""

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
        telling = asyncio.create_task(bench.tracker._sender.run())
        assert bench.tracker.update_own(100, 10.0)
        for _ in range(50):
            await asyncio.sleep(0)
        announcing.cancel()
        telling.cancel()
        assert set(bench.calls.sent[:2]) == {(TWO, True, False), (THREE, True, False)}
        strangers = [peer for peer, _, _ in bench.calls.sent[2:]]
        assert 0 < len(strangers) <= 8
        assert set(strangers) <= {contact(n).peer_id for n in range(10, 110)}

    play(scenario)


def test_reports_of_a_banned_peer_are_refused() -> None:
    async def scenario() -> None:
        bench = Bench({TWO})
        await bench.tracker._refresh()
        assert bench.tracker.others().keys() == {THREE}
        with pytest.raises(PeerError, match="banned"):
            await bench.receives(TWO, samples=1000)
        assert bench.tracker.others().keys() == {THREE}

    play(scenario)


def test_the_answer_of_a_peer_that_is_banned_meanwhile_does_not_count() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.tracker._refresh()

        def ban(peer: PeerId) -> None:
            if peer == TWO:
                bench.blocklist.ban([TWO])
                bench.tracker.forget([TWO])

        bench.calls.meanwhile, bench.calls.at_s = ban, bench.dht.now_s
        await bench.tracker.probe()
        assert bench.tracker.others().keys() == {THREE}

    play(scenario)


@pytest.mark.parametrize(
    ("others", "sent"), [(2, 2), (PROBED_MAX, PROBED_MAX), (PROBED_MAX + 1, 7), (200, 8)]
)
def test_a_peer_whose_round_has_failed_asks_all_of_a_group_and_few_of_a_large_run(
    others: int, sent: int
) -> None:
    """Regression test: in a run of 240 peers each failed round cost every one of them 240 calls."""

    async def scenario() -> None:
        bench = Bench()
        numbers = range(2, others + 2)
        bench.dht.found = {str(number): entry(number, epoch=0, samples=10) for number in numbers}
        await bench.tracker._refresh()
        assert len(bench.tracker.others()) == others
        bench.calls.sent.clear()
        await bench.tracker.probe()
        assert len(bench.calls.sent) == sent

    play(scenario)


def test_an_announced_full_epoch_is_believed_only_when_the_own_view_is_close() -> None:
    """An announcement counts once this peer's view has reached three quarters of the target, and not
    before.
    """

    async def scenario() -> None:
        bench = Bench()
        await bench.tracker._refresh()
        # of the others' claims, made when our epoch began, 15 each count: what they may have computed in the
        # slack, and as much again since
        assert not bench.tracker.update_own(65, 6.5), "nobody says that 95 are enough"
        assert not bench.tracker.update_own(44, 4.4)
        assert not await bench.receives(TWO, full=True), "74 of 100 are in sight"
        assert bench.tracker.full_announcements == 1
        assert not bench.tracker.update_own(44, 4.4)
        assert bench.tracker.update_own(45, 4.5), "the word still stands"
        assert await bench.receives(THREE, full=True)

    play(scenario)


def test_a_full_epoch_is_announced_to_peers_that_are_not_ahead() -> None:
    async def scenario() -> None:
        bench = Bench()
        assert bench.dht.found is not None
        bench.dht.found["3"] = entry(3, epoch=1, samples=1)
        await bench.tracker._refresh()
        bench.calls.sent.clear()
        announcing = asyncio.create_task(bench.tracker._announce_loop())
        assert bench.tracker.update_own(100, 10.0)
        for _ in range(50):
            await asyncio.sleep(0)
        announcing.cancel()
        assert bench.calls.sent == [(TWO, True, False)]

    play(scenario)


def test_leaving_is_reported_to_all_and_the_record_withdrawn() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.tracker._refresh()
        await bench.tracker._records.publish(
            ProgressReport(epoch=0, samples=1, rate=1.0, at_s=1000.0, since_s=990.0)
        )
        bench.calls.sent.clear()
        await bench.tracker.close()
        assert sorted(bench.calls.sent) == sorted([(TWO, False, True), (THREE, False, True)])
        assert bench.dht.deleted == 1
        assert not bench.tracker.wait_refresh(0.0)

    play(scenario)
