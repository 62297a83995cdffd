"""How the members of a round come to hold the same averages and a certificate for them. Pure.

A member votes once, for everything that it holds, when everything is in place. After repairs, and in audited
rounds, members compare first what they would vote for. Once a majority is known nobody votes for anything
else: a member that holds other averages fetches those.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from averaging.allreduce.logic.assembly import Assembly
from averaging.allreduce.logic.effects import AskInventory, Audit, Effect, FetchChunk, Sign
from averaging.allreduce.logic.replacement import EVERYTHING, Adoption, Convergence
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.values import Inventory, InventoryQuestion
from averaging.allreduce.logic.versions import Version
from averaging.allreduce.logic.votes import VoteExchange

# Time for which votes are still requested once the remaining members cannot form a majority: others may have
# decided before they failed. Longer: a step waits in vain; shorter: more rounds end with an unknown result.
RESOLVE_S = 2.0
_CONVERGENCES_MAX = 3  # after this many, a member votes for the result that it holds
_INTENTS_S = 2.0  # time to wait for intents of live members before averages are compared
_REASONS_S = 0.2  # time to learn why a member is missing in some averages, once everything else is decided


@dataclass(frozen=True, slots=True)
class Standing:
    """The situation of this member: which averages it holds, and which members are alive."""

    complete: bool  # all required averages are in place
    may_complete: bool  # or they can be completed by transfers in progress
    repaired: bool  # a reducer was lost, for this member or for others
    live: Set[int]
    failed: Mapping[int, str]
    left_out: Mapping[int, str]  # members left out according to this member -> reason
    now_s: float


@dataclass(frozen=True, slots=True)
class Commit:
    """There is a certificate, and this member holds the averages that it certifies."""


@dataclass(frozen=True, slots=True)
class Fail:
    """This member can no longer commit."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUpOwnWork:
    """A majority voted for other averages: take no more averages from reducers, and reduce nothing."""


