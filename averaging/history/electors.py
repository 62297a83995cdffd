"""The electors of a head, who decide about the next round, and how other peers become electors. Pure.

An identity costs nothing, so peers become electors by certified work, and only so fast. Everything that the
rule needs is in the certificates: the electors of the next head follow from those of this one, from what the
head remembers about other peers (`Register`), and from the contributors of the round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.core.standing import Founding

ELECTORS_MAX: Final = 64  # electors of a run; a certificate carries a signature of more than half of them
CANDIDATES_MAX: Final = 64  # candidates in the register; enough for the newcomers of a whole group
ROUNDS_NEEDED: Final = 3  # certified rounds as a contributor, before a newcomer becomes an elector
ROUNDS_MAX: Final = 127  # counted
# In a run without an owner, every contributor of the first certificates, up to this number, becomes an
# elector. Peers that start together thus decide together, including those that missed the first round. A
# stranger gains nothing, because during these certificates a longer chain from the beginning wins anyway
# (`Lineage`)
FOUNDING_MAX: Final = 32
ALWAYS: Final = (1 << 32) - 1  # invited runs: every contributor becomes an elector, at any time
# Consecutive certificates without its contribution after which an elector leaves the list. Too small: honest
# electors that sometimes miss a round are replaced by a majority of others; too large: after several failures
# too many failed electors still count, and the others pause for a grace
MISSES_MAX: Final = 3
HOUR_S: Final = 3600.0  # period in which at most a quarter more electors are admitted, at least one
# tolerated difference between the hours of two peers. Too small: a peer that learned of the last certificate
# late does not vote; too large: hours become shorter
_HOUR_SLACK_S: Final = 300.0


def is_quorum(electors: Sequence[PeerId], present: Collection[PeerId], gone: Collection[PeerId] = ()) -> bool:
    """Return whether the electors that are `present` may decide: more than half of those that have not said
    goodbye (`gone`), or exactly half including the most senior one. A head without electors, which is that
    before the first certificate, needs none of them; where all have left there is no quorum any more.

    `electors`: in order of seniority, the most senior first.
    """
    eligible = [elector for elector in electors if elector not in gone]
    if not eligible:
        return not electors
    found = sum(elector in present for elector in eligible)
    return 2 * found > len(eligible) or (2 * found == len(eligible) and eligible[0] in present)


def seats_of(present: Collection[PeerId], electors: Sequence[PeerId]) -> tuple[int, list[bool]]:
    """Return a value to compare two sides of a cut: the number of present electors, then their seniority. The
    side with the larger value continues.
    """
    seats = [elector in present for elector in electors]
    return sum(seats), seats


@dataclass(frozen=True, slots=True)
class Known:
    """A peer that is no elector, with its record in the certificates."""

    peer: PeerId
    rounds: int  # certified ones that it contributed to
    was_elector: bool = False  # it left the list and returns with its next contribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """The memory of a head about the admission of electors. The default: of a new run without an owner."""

    at_once: int = FOUNDING_MAX  # further certificates whose contributors all become electors; or ALWAYS
    seats: int = 1  # newcomers that may still become electors in this hour
    # certificates in a row that each elector of the head has missed, in their order; (): none has missed any
    misses: tuple[int, ...] = ()
    # former electors, at most ELECTORS_MAX, then candidates, at most CANDIDATES_MAX; each with the latest
    # first
    known: tuple[Known, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.at_once <= ALWAYS or not 0 <= self.seats <= ELECTORS_MAX:
            raise PeerError(f"a register with {self.seats} seats, and {self.at_once} rounds of admission")
        if len(self.misses) > ELECTORS_MAX or any(not 0 <= one < MISSES_MAX for one in self.misses):
            raise PeerError(f"an elector leaves once it has missed {MISSES_MAX} certificates in a row")
        former = sum(one.was_elector for one in self.known)
        if former > ELECTORS_MAX or len(self.known) - former > CANDIDATES_MAX:
            raise PeerError(f"a register of {former} former electors and {len(self.known) - former} others")
        if any(not 0 <= one.rounds <= ROUNDS_MAX for one in self.known):
            raise PeerError(f"a register counts at most {ROUNDS_MAX} rounds of a peer")
        if len({one.peer for one in self.known}) != len(self.known):
            raise PeerError("a register names a peer once")

    def rounds_of(self, peer: PeerId) -> int:
        """Return how many certified rounds a peer that is no elector contributed to, as far as the head
        remembers it.
        """
        return next((one.rounds for one in self.known if one.peer == peer), 0)

    def absent(self, electors: Sequence[PeerId]) -> list[PeerId]:
        """Return those of the head's electors that have missed its last certificate."""
        return [peer for peer, misses in zip(electors, self.misses, strict=False) if misses]


NEW_REGISTER: Final = Register()


def first_electors(founding: Founding) -> tuple[PeerId, ...]:
    """Return the electors of a run before its first certificate: the owner of an open run; none where
    contributors of the first certificate decide.
    """
    return (founding.owner,) if founding.owner is not None and not founding.is_invited else ()


def first_register(founding: Founding) -> Register:
    """Return the register of a run before its first certificate."""
    if founding.is_invited:
        return Register(at_once=ALWAYS)
    return Register(at_once=0 if founding.owner is not None else FOUNDING_MAX)


