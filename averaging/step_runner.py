"""One step of an averager, from the search for a group to a committed round. A round that fails is retried
with the remaining peers while time remains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgpack

from averaging.allreduce.allreduce import AllReduce, RoundMemory
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.group import GATHERED_BYTES_MAX, Group, Member
from averaging.matchmaking.logic.messages import ROUND_KEY_MAX, SearchFailed
from averaging.matchmaking.logic.precedence import with_standing
from averaging.matchmaking.service.matchmaking_service import GroupService
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.feedback import Feedback
from averaging.reduction.vector import FlatVector
from averaging.result import RoundFailure, RoundResult
from swarm.core.backoff import backoff_s
from swarm.core.clock import Clock
from swarm.core.errors import UsageError
from swarm.core.ids import Contact, PeerId

_RESERVE = 0.2  # smallest share of the time that the search leaves for the round
_RESERVE_MAX = 0.5  # largest share, however long rounds took
_PAUSE_FIRST_S = 0.05  # pause after a broken round; doubled with each further one
_PAUSE_S_MAX = 2.0
_ROUNDS_RESERVED = 2.0  # the search leaves the duration of this many earlier rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """The options of one step, as its caller gave them."""

    weight: float
    round_key: str
    gathered: bytes  # msgpack
    timeout_s: float  # for everything, retries included
    history: RoundLineage | None = None  # for a run whose electors must agree to the round
    is_cell: bool = False  # a round of a run that extends no history, in a cell of the grid


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The outcome of a step on the network's side."""

    result: RoundResult
    averages: Averages | None  # to be written back; None: nothing to write
    members: tuple[Contact, ...] = ()  # members of the last group
    last_round_s: float  # duration of the last committed round, by which the next step plans