class Agreement:
    """Decides what this member votes for, and whether the round is committed."""

    def __init__(self, setup: RoundSetup, assembly: Assembly, votes: VoteExchange) -> None:
        self._setup, self._assembly, self._votes = setup, assembly, votes
        self._own = setup.own
        self._auditing = self._audited = False
        self.signing = False  # this member's vote is being signed
        self._refusal = ""  # why this member voted for none, although everything was in place
        self._convergence: Convergence | None = None
        self._convergences = 0
        self._intent_s: float | None = None  # when this member first stated its intent
        self._adoption: Adoption | None = None
        self._hopeless_s: float | None = None
        self._certified_s: float | None = None  # when the certificate became known

    @property
    def adopting(self) -> bool:
        """Return whether this member takes what others decided."""
        return self._adoption is not None

    @property
    def speaks(self) -> bool:
        """Return whether this member must exchange votes although some averages are still missing."""
        return self._hopeless_s is not None

    # ---- events

    def on_audited(self) -> None:
        """Record that the audit of other reducers found nothing wrong."""
        self._audited = True

    def on_refused(self, reason: str) -> list[Sign]:
        """Record that the run's history does not allow this member's vote, perhaps not even a vote for
        none.
        """
        if self._refusal:
            return []
        self._refusal = reason
        return [Sign(b"")]

    def on_inventory(self, place: int, inventory: Inventory) -> None:
        """Process a member's inventory of the whole vector."""
        if self._adoption is not None:
            self._adoption.on_inventory(place, inventory, len(self._setup.plan.chunks))
        if self._convergence is not None:
            self._convergence.on_inventory(place, inventory)

    def on_no_inventory(self, place: int, question: InventoryQuestion, why: str) -> None:
        """Record that a member's inventory could not be requested."""
        if question == EVERYTHING:
            if self._adoption is not None:
                self._adoption.on_no_inventory(place, f"{self._setup.name(place)}: {why}")
            if self._convergence is not None:
                self._convergence.on_no_inventory(place)

    def on_member_failed(self, place: int) -> None:
        """Record that a member failed."""
        if self._convergence is not None:
            self._convergence.on_no_inventory(place)

    def on_fetched(self, chunk: int, version: Version, ok: bool) -> bool:
        """Process the end of a fetch, with an average or without. Return whether this object had asked for
        it.
        """
        for part in (self._adoption, self._convergence):
            if part is not None and part.expects(chunk, version):
                part.on_fetched(chunk, ok)
                return True
        return False

    # ---- decisions

    def decide(self, standing: Standing) -> list[Effect | Commit | Fail | GiveUpOwnWork]:
        """Return the next actions: vote, compare, adopt a decision, commit or fail."""
        certificate, majority = self._votes.certificate, self._votes.majority
        if self._setup.own_auxiliary:
            if certificate is not None:
                return [Commit()]
        elif majority is not None:
            if not standing.complete or self._assembly.result() != majority:
                return self._adopt(majority, standing)
            if certificate is not None:
                return [] if self._waits_for_reasons(standing) else [Commit()]
        if self._votes.tally.is_dead():
            return [Fail(self._why_hopeless(standing))]
        if majority is not None:
            return [*self._endorse(majority)]
        hopeless = self._hope(standing)
        if hopeless:
            return hopeless
        votes = self._own in self._setup.contributors and self._votes.own_vote is None
        if not standing.complete or self._setup.own_auxiliary or self.signing or self._hopeless_s is not None:
            return []
        if self._assembly.covered() < self._setup.min_fraction:
            return [
                Fail(
                    f"nobody is left who contributes to {1.0 - self._assembly.covered():.0%} of the vector: "
                    f"{'; '.join(standing.left_out.values())}"
                )
            ]
        return self._vote(standing) if votes else []

    def _waits_for_reasons(self, standing: Standing) -> bool:
        """Return whether to delay the commit a little: a live member is missing from some averages, and the
        reducer that knows why has not said so yet.
        """
        if self.adopting:
            return False
        if self._certified_s is None:
            self._certified_s = standing.now_s
        if standing.now_s - self._certified_s >= _REASONS_S or not self._votes.silent(standing.live):
            return False
        reasons = self._votes.left_out.keys() | standing.left_out.keys() | standing.failed.keys()
        fractions = self._assembly.fractions()
        return any(
            fractions.get(place, 0.0) < 1.0 and place not in reasons for place in self._setup.contributors
        )

    def _vote(self, standing: Standing) -> list[Effect | Commit | Fail | GiveUpOwnWork]:
        digest = self._assembly.result()
        if self._setup.audited:
            if self._audited:
                return self._compare_audits(digest, standing)
            started, self._auditing = self._auditing, True
            return [] if started else [Audit()]
        if not standing.repaired:
            return [*self._sign(digest)]
        return [*self._compare_intents(digest, standing)]

    def _compare_audits(
        self, digest: bytes, standing: Standing
    ) -> list[Effect | Commit | Fail | GiveUpOwnWork]:
        """Vote once all live contributors hold the same averages and their audits found nothing wrong."""
        self._intend(digest, standing.now_s)
        live = [place for place in self._setup.contributors if place in standing.live]
        intents = [self._votes.intent_of(place) for place in live]
        if any(intent is not None and intent != digest for intent in intents):
            return [Fail(f"members hold different averages ({self._votes.sides()})")]
        return [] if None in intents else [*self._sign(digest)]

    def _compare_intents(self, digest: bytes, standing: Standing) -> list[Effect]:
        """After a repair: vote once more than half of those whose votes count would vote for the same."""
        now_s, chunks = standing.now_s, len(self._setup.plan.chunks)
        if self._convergence is not None:
            if not self._convergence.done:
                return [*self._convergence.next(chunks)]
            self._convergence, self._intent_s = None, now_s
            if self._votes.intents.get(self._own) == digest:
                # this member holds the most frequent result and cannot improve it
                return [*self._sign(digest)]
        self._intend(digest, now_s)
        deciders = self._setup.deciders
        agreeing = sum(self._votes.intent_of(place) == digest for place in deciders)
        if 2 * agreeing > len(deciders) or self._convergences >= _CONVERGENCES_MAX:
            return [*self._sign(digest)]
        unknown = any(self._votes.intent_of(place) is None for place in deciders if place in standing.live)
        assert self._intent_s is not None
        if (unknown or self._convergences) and now_s - self._intent_s < _INTENTS_S:
            return []
        self._convergences += 1
        members = self._setup.group.members
        asked = [place for place in self._reachable(standing) if not members[place].auxiliary]
        own = self._own if self._setup.can_dial(self._own) else None
        self._convergence = Convergence(asked, self._assembly, own)
        return [*self._convergence.next(chunks)]

    def _intend(self, digest: bytes, now_s: float) -> None:
        if self._votes.intents.get(self._own) != digest:
            self._votes.intend(digest, now_s)
            self._intent_s = now_s if self._intent_s is None else self._intent_s

    def _sign(self, digest: bytes) -> list[Sign]:
        self.signing = True
        return [Sign(digest)]

    def _endorse(self, majority: bytes) -> list[Sign]:
        """Vote, as an elector, for what more than half of the contributors voted for."""
        is_elector = self._setup.peer_id(self._own) in self._setup.electors
        if not is_elector or self._votes.own_vote is not None or self.signing:
            return []
        self.signing = True
        return [Sign(majority)]

    # ---- a majority voted for something else

    def _adopt(self, result: bytes, standing: Standing) -> list[Effect | Commit | Fail | GiveUpOwnWork]:
        """Fetch the averages that a majority voted for, unless the missing ones are on their way."""
        if self._adoption is None:
            if not standing.complete and standing.may_complete:
                return [*self._endorse(result)]
            return self._begin_adoption(result, standing)
        if self._adoption.failed:
            return [
                Fail(
                    "others committed without this peer, and their averages cannot be had any more "
                    f"({self._adoption.why})"
                )
            ]
        return [*self._adoption.next(), *self._endorse(result)]

    def _begin_adoption(
        self, result: bytes, standing: Standing
    ) -> list[Effect | Commit | Fail | GiveUpOwnWork]:
        voters = self._votes.voters_of(result)
        candidates = [place for place in self._setup.members if place != self._own]
        candidates = [place for place in candidates if self._setup.can_dial(place)]
        # a member that failed for this one may be alive for others and have the missing averages
        candidates.sort(key=lambda place: (place not in voters, place in standing.failed))
        self._adoption = Adoption(result, candidates, self._assembly)
        self._convergence = None
        asks: list[AskInventory | FetchChunk] = self._adoption.next()
        return [GiveUpOwnWork(), *asks, *self._endorse(result)]

    # ---- the round cannot be decided any more

    def _hope(self, standing: Standing) -> list[Effect | Commit | Fail | GiveUpOwnWork]:
        """Vote for none once the remaining members are no majority, and fail after some time: votes that
        others cast before they failed may still become known.
        """
        if not self._votes.is_hopeless(standing.live):
            self._hopeless_s = None
            return []
        if self._hopeless_s is None:
            self._hopeless_s = standing.now_s
            effects: list[Effect | Commit | Fail | GiveUpOwnWork] = []
            effects += self._votes.ask_all(self._reachable(standing))
            if self._own in self._setup.contributors and self._votes.own_vote is None and not self.signing:
                self.signing = True
                effects.append(Sign(b""))  # so that others know that there will be no majority
            return effects
        if standing.now_s - self._hopeless_s >= RESOLVE_S:
            return [Fail(self._why_hopeless(standing))]
        return []

    def _reachable(self, standing: Standing) -> list[int]:
        return [
            place for place in sorted(standing.live) if place != self._own and self._setup.can_dial(place)
        ]

    def _why_hopeless(self, standing: Standing) -> str:
        if self._refusal:
            return self._refusal
        if len(self._votes.tally.results) > 1:
            return "; ".join(
                [f"members hold different averages ({self._votes.sides()})", *standing.failed.values()]
            )
        deciders = self._setup.deciders
        live = sum(place in standing.live for place in deciders)
        reasons = "; ".join(standing.failed.values())
        if not live:
            return f"nobody is left who contributes: {reasons}"
        return f"{live} of {len(deciders)} peers that contribute are left, which is no majority: {reasons}"
