"""The resolution of a round that failed here after this member had voted: its vote binds it until it knows
how the round ended.

Others may have committed such a round, so this peer votes on no other attempt at the head. Most often nobody
has: the members that did not vote for the same result have signed votes for none since, and say so when they
are asked. A member that never heard of the round, since the message that its group had begun was lost,
votes for none when it is asked.
"""

from __future__ import annotations

import asyncio

from averaging.allreduce import wire
from averaging.allreduce.config import ENDORSE, VOTE
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.membership import JOIN_S
from averaging.allreduce.logic.values import Statement
from averaging.allreduce.network import RoundNetwork
from averaging.history.grace import GRACE_S_MAX
from averaging.history.round_lineage import RoundLineage
from swarm.core.backoff import Backoff
from swarm.core.errors import NetworkError, PeerError
from swarm.wire.reduce_pb2 import VoteRequest

_PAUSE_S_FIRST = 0.5  # first pause before members are asked again
_PAUSE_S_MAX = 4.0
_CALL_S = 2.0
_RELAYS_MAX = 4  # members that are asked for the votes of those that cannot be called


async def resolve(machine: RoundMachine, network: RoundNetwork, history: RoundLineage) -> None:
    """Ask the members of a failed round how they voted, until nobody can commit it any more, which frees this
    peer's vote, or until its head moves; at most for the longest grace, after which it stops waiting. Where
    the round's certificate is known there is nothing to ask: the vote binds until the head moves.
    """
    pauses = Backoff(_PAUSE_S_FIRST, _PAUSE_S_MAX)
    end_s = network.now_s + GRACE_S_MAX
    while history.leave(machine.setup.proposal) and network.now_s < end_s and not machine.votes.certificate:
        async with asyncio.TaskGroup() as calls:
            for place in _to_ask(machine):
                calls.create_task(_ask(place, machine, network))
                if machine.setup.peer_id(place) not in machine.votes.tally.votes:
                    calls.create_task(_ask_to_decline(place, machine, network))
        if machine.votes.tally.is_dead():
            history.release(machine.setup.proposal)
            return
        await asyncio.sleep(pauses.next_s())


def _to_ask(machine: RoundMachine) -> list[int]:
    """Return the members to ask: those whose votes are not known, and some others if one of them cannot be
    called.
    """
    setup, votes = machine.setup, machine.votes.tally.votes
    silent = [place for place in setup.contributors if setup.peer_id(place) not in votes]
    others = [place for place in setup.contributors if place not in silent and place != setup.own]
    hidden = not all(setup.can_dial(place) for place in silent)
    asked = silent + (others[:_RELAYS_MAX] if hidden else [])
    return [place for place in asked if setup.can_dial(place)]


async def _ask(place: int, machine: RoundMachine, network: RoundNetwork) -> None:
    """Ask one member, and count the votes that it knows."""
    setup, votes = machine.setup, machine.votes
    request = VoteRequest(group_id=setup.group.group_id, statement=wire.statement_to_wire(votes.statement()))
    contact = setup.group.members[place].contact
    try:
        reply = await network.call(contact, VOTE, request, timeout_s=_CALL_S)
        statement = wire.statement_from_wire(reply.statement, len(setup.members))
        votes.on_statement(place, statement, network.now_s)
    except (NetworkError, PeerError):
        return  # it is asked again


async def _ask_to_decline(place: int, machine: RoundMachine, network: RoundNetwork) -> None:
    """Ask a member to vote for none if it never heard of this round, and count its vote. It waits `JOIN_S`
    for the message that the round has begun: an elector that asks too early ends no round.
    """
    setup, votes = machine.setup, machine.votes
    contact = setup.group.members[place].contact
    request = wire.endorsement_to_wire(setup.proposal, b"", ())
    try:
        reply = await network.call(contact, ENDORSE, request, timeout_s=JOIN_S + _CALL_S)
        if reply.HasField("vote"):
            votes.on_statement(place, Statement((wire.vote_from_wire(reply.vote),)), network.now_s)
    except (NetworkError, PeerError):
        return  # it is asked again