class Strategy(Protocol):
    """The way in which a group averages the values of its members."""

    @property
    def gathered_prefix_bytes(self) -> int:
        """Return how many bytes at the beginning of each member's gathered metadata belong to the
        strategy.
        """
        ...

    async def run(self, group: Group, deadline_s: float) -> RoundOutcome:
        """Run one round; see `AllReduce.run`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeVector:
    """The usual strategy: one all-reduce over `vector`, which must not change meanwhile. The averages are
    stored in `result_buffer`.
    """

    all_reduce: AllReduce
    vector: FlatVector
    result_buffer: ResultBuffer
    config: RoundConfig
    feedback: Feedback | None
    history: RoundLineage | None = None
    gathered_prefix_bytes: int = 0

    async def run(self, group: Group, deadline_s: float) -> RoundOutcome:
        """Run one all-reduce over the vector."""
        return await self.all_reduce.run(
            group,
            self.vector,
            deadline_s=deadline_s,
            config=self.config,
            memory=RoundMemory(self.result_buffer, self.feedback),
            history=self.history,
        )


class StepRunner:
    """Runs one step on the network loop."""

    def __init__(self, groups: GroupService, strategy: Strategy, clock: Clock, last_round_s: float) -> None:
        self._groups = groups
        self._strategy = strategy
        self._clock = clock
        self._last_round_s = last_round_s
        self._seconds: dict[str, float] = {"matchmaking": 0.0}
        self._left_out: dict[PeerId, str] = {}
        self._accused: dict[PeerId, str] = {}
        self.in_round = False  # with a group, whose members count on this peer; else it searches for one
        self._last_failure = ""  # why the last attempt failed
        self.unresolved = False  # others may have committed a round that failed here
        self._sent = self._received = self._attempts = 0

    async def run(self, member: Member, options: RoundOptions) -> StepOutcome:
        """Search for groups and run rounds until one is committed or the time is over."""
        end_s = self._clock.monotonic_s() + options.timeout_s
        reserve_s = min(
            max(_RESERVE * options.timeout_s, _ROUNDS_RESERVED * self._last_round_s),
            _RESERVE_MAX * options.timeout_s,
        )
        search_end_s = end_s - reserve_s
        group: Group | None = None
        while True:
            now_s = self._clock.monotonic_s()
            search_end_s = max(search_end_s, now_s + _RESERVE_MAX * (end_s - now_s))
            history = options.history
            electors = history.electors if history is not None and not history.is_break else ()
            present = history.present if history is not None and not history.is_break else ()
            # peers may disagree on which peers to pass over: their second attempt has everybody
            precedence = replace(
                self._groups.ledger.precedence(present, passes_over=not self._attempts),
                is_cell=options.is_cell,
                may_be_alone=options.weight > 0.0
                and history is not None
                and (history.may_be_alone or (electors == (member.peer_id,) and not history.seats)),
            )
            if history is not None and history.extends and electors:
                precedence = replace(precedence, is_quorum_without=history.is_quorum_without)
            found = await self._groups.find(
                member=member,
                round_key=options.round_key,
                deadline_s=search_end_s,
                gathered=options.gathered,
                electors=history.seats if history is not None else 0,
                precedence=precedence,
            )
            self._seconds["matchmaking"] += self._clock.monotonic_s() - now_s
            if isinstance(found, SearchFailed):
                return self._failure(found.reason, self._explain(found.detail), group)
            group = with_standing(found, precedence)
            lacking = await self._lacks_quorum(group, options.history)
            if lacking:
                return self._failure("quorum", lacking, group)
            try:
                outcome = await self._run_round(group, end_s)
            finally:
                if history is not None:
                    history.ended()
            self.unresolved |= outcome.unresolved
            if not outcome.failed:
                return self._success(group, outcome)
            if outcome.out_of_memory:  # a retry would run out of memory again
                return self._failure("memory", outcome.reason or "", group)
            if not any(one.weight > 0.0 for one in group.members):
                return self._failure("nobody contributes", "all members of the group have weight 0", group)
            pause_s = backoff_s(self._attempts, _PAUSE_FIRST_S, _PAUSE_S_MAX)
            await asyncio.sleep(min(pause_s, max(end_s - self._clock.monotonic_s(), 0.0)))
            if self._clock.monotonic_s() >= end_s:
                return self._failure("deadline", outcome.reason or "", group)

    async def _lacks_quorum(self, group: Group, history: RoundLineage | None) -> str:
        """Return why this group cannot commit, before it sends anything; "" when it can."""
        if history is None:
            return ""
        contributors = [member.peer_id for member in group.members if member.weight > 0.0]
        reason = "the round was cancelled"
        try:
            reason = await history.may_begin(contributors, group.peer_ids)
        finally:
            if reason:
                self._groups.round_over(committed=False, left_out=frozenset(), accused={})
        return reason

    async def _run_round(self, group: Group, end_s: float) -> RoundOutcome:
        """Run one round with one group."""
        begun_s = self._clock.monotonic_s()
        self._attempts += 1
        committed, left_out, accused = False, frozenset[PeerId](), dict[PeerId, str]()
        faults = dict[PeerId, str]()
        self.in_round = True
        try:
            if not any(member.weight > 0.0 for member in group.members):
                outcome = RoundOutcome.broken("all weights are 0")
            else:
                outcome = await self._strategy.run(group, end_s)
            committed = not outcome.failed
            left_out, accused = (
                frozenset(outcome.left_out) | frozenset(outcome.accused),
                dict(outcome.accused),
            )
            faults = dict(outcome.faults)
        finally:
            self.in_round = False
            self._groups.round_over(committed=committed, left_out=left_out, accused=accused, faults=faults)
        self._left_out.update(outcome.left_out)
        self._accused.update(outcome.accused)
        if outcome.failed:
            self._last_failure = f"a round broke: {outcome.reason}"
        self._sent += outcome.bytes_sent
        self._received += outcome.bytes_received
        for phase, seconds in outcome.seconds.items():
            name = "all_reduce" if phase == "total" else phase
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if committed:
            self._last_round_s = self._clock.monotonic_s() - begun_s
        return outcome

    def _success(self, group: Group, outcome: RoundOutcome) -> StepOutcome:
        weights = {member.peer_id: member.weight for member in group.members}
        self._groups.ledger.contributed(
            {peer: part * weights.get(peer, 0.0) for peer, part in outcome.contributions.items() if part}
        )
        result = RoundResult(
            failed=False,
            detail=self._explain(""),
            contributions=dict(outcome.contributions),
            weights=weights,
            clipped=dict(outcome.clipped),
            weight=_weight_of_average(group, outcome),
            digest=outcome.digest,
            certificate=outcome.certificate,
            **self._common(group),
        )
        return StepOutcome(
            result=result,
            averages=outcome.averages,
            last_round_s=self._last_round_s,
            members=tuple(member.contact for member in group.members),
        )

    def _failure(self, reason: RoundFailure, detail: str, group: Group | None) -> StepOutcome:
        result = RoundResult(failed=True, reason=reason, detail=detail, **self._common(group))
        return StepOutcome(result=result, averages=None, last_round_s=self._last_round_s)

    def _explain(self, detail: str) -> str:
        return "; before that ".join(text for text in (detail, self._last_failure) if text)

    def _common(self, group: Group | None) -> dict[str, Any]:
        return {
            "peers": group.peer_ids if group is not None else (),
            "gathered": _unpack_gathered(group, self._strategy.gathered_prefix_bytes)
            if group is not None
            else {},
            "left_out": dict(self._left_out),
            "accused": dict(self._accused),
            "seconds": dict(self._seconds),
            "bytes_sent": self._sent,
            "bytes_received": self._received,
            "attempts": self._attempts,
            "unresolved": self.unresolved,
            "group_id": group.group_id.hex() if group is not None else "",
        }


def _weight_of_average(group: Group, outcome: RoundOutcome) -> float:
    """Return the weight of this member's average in the next round: an equal part of the group's total
    weight. No weight is lost or created, however unequal groups are, so the mean over all peers stays the
    same.
    """
    holding = sum(not member.auxiliary and member.peer_id not in outcome.left_out for member in group.members)
    whole = sum(member.weight * outcome.contributions.get(member.peer_id, 0.0) for member in group.members)
    return whole / holding if holding else 0.0


def round_key_text(round_key: str | int | None) -> str:
    """Return a round key as text. Raises UsageError when it is too long."""
    text = "" if round_key is None else str(round_key)
    if len(text) > ROUND_KEY_MAX:
        raise UsageError(f"a round key has at most {ROUND_KEY_MAX} characters")
    return text


def pack_gathered(gather: object, prefix: bytes) -> bytes:
    """Return the strategy's `prefix`, followed by `gather` as msgpack unless it is None. Raises UsageError
    when `gather` is too large or msgpack cannot write it.
    """
    if gather is None:
        return prefix
    try:
        packed: bytes = msgpack.packb(gather)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"gather takes what msgpack can write (numbers, text, bytes, lists, maps): {error}"
        ) from error
    if len(prefix) + len(packed) > GATHERED_BYTES_MAX:
        raise UsageError(f"gather takes at most {GATHERED_BYTES_MAX - len(prefix)} bytes, not {len(packed)}")
    return prefix + packed


def _unpack_gathered(group: Group, gathered_prefix_bytes: int) -> Mapping[PeerId, Any]:
    """Return what members passed as `gather`, without members that passed nothing, or bytes that are not
    msgpack.
    """
    gathered = {}
    for peer_id, raw in zip(group.peer_ids, group.gathered, strict=True):
        if packed := raw[gathered_prefix_bytes:]:
            try:
                gathered[peer_id] = msgpack.unpackb(packed, strict_map_key=False)
            except (ValueError, TypeError, RecursionError):
                continue
    return gathered
