"""Votes of a round that failed, and when those who cast them may vote again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from averaging.allreduce import wire
from averaging.allreduce.config import ENDORSE, VOTE
from averaging.allreduce.network import RoundNetwork
from averaging.allreduce.voter import IN_ANOTHER_ROUND
from averaging.history.certificate import Proposal, Vote, vote_statement
from averaging.history.promises import Promises
from swarm.core.errors import DeadlineExceeded
from swarm.core.ids import Contact, PeerId
from swarm.testing.virtual_loop import run_virtual
from tests.sim.round_scene import Scene, lineage


class Bound:
    """The promises of one member by its votes. One that is `unwilling` votes for none."""

    def __init__(self, *, unwilling: bool) -> None:
        self.promises = Promises()
        self._unwilling = unwilling

    def may_vote(self, proposal: Proposal, result: bytes) -> str:
        if result and self._unwilling:
            return "it does not want to"
        reason = self.promises.refusal(proposal, result)
        if not reason:
            self.promises = self.promises.voted(proposal, result, outside=False)
        return reason

    def leave(self, proposal: Proposal) -> bool:
        self.promises = self.promises.ended(proposal)
        return self.promises.binds(proposal)

    def release(self, proposal: Proposal) -> None:
        self.promises = self.promises.released(proposal)


@pytest.mark.parametrize("seed", range(3))
def test_votes_in_a_failed_round_bind_until_the_other_members_can_be_asked(seed: int) -> None:
    """Two of four members vote for the averages and the others for none, and a cut keeps either side from
    hearing the other. When it is over the first two ask, and may then vote in another attempt.
    """
    scene = Scene(seed, [1.0] * 4)
    bound = [Bound(unwilling=place >= 2) for place in range(4)]
    for place, one in enumerate(bound):
        votes = lineage([peer.peer_id for peer in scene.peers], {}, one.may_vote)
        scene.histories[place] = replace(votes, leave=one.leave, release=one.release)

    async def main() -> None:
        async def cut() -> None:
            while not all(one.promises.attempt for one in bound[:2]):  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.001)
            scene.network.partition(scene.peers[:2])

        cutting = asyncio.create_task(cut())
        outcomes = await scene.conduct()
        await cutting
        assert [outcome.unresolved for outcome in outcomes] == [True, True, False, False]
        await asyncio.sleep(10.0)
        assert [one.promises.has_ended for one in bound] == [True, True, False, False]
        scene.network.heal()
        await asyncio.sleep(6.0)  # the longest pause between two times of asking, and the calls
        assert not any(one.promises.attempt for one in bound)
        await scene.close()

    run_virtual(main())


@pytest.mark.parametrize("seed", range(3))
def test_a_member_that_never_heard_of_its_round_frees_those_that_voted(seed: int) -> None:
    """Two of five members vote for the averages and two for none, and a cut keeps either side from hearing
    the other. The leader's message to the fifth, that the group has begun, was lost: only its vote can tell
    the first two that nobody can commit the round.
    """
    scene = Scene(seed, [1.0] * 5)
    bound = [Bound(unwilling=place in (2, 3)) for place in range(5)]
    for place, one in enumerate(bound):
        votes = lineage([peer.peer_id for peer in scene.peers], {}, one.may_vote)
        scene.histories[place] = replace(votes, leave=one.leave, release=one.release)
    asked: list[bytes] = []

    async def declines(caller: PeerId, proposal: Proposal, result: bytes, given: Sequence[Vote]) -> Vote:
        asked.append(result)
        identity = scene.peers[4].identity
        signature = identity.sign(vote_statement(proposal.digest(), b""))
        return Vote(voter=identity.peer_id, result=b"", signature=signature)

    async def main() -> None:
        async def cut() -> None:
            while not all(one.promises.attempt for one in bound[:2]):  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.001)
            scene.network.partition(scene.peers[:2])

        scene.services[4].serve_history("a run", declines)
        cutting = asyncio.create_task(cut())
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scene.run(place)) for place in range(4)]
        await cutting
        assert [task.result().unresolved for task in running] == [True, True, False, False]
        await asyncio.sleep(10.0)
        assert [one.promises.has_ended for one in bound] == [True, True, False, False, False]
        scene.network.heal()
        # the calls that were lost, the longest pause, and the calls, of which one waits for the round
        await asyncio.sleep(14.0)
        assert not any(one.promises.attempt for one in bound)
        assert not any(asked), "it is asked for a vote for none"
        await scene.close()

    run_virtual(main())


@pytest.mark.parametrize("seed", range(3))
def test_an_elector_that_asks_for_votes_for_none_too_early_ends_no_round(seed: int) -> None:
    """A hostile elector knows of a round as soon as it has begun, and asks a member that has not heard of it
    yet.
    """
    scene = Scene(seed, [1.0] * 4)
    asked: list[bytes] = []

    async def declines(caller: PeerId, proposal: Proposal, result: bytes, given: Sequence[Vote]) -> str:
        asked.append(result)
        return "a vote for none would end the round"

    async def main() -> None:
        late = scene.services[3]
        late.serve_history("a run", declines)
        votes = lineage([peer.peer_id for peer in scene.peers], {})
        scene.histories.update(dict.fromkeys(range(4), votes))
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scene.run(place)) for place in range(3)]
            await asyncio.sleep(0.001)
            proposal = scene.services[0].running[0].machine.setup.proposal
            request = wire.endorsement_to_wire(proposal, b"", ())
            asking = tasks.create_task(
                scene.peers[0].caller.call(scene.peers[3].contact, ENDORSE, request, timeout_s=10.0)
            )
            await asyncio.sleep(1.0)
            running.append(tasks.create_task(scene.run(3)))
        assert asking.result().refusal == IN_ANOTHER_ROUND
        assert not asked
        assert not any(task.result().failed for task in running)
        await scene.close()

    run_virtual(main())


@pytest.mark.parametrize("count", [2, 4])
def test_a_question_for_votes_that_is_lost_is_asked_again(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: two members that had voted waited for one another's vote until the round's deadline,
    because the only question, or its answer, was lost.
    """
    call, lost = RoundNetwork.call, set[PeerId]()

    async def losing_call(
        network: RoundNetwork, contact: Contact, method: Any, *args: Any, **limit: Any
    ) -> Any:
        if method is VOTE and contact.peer_id not in lost:
            lost.add(contact.peer_id)
            await asyncio.sleep(limit["timeout_s"])
            raise DeadlineExceeded("the answer was lost")
        return await call(network, contact, method, *args, **limit)

    monkeypatch.setattr(RoundNetwork, "call", losing_call)
    scene = Scene(1, [1.0] * count)

    async def main() -> float:
        outcomes = await scene.conduct()
        assert not any(outcome.failed for outcome in outcomes)
        ended_s = asyncio.get_running_loop().time()
        await scene.close()
        return ended_s

    assert run_virtual(main()) < 7.0
    assert lost