def electors_after(
    electors: Sequence[PeerId],
    register: Register,
    contributors: Sequence[PeerId],
    *,
    gone: Collection[PeerId] = (),
    is_break: bool = False,
    new_hour: bool = False,
) -> tuple[tuple[PeerId, ...], Register]:
    """Return the electors after a round with these contributors, the most senior first, and the register.

    Electors keep their order. One leaves the list when it has missed `MISSES_MAX` certificates in a row or
    has said goodbye (`gone`); when it did not contribute, after a break, while every contributor becomes an
    elector, and where the junior one of two would depend on it. Former electors follow, then
    newcomers as far as there are seats, those with the most certified rounds first; of equal ones the first
    in group order. Where no elector contributed (they had nothing to contribute, and voted) all of them stay;
    after a break the contributors inherit: the former electors among them, else those that certificates know,
    else all.

    `new_hour`: the seats of another hour can be taken (`grants_hour`).
    """
    here, of_head, known = set(contributors), set(electors), {one.peer: one for one in register.known}
    present = [elector for elector in electors if elector in here]
    misses = _misses(electors, register, here)
    others = [peer for peer in contributors if peer not in of_head]
    seats = max(1, len(electors) // 4) if new_hour else register.seats
    if register.at_once:
        chosen = [*present, *others]
    else:
        former = [peer for peer in others if peer in known and known[peer].was_elector]
        candidates = [peer for peer in others if peer not in former]
        counted = [peer for peer in candidates if peer in known]
        if present or not is_break:
            admitted = [] if is_break else _admitted(counted, register, seats)
            stay = [peer for peer in electors if misses.get(peer, 0) < MISSES_MAX and peer not in gone]
            chosen = [*(present if is_break else stay or electors), *former, *admitted]
            if len(chosen) == 2 and present and not is_quorum(chosen, here):
                chosen = [*present, *former, *admitted]
            seats -= len(admitted)
        else:
            chosen = former or counted or candidates
    after = tuple(chosen[:ELECTORS_MAX])
    if register.at_once == ALWAYS:
        return after, register
    left = tuple(misses.get(peer, 0) for peer in after)
    return after, replace(
        register,
        at_once=max(register.at_once - 1, 0),
        seats=seats,
        misses=left if any(left) else (),
        known=_remembered(electors, register, contributors, after),
    )


def _misses(electors: Sequence[PeerId], register: Register, here: Collection[PeerId]) -> dict[PeerId, int]:
    """Return how many certificates in a row each elector has missed, the one with these contributors
    included. One that no elector contributed to was missed by none: they voted.
    """
    before = dict(zip(electors, register.misses, strict=False))  # none: nobody has missed any
    if not any(elector in here for elector in electors):
        return before
    return {elector: 0 if elector in here else before.get(elector, 0) + 1 for elector in electors}


def _admitted(candidates: Sequence[PeerId], register: Register, seats: int) -> list[PeerId]:
    """Return the candidates that become electors with their contribution to this round."""
    rounds = {one.peer: one.rounds + 1 for one in register.known}
    ready = [peer for peer in candidates if rounds[peer] >= ROUNDS_NEEDED]
    return sorted(ready, key=lambda peer: -rounds[peer])[:seats]


def _remembered(
    electors: Sequence[PeerId], register: Register, contributors: Sequence[PeerId], after: Sequence[PeerId]
) -> tuple[Known, ...]:
    """Return what is remembered after a round. Those that were in it are before those that were not, so that
    identities that contributed once displace nobody who continues.
    """
    known, gone, here = {one.peer: one for one in register.known}, set(after), set(contributors)
    missed = [Known(peer, known[peer].rounds if peer in known else 0, True) for peer in electors]
    worked = [
        Known(
            peer,
            min((known[peer].rounds if peer in known else 0) + 1, ROUNDS_MAX),
            peer in known and known[peer].was_elector,
        )
        for peer in contributors
        if peer not in electors
    ]
    worked.sort(key=lambda one: -one.rounds)
    away = [one for one in register.known if one.peer not in here]
    everybody = [one for one in (*missed, *worked, *away) if one.peer not in gone]
    former = [one for one in everybody if one.was_elector]
    candidates = [one for one in everybody if not one.was_elector]
    return (*former[:ELECTORS_MAX], *candidates[:CANDIDATES_MAX])


def leaving(
    electors: Sequence[PeerId],
    register: Register,
    contributors: Collection[PeerId],
    gone: Collection[PeerId],
    *,
    is_break: bool,
) -> tuple[PeerId, ...]:
    """Return those of the electors that a certificate takes from the list since they have said goodbye
    (`gone`); none where an elector that does not contribute leaves anyhow.
    """
    if is_break or register.at_once:
        return ()
    return tuple(peer for peer in electors if peer in gone and peer not in contributors)


def grants_hour(electors: Sequence[PeerId], agreeing: Collection[PeerId]) -> bool:
    """Return whether more than half of the electors are among those that contribute and say that an hour has
    passed since the last admission. Nobody else's clock counts.
    """
    return 2 * sum(elector in agreeing for elector in electors) > len(electors)


class GrowthClock:
    """One peer's view of the hour in which at most a quarter more electors are admitted. `now_s`: monotonic
    clock.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None  # None: with the next question
        self._is_sure = False  # this process observed the beginning of the hour

    def begin(self, *, is_sure: bool) -> None:
        """An hour has begun. `is_sure`: just now, in a round that this process took part in."""
        self._began_s, self._is_sure = None, is_sure

    def is_over(self, now_s: float) -> bool:
        """Return whether an hour has passed, as far as this process has seen."""
        if self._began_s is None:
            self._began_s = now_s
        return now_s - self._began_s >= HOUR_S

    def is_too_early(self, now_s: float, *, outside: bool) -> bool:
        """Return whether to refuse a vote for a new hour. In a group the clocks of most electors decide, and
        this peer's only if it has seen the hour begin. `outside`: this peer is asked for its vote by a group
        that it is not in, and whose members' clocks it has only the leader's word for.
        """
        if not outside and not self._is_sure:
            return False
        self.is_over(now_s)
        assert self._began_s is not None
        return now_s - self._began_s < HOUR_S - _HOUR_SLACK_S
