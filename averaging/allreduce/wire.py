"""Conversion between a round's values and its messages. Everything that a peer sends is checked here:
PeerError names what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from averaging.allreduce.config import REASON_CHARACTERS_MAX, VERSIONS_MAX
from averaging.allreduce.logic.values import InventoryQuestion, RoundState, Statement
from averaging.allreduce.logic.versions import Version, check_clipped, decode_places
from averaging.history.certificate import DIGEST_BYTES, RESULT_BYTES_MAX, Proposal, RoundKind, Vote
from averaging.history.electors import ELECTORS_MAX
from averaging.history.encoding import (
    decode_peers,
    decode_register,
    decode_samples,
    encode_peers,
    encode_register,
)
from averaging.reduction.framing import pack
from averaging.reduction.partition import Plan
from swarm.compression import Codec
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.wire import reduce_pb2 as pb

_KINDS = {0: RoundKind.EPOCH, 1: RoundKind.STATE}
_STATES = {
    RoundState.UNKNOWN: pb.HeartbeatReply.UNKNOWN,
    RoundState.RUNNING: pb.HeartbeatReply.RUNNING,
    RoundState.COMMITTED: pb.HeartbeatReply.COMMITTED,
    RoundState.FAILED: pb.HeartbeatReply.FAILED,
}


# ---- streams


def opening(group_id: bytes, codec: Codec, plan_digest: bytes) -> pb.ExchangeHeader:
    """Return the header of the first message of a stream to a reducer."""
    message = pb.ExchangeOpen(
        group_id=group_id, codec=codec.wire_id, codec_version=codec.version, plan_digest=plan_digest
    )
    return pb.ExchangeHeader(open=message)


def check_opening(message: pb.ExchangeOpen, codec: Codec, plan_digest: bytes) -> None:
    """Raise PeerError unless the opener of a stream has the same codec and cut."""
    if (message.codec, message.codec_version) != (codec.wire_id, codec.version):
        raise PeerError(
            f"codec {message.codec} version {message.codec_version} is not this round's: {codec.name} "
            f"version {codec.version}"
        )
    if message.plan_digest != plan_digest:
        raise PeerError(
            "its cut of the vector into chunks differs: does the vector have another size there, or "
            "chunk_bytes another value?"
        )


def withdrawal(reason: str) -> bytes:
    """Return the message by which a sender withdraws."""
    return pack(pb.ExchangeHeader(withdrawal=pb.ExchangeWithdrawal(reason=reason)))


def refusal(reason: str) -> bytes:
    """Return the message by which a reducer refuses further values."""
    return pack(pb.ExchangeHeader(refusal=pb.ExchangeRefusal(reason=reason)))


def waiting(place: int) -> bytes:
    """Return the message by which a reducer names the member that it waits for."""
    return pack(pb.ExchangeHeader(waiting=pb.ExchangeWaiting(place=place)))


def left_out(place: int, reason: str) -> bytes:
    """Return the message by which a reducer says why its next averages are without a member."""
    return pack(pb.ExchangeHeader(left_out=pb.LeftOut(place=place, reason=reason[:REASON_CHARACTERS_MAX])))


# ---- votes


def vote_to_wire(vote: Vote) -> pb.Vote:
    """Return a vote as a message."""
    return pb.Vote(voter=vote.voter.public_key, result=vote.result, signature=vote.signature)


def vote_from_wire(message: pb.Vote) -> Vote:
    """Return the vote in a message."""
    return Vote(voter=_peer(message.voter), result=message.result, signature=message.signature)


def statement_to_wire(statement: Statement) -> pb.Statement:
    """Return a member's statement as a message."""
    return pb.Statement(
        votes=[vote_to_wire(vote) for vote in statement.votes],
        intents=[pb.Intent(place=place, result=result) for place, result in statement.intents.items()],
        left_out=[
            pb.LeftOut(place=place, reason=reason[:REASON_CHARACTERS_MAX])
            for place, reason in statement.left_out.items()
        ],
        gave_up=statement.gave_up[:REASON_CHARACTERS_MAX],
    )


def statement_from_wire(message: pb.Statement, members: int) -> Statement:
    """Return the statement in the message of a member of a group of `members`."""
    for intent in message.intents:
        if intent.place >= members:
            raise PeerError(f"an intent for place {intent.place} in a group of {members}")
        if not DIGEST_BYTES <= len(intent.result) <= RESULT_BYTES_MAX:
            raise PeerError(f"an intent has a digest of {DIGEST_BYTES} bytes, not {len(intent.result)}")
    return Statement(
        votes=tuple(vote_from_wire(vote) for vote in message.votes),
        intents={intent.place: intent.result for intent in message.intents},
        left_out={
            item.place: item.reason[:REASON_CHARACTERS_MAX]
            for item in message.left_out
            if item.place < members
        },
        gave_up=message.gave_up[:REASON_CHARACTERS_MAX],
    )


