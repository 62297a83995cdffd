"""A step between its group and its round."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from averaging.allreduce.outcome import RoundOutcome
from averaging.history.certificate import RoundKind
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.group import Group, Member
from averaging.run_ledger import RunLedger
from averaging.step_runner import RoundOptions, StepRunner
from swarm.core.clock import SystemClock
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import PeerStanding
from swarm.testing.identities import SeededIdentity

MEMBER = Member(
    contact=Contact(SeededIdentity(1).peer_id, (Address("127.0.0.1", 4000),)), weight=1.0, bandwidth=1.0
)


class Groups:
    """Finds a group at once, and counts the ends of rounds."""

    def __init__(self) -> None:
        self.overs: list[bool] = []
        self.ledger = RunLedger(MEMBER.peer_id, "run", SystemClock(), PeerStanding())

    async def find(self, **_: Any) -> Group:
        return Group(group_id=bytes(32), members=(MEMBER,), codec="float32", gathered=(b"",))

    def round_over(self, *, committed: bool, **_: Any) -> None:
        self.overs.append(committed)


def lineage(asked: asyncio.Event) -> RoundLineage:
    async def may_begin(contributors: Sequence[PeerId], members: Collection[PeerId]) -> str:
        asked.set()
        await asyncio.Event().wait()  # an elector that does not answer
        return ""

    async def find_contact(peer: PeerId) -> Contact | None:
        return None

    return RoundLineage(
        run="run",
        head=bytes(32),
        epoch=1,
        kind=RoundKind.EPOCH,
        electors=(),
        goodbyes={},
        may_begin=may_begin,
        ended=lambda: None,
        may_vote=lambda proposal, result: "",
        release=lambda proposal: None,
        leave=lambda proposal: False,
        find_contact=find_contact,
    )


@pytest.mark.parametrize("times", [1, 3])
def test_a_step_cancelled_while_it_asks_for_a_quorum_frees_its_averager(times: int) -> None:
    """The group was found: an averager that stays in its round refuses every later step."""

    async def play() -> None:
        groups, asked = Groups(), asyncio.Event()
        runner = StepRunner(groups, SimpleNamespace(), SystemClock(), 0.0)
        options = RoundOptions(
            weight=1.0, round_key="1", gathered=b"", timeout_s=30.0, history=lineage(asked)
        )
        for _ in range(times):
            asked.clear()
            step = asyncio.ensure_future(runner.run(MEMBER, options))
            await asked.wait()
            step.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await step
        assert groups.overs == [False] * times

    asyncio.run(play())


def test_a_step_says_whether_a_group_counts_on_this_peer() -> None:
    """A download that ends leaves a search, and no round that others have begun with this peer."""

    async def play() -> list[bool]:
        groups, seen = Groups(), []

        async def run_round(group: Group, end_s: float) -> RoundOutcome:
            seen.append(runner.in_round)
            return RoundOutcome.broken("this peer ran out of memory", out_of_memory=True)

        strategy = SimpleNamespace(run=run_round, gathered_prefix_bytes=0)
        runner = StepRunner(groups, strategy, SystemClock(), 0.0)
        seen.append(runner.in_round)
        await runner.run(
            MEMBER, RoundOptions(weight=1.0, round_key="1", gathered=b"", timeout_s=30.0, history=None)
        )
        return [*seen, runner.in_round]

    assert asyncio.run(play()) == [False, True, False]
