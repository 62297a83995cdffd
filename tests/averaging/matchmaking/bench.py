"""A matchmaker with invented peers around it: their messages, and what it does about them."""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass

from averaging.matchmaking.logic.group import Group, Member
from averaging.matchmaking.logic.matchmaking import TARGET_GROUP_SIZE, Matchmaker
from averaging.matchmaking.logic.messages import (
    Answer,
    Effect,
    Holder,
    Join,
    LookForGroup,
    PeerStatus,
    Precedence,
    ReadRecords,
    SearchFailed,
    SearchFinished,
    SearchRequest,
    VectorSchema,
)
from swarm.core.ids import Address, Contact, PeerId

OURS = VectorSchema(digest=b"s", text="ours", codec="float16")


def contact(number: int, *, dialable: bool = True) -> Contact:
    addresses = (Address("127.0.0.1", 4000 + number),) if dialable else ()
    return Contact(PeerId(bytes([number]) * 32), addresses)


def holder(number: int, schema: bytes = b"s", *, dialable: bool = True) -> Holder:
    return Holder(
        contact=contact(number, dialable=dialable), schema=schema, schema_text=f"schema {schema.decode()}"
    )


def query_of(
    number: int, deadline_s: float, *, key: str = "", schema: bytes = b"s", dialable: bool = True
) -> LookForGroup:
    return LookForGroup(
        contact=contact(number, dialable=dialable),
        round_key=key,
        schema=schema,
        schema_text="",
        deadline_s=deadline_s,
        can_lead=dialable,
    )


def join_of(number: int, deadline_s: float, *, key: str = "", weight: float = 1.0) -> Join:
    return Join(query=query_of(number, deadline_s, key=key), weight=weight, bandwidth=1.0)


@dataclass
class MatchmakerBench:
    """One machine at time 0 with its presence records read, its search begun with a deadline of 10 s; its own
    number is 5.
    """

    machine: Matchmaker
    members: Container[PeerId] = ()

    @classmethod
    def make(
        cls, target_group_size: int = TARGET_GROUP_SIZE, members: tuple[int, ...] = ()
    ) -> MatchmakerBench:
        machine = Matchmaker(
            own=contact(5).peer_id,
            schema=OURS,
            rng=random.Random(0),
            now_s=-100.0,
            target_group_size=target_group_size,
        )
        return cls(machine, {contact(number).peer_id for number in members})

    def start(
        self,
        *holders: Holder,
        key: str = "",
        dialable: bool = True,
        may_be_alone: bool = False,
        now_s: float = 0.0,
    ) -> list[Effect]:
        self.machine.on_holders({one.contact.peer_id: one for one in holders}, now_s)
        member = Member(contact=contact(5, dialable=dialable), weight=1.0, bandwidth=1.0)
        self.machine.start(
            SearchRequest(
                round_key=key,
                deadline_s=now_s + 10.0,
                rank_deadline_s=now_s + 10.0,
                may_be_alone=may_be_alone,
                precedence=Precedence(is_member=self.members.__contains__),
            ),
            member,
            now_s,
        )
        effects = self.machine.poll(now_s)
        if any(isinstance(effect, ReadRecords) for effect in effects):
            self.machine.on_holders({one.contact.peer_id: one for one in holders}, now_s)
            effects += self.machine.poll(now_s)
        return effects


def outcome(effects: list[Effect]) -> Group | SearchFailed | None:
    found = [effect.outcome for effect in effects if isinstance(effect, SearchFinished)]
    assert len(found) <= 1
    return found[0] if found else None


def searching_answer(deadline_s: float, key: str = "") -> Answer:
    return Answer(status=PeerStatus.SEARCHING, round_key=key, deadline_s=deadline_s)