def endorsement_to_wire(proposal: Proposal, result: bytes, votes: Iterable[Vote]) -> pb.EndorseRequest:
    """Return the request for an elector's vote as a message."""
    at_once, seats, known, misses = encode_register(proposal.register)
    return pb.EndorseRequest(
        run=proposal.run,
        head=proposal.head,
        epoch=proposal.epoch,
        kind=proposal.kind.value,
        group_id=proposal.group_id,
        contributors=[peer.public_key for peer in proposal.contributors],
        electors=[peer.public_key for peer in proposal.electors],
        is_break=proposal.is_break,
        grid_rounds=proposal.grid_rounds,
        new_hour=proposal.new_hour,
        at_once=at_once,
        seats=seats,
        known=known,
        misses=misses,
        gone=encode_peers(proposal.gone),
        samples=proposal.samples,
        result=result,
        votes=[vote_to_wire(vote) for vote in votes],
    )


def endorsement_from_wire(message: pb.EndorseRequest) -> tuple[Proposal, bytes, tuple[Vote, ...]]:
    """Return the proposal, the result and the votes in a request for an elector's vote."""
    if message.kind not in _KINDS:
        raise PeerError(f"there is no round of kind {message.kind}")
    proposal = Proposal(
        run=message.run,
        head=message.head,
        epoch=message.epoch,
        kind=_KINDS[message.kind],
        group_id=message.group_id,
        contributors=tuple(_peer(key) for key in message.contributors),
        electors=tuple(_peer(key) for key in message.electors),
        is_break=message.is_break,
        grid_rounds=message.grid_rounds,
        new_hour=message.new_hour,
        register=decode_register(message.at_once, message.seats, message.known, message.misses),
        gone=decode_peers(message.gone, ELECTORS_MAX),
        samples=decode_samples(message.samples),
    )
    return proposal, message.result, tuple(vote_from_wire(vote) for vote in message.votes)


# ---- heartbeats and repair


def state_to_wire(state: RoundState, reason: str) -> pb.HeartbeatReply:
    """Return the answer to a heartbeat."""
    return pb.HeartbeatReply(state=_STATES[state], reason=reason[:REASON_CHARACTERS_MAX])


def state_from_wire(message: pb.HeartbeatReply) -> tuple[RoundState, str]:
    """Return the state in an answer to a heartbeat, and the reason for a failure."""
    for state, number in _STATES.items():
        if message.state == number:
            return state, message.reason[:REASON_CHARACTERS_MAX]
    raise PeerError(f"there is no state {message.state} of a round")


def question_to_wire(group_id: bytes, question: InventoryQuestion) -> pb.InventoryRequest:
    """Return an inventory question as a message."""
    return pb.InventoryRequest(
        group_id=group_id,
        reducer=question.reducer or 0,
        everything=question.reducer is None,
        wait=question.wait,
        known=question.known,
        known_sealed=question.known_sealed,
    )


def question_from_wire(message: pb.InventoryRequest, members: int) -> InventoryQuestion:
    """Return the question in a message."""
    if message.reducer >= members:
        raise PeerError(f"a question about reducer {message.reducer} among {members}")
    reducer = None if message.everything else message.reducer
    return InventoryQuestion(reducer, message.wait, message.known, message.known_sealed)


def inventory_to_wire(
    message: pb.InventoryRequest, plan: Plan, held: Mapping[int, Version]
) -> pb.InventoryReply:
    """Return the answer to an inventory question, as far as one message has room."""
    chunks = plan.chunks if message.everything else plan.shard(message.reducer)
    found = [chunk.index for chunk in chunks if chunk.index >= message.first_chunk and chunk.index in held]
    reply = pb.InventoryReply(more=len(found) > VERSIONS_MAX)
    for index in found[:VERSIONS_MAX]:
        version = held[index]
        reply.versions.append(
            pb.Version(
                chunk=index,
                attempt=version.attempt,
                contributors=version.contributors,
                digest=version.digest,
                clipped=version.clipped,
            )
        )
    return reply


def versions_from_wire(
    request: pb.InventoryRequest, reply: pb.InventoryReply, plan: Plan
) -> dict[int, Version]:
    """Return the versions in an answer to `request`."""
    table: dict[int, Version] = {}
    for item in reply.versions:
        if not request.first_chunk <= item.chunk < len(plan.chunks) or len(item.digest) != DIGEST_BYTES:
            raise PeerError(
                f"it says that it holds chunk {item.chunk}, with a digest of {len(item.digest)} bytes"
            )
        if not request.everything and plan.chunks[item.chunk].reducer != request.reducer:
            raise PeerError(f"it answers with chunk {item.chunk}, which it was not asked about")
        if item.attempt >= plan.members:
            raise PeerError(f"attempt {item.attempt} among {plan.members} members")
        decode_places(item.contributors, plan.members)
        check_clipped(item.clipped, item.contributors, plan.members)
        table[item.chunk] = Version(item.attempt, item.contributors, item.digest, item.clipped)
    return table


def _peer(key: bytes) -> PeerId:
    try:
        return PeerId(key)
    except UsageError as error:
        raise PeerError(str(error)) from None
