"""Simulation of a crowd of free identities in an open run: how fast they become electors. Virtual time.

The honest electors decide with their real `Lineage` and `GrowthClock`. A round consists of its contributors,
and a certificate exists if enough peers would sign it. The crowd contributes real work (without it no round
counts), claims in every round that an hour has passed, and signs everything. Unreachable electors sign
nothing; without a quorum, the present electors continue with a break after the grace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from averaging.history.certificate import Certificate, Proposal, RoundKind, is_majority
from averaging.history.electors import (
    HOUR_S,
    grants_hour,
    is_quorum,
)
from averaging.history.lineage import Lineage
from swarm.core.ids import PeerId
from swarm.core.standing import Founding
from swarm.testing.chance import Chance
from swarm.testing.identities import StandInIdentity

RUN: Final = "growth"


@dataclass(frozen=True, kw_only=True)
class GrowthConfig:
    """One simulated run."""

    seed: int
    # "many": other identities in every round, drawn by chance; "patient": always the same ones
    # "nobody": no newcomer comes; "none": an honest one
    crowd: Literal["nobody", "none", "many", "patient"]
    honest: int = 4  # electors when the crowd arrives; the first owns the run
    identities: int = 1000  # of the crowd
    group_size_max: int = 64
    hours: float = 6.0
    round_s: float = 10.0
    miss: float = 0.0  # share of the rounds that an honest elector misses
    is_reachable: bool = True  # an elector that misses a round signs it nevertheless
    away_rounds: int = 1  # consecutive rounds that an absent elector misses
    grace_s: float = 15.0  # time without a quorum before the present electors continue with a break
    crowd_after_s: float = 0.0  # arrival of the crowd, relative to that of an honest newcomer


@dataclass
class GrowthFigures:
    """The electors of one simulated run."""

    admitted_s: list[float] = field(default_factory=list)  # when each identity of the crowd became elector
    newcomer_s: float | None = None  # time until the honest newcomer became an elector; None: it did not
    # first time at which the crowd could decide without the honest electors; None: never
    quorum_s: float | None = None
    electors: int = 0  # at the end
    shares: list[float] = field(default_factory=list)  # the crowd's largest part of the electors, by hour
    lost_s: float = 0.0  # time without a quorum
    breaks: int = 0
    rounds: int = 0
    refused: int = 0  # rounds that the honest electors did not sign


class GrowthRun:
    """One run, from the arrival of the crowd."""

    def __init__(self, config: GrowthConfig) -> None:
        self.config = config
        self._chance = Chance("growth", config.seed, config.crowd)
        self._honest = [_peer(f"honest {number}") for number in range(config.honest)]
        self._newcomer = _peer("newcomer")
        self._crowd = [_peer(f"crowd {number}") for number in range(config.identities)]
        self._is_of_crowd = frozenset(self._crowd)
        founding = Founding(self._honest[0])
        self._lineages = {peer: Lineage(RUN, peer, founding) for peer in self._honest}
        self._now_s = 0.0
        self._back_s = dict.fromkeys(self._honest, 0.0)  # until when each elector is away
        self._waited_s = 0.0  # without a quorum
        self.figures = GrowthFigures()

    def run(self) -> GrowthFigures:
        """Let the honest peers become electors, then let the crowd join as soon as there is a seat."""
        while len(self._any.electors) < len(self._honest) or not self._any.register.seats:
            self._round(self._honest)
        self.figures = GrowthFigures()
        begun_s = self._now_s
        known = {*self._honest}
        while (since_s := self._now_s - begun_s) < self.config.hours * HOUR_S:
            self._round(self._group(since_s))
            electors = self._any.electors
            for peer in electors:
                if peer in known:
                    continue
                known.add(peer)
                if peer == self._newcomer:
                    self.figures.newcomer_s = since_s
                else:
                    self.figures.admitted_s.append(since_s)
            hour = int(since_s / HOUR_S)
            self.figures.shares += [0.0] * (hour + 1 - len(self.figures.shares))
            share = sum(peer in self._is_of_crowd for peer in electors) / len(electors)
            self.figures.shares[hour] = max(self.figures.shares[hour], share)
            if self.figures.quorum_s is None and is_quorum(electors, self._is_of_crowd):
                self.figures.quorum_s = since_s
        self.figures.electors = len(self._any.electors)
        return self.figures

    @property
    def _any(self) -> Lineage:
        return self._lineages[self._honest[0]]

    def _group(self, since_s: float) -> list[PeerId]:
        """Return the contributors of the next round."""
        group = self._present()
        if self.config.crowd == "nobody":
            return group
        free = self.config.group_size_max - len(group)
        others = [self._newcomer]
        if since_s < self.config.crowd_after_s:
            return [*group, *others]
        if self.config.crowd == "many":
            others += self._crowd
            self._chance.shuffle(others)
        elif self.config.crowd == "patient":
            others += self._crowd[: free - len(others)]
        return [*group, *others[:free]]

    def _present(self) -> list[PeerId]:
        """Return the honest electors that do not miss the next round, at least one."""
        config = self.config
        for peer in self._honest:
            # probability that gives this share of missed rounds in the long run
            leaves = config.miss / (config.away_rounds * (1.0 - config.miss) + config.miss)
            if self._back_s[peer] <= self._now_s and self._chance.happens(leaves):
                self._back_s[peer] = self._now_s + config.away_rounds * config.round_s
        here = [peer for peer in self._honest if self._back_s[peer] <= self._now_s]
        return here or self._honest[:1]

    def _round(self, members: list[PeerId]) -> None:
        """Run a round of these peers."""
        self._now_s += self.config.round_s
        contributors = sorted(members)
        is_break = self._waited_s > self.config.grace_s
        granting = {
            peer
            for peer in contributors
            if peer not in self._lineages or self._lineages[peer].growth.is_over(self._now_s)
        }
        lineage = self._any
        proposal = lineage.propose(
            epoch=lineage.epoch + 1,
            kind=RoundKind.EPOCH,
            group_id=self._chance.randbytes(32),
            contributors=contributors,
            is_break=is_break,
            new_hour=not (lineage.register.at_once or is_break) and grants_hour(lineage.electors, granting),
        )
        signing = {
            peer
            for peer in {*contributors, *(lineage.electors if self.config.is_reachable else ())}
            if peer not in self._lineages or self._signs(peer, proposal)
        }
        self.figures.rounds += 1
        has_quorum = is_break or is_quorum(lineage.electors, signing)
        if not is_majority(proposal.deciders, signing) or not has_quorum:
            self.figures.refused += 1
            self.figures.lost_s += self.config.round_s
            self._waited_s += self.config.round_s
            return
        self.figures.breaks += is_break
        self._waited_s = 0.0
        certificate = Certificate(proposal=proposal, result=bytes(32), votes={}, goodbyes={})
        for one in self._lineages.values():
            one.extend(certificate)

    def _signs(self, peer: PeerId, proposal: Proposal) -> bool:
        """Return whether an honest peer signs this proposal."""
        lineage = self._lineages[peer]
        outside = peer not in proposal.contributors
        too_early = proposal.new_hour and lineage.growth.is_too_early(self._now_s, outside=outside)
        return not too_early and not lineage.refusal(proposal, bytes(32))


def _peer(name: str) -> PeerId:
    return StandInIdentity(f"growth {name}").peer_id
