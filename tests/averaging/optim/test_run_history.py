"""The history of an optimizer: its knowledge of unreachable electors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from averaging.history.ahead import Ahead, still_ahead
from averaging.history.certificate import (
    Certificate,
    Proposal,
    RoundKind,
    Vote,
    goodbye_statement,
    vote_statement,
)
from averaging.history.chain import Chain
from averaging.history.encoding import decode_chain
from averaging.history.grace import GRACE_S_MIN
from averaging.history.lineage import Lineage
from averaging.history.tally import Tally
from averaging.optim.endorsing import Endorser
from averaging.optim.history import RunHistory
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import Contact, PeerId
from swarm.testing.identities import SeededIdentity
from swarm.wire import state_pb2
from tests.averaging.optim.histories import HEAD, Calls, contact, history_with

EPOCH_S = 0.5


@pytest.mark.parametrize("again", [0, 1, 5])
def test_a_stale_report_of_a_dead_elector_does_not_lengthen_the_grace(again: int) -> None:
    """The records of killed peers stay in the DHT for a while, and are read again and again."""

    async def play() -> None:
        history = history_with(Calls())
        dead = [contact(2), contact(3)]
        history.restore(
            Chain(head=HEAD, electors=(*(one.peer_id for one in dead), contact(1).peer_id), certificates=())
        )
        for one in dead:
            history.heard(one, b"x" * 32)
        assert not history.seek_quorum((), 0.0, EPOCH_S)
        await history.compare()
        for _ in range(again):
            for one in dead:
                history.heard(one, b"x" * 32)
        assert not history.seek_quorum((), 0.9, EPOCH_S)
        assert history.waits_briefly
        assert history.seek_quorum((), 1.9, EPOCH_S)
        assert history.is_break

    asyncio.run(play())


def test_a_history_is_fetched_from_the_next_peer_when_one_does_not_answer() -> None:
    """Newcomers asked only the first peer that had reported a head, even if it had failed."""
    asked: list[Contact] = []

    class DeadPeers:
        async def call(self, peer: Contact, method: Any, request: Any, *, timeout_s: float) -> Any:
            asked.append(peer)
            raise NetworkError("nobody listens there")

    async def play() -> None:
        history = history_with(DeadPeers())
        for number in (2, 3, 4):
            history.heard(contact(number), HEAD)
        await history.compare()
        assert asked == [contact(4), contact(3), contact(2)], "the one that was heard last first"

    asyncio.run(play())


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_peer_shows_the_history_of_the_state_that_it_has(is_loaded: bool) -> None:
    """Regression test: peers that waited for a state of which only the dead had a copy showed one another
    that history. A peer that gave it up followed it again because of another one, and no grace ended.
    """

    async def shown(history: RunHistory) -> bytes:
        reply = await history.on_history(contact(3).peer_id, state_pb2.HistoryRequest(run="run"))
        return decode_chain(reply.chain).last_head

    async def play() -> None:
        history = history_with(Calls())
        own = Chain(head=HEAD, electors=(contact(1).peer_id,), certificates=(), root_epoch=3)
        history.restore(own)
        history.follow(Ahead(replace(own, head=b"x" * 32, root_epoch=9), contact(2)))
        assert await shown(history) == HEAD
        if is_loaded:
            history.settle()
        else:
            history.unfollow()
        assert await shown(history) == (b"x" * 32 if is_loaded else HEAD)

    asyncio.run(play())


def test_an_elector_that_reports_another_head_lives() -> None:
    async def play() -> None:
        history = history_with(Calls())
        history.restore(Chain(head=HEAD, electors=(contact(2).peer_id, contact(1).peer_id), certificates=()))
        history.heard(contact(2), b"x" * 32)
        history.seek_quorum((), 0.0, EPOCH_S)
        await history.compare()
        history.heard(contact(2), b"y" * 32)
        assert not history.seek_quorum((), 1.9, EPOCH_S)
        assert not history.waits_briefly

    asyncio.run(play())


def test_an_elector_of_which_nothing_was_heard_since_a_restart_is_waited_for() -> None:
    """Regression test: a peer that was restarted while an elector was cut off took it for dead, and continued
    with a break after a second, while that elector's side could have a quorum.
    """

    async def play() -> None:
        history = history_with(Calls())
        electors = (contact(2).peer_id, contact(3).peer_id, contact(1).peer_id)
        history.restore(Chain(head=HEAD, electors=electors, certificates=()))
        alive(history, 3)
        now_s = 0.0
        while not history.seek_quorum([contact(3).peer_id], now_s, EPOCH_S):
            now_s += 0.5
        assert now_s == GRACE_S_MIN
        assert history.is_break

    asyncio.run(play())


def test_a_restarted_peer_that_knows_nobody_continues_soon() -> None:
    """A run of one machine is continued from its checkpoint, often as a new peer."""

    async def play() -> None:
        history = history_with(Calls(), knows=())
        history.restore(Chain(head=HEAD, electors=(contact(2).peer_id,), certificates=()))
        assert not history.seek_quorum((), 0.0, EPOCH_S)
        assert history.seek_quorum((), 1.0, EPOCH_S)
        assert history.is_break

    asyncio.run(play())


def test_a_peer_may_commit_alone_as_a_quorum_or_after_the_grace() -> None:
    async def play() -> None:
        history = history_with(Calls())
        electors = (contact(1).peer_id, contact(2).peer_id, contact(3).peer_id)
        history.restore(Chain(head=HEAD, electors=electors, certificates=()))
        alive(history, 2, 3)
        assert history.seek_quorum(electors[1:], 0.0, EPOCH_S)
        assert not history.may_commit_alone, "the others, with which it is a quorum, may have gone"
        for number in range(40):
            history.seek_quorum((), 0.5 * number, EPOCH_S)
        assert history.may_commit_alone
        assert history_with(Calls()).may_commit_alone, "the first certificate needs no quorum"

    asyncio.run(play())


def alive(history: RunHistory, *numbers: int) -> None:
    for number in numbers:
        history.heard(contact(number), HEAD)


def test_peers_continue_soon_when_all_electors_have_said_goodbye() -> None:
    """The founder may leave before anybody else is an elector."""

    async def play() -> None:
        history = history_with(Calls())
        history.restore(Chain(head=HEAD, electors=(contact(2).peer_id,), certificates=()))
        alive(history, 2)
        assert not history.seek_quorum((), 0.0, EPOCH_S)
        assert not history.seek_quorum((), 1.9, EPOCH_S), "it may come back"
        history.on_goodbye(contact(2).peer_id, SeededIdentity(2).sign(goodbye_statement("run", HEAD)))
        assert history.seek_quorum((), 2.0, EPOCH_S)
        assert history.is_break

    asyncio.run(play())


def test_nobody_waits_for_an_elector_that_the_owner_has_removed() -> None:
    async def play() -> None:
        history = history_with(Calls())
        history.restore(Chain(head=HEAD, electors=(contact(2).peer_id, contact(1).peer_id), certificates=()))
        history.removed = frozenset([contact(2).peer_id])
        for now_s in (0.0, 0.6):
            alive(history, 2)  # its records are still in the DHT
            assert not history.seek_quorum((), now_s, EPOCH_S)
        assert history.seek_quorum((), 1.2, EPOCH_S)

    asyncio.run(play())


@pytest.mark.parametrize("claimed", [0, 6, 8])
def test_a_state_of_another_epoch_than_its_certificate_is_refused(claimed: int) -> None:
    """A donor could add epochs to a genuine state: schedules and counters would follow them."""

    async def play() -> None:
        history = history_with(Calls())
        history.restore(Chain(head=HEAD, electors=(contact(2).peer_id,), certificates=(), root_epoch=7))
        assert await history.follow_to(HEAD, 7, [contact(2).peer_id])
        with pytest.raises(PeerError, match=f"claims epoch {claimed}, and its certificate says 7"):
            await history.follow_to(HEAD, claimed, [contact(2).peer_id])
        assert not await history.follow_to(b"o" * 32, 7, [contact(2).peer_id])

    asyncio.run(play())


RESULT = bytes(32)


def votes(proposal: Proposal, numbers: list[int], result: bytes = RESULT) -> list[Vote]:
    """Return the votes of these peers for a result of this proposal."""
    statement = vote_statement(proposal.digest(), result)
    return [
        Vote(voter=contact(one).peer_id, result=result, signature=SeededIdentity(one).sign(statement))
        for one in numbers
    ]


def proposal_upon(lineage: Lineage, numbers: list[int]) -> Proposal:
    """Return an attempt of these peers at the next epoch."""
    return lineage.propose(
        epoch=lineage.epoch + 1,
        kind=RoundKind.EPOCH,
        group_id=bytes(numbers) + bytes(32 - len(numbers)),
        contributors=[contact(one).peer_id for one in numbers],
        is_break=False,
    )


def endorser(history: RunHistory) -> Endorser:
    """Return what votes for the history of peer 1."""
    return Endorser(history, SeededIdentity(1).sign)


def begun() -> tuple[Lineage, Certificate]:
    """Return the history of a run after its first certificate, of peers 1 to 3, and that certificate."""
    lineage = Lineage("run", contact(1).peer_id)
    tally = Tally(proposal_upon(lineage, [1, 2, 3]), ())
    for vote in votes(tally.proposal, [1, 2, 3]):
        tally.add(vote)
    assert tally.certificate is not None
    lineage.extend(tally.certificate)
    return lineage, tally.certificate


def test_a_contributor_that_never_heard_of_its_round_votes_for_none_when_an_elector_asks() -> None:
    """The others lack this vote to know that nobody can commit the round."""

    async def play() -> None:
        lineage, certificate = begun()
        history, attempt = history_with(Calls()), proposal_upon(lineage, [1, 2])
        history.commit(certificate)
        for _ in range(2):  # the first answer may have been lost
            vote = await endorser(history).endorse(contact(2).peer_id, attempt, b"", ())
            assert isinstance(vote, Vote)
            assert vote.result == b""
            vote.check(attempt.digest())
        assert isinstance(
            await endorser(history).endorse(contact(2).peer_id, attempt, RESULT, votes(attempt, [2])), str
        )

    asyncio.run(play())


@pytest.mark.parametrize("case", ["stranger asks", "not a member", "restored", "it has voted", "no elector"])
def test_a_vote_for_none_is_refused_to_all_other_callers(case: str) -> None:
    async def play() -> None:
        lineage, certificate = begun()
        history, attempt, caller = (
            history_with(Calls()),
            proposal_upon(lineage, [1, 2, 3]),
            contact(2).peer_id,
        )
        if case == "restored":  # another process of this peer may have been in the round
            history.restore(lineage.chain())
        elif case != "no elector":
            history.commit(certificate)
        if case == "stranger asks":
            caller = contact(4).peer_id
        elif case == "not a member":
            attempt = proposal_upon(lineage, [2, 3])
        elif case == "it has voted":
            given = await endorser(history).endorse(caller, attempt, RESULT, votes(attempt, [2, 3]))
            assert isinstance(given, Vote)
            assert given.result == RESULT
        assert isinstance(await endorser(history).endorse(caller, attempt, b"", ()), str)

    asyncio.run(play())


class Peers:
    """Calls to other peers' histories; those that are not there do not answer."""

    def __init__(self) -> None:
        self.histories: dict[PeerId, RunHistory] = {}
        self.goodbye: state_pb2.Goodbye | None = None  # that all of them show

    async def call(self, peer: Contact, method: Any, request: Any, *, timeout_s: float) -> Any:
        if peer.peer_id not in self.histories:
            raise NetworkError("nobody listens there")
        reply = await self.histories[peer.peer_id].on_history(contact(1).peer_id, request)
        if self.goodbye is not None:
            reply.goodbyes.append(self.goodbye)
        return reply


