"""Conversion between the messages of `averaging.matchmaking.logic.messages` and protobuf. Everything that a
peer sends is checked here; PeerError says what is wrong.
"""

from __future__ import annotations

import math

from averaging.matchmaking.logic.cell_members import CELL_MEMBERS_MAX
from averaging.matchmaking.logic.grid import PLACE_MAX
from averaging.matchmaking.logic.group import GATHERED_BYTES_MAX, GROUP_MEMBERS_MAX, Group, Member
from averaging.matchmaking.logic.messages import (
    ROUND_KEY_MAX,
    TEXT_MAX,
    Answer,
    AveragerName,
    CellLookup,
    CellLookupReply,
    Holder,
    Join,
    Leader,
    LookForGroup,
    PeerStatus,
)
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.net.contacts import contact_from_wire, contact_to_wire
from swarm.net.rpc import Method
from swarm.wire import group_pb2

SCHEMA_BYTES_MAX = 64
_NAME_MAX = 128
_KEY_MAX = ROUND_KEY_MAX + 1 + PLACE_MAX  # the caller's key and the place in the grid
_STATUSES = frozenset(int(status) for status in PeerStatus)

LOOK_FOR_GROUP = Method(
    name="/swarm.Groups/Seek",
    request=group_pb2.Seek,
    reply=group_pb2.SeekAnswer,
    request_bytes_max=16 << 10,
    reply_bytes_max=64 << 10,
)
JOIN = Method(
    name="/swarm.Groups/Join",
    request=group_pb2.Join,
    reply=group_pb2.JoinAnswer,
    request_bytes_max=(16 << 10) + GATHERED_BYTES_MAX,
    reply_bytes_max=GROUP_MEMBERS_MAX * (GATHERED_BYTES_MAX + 1024),
)
CELL_LOOKUP = Method(
    name="/swarm.Groups/Meet",
    request=group_pb2.Meet,
    reply=group_pb2.MeetAnswer,
    request_bytes_max=8 << 10,
    reply_bytes_max=128 << 10,
)


