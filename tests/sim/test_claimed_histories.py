"""The histories that strangers claim to have: nobody waits for them, and they cost little."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from averaging.history.chain import Chain
from averaging.history.encoding import encode_part
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import Contact, PeerId
from swarm.testing.virtual_loop import run_virtual
from swarm.wire import state_pb2
from tests.averaging.optim.histories import HEAD, contact, history_with


class HangingStrangers:
    """Peers 2 and 3 answer after a moment, with an empty history; all others never answer."""

    def __init__(self) -> None:
        self.calls: list[PeerId] = []
        self.open_calls = self.open_calls_max = 0

    async def call(self, peer: Contact, method: Any, request: Any, *, timeout_s: float) -> Any:
        self.calls.append(peer.peer_id)
        self.open_calls += 1
        self.open_calls_max = max(self.open_calls, self.open_calls_max)
        try:
            if peer not in (contact(2), contact(3)):
                await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
            await asyncio.sleep(0)
        except TimeoutError:
            raise NetworkError("no answer") from None
        finally:
            self.open_calls -= 1
        raise PeerError("no history")


@pytest.mark.parametrize("strangers", [1, 40])
def test_nobody_waits_for_the_histories_that_strangers_claim_to_have(strangers: int) -> None:
    """Regression test: heads that nobody knows made each read of the progress take 3 s, and the histories of
    members were never fetched when there were many.
    """

    async def play() -> None:
        calls, loop = HangingStrangers(), asyncio.get_running_loop()
        history = history_with(calls)
        history.restore(Chain(head=HEAD, electors=(contact(2).peer_id, contact(1).peer_id), certificates=()))
        history.ledger.contributed({contact(3).peer_id: 1.0})
        fetching = asyncio.create_task(history.run())
        for number in (2, 3):
            history.heard(contact(number), b"m" * 32)
        for number in range(10, 10 + strangers):
            history.heard(contact(number), number.to_bytes(32, "big"))
            history.heard(contact(1000 + number), b"m" * 32)  # a head that members report
        began_s = loop.time()
        await history.compare()
        assert loop.time() - began_s < 0.1
        assert {contact(2).peer_id, contact(3).peer_id} <= set(calls.calls)
        assert history.is_new(contact(2).peer_id, b"m" * 32)
        assert not history.is_new(contact(10).peer_id, b"x" * 32), "nobody waits for a stranger's group"
        await asyncio.wait({fetching}, timeout=2.0 * strangers)
        asked = {peer for peer in calls.calls if peer not in (contact(2).peer_id, contact(3).peer_id)}
        assert asked == {contact(number).peer_id for number in range(10, 10 + strangers)}
        assert calls.open_calls_max <= 6
        fetching.cancel()

    run_virtual(play())


def test_strangers_that_claim_histories_and_do_not_answer_are_asked_twice_a_second_at_most() -> None:
    """Regression: heads that nobody has, at an address of somebody else, cost a member a hundred handshakes a
    second.
    """

    class Refusing(HangingStrangers):
        async def call(self, peer: Contact, method: Any, request: Any, *, timeout_s: float) -> Any:
            self.calls.append(peer.peer_id)
            await asyncio.sleep(0.01)
            raise NetworkError("it is another peer")

    async def play() -> None:
        calls = Refusing()
        history = history_with(calls)
        history.restore(Chain(head=HEAD, electors=(contact(2).peer_id, contact(1).peer_id), certificates=()))
        fetching = asyncio.create_task(history.run())
        for _ in range(120):  # a minute
            for number in range(10, 110):
                history.heard(contact(number), number.to_bytes(32, "big"))
            await asyncio.sleep(0.5)
        assert 100 <= len(calls.calls) <= 130
        fetching.cancel()

    run_virtual(play())


def test_an_answer_with_a_goodbye_of_nobody_does_not_end_the_comparison_of_histories() -> None:
    """Regression, found by `make fuzz`: the task that compares histories failed, and began again."""

    class Malformed(HangingStrangers):
        async def call(self, peer: Contact, method: Any, request: Any, *, timeout_s: float) -> Any:
            self.calls.append(peer.peer_id)
            chain = encode_part(Chain(head=HEAD, electors=(contact(2).peer_id,), certificates=()))
            return state_pb2.HistoryReply(chain=chain, goodbyes=[state_pb2.Goodbye(peer=b"short")])

    async def play() -> None:
        calls = Malformed()
        history = history_with(calls)
        history.heard(contact(2), b"m" * 32)
        await history.compare()
        assert calls.calls == [contact(2).peer_id]

    asyncio.run(play())