def two_of_three(calls: Peers, head: bytes = HEAD) -> tuple[RunHistory, RunHistory]:
    """Return the histories of peers 1 and 2, which know one another and the electors 2, 1 and 3."""
    own, other = history_with(calls), history_with(calls, 2)
    electors = tuple(contact(number).peer_id for number in (2, 1, 3))
    for history in (own, other):
        history.restore(Chain(head=head, electors=electors, certificates=()))
        history.commit(certificate_upon(history, [1, 2, 3]))
    assert own.head == other.head
    calls.histories[contact(2).peer_id] = other
    for number in (2, 3):
        own.heard(contact(number), own.head)
    return own, other


def certificate_upon(history: RunHistory, contributors: list[int], *, is_break: bool = False) -> Certificate:
    """Return a certificate of these peers, all of which vote, that extends a history's head."""
    lineage = Lineage("run", contact(1).peer_id)
    lineage.adopt(history.root)
    proposal = lineage.propose(
        epoch=lineage.epoch + 1,
        kind=RoundKind.EPOCH,
        group_id=bytes([*contributors]).ljust(32),
        contributors=[contact(number).peer_id for number in contributors],
        is_break=is_break,
    )
    tally = Tally(proposal, lineage.electors, lineage.register)
    for vote in votes(proposal, contributors):
        tally.add(vote)
    assert tally.certificate is not None
    return tally.certificate