def _number(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise PeerError(f"{name} must be a finite number, not {value}")
    return value


def _text(value: str, limit: int, name: str) -> str:
    if len(value) > limit:
        raise PeerError(f"{name} has at most {limit} characters, not {len(value)}")
    return value


def encode_announcement(holder: Holder, *, name: AveragerName, now_s: float) -> group_pb2.Seek:
    return group_pb2.Seek(
        run=name.run,
        averager=name.averager,
        contact=contact_to_wire(holder.contact),
        schema=holder.schema,
        schema_text=holder.schema_text[:TEXT_MAX],
        now_s=now_s,
        announce=True,
    )


def encode_query(query: LookForGroup, *, name: AveragerName, now_s: float) -> group_pb2.Seek:
    return group_pb2.Seek(
        run=name.run,
        averager=name.averager,
        contact=contact_to_wire(query.contact),
        round_key=query.round_key,
        schema=query.schema,
        schema_text=query.schema_text[:TEXT_MAX],
        deadline_s=query.deadline_s,
        can_lead=query.can_lead,
        now_s=now_s,
        turn=query.turn,
    )


def decode_query(message: group_pb2.Seek, caller: PeerId, now_s: float) -> LookForGroup:
    """Check and convert a query. `now_s` is this peer's swarm time at its arrival; the time on the way counts
    as an offset of the caller's clock, which is small.
    """
    contact = contact_from_wire(message.contact)
    if contact.peer_id != caller:
        raise PeerError(f"{caller} speaks for another peer, {contact.peer_id}")
    if len(message.schema) > SCHEMA_BYTES_MAX:
        raise PeerError(f"a schema hash has at most {SCHEMA_BYTES_MAX} bytes")
    return LookForGroup(
        contact=contact,
        round_key=_text(message.round_key, _KEY_MAX, "a round key"),
        schema=message.schema,
        schema_text=_text(message.schema_text, TEXT_MAX, "a schema's description"),
        deadline_s=_number(message.deadline_s, "a deadline"),
        can_lead=message.can_lead and contact.is_callable,
        turn=message.turn,
        clock_off_s=_number(message.now_s, "a time") - now_s,
    )


def encode_answer(answer: Answer, *, now_s: float) -> group_pb2.SeekAnswer:
    leader = None
    if answer.leader is not None:
        leader = group_pb2.GroupLeader(
            contact=contact_to_wire(answer.leader.contact), deadline_s=answer.leader.deadline_s
        )
    return group_pb2.SeekAnswer(
        standing=group_pb2.SeekAnswer.Standing.Name(int(answer.status)),
        round_key=answer.round_key,
        deadline_s=answer.deadline_s,
        can_lead=answer.can_lead,
        leader=leader,
        expected_s=answer.expected_s,
        text=answer.text[:TEXT_MAX],
        now_s=now_s,
        turn=answer.turn,
        members=[member.to_bytes() for member in answer.members],
    )


def decode_answer(message: group_pb2.SeekAnswer, now_s: float) -> Answer:
    """Check and convert a status reply. `now_s` is this peer's swarm time half-way between query and
    reply.
    """
    if int(message.standing) not in _STATUSES:
        raise PeerError(
            f"a peer reported a status that this version does not know ({message.standing}):"
            " one of the two is too old"
        )
    if len(message.members) > GROUP_MEMBERS_MAX:
        raise PeerError(f"a group has at most {GROUP_MEMBERS_MAX} members")
    leader = None
    if message.HasField("leader"):
        leader = Leader(
            contact=contact_from_wire(message.leader.contact),
            deadline_s=_number(message.leader.deadline_s, "a deadline"),
        )
    try:
        members = tuple(PeerId.from_bytes(member) for member in message.members)
    except UsageError as error:
        raise PeerError(f"a member is malformed: {error}") from error
    return Answer(
        status=PeerStatus(message.standing),
        round_key=_text(message.round_key, _KEY_MAX, "a round key"),
        deadline_s=_number(message.deadline_s, "a deadline"),
        can_lead=message.can_lead,
        leader=leader,
        expected_s=_number(message.expected_s, "a duration"),
        text=_text(message.text, TEXT_MAX, "an explanation"),
        members=members,
        turn=message.turn,
        clock_off_s=_number(message.now_s, "a time") - now_s,
    )


def encode_join(join: Join, *, name: AveragerName, now_s: float) -> group_pb2.Join:
    return group_pb2.Join(
        seek=encode_query(join.query, name=name, now_s=now_s),
        weight=join.weight,
        bandwidth=join.bandwidth,
        bandwidth_is_set=join.bandwidth_is_set,
        auxiliary=join.auxiliary,
        grid_rounds=join.grid_rounds,
        new_hour=join.new_hour,
        gone=join.gone,
        samples=join.samples,
        gathered=join.gathered,
    )


def decode_join(message: group_pb2.Join, caller: PeerId, now_s: float) -> Join:
    query = decode_query(message.seek, caller, now_s)
    return Join(
        query=query,
        weight=message.weight,
        bandwidth=message.bandwidth,
        bandwidth_is_set=message.bandwidth_is_set,
        auxiliary=message.auxiliary,
        grid_rounds=message.grid_rounds,
        new_hour=message.new_hour,
        gone=message.gone,
        samples=message.samples,
        gathered=message.gathered,
    )  # the bounds of these values are checked by `Member`


def encode_join_answer(answer: Group | Answer, *, now_s: float) -> group_pb2.JoinAnswer:
    if isinstance(answer, Answer):
        return group_pb2.JoinAnswer(standing=encode_answer(answer, now_s=now_s))
    members = [
        group_pb2.GroupMember(
            contact=contact_to_wire(member.contact),
            weight=member.weight,
            bandwidth=member.bandwidth,
            bandwidth_is_set=member.bandwidth_is_set,
            auxiliary=member.auxiliary,
            grid_rounds=member.grid_rounds,
            new_hour=member.new_hour,
            gone=member.gone,
            samples=member.samples,
            gathered=gathered,
        )
        for member, gathered in zip(answer.members, answer.gathered, strict=True)
    ]
    return group_pb2.JoinAnswer(
        group=group_pb2.Group(group_id=answer.group_id, members=members, codec=answer.codec)
    )


def decode_join_answer(message: group_pb2.JoinAnswer, now_s: float) -> Group | Answer:
    kind = message.WhichOneof("answer")
    if kind is None:
        raise PeerError("an answer to Join is empty")
    if kind == "standing":
        return decode_answer(message.standing, now_s)
    group = message.group
    try:
        return Group(
            group_id=group.group_id,
            members=tuple(
                Member(
                    contact=contact_from_wire(one.contact),
                    weight=one.weight,
                    bandwidth=one.bandwidth,
                    bandwidth_is_set=one.bandwidth_is_set,
                    auxiliary=one.auxiliary,
                    grid_rounds=one.grid_rounds,
                    new_hour=one.new_hour,
                    gone=one.gone,
                    samples=one.samples,
                )
                for one in group.members
            ),
            codec=_text(group.codec, _NAME_MAX, "a codec's name"),
            gathered=tuple(one.gathered for one in group.members),
        )
    except UsageError as error:
        raise PeerError(f"it announced a group that cannot be: {error}") from error


def encode_cell_lookup(lookup: CellLookup, *, name: AveragerName) -> group_pb2.Meet:
    return group_pb2.Meet(
        run=name.run,
        averager=name.averager,
        contact=contact_to_wire(lookup.contact),
        schema=lookup.schema,
        place=lookup.place,
        round_key=lookup.round_key,
        turn=lookup.turn,
        leaves=lookup.leaves,
    )


def decode_cell_lookup(message: group_pb2.Meet, caller: PeerId) -> CellLookup:
    contact = contact_from_wire(message.contact)
    if contact.peer_id != caller:
        raise PeerError(f"{caller} speaks for another peer, {contact.peer_id}")
    if len(message.schema) > SCHEMA_BYTES_MAX:
        raise PeerError(f"a schema hash has at most {SCHEMA_BYTES_MAX} bytes")
    return CellLookup(
        contact=contact,
        schema=message.schema,
        place=_text(message.place, PLACE_MAX, "a place in the grid"),
        round_key=_text(message.round_key, ROUND_KEY_MAX, "a round key"),
        turn=message.turn,
        leaves=message.leaves,
    )


def encode_cell_lookup_reply(reply: CellLookupReply) -> group_pb2.MeetAnswer:
    return group_pb2.MeetAnswer(
        mates=[contact_to_wire(member) for member in reply.members], home=reply.home, passed=reply.passed
    )


def decode_cell_lookup_reply(message: group_pb2.MeetAnswer) -> CellLookupReply:
    if len(message.mates) > CELL_MEMBERS_MAX:
        raise PeerError(f"a cell's list has at most {CELL_MEMBERS_MAX} peers, not {len(message.mates)}")
    return CellLookupReply(
        members=tuple(contact_from_wire(member) for member in message.mates),
        home=_text(message.home, PLACE_MAX, "a place in the grid"),
        passed=message.passed,
    )
