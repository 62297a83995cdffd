"""The end of a round: what one liar, cuts of the network and missing electors can do to it, and what not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from averaging.allreduce.allreduce import AllReduce
from averaging.allreduce.config import ENDORSE
from averaging.allreduce.driver import RoundDriver
from averaging.allreduce.logic.setup import proposal_of
from averaging.allreduce.logic.values import Statement
from averaging.allreduce.outcome import RoundOutcome
from averaging.allreduce.wire import endorsement_to_wire
from averaging.history.certificate import (
    DIGEST_BYTES,
    NO_HEAD,
    Proposal,
    Vote,
    genesis,
    goodbye_statement,
    vote_statement,
)
from averaging.history.electors import Known, Register, electors_after
from averaging.mixed_codecs import MixedCodecs
from averaging.reduction.framing import pack, unpack
from swarm.core.ids import PeerId
from swarm.testing.identities import SeededIdentity
from swarm.testing.network import LinkConfig, SimulatedPeer
from swarm.testing.rounds import all_reduce_of
from swarm.testing.virtual_loop import run_virtual
from tests.sim.round_scene import CONFIG, DEADLINE_S, Scene, lineage

OTHER = SeededIdentity(99)


def one_result(outcomes: Sequence[RoundOutcome]) -> None:
    """Check that members that committed hold the same bytes, which are those of their certificates."""
    committed = [outcome for outcome in outcomes if not outcome.failed]
    assert len({outcome.digest for outcome in committed}) <= 1
    for outcome in committed:
        assert outcome.certificate is not None
        assert outcome.averages is not None
        outcome.certificate.check((), Register())
        assert outcome.certificate.result[:DIGEST_BYTES].hex() == outcome.digest
        assert committed[0].vector is not None
        assert outcome.vector is not None
        assert torch.equal(outcome.vector, committed[0].vector)
    assert len({outcome.certificate.head for outcome in outcomes if outcome.certificate is not None}) <= 1


def equivocate(monkeypatch: pytest.MonkeyPatch, liar: int, victim: PeerId) -> None:
    """The reducer `liar` gives other bytes to `victim` than to everybody else."""
    send = RoundDriver.send

    async def lie(self: RoundDriver, stream: object, message: bytes) -> None:
        header, payload = unpack(message)
        other = stream.peer_id if hasattr(stream, "peer_id") else None
        if self.kernels.own == liar and header.HasField("average") and other == victim:
            message = pack(header, bytes(len(payload)))
        await send(self, stream, message)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundDriver, "send", lie)


@pytest.mark.parametrize("says", ["nothing", "that it voted for the victim's bytes"])
def test_a_member_that_was_given_other_bytes_commits_those_of_the_majority(
    says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reducer that tells its victim that it agrees with it cannot make it commit alone."""
    scene = Scene(1, [1.0] * 4)
    victim, liar = 2, 1
    equivocate(monkeypatch, liar, scene.peers[victim].peer_id)
    answer = RoundDriver.answer_votes

    async def flatter(self: RoundDriver, place: int, statement: Statement) -> Statement:
        own = next((vote for vote in statement.votes if vote.voter == scene.peers[place].peer_id), None)
        if says == "nothing" or self.kernels.own != liar or place != victim or own is None:
            return await answer(self, place, statement)
        signed = scene.peers[liar].identity.sign(
            vote_statement(self.machine.setup.proposal.digest(), own.result)
        )
        vote = Vote(voter=scene.peers[liar].peer_id, result=own.result, signature=signed)
        return Statement(votes=(vote,))

    monkeypatch.setattr(RoundDriver, "answer_votes", flatter)

    async def main() -> None:
        outcomes = await scene.conduct()
        one_result(outcomes)
        assert not any(outcome.failed for outcome in outcomes), [outcome.reason for outcome in outcomes]
        # the zeros that the victim was given are not what it reports
        held = outcomes[victim].vector
        assert held is not None
        assert not bool((held[2500:5000] == 0.0).any())
        assert not any(scene.peers[victim].peer_id in outcomes[place].faults for place in (0, 3))
        await scene.close()

    run_virtual(main())