def test_no_group_begins_that_needs_the_vote_of_an_elector_in_another_group() -> None:
    """Regression test: two groups began on one head, and each waited for the vote of a member of the other
    until the end of the grace. The third elector was away.
    """

    async def play() -> None:
        own, other = two_of_three(Peers())
        mine, theirs = (history.round(RoundKind.EPOCH, 2, "2") for history in (own, other))
        first, second = contact(1).peer_id, contact(2).peer_id
        assert await mine.may_begin([first], [first]) == "", "the other one would vote for it"
        mine.ended()
        assert await theirs.may_begin([first, second], [first, second]) == ""
        assert await mine.may_begin([first], [first])
        theirs.ended()
        assert await mine.may_begin([first], [first]) == ""

    asyncio.run(play())


@pytest.mark.parametrize("abstains", [False, True])
def test_an_elector_that_contributes_nothing_counts_in_its_own_group_if_it_may_vote(
    *, abstains: bool
) -> None:
    """Regression test: it was in a round, that of this group, and so it was taken for one that votes for no
    group. The others waited for it until they continued with a break.
    """

    async def play() -> None:
        own, other = two_of_three(Peers())
        if abstains:  # it has restarted from a checkpoint
            other.restore(Chain(head=HEAD, electors=own.root.electors, certificates=()))
            other.restore(own.past())
        mine, theirs = (history.round(RoundKind.EPOCH, 2, "2") for history in (own, other))
        first, second = contact(1).peer_id, contact(2).peer_id
        assert bool(await theirs.may_begin([first], [first, second])) is abstains
        assert bool(await mine.may_begin([first], [first, second])) is abstains

    asyncio.run(play())


