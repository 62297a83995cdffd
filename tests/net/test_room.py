"""Callers share the memory of a server: strangers get half of it together, and a caller that takes no answers
keeps only its own waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net import room
from swarm.net.room import ANSWER_BYTES_MAX, ANSWER_BYTES_PER_PEER_MAX, AnswerRoom, RequestReads

PEERS = [Identity.generate().peer_id for _ in range(12)]
MEMBER = PEERS[0]


def standing() -> PeerStanding:
    known = PeerStanding()
    known.add_members("run", [MEMBER])
    return known


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_of_answers_agree_with_a_model_and_stay_within_their_limits(seed: int) -> None:
    rng, answers = random.Random(seed), AnswerRoom(standing())
    held: list[tuple[PeerId, int]] = []
    for _ in range(400):
        peer, size_bytes = rng.choice(PEERS), rng.randrange(1, 4 << 20)
        if held and rng.random() < 0.5:
            answers.release(*held.pop(rng.randrange(len(held))))
        elif answers.fits(peer, size_bytes):
            answers.take(peer, size_bytes)
            held.append((peer, size_bytes))
        strangers_bytes = sum(size for one, size in held if one != MEMBER)
        assert answers.size_bytes == sum(size for _, size in held) <= ANSWER_BYTES_MAX
        assert strangers_bytes <= ANSWER_BYTES_MAX // 2
        assert all(
            sum(size for one, size in held if one == peer) <= ANSWER_BYTES_PER_PEER_MAX for peer in PEERS
        )
    for one in held:
        answers.release(*one)
    assert answers.size_bytes == 0
    assert answers.fits(PEERS[1], ANSWER_BYTES_PER_PEER_MAX)


def test_strangers_that_take_no_answers_leave_room_for_members() -> None:
    answers = AnswerRoom(standing())
    for stranger in PEERS[1:]:
        while answers.fits(stranger, 1 << 20):
            answers.take(stranger, 1 << 20)
    assert not answers.fits(Identity.generate().peer_id, 1)
    assert answers.fits(MEMBER, ANSWER_BYTES_PER_PEER_MAX)


def test_calls_that_wait_for_room_get_it_in_turn_and_a_cancelled_one_keeps_nothing() -> None:
    async def scenario() -> None:
        answers = AnswerRoom(standing())
        await answers.wait(MEMBER, ANSWER_BYTES_PER_PEER_MAX)
        waiting = [asyncio.create_task(answers.wait(MEMBER, 4 << 20)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        answers.release(MEMBER, ANSWER_BYTES_PER_PEER_MAX)
        await asyncio.wait(waiting)
        assert answers.size_bytes == 8 << 20
        cancelled = asyncio.create_task(answers.wait(MEMBER, 4 << 20))
        await asyncio.sleep(0)
        answers.release(MEMBER, 4 << 20)  # gives the place, and the task is cancelled before it runs
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert answers.size_bytes == 4 << 20

    asyncio.run(scenario())


def test_a_member_that_half_sends_requests_delays_another_member_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one has all places of members, and more requests that wait than there are places."""
    monkeypatch.setattr(room, "READ_S_WHEN_OTHERS_WAIT", 0.05)

    async def scenario() -> None:
        known = standing()
        known.add_members("run", [MEMBER, PEERS[1]])
        reads, ended = RequestReads(known), list[int]()

        async def half_send() -> None:
            with contextlib.suppress(TimeoutError):
                async with reads.place(PEERS[1]):
                    await asyncio.Event().wait()

        async with asyncio.TaskGroup() as group:
            attackers = [group.create_task(half_send()) for _ in range(4 * room.READS_MAX)]
            await asyncio.sleep(0)
            async with asyncio.timeout(5):
                for _ in range(3):
                    async with reads.place(MEMBER):
                        ended.append(sum(attacker.done() for attacker in attackers))
            for attacker in attackers:
                attacker.cancel()
        places = room.READS_MAX // 2
        assert all(count <= (nth + 1) * places for nth, count in enumerate(ended)), (
            "the next place is its own"
        )

    asyncio.run(scenario())


def test_a_request_that_does_not_arrive_makes_place_for_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "READ_S_WHEN_OTHERS_WAIT", 0.05)

    async def scenario() -> None:
        reads, ended, half = RequestReads(standing()), 0, asyncio.Event()

        async def half_send(peer: PeerId) -> None:
            nonlocal ended
            try:
                async with reads.place(peer):
                    await asyncio.Event().wait()
            except TimeoutError:
                ended += 1
                if ended >= room.READS_MAX // 2:
                    half.set()

        async with asyncio.TaskGroup() as group:
            attackers = [group.create_task(half_send(PEERS[1])) for _ in range(room.READS_MAX)]
            await asyncio.sleep(0)
            async with reads.place(MEMBER):  # strangers do not delay a member
                assert ended == 0
            async with asyncio.timeout(5):
                async with reads.place(PEERS[2]):
                    pass
                await half.wait()
            for attacker in attackers:
                attacker.cancel()

    asyncio.run(scenario())
