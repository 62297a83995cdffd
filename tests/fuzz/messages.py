"""Messages of calls, decoded as their callers and handlers do. The lying node of `tests.fuzz.nodes` sends
some of these answers rarely or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from google.protobuf.message import Message

from averaging.allreduce import wire as rounds
from averaging.matchmaking.service import wire as groups
from averaging.optim.exchange import goodbyes_of
from averaging.optim.progress.claims import claim_of, read_claim
from averaging.optim.progress.logic.reports import ProgressReport
from averaging.reduction.partition import Chunk, Plan
from moe.protocol.parts import announced_bytes, cut, parts_of
from swarm.core.ids import Address, Contact
from swarm.membership.capability import encode
from swarm.membership.invite import Invite, RunIdentity, Terms, make_invite
from swarm.net.contacts import contact_from_wire, contact_to_wire
from swarm.net.membership import RunMembership
from swarm.wire import expert_pb2, group_pb2, peer_pb2, reduce_pb2, run_pb2, state_pb2
from tests.averaging.history.peers import IDENTITIES, PEERS, identity, proposal, vote
from tests.fuzz.making import PEER, Learned, Maker

_NOW_S = 1.8e9
_MEMBERS = 3
_PLAN = Plan(
    numel=90,
    chunks=tuple(Chunk(index=at, start=10 * at, stop=10 * at + 10, reducer=at // 3) for at in range(9)),
    members=_MEMBERS,
)
_OWNER = identity(104)
_TERMS = Terms(roles=("train", "serve", "observe", "invite"), uses=9, lifetime_s=86400.0)


def _invites() -> list[Invite]:
    """Return an invite of the owner of a run, and one of a peer that joined by it."""
    run = RunIdentity(_OWNER.peer_id, "fuzz")
    first = make_invite(run, _OWNER, (), _TERMS, now_s=_NOW_S)
    held = first.capability_of(PEERS[3], _NOW_S)
    return [first, make_invite(run, IDENTITIES[3], held, _TERMS, now_s=_NOW_S)]


INVITES = _invites()
_INVITE = INVITES[0]
CAPABILITIES = [encode(one.capability_of(PEERS[1], _NOW_S)) for one in INVITES]


def _membership() -> RunMembership:
    return RunMembership(_INVITE, PEERS[0], [PEERS[2]], lambda: _NOW_S)


def _inventory(reply: Any) -> object:
    request = reduce_pb2.InventoryRequest(group_id=bytes(16), everything=True, first_chunk=1)
    return rounds.versions_from_wire(request, reply, _PLAN)


def _contact() -> peer_pb2.Contact:
    return contact_to_wire(Contact(PEER, (Address("127.0.0.1", 9),)))


def _messages() -> list[Message]:
    """Return one valid message of each kind, which made ones begin with."""
    about = proposal(bytes(32), PEERS[:1], PEERS[:3])
    votes = [vote(one, about, bytes(32)) for one in PEERS[:3]]
    statement = reduce_pb2.Statement(
        votes=[rounds.vote_to_wire(one) for one in votes],
        intents=[reduce_pb2.Intent(place=1, result=bytes(32))],
        left_out=[reduce_pb2.LeftOut(place=2, reason="late")],
    )
    version = reduce_pb2.Version(chunk=1, attempt=0, contributors=b"\x07", digest=bytes(32))
    answer = group_pb2.SeekAnswer(standing="SEEKING", round_key="a", deadline_s=_NOW_S, now_s=_NOW_S)
    member = group_pb2.GroupMember(contact=_contact(), weight=1.0, bandwidth=1e6, gathered=b"x")
    tensor = expert_pb2.TensorHeader(payload_bytes=16)
    claim = ProgressReport(epoch=4, samples=100, rate=2.5, at_s=_NOW_S, since_s=_NOW_S - 5.0)
    return [
        reduce_pb2.HeartbeatReply(state=1, reason="late"),
        reduce_pb2.VoteReply(statement=statement),
        rounds.endorsement_to_wire(about, bytes(32), votes),
        reduce_pb2.EndorseReply(vote=rounds.vote_to_wire(votes[0])),
        reduce_pb2.InventoryRequest(group_id=bytes(16), reducer=1, known=2),
        reduce_pb2.InventoryReply(versions=[version], sealed=True, wanted=[2]),
        answer,
        group_pb2.JoinAnswer(group=group_pb2.Group(group_id=bytes(16), members=[member, member])),
        group_pb2.MeetAnswer(mates=[_contact()], home="1/2"),
        group_pb2.Meet(contact=_contact(), schema=bytes(32), place="1/2", round_key="a"),
        run_pb2.AdmitRequest(run=_INVITE.run_id, capability=CAPABILITIES[1]),
        run_pb2.AdmitReply(member=True, capability=CAPABILITIES[1]),
        state_pb2.HistoryReply(goodbyes=[state_pb2.Goodbye(peer=PEERS[1].public_key, signature=bytes(64))]),
        claim_of(claim),
        _contact(),
        expert_pb2.ExpertRequest(
            uid="ffn.0",
            batch=1,
            tensors=[tensor],
            payload=bytes(32),
            more=[expert_pb2.ExpertRequest(tensors=[tensor])],
        ),
        expert_pb2.ExpertReply(
            tensors=[tensor], payload=bytes(32), more=[expert_pb2.ExpertReply(tensors=[tensor])]
        ),
    ]


def _parts(message: Any) -> object:
    """Read the parts of a request, and cut its payload, as a server does."""
    return _cut(message.payload, parts_of(message))


def _answers(message: Any) -> object:
    """Cut the payload of an answer to several requests, as a caller does."""
    return _cut(message.payload, [message, *message.more])


def _cut(payload: bytes, parts: Sequence[Any]) -> object:
    received = torch.tensor(list(payload), dtype=torch.uint8)
    return cut(received, [announced_bytes(part.tensors) for part in parts])


# type of a message: what decodes it
DECODERS: dict[type[Message], Callable[[Any], object]] = {
    reduce_pb2.HeartbeatReply: rounds.state_from_wire,
    reduce_pb2.VoteReply: lambda message: rounds.statement_from_wire(message.statement, _MEMBERS),
    reduce_pb2.EndorseRequest: rounds.endorsement_from_wire,
    reduce_pb2.EndorseReply: lambda message: rounds.vote_from_wire(message.vote),
    reduce_pb2.InventoryRequest: lambda message: rounds.question_from_wire(message, _MEMBERS),
    reduce_pb2.InventoryReply: _inventory,
    group_pb2.SeekAnswer: lambda message: groups.decode_answer(message, _NOW_S),
    group_pb2.JoinAnswer: lambda message: groups.decode_join_answer(message, _NOW_S),
    group_pb2.MeetAnswer: groups.decode_cell_lookup_reply,
    group_pb2.Meet: lambda message: groups.decode_cell_lookup(message, PEER),
    run_pb2.AdmitRequest: lambda message: _membership().answer(PEERS[1], message),
    run_pb2.AdmitReply: lambda message: _membership().check_reply(PEERS[1], message),
    state_pb2.HistoryReply: goodbyes_of,
    state_pb2.Claim: lambda message: read_claim(message, _NOW_S),
    peer_pb2.Contact: contact_from_wire,
    expert_pb2.ExpertRequest: _parts,
    expert_pb2.ExpertReply: _answers,
}
_LEARNED = Learned(*_messages())


def message_cases() -> dict[str, Callable[[Maker], object]]:
    """Return for each kind of message what makes one and decodes it."""

    def case(kind: type[Message], decode: Callable[[Any], object]) -> Callable[[Maker], object]:
        def run(maker: Maker) -> object:
            made = Maker(str(maker.rng.random()), _LEARNED).message(kind)
            return decode(kind.FromString(made.SerializeToString()))

        return run

    return {f"message {kind.DESCRIPTOR.name}": case(kind, decode) for kind, decode in DECODERS.items()}