@pytest.mark.parametrize("ends", ["cancelled", "it lacks a quorum"])
def test_a_group_that_did_not_begin_keeps_no_elector_from_voting(ends: str) -> None:
    async def play() -> None:
        own, other = two_of_three(calls := Peers())
        del calls.histories[contact(2).peer_id]
        attempt = asyncio.ensure_future(
            other.round(RoundKind.EPOCH, 2, "2").may_begin([contact(4).peer_id], [])
        )
        await asyncio.sleep(0.0)
        if ends == "cancelled":
            attempt.cancel()
        await asyncio.wait([attempt])
        calls.histories[contact(2).peer_id] = other
        assert await own.round(RoundKind.EPOCH, 2, "2").may_begin([contact(1).peer_id], []) == ""

    asyncio.run(play())


@pytest.mark.parametrize("is_signed", [True, False])
def test_goodbyes_are_learned_from_others(*, is_signed: bool) -> None:
    """Regression test: a peer that was not at the head yet when an elector left waited for it for the grace,
    and continued with a break, while another one knew of the goodbye and searched without it.
    """

    async def play() -> None:
        own, _ = two_of_three(calls := Peers())
        said = SeededIdentity(3 if is_signed else 4).sign(goodbye_statement("run", own.head))
        calls.goodbye = state_pb2.Goodbye(peer=contact(3).peer_id.public_key, signature=said)
        assert not own.seek_quorum([], 0.0, EPOCH_S)
        await own.compare()
        signed = {contact(3).peer_id: said} if is_signed else {}
        assert own.round(RoundKind.EPOCH, 2, "2").goodbyes == signed

    asyncio.run(play())


@pytest.mark.parametrize("wins", [True, False])
def test_a_history_that_loses_against_what_a_peer_has_committed_since_is_not_followed(*, wins: bool) -> None:
    """Regression test: a peer that waited for a quorum was to follow others that had continued with a break.
    It committed a break of its own, which won against theirs, and followed them none the less: nobody was
    left who had the state of the history that continues.
    """

    async def play() -> None:
        own, _ = two_of_three(Peers())
        # of the electors 2, 1 and 3
        senior, junior = (certificate_upon(own, group, is_break=True) for group in ([2, 4], [3, 5]))
        mine, theirs = (junior, senior) if wins else (senior, junior)
        lineage = Lineage("run", contact(1).peer_id)
        lineage.adopt(own.root)
        ahead = Ahead(replace(own.root, certificates=(theirs,)), contact(3))
        lineage.extend(mine)
        found = still_ahead(ahead, lineage)
        assert (found is not None) is wins
        assert found is None or found.epochs_given_up == 1

    asyncio.run(play())


def test_electors_that_have_left_a_history_do_not_say_what_its_state_is() -> None:
    """Regression test: all electors of the head that continues had gone over to another history. What they
    hold is not the state of that head, and the one peer that had it was refused as a donor.
    """

    async def play() -> None:
        own, other = two_of_three(Peers())
        theirs = certificate_upon(own, [1, 2, 3])
        followed = Chain(
            head=other.head,
            electors=other.root.electors,
            certificates=(certificate_upon(own, [2, 3]),),
            root_register=other.root.root_register,
            root_epoch=other.root.root_epoch,
        )
        own.commit(theirs)
        for number in (2, 3):
            own.heard(contact(number), followed.last_head)
        own.follow(Ahead(followed, contact(4)))
        assert own.electors() == list(followed.last_electors)
        own.heard(contact(2), theirs.head)  # of the history that this peer has left
        assert own.electors() == [contact(3).peer_id]

    asyncio.run(play())