@pytest.mark.parametrize("seed", range(5))
def test_an_even_split_fails_for_everybody(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reducer that gives half of the contributors other bytes than the rest: no result has a majority."""
    scene = Scene(seed, [1.0] * 4)
    send = RoundDriver.send
    odd = {scene.peers[0].peer_id, scene.peers[3].peer_id}

    async def lie(self: RoundDriver, stream: object, message: bytes) -> None:
        header, payload = unpack(message)
        lies = header.HasField("average") and stream.peer_id in odd  # type: ignore[attr-defined]
        if self.kernels.own == 1 and lies:
            message = pack(header, bytes(len(payload)))
        await send(self, stream, message)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundDriver, "send", lie)

    async def main() -> None:
        outcomes = await scene.conduct()
        assert all(outcome.failed for outcome in outcomes)
        assert all("different averages" in str(outcome.reason) for outcome in outcomes)
        assert not any(outcome.unresolved for outcome in outcomes)
        await scene.close()

    run_virtual(main())


@pytest.mark.parametrize("seed", range(250))
def test_cuts_and_freezes_do_not_fork_a_round(seed: int) -> None:
    """Splits, one-way cuts and freezes at any moment, some of which heal: nobody commits other bytes."""
    rng = random.Random(f"cuts {seed}")
    count = rng.randint(3, 6)
    auxiliary = [place for place in range(2, count) if rng.random() < 0.2]
    weights = [
        0.0 if place in auxiliary else rng.choice([0.0, 1.0, 1.0, 1.0]) if place > 1 else 1.0
        for place in range(count)
    ]
    scene = Scene(seed, weights, auxiliary)

    async def begin_faults() -> None:
        for _ in range(rng.randint(1, 3)):
            await asyncio.sleep(0.15 * rng.random())
            kind = rng.choice(["split", "one way", "freeze"])
            some = rng.sample(scene.peers, rng.randint(1, count - 1))
            others = [peer for peer in scene.peers if peer not in some]
            if kind == "split":
                scene.network.partition(some)
            elif kind == "one way":
                scene.network.cut(some, rng.sample(others, rng.randint(1, len(others))))
            else:
                some[0].frozen = True
        if rng.random() < 0.7:
            await asyncio.sleep(rng.choice([0.3, 1.5, 4.0]))
            scene.network.heal()
            for peer in scene.peers:
                peer.frozen = False

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scene.run(place)) for place in range(count)]
            tasks.create_task(begin_faults())
        outcomes = [task.result() for task in running]
        taking = [outcome for place, outcome in enumerate(outcomes) if place not in auxiliary]
        one_result(taking)
        for outcome in outcomes:  # a member that failed says why, and whether others may have committed
            assert bool(outcome.reason) == outcome.failed
            assert outcome.failed or not outcome.unresolved
        for peer in scene.peers:
            peer.frozen = False
        await scene.close()

    run_virtual(main())


def test_half_of_the_contributors_die_and_the_attempt_fails_at_once() -> None:
    """No majority of the group is left, so that those who are left try again without the others."""
    scene = Scene(3, [1.0] * 4)
    scene.network.config = LinkConfig(delay_s=0.02, bandwidth=2e4)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scene.run(place)) for place in range(4)]
            await asyncio.sleep(0.3)
            for place in (2, 3):
                running[place].cancel()
                await scene.network.crash(scene.peers[place])
            died_s = loop.time()
            outcomes = [await task for task in running[:2]]
        assert all(outcome.failed for outcome in outcomes)
        assert all("2 of 4 peers that contribute are left" in str(outcome.reason) for outcome in outcomes)
        assert not any(outcome.unresolved for outcome in outcomes)
        assert loop.time() - died_s < 2.0
        await scene.close()

    run_virtual(main())


# ---- rounds with a history


class Elector:
    """A peer of the run that is not in the group."""

    def __init__(self, scene: Scene, answers: bool) -> None:
        self.peer: SimulatedPeer = scene.network.peer()
        self.service: AllReduce = all_reduce_of(self.peer)
        self.asked: list[tuple[Proposal, bytes, int]] = []
        self.answers = answers
        self.service.serve_history("a run", self.endorse)

    async def endorse(
        self, caller: PeerId, proposal: Proposal, result: bytes, votes: Sequence[Vote]
    ) -> Vote | str:
        for vote in votes:
            vote.check(proposal.digest())
        self.asked.append((proposal, result, len(votes)))
        if not self.answers:
            return "it has voted for another round"
        signature = self.peer.identity.sign(vote_statement(proposal.digest(), result))
        return Vote(voter=self.peer.peer_id, result=result, signature=signature)


@pytest.mark.parametrize("answers", [True, False])
def test_electors_outside_of_the_group_are_asked_for_their_votes(answers: bool) -> None:
    """Three contributors, of which one is an elector; two more electors are elsewhere: a quorum needs one of
    these.
    """
    scene = Scene(5, [1.0, 1.0, 1.0])
    others = [Elector(scene, answers) for _ in range(2)]
    electors = [others[0].peer.peer_id, scene.peers[0].peer_id, others[1].peer.peer_id]
    contacts = {other.peer.peer_id: other.peer.contact for other in others}
    scene.histories = {place: lineage(electors, contacts) for place in range(3)}

    async def main() -> None:
        outcomes = await scene.conduct()
        assert all(other.asked for other in others)
        proposal, _, votes = others[0].asked[0]
        assert proposal.contributors == scene.group.peer_ids
        assert proposal.electors == electors_after(electors, Register(), scene.group.peer_ids)[0]
        assert votes >= 2
        for outcome in outcomes:
            assert outcome.failed != answers
            assert outcome.unresolved != answers
            if answers:
                assert outcome.certificate is not None
                outcome.certificate.check(electors, Register())
        for other in others:
            other.service.close()
        await scene.close()

    run_virtual(main())


@pytest.mark.parametrize("answers", [True, False])
def test_a_group_of_one_commits_when_the_senior_elector_signs_from_outside(answers: bool) -> None:
    scene = Scene(9, [1.0])
    busy = Elector(scene, answers)
    electors = [busy.peer.peer_id, scene.peers[0].peer_id]
    scene.histories = {0: lineage(electors, {busy.peer.peer_id: busy.peer.contact})}

    async def main() -> None:
        (outcome,) = await scene.conduct()
        assert outcome.failed != answers
        if answers:
            assert outcome.vector is not None
            assert torch.equal(outcome.vector, scene.vectors[0])
            assert outcome.certificate is not None
            outcome.certificate.check(electors, Register())
            assert outcome.certificate.proposal.electors == (scene.peers[0].peer_id,)
        busy.service.close()
        await scene.close()

    run_virtual(main())


def test_an_elector_in_a_round_signs_for_no_other_group_until_its_own_is_over() -> None:
    """Newcomers that missed the round of all others asked its only elector, and made that round fail."""
    scene = Scene(5, [1.0, 1.0, 1.0])
    outsider, elector, asked = scene.network.peer(), scene.peers[0], list[Proposal]()
    scene.histories = dict.fromkeys(range(3), history := lineage([elector.peer_id], {}))

    async def endorse(caller: PeerId, proposal: Proposal, result: bytes, votes: Sequence[Vote]) -> str:
        asked.append(proposal)
        return "it has voted for another round"

    scene.services[0].serve_history("a run", endorse)
    proposal = replace(proposal_of(scene.group, history), group_id=bytes(32))

    async def ask() -> str:
        request = endorsement_to_wire(proposal, bytes(32), ())
        return (await outsider.caller.call(elector.contact, ENDORSE, request, timeout_s=5.0)).refusal

    async def main() -> None:
        conducting = asyncio.ensure_future(scene.conduct())
        await asyncio.sleep(0)
        assert "another round on this head" in await ask()
        assert not any(outcome.failed for outcome in await conducting)
        assert [await ask(), *asked] == ["it has voted for another round", proposal]
        await scene.close()

    run_virtual(main())


def test_a_group_with_a_quorum_asks_nobody_else() -> None:
    scene = Scene(6, [1.0, 1.0, 0.0], auxiliary=[2])
    other = Elector(scene, answers=True)
    # the auxiliary member is an elector, too: it votes for what the contributors voted for
    electors = [scene.peers[0].peer_id, scene.peers[2].peer_id, other.peer.peer_id]
    contacts = {other.peer.peer_id: other.peer.contact}
    scene.histories = {place: lineage(electors, contacts) for place in range(3)}

    async def main() -> None:
        outcomes = await scene.conduct()
        assert not any(outcome.failed for outcome in outcomes), [outcome.reason for outcome in outcomes]
        assert not other.asked
        other.service.close()
        await scene.close()

    run_virtual(main())


def test_a_member_whose_history_refuses_votes_for_none_and_commits_with_the_others() -> None:
    scene = Scene(7, [1.0, 1.0, 1.0])
    electors = [peer.peer_id for peer in scene.peers]
    refusing = lineage(electors, {}, lambda proposal, result: "it has voted on this head")
    scene.histories = {0: lineage(electors, {}), 1: refusing, 2: lineage(electors, {})}

    async def main() -> None:
        outcomes = await scene.conduct()
        assert not any(outcome.failed for outcome in outcomes), [outcome.reason for outcome in outcomes]
        certificate = outcomes[1].certificate
        assert certificate is not None
        assert scene.peers[1].peer_id not in certificate.votes
        await scene.close()

    run_virtual(main())


def test_a_round_without_a_history_extends_no_head() -> None:
    scene = Scene(8, [1.0, 1.0])

    async def main() -> None:
        outcomes = await scene.conduct()
        one_result(outcomes)
        assert outcomes[0].certificate is not None
        assert outcomes[0].certificate.proposal.head == NO_HEAD
        await scene.close()

    run_virtual(main())


def test_only_the_last_all_reduce_of_several_codecs_extends_the_history() -> None:
    scene = Scene(7, [1.0, 1.0, 1.0])
    electors = [peer.peer_id for peer in scene.peers]
    asked: list[Proposal] = []

    def may_vote(proposal: Proposal, result: bytes) -> str:
        asked.append(proposal)
        return ""

    given = [[vector[:10].clone(), vector.clone()] for vector in scene.vectors]
    mixed = [
        MixedCodecs([], mine, lambda _, tensor: "float32" if tensor.numel() > 10 else "float16")
        for mine in given
    ]

    async def one(place: int) -> RoundOutcome:
        strategy = mixed[place].take(
            scene.services[place],
            CONFIG,
            lineage(electors, {}, may_vote),
            gives=True,
            read_in_place=False,
        )
        return await strategy.run(scene.group, scene.peers[place].clock.monotonic_s() + DEADLINE_S)

    async def main() -> list[RoundOutcome]:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(place)) for place in range(3)]
        await scene.close()
        return [task.result() for task in running]

    outcomes = run_virtual(main())
    assert not any(outcome.failed for outcome in outcomes), outcomes
    assert len(asked) == 3, "one vote of each, for the last all-reduce"
    assert len({proposal.digest() for proposal in asked}) == 1
    for place, outcome in enumerate(outcomes):
        assert outcome.certificate is not None
        outcome.certificate.check(electors, Register())
        assert outcome.certificate.proposal.head == genesis("a run")
        mixed[place].apply(delta=False)
        for nth, tolerance in enumerate((2e-3, 1e-6)):
            mean = torch.stack([vector[: len(given[place][nth])] for vector in scene.vectors]).mean(0)
            torch.testing.assert_close(given[place][nth], mean, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("count", [1, 2])
def test_newcomers_that_vote_for_none_do_not_keep_the_electors_from_committing(count: int) -> None:
    """Identities are free: other ones could be in the way in every round."""
    scene = Scene(11, [1.0] * 6)
    electors = [peer.peer_id for peer in scene.peers[:count]]
    for place in range(6):
        refusing = lineage(electors, {}, lambda _, result: "it wants no round" if result else "")
        known = lineage(electors, {}) if place < count else refusing
        scene.histories[place] = replace(known, register=Register(at_once=0))

    async def main() -> None:
        outcomes = await scene.conduct()
        assert not any(outcome.failed for outcome in outcomes), outcomes
        for outcome in outcomes:
            assert outcome.certificate is not None
            outcome.certificate.check(electors, Register(at_once=0))
            assert outcome.certificate.proposal.electors == tuple(electors)
        assert len({outcome.digest for outcome in outcomes}) == 1
        await scene.close()

    run_virtual(main())


@pytest.mark.parametrize("register", [Register(), Register(at_once=0, known=(Known(OTHER.peer_id, 5),))])
def test_a_contributor_that_sends_nothing_is_no_elector_after_the_round(register: Register) -> None:
    """Before, the certificate counted everybody who was to contribute: three groups made an elector of a
    stranger that sent nothing.
    """
    scene = Scene(14, [1.0] * 4)
    electors = [peer.peer_id for peer in scene.peers[:3]]
    idle = scene.peers[3]
    known = tuple(replace(one, peer=idle.peer_id) for one in register.known)
    register = replace(register, known=known)
    for place in range(3):
        scene.histories[place] = replace(lineage(electors, {}), register=register)
    scene.group = replace(scene.group, reducers=frozenset(electors))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scene.run(place)) for place in range(3)]
        for task in running:
            outcome = task.result()
            assert outcome.certificate is not None, outcome
            assert idle.peer_id in outcome.faults, "all electors reduce, and say so"
            outcome.certificate.check(electors, register)
            assert idle.peer_id in outcome.certificate.proposal.electors, "if it had worked"
            assert outcome.certificate.workers == tuple(electors)
            assert outcome.certificate.electors == tuple(electors)
            assert outcome.certificate.register.rounds_of(idle.peer_id) == (5 if known else 0)
        await scene.close()

    run_virtual(main())


def test_an_elector_that_missed_the_last_certificate_does_not_lead() -> None:
    """One that leads and never begins would hold the others once for each certificate that it may miss."""
    first, second, third = [SeededIdentity(number).peer_id for number in range(3)]
    history = lineage([first, second, third], {})
    assert history.present == (first, second, third)
    assert replace(history, register=Register(misses=(1, 0, 2))).present == (second,)
    assert replace(history, register=Register(misses=(1, 1, 1))).present == (first, second, third)


@pytest.mark.parametrize("unaware", [None, 0, 2])
def test_an_elector_leaves_the_list_once_all_members_of_a_group_know_its_goodbye(unaware: int | None) -> None:
    scene = Scene(13, [1.0] * 3)
    leaver = OTHER
    electors = [scene.peers[0].peer_id, scene.peers[1].peer_id, leaver.peer_id]
    goodbyes = {leaver.peer_id: leaver.sign(goodbye_statement("a run", genesis("a run")))}
    for place in range(3):
        known = {} if place == unaware else goodbyes
        history = replace(lineage(electors, {}), register=Register(at_once=0), goodbyes=known)
        scene.histories[place] = history
        member = replace(scene.group.members[place], gone=history.gone)
        members = (*scene.group.members[:place], member, *scene.group.members[place + 1 :])
        scene.group = replace(scene.group, members=members)

    async def main() -> None:
        for outcome in await scene.conduct():
            assert outcome.certificate is not None, outcome
            outcome.certificate.check(electors, Register(at_once=0))
            proposal = outcome.certificate.proposal
            left = unaware is None
            assert proposal.gone == ((leaver.peer_id,) if left else ())
            assert proposal.electors == tuple(electors[:2] if left else electors)
        await scene.close()

    run_virtual(main())


@pytest.mark.parametrize("extends", [True, False])
def test_votes_of_electors_count_in_every_all_reduce_of_a_round(extends: bool) -> None:
    scene = Scene(12, [1.0] * 4)
    electors = [peer.peer_id for peer in scene.peers[:2]]
    history = replace(lineage(electors, {}), register=Register(at_once=0), extends=extends)
    about = proposal_of(scene.group, history)
    assert about.deciders == tuple(electors)
    assert (about.head == NO_HEAD) is not extends
