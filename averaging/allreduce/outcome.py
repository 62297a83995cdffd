"""The outcome of a round for one member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from averaging.allreduce.logic.machine import RoundMachine
from averaging.history.certificate import Certificate
from averaging.reduction.averages import Averages
from swarm.core.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """The outcome of a round for this member."""

    failed: bool
    reason: str | None  # reason of a failure, with the peer and its action; "deadline: …" when time ran out
    # the result, the same bytes on all members. None when failed, and for an auxiliary member
    averages: Averages | None
    # members in the average, with the fraction of the vector's elements that each is in; {} when failed
    contributions: Mapping[PeerId, float]
    # members that lied, by proof or by this member's own audit -> what they lied about
    accused: Mapping[PeerId, str]
    # members that failed or are missing in some averages -> reason; may include this member
    left_out: Mapping[PeerId, str]
    # hexadecimal, over all encoded averages in order; "" when failed, and for an auxiliary member
    digest: str
    # clipped members -> fraction of the elements; {} when failed
    clipped: Mapping[PeerId, float]
    bytes_sent: int  # bytes of tensors, framing included
    bytes_received: int
    # "total", "exchange" (until all was in place), "commit"; tensor work within: "encode", "reduce", "settle"
    seconds: Mapping[str, float]
    out_of_memory: bool = False  # it failed because this member had no memory left: `reason` says where
    # The proof that the round was committed. A failed round has it if the others committed and this member
    # could not; its state is then behind theirs.
    certificate: Certificate | None = None
    # it failed here, and others have committed what this member voted for, or may have
    unresolved: bool = False
    # members that were at fault in the round, as observed by this member -> fault
    faults: Mapping[PeerId, str] = field(default_factory=dict)

    @classmethod
    def broken(cls, reason: str, *, out_of_memory: bool = False) -> RoundOutcome:
        """Return the outcome of a round that failed before anything was sent."""
        return cls(
            failed=True,
            reason=reason,
            averages=None,
            contributions={},
            accused={},
            left_out={},
            digest="",
            clipped={},
            bytes_sent=0,
            bytes_received=0,
            seconds={},
            out_of_memory=out_of_memory,
        )

    def without_memory(self, reason: str) -> RoundOutcome:
        """Return the outcome of a committed round that this member had no memory to end."""
        return replace(
            self,
            failed=True,
            reason=reason,
            averages=None,
            contributions={},
            digest="",
            clipped={},
            out_of_memory=True,
        )

    @property
    def vector(self) -> torch.Tensor | None:
        """Return the decoded result, flat float32, as a new tensor each time; None without averages."""
        return self.averages.decoded() if self.averages is not None else None


def outcome_of(
    machine: RoundMachine, averages: Averages, accused: Mapping[int, str], seconds: Mapping[str, float]
) -> RoundOutcome:
    """Return the outcome of a round from its machine. `accused`: by place; `seconds`: per phase."""
    finish, setup, assembly = machine.finished, machine.setup, machine.assembly
    assert finish is not None
    whole = finish.failure is None and not setup.own_auxiliary
    fractions = assembly.fractions() if finish.failure is None else {}
    clipped = assembly.clipped() if finish.failure is None else {}
    return RoundOutcome(
        failed=finish.failure is not None,
        reason=finish.failure,
        averages=averages if whole else None,
        contributions={setup.peer_id(place): fraction for place, fraction in fractions.items()},
        accused={
            **{setup.peer_id(place): lie for place, lie in accused.items()},
            **dict.fromkeys(machine.votes.tally.liars, "it signed two different votes in one attempt"),
        },
        left_out={setup.peer_id(place): reason for place, reason in sorted(left_out(machine).items())},
        digest=assembly.digest().hex() if whole else "",
        clipped={setup.peer_id(place): fraction for place, fraction in clipped.items()},
        bytes_sent=0,
        bytes_received=0,
        seconds=seconds,
        certificate=finish.certificate,
        unresolved=finish.unresolved,
        faults={setup.peer_id(place): reason for place, reason in sorted(faults(machine).items())},
    )


def faults(machine: RoundMachine) -> dict[int, str]:
    """Return the members that stalled, stopped, or left a round that the others committed; by place. Only
    faults that this member has seen itself count, and none when this member itself failed: no other member
    must pass for the cause. A member that gave up is no cause of a round that was not committed here and had
    another one: its time was over a moment before this member's. A member that voted for another result may
    be the victim of a reducer that gave it other averages; and so may one whose values are in none, unless
    most of those whose votes count reduce.
    """
    setup, tally = machine.setup, machine.votes.tally
    if machine.excluded_reason:
        return {}
    found = machine.repairs.lost | machine.shard.left_out | machine.membership.failed
    certificate = machine.votes.certificate
    if certificate is None:
        found = {place: why for place, why in found.items() if place not in machine.gave_up} or found
    else:
        for place in setup.contributors:
            vote = tally.votes.get(setup.peer_id(place))
            if vote is not None and not vote.result:
                found.setdefault(place, "it voted for none, and the others committed")
        fractions = machine.assembly.fractions()
        most_deciders_reduce = 2 * len({*setup.deciders}.intersection(setup.plan.reducers)) > len(
            setup.deciders
        )
        for place in setup.contributors if machine.assembly.complete and most_deciders_reduce else ():
            if not fractions.get(place):
                found.setdefault(place, "nothing of it is in the averages")
    found.pop(setup.own, None)
    return found


def left_out(machine: RoundMachine) -> dict[int, str]:
    """Return the members that were left out of some average, were lost or failed, with the reasons; by
    place.
    """
    setup, assembly = machine.setup, machine.assembly
    fractions = assembly.fractions()
    # reports against a member whose values are in all averages are ignored
    found = {
        place: reason
        for place, reason in machine.votes.left_out.items()
        if not assembly.complete or fractions.get(place, 0.0) < 1.0
    }
    found |= machine.repairs.left_out | machine.shard.left_out | machine.repairs.lost
    found |= machine.membership.failed
    if machine.excluded_reason:
        found[setup.own] = machine.excluded_reason
    if assembly.complete and setup.plan.chunks:
        for place in setup.contributors:
            if fractions.get(place, 0.0) < 1.0:  # a failed reducer left it out, and its reasons are lost
                found.setdefault(place, "its values are not in chunks whose reducers did not say why")
    return found
