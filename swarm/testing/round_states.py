"""Exploration of all ways in which a few peers can go through two rounds, random walks, and the properties
that must hold in every state (docs/reliability.md).

Some peer may collect all signatures. Two certificates for one head that can be made of all votes ever signed
are therefore a fork. A liar can cause one without any honest peer voting twice; then the liar's signatures
must prove it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from averaging.history.certificate import is_majority
from averaging.history.electors import is_quorum
from swarm.testing.chance import Chance
from swarm.testing.round_peers import Situation
from swarm.testing.round_steps import RoundSteps
from swarm.testing.round_tables import RoundSetting, RoundTables, State
from swarm.testing.vote_states import ForkError

_FAULTS: Final = 0.1  # of the steps of a random walk
_TURNS_MAX: Final = 12  # within which peers without faults have one head, and commit a round
_MESSAGES_MAX: Final = 2000  # that these send in one turn


class StuckError(AssertionError):
    """Peers without faults made no progress. The message lists the steps."""


@dataclass
class RoundFigures:
    """Counts of the explored states."""

    states: int = 0
    steps: int = 0
    certified: int = 0  # states in which every head that the setting allows can be certified
    proved: int = 0  # states with a fork that the liar's signatures prove
    healed: int = 0  # states from which peers without faults made progress
    turns_most: int = 0  # until they had
    breaks: int = 0  # of these, with a break: votes of unknown outcome, or restarts, bind a quorum


class Checks:
    """The promises, for the states of one setting."""

    def __init__(self, steps: RoundSteps) -> None:
        self.steps, self.report = steps, RoundFigures()
        self._certified: dict[tuple[int, int], dict[bytes, list[tuple[int, bytes, int]]]] = {}

    def certified(self, signed: int) -> dict[bytes, list[tuple[int, bytes, int]]]:
        """Return what these votes certify, by head: attempt, result, voters as bits. The liar votes for every
        result that has a vote. Breaks are left out, because they declare that they lack a quorum.
        """
        steps, liar = self.steps, self.steps.setting.liar
        key = (signed, len(steps.tables.attempts))
        if key not in self._certified:
            voters: dict[tuple[int, bytes], int] = {}
            for (number, result, peer), bit in steps.tables.votes.items():
                if signed & bit and result:
                    voters[number, result] = voters.get((number, result), 0) | 1 << peer
            found: dict[bytes, list[tuple[int, bytes, int]]] = {}
            for (number, result), bits in voters.items():
                attempt = steps.tables.attempts[number]
                bits |= 0 if liar is None else 1 << liar
                names = [peer for place, peer in enumerate(steps.tables.ids) if bits >> place & 1]
                if attempt.proposal.is_break or not is_majority(attempt.proposal.deciders, names):
                    continue
                if is_quorum(attempt.electors, names):
                    found.setdefault(attempt.proposal.head, []).append((number, result, bits))
            self._certified[key] = found
        return self._certified[key]

    def check(self, state: State) -> bool:
        """Return whether there is no fork. Raise ForkError for one that no signatures prove."""
        for head, found in self.certified(state.signed).items():
            for one, other in itertools.combinations(found, 2):
                if not self._is_proved(state, one, other):
                    raise ForkError(f"two certificates extend {head.hex()[:6]}: {one[0]} and {other[0]}")
                self.report.proved += 1
                return False
        return True

    def _is_proved(self, state: State, one: tuple[int, bytes, int], other: tuple[int, bytes, int]) -> bool:
        """Return whether the liar's votes stand in both, or an honest peer has a vote of it that contradicts
        the one that stands in a certificate.
        """
        liar = self.steps.setting.liar
        if liar is None:
            return False
        for number, result, _ in (one, other):
            for (attempt, said, peer), bit in self.steps.tables.votes.items():
                if (attempt, peer) == (number, liar) and said != result and state.heard & bit:
                    return True
        # both need the liar: the honest voters of one of them are no quorum of their own
        honest = ~(1 << liar)
        return not one[2] & other[2] & honest

    # ---- progress

    def heal(self, state: State) -> State:
        """End all faults, silence the liar, and let all peers continue. Return the resulting state. Raise
        StuckError if the honest peers do not soon share one head and commit a round together (with a break if
        votes bind a quorum).
        """
        steps = self.steps
        honest = steps.tables.honest
        begun = steps.tables.local(state, honest[0]).lineage.epoch
        has_broken = False
        for turn in range(_TURNS_MAX):
            state = self._delivered(state)
            state = self._resolved(state)
            for peer, other in itertools.permutations(honest, 2):
                state = next(steps.compared(state, peer, other), state)
            locals_ = [steps.tables.local(state, peer) for peer in honest]
            heads = {local.lineage.head for local in locals_}
            if turn and len(heads) == 1 and locals_[0].lineage.epoch > begun and self._is_free(locals_):
                self.report.healed += 1
                self.report.breaks += has_broken
                self.report.turns_most = max(self.report.turns_most, turn)
                return state
            for head in sorted(heads):
                here = [peer for peer in honest if steps.tables.local(state, peer).lineage.head == head]
                state, broke = self._commit(state, here, turn)
                has_broken |= broke
            begun = min(begun, *(local.lineage.epoch for local in locals_))
        raise StuckError(f"honest peers have not committed a round together within {_TURNS_MAX} turns")

    @staticmethod
    def _is_free(locals_: Sequence[Situation]) -> bool:
        return not any(one.lineage.is_promised or one.lineage.abstains for one in locals_)

    def _commit(self, state: State, here: list[int], turn: int) -> tuple[State, bool]:
        """Let peers at one head do a round without faults: those that may vote, or after the grace all with
        a break. Raise StuckError when a quorum of those that may vote does not commit at once.
        """
        steps = self.steps
        lineages = {peer: steps.tables.local(state, peer).lineage for peer in here}
        free = [peer for peer in here if not (lineages[peer].is_promised or lineages[peer].abstains)]
        quorum = is_quorum(lineages[here[0]].electors, [steps.tables.ids[peer] for peer in free])
        members = free if quorum else here
        attempt = steps.tables.attempt(
            lineages[here[0]], f"healing {turn} {members} {quorum}", tuple(members), is_break=not quorum
        )
        state = self._delivered(next(steps.formed(state, attempt, members)))
        for peer in members:
            if steps.tables.local(state, peer).lineage.head == attempt.proposal.head:
                raise StuckError(f"{peer} has not committed a round of {members}, who reach one another")
        return state, not quorum

    def _delivered(self, state: State) -> State:
        """Let every message arrive; when none is left, let time pass until all rounds have ended."""
        steps = self.steps
        for _ in range(_MESSAGES_MAX):
            if state.messages:
                state = self._arrived(state, min(state.messages))
                continue
            running = [
                peer for peer in steps.tables.honest if steps.tables.local(state, peer).running is not None
            ]
            if not running:
                return state
            for peer in running:
                state = next(steps.ticked(state, peer))
        raise StuckError(f"{_MESSAGES_MAX} messages did not end a round")

    def _arrived(self, state: State, number: int) -> State:
        message = self.steps.tables.messages[number]
        silent = self.steps.setting.liar in (message.sender, message.receiver)
        afters = self.steps.lost(state, number) if silent else self.steps.arrivals(state, number)
        return next(iter(afters), state._replace(messages=state.messages - {number}))

    def _resolved(self, state: State) -> State:
        steps = self.steps
        for peer in steps.tables.honest:
            for one in steps.tables.local(state, peer).unresolved():
                for other in one.attempt.members:
                    if other != steps.setting.liar:
                        state = next(steps.resolved(state, peer, one, other), state)
        return state


def explore(setting: RoundSetting, *, heal_every: int = 1) -> RoundFigures:
    """Visit every state, and check that from every one that is a multiple of `heal_every` peers without
    faults continue. Raise ForkError or StuckError with the steps that lead there.
    """
    steps = RoundSteps(RoundTables(setting))
    checks = Checks(steps)
    start = steps.tables.start()
    before: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    report = checks.report
    while waiting:
        state = waiting.popleft()
        report.states += 1
        report.certified += len(checks.certified(state.signed)) == setting.heads
        try:
            goes_on = checks.check(state)
            if report.states % heal_every == 0:
                checks.heal(state)
        except (ForkError, StuckError) as error:
            raise type(error)(f"{error}\n{setting}\n{_story(before, state)}") from None
        if not goes_on:
            continue  # successors of a fork are not explored
        for step in steps.after(state):
            for after in step.act():
                report.steps += 1
                if after not in before:
                    before[after] = state, step.text
                    waiting.append(after)
        if len(before) > setting.states_max:
            raise RuntimeError(f"more than {setting.states_max} states")
    return report


def walk(setting: RoundSetting, seed: int, count: int, *, heal_every: int = 100) -> RoundFigures:
    """Take `count` steps at random. After `heal_every`, or when nothing can happen any more, peers without
    faults must continue.
    """
    steps, chance = RoundSteps(RoundTables(setting, merges=False)), Chance("rounds", seed)
    checks = Checks(steps)
    state, story = steps.tables.start(), []
    report = checks.report
    try:
        for number in range(1, count + 1):
            choices = list(steps.after(state))
            is_fault = chance.happens(_FAULTS)
            some = [one for one in choices if one.is_fault == is_fault] or choices
            chance.shuffle(some)
            step, afters = next(((one, found) for one in some if (found := [*one.act()])), (None, []))
            report.steps += 1
            if step is None or number % heal_every == 0:
                story.append("without faults")
                healed = checks.heal(state)
                state = healed._replace(faults=setting.faults, restarts=setting.restarts)
            else:
                story.append(step.text)
                state = chance.choice(afters)
            if not checks.check(state):
                break
    except (ForkError, StuckError) as error:
        raise type(error)(f"{error}\n{setting}, seed {seed}\n" + "\n".join(story)) from None
    report.certified += 1
    return report


def _story(before: dict[State, tuple[State, str] | None], state: State) -> str:
    """Return the steps to a state, one a line."""
    lines: list[str] = []
    came = before[state]
    while came is not None:
        lines.append(came[1])
        came = before[came[0]]
    return "\n".join(reversed(lines))
