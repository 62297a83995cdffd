"""Every order of the votes of one round: two certificates for one head never exist without a liar."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from averaging.history import certificate, lineage, tally
from averaging.history.certificate import is_majority
from averaging.history.electors import is_quorum
from averaging.history.lineage import Lineage
from swarm.testing.identities import StandInIdentity, stand_in_verify
from swarm.testing.vote_states import ForkError, Setting, VoteStates

SENIOR, SECOND, THIRD, NEWCOMER = range(4)


@pytest.fixture(autouse=True)
def _stand_in_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate, lineage, tally):
        monkeypatch.setattr(module, "verify", stand_in_verify)


def groups(peers: int) -> list[tuple[int, ...]]:
    """Return every group of these peers."""
    return [group for size in range(1, peers + 1) for group in itertools.combinations(range(peers), size)]


def pairs(peers: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return every two attempts of these peers, in which the same ones may take part."""
    return list(itertools.combinations_with_replacement(groups(peers), 2))


def explored(setting: Setting) -> None:
    """Visit all states: ForkError is raised at a fork, and some states must have a certificate."""
    report = VoteStates(setting).explore()
    assert report.certified


SETTINGS = [
    Setting(electors=3, attempts=((0, 1, 2), (0, 1, 2))),
    Setting(electors=3, attempts=((0, 1), (1, 2), (0, 2))),
    Setting(electors=3, attempts=((0, 1), (1, 2)), restarts=1),
    Setting(electors=3, attempts=((0, 1, 2), (0, 1, 2)), goodbyes=(0, 1, 2)),
    Setting(electors=2, attempts=((2,), (3,)), goodbyes=(0, 1)),
    Setting(electors=3, attempts=((1, 2, 3), (2,)), goodbyes=(0, 1)),
    *(
        pytest.param(setting, marks=pytest.mark.slow)
        for setting in (
            Setting(electors=3, attempts=((0,), (1, 2)), restarts=2),
            Setting(electors=4, attempts=((2, 3), (0, 1))),
            Setting(electors=4, attempts=((1, 2), (0, 3))),
        )
    ),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_one_head_has_one_certificate_in_every_order_of_votes(setting: Setting) -> None:
    report = VoteStates(setting).explore()
    assert report.certified
    assert report.states > 100


@pytest.mark.slow
@pytest.mark.parametrize("attempts", pairs(3), ids=str)
@pytest.mark.parametrize(("restarts", "goodbyes"), [(0, ()), (1, ()), (0, (0, 1, 2))], ids=str)
def test_one_head_has_one_certificate_for_every_two_groups_of_three_peers(
    attempts: tuple[tuple[int, ...], ...], restarts: int, goodbyes: tuple[int, ...]
) -> None:
    explored(Setting(electors=3, attempts=attempts, restarts=restarts, goodbyes=goodbyes))


@pytest.mark.slow
@pytest.mark.parametrize("attempts", pairs(4), ids=str)
def test_one_head_has_one_certificate_for_every_two_groups_with_a_newcomer(
    attempts: tuple[tuple[int, ...], ...],
) -> None:
    explored(Setting(electors=3, attempts=attempts))


BREAKAGES: dict[str, tuple[Setting, Callable[[pytest.MonkeyPatch], None]]] = {
    "a peer that restarted votes": (
        Setting(electors=3, attempts=((0, 1), (1, 2)), restarts=1),
        lambda patch: patch.setattr(Lineage, "abstains", False),
    ),
    "a peer forgets what it voted for": (
        Setting(electors=3, attempts=((0, 1), (1, 2))),
        lambda patch: patch.setattr(Lineage, "promise", lambda *_: None),
    ),
    "a peer says goodbye although it voted": (
        Setting(electors=3, attempts=((1, 2, 3), (2,)), goodbyes=(0, 1)),
        lambda patch: patch.setattr(Lineage, "may_say_goodbye", lambda self: not self.is_promised),
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_model_finds_a_fork_when_a_rule_is_broken(breakage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, break_it = BREAKAGES[breakage]
    break_it(monkeypatch)
    with pytest.raises(ForkError, match="certified: attempt 1"):
        VoteStates(setting).explore()


@pytest.mark.parametrize("liar", range(3))
def test_a_lying_reducer_among_three_electors_can_fork_one_attempt(liar: int) -> None:
    report = VoteStates(Setting(electors=3, attempts=((0, 1, 2),), liar=liar, splits=True)).explore()
    assert len(report.forks) == 1


@pytest.mark.slow
def test_a_lying_reducer_among_four_electors_cannot_fork_one_attempt() -> None:
    report = VoteStates(Setting(electors=4, attempts=((0, 1, 2, 3),), liar=0, splits=True)).explore()
    assert not report.forks


def meet_in(electors: int, liar: int, *, one_attempt: bool) -> bool:
    """Return whether two certificates can have no honest signer in common: of one attempt of all electors, or
    of two attempts of other groups.
    """
    peers = [StandInIdentity(number).peer_id for number in range(electors)]
    honest = set(peers) - {peers[liar]}
    found = [
        set(voters)
        for size in range(electors + 1)
        for voters in itertools.combinations(peers, size)
        if is_quorum(peers, voters) and (not one_attempt or is_majority(peers, voters))
    ]
    return any(not (one & other & honest) for one, other in itertools.product(found, found))


@pytest.mark.parametrize("electors", [2, 3, 4, 5])
def test_which_single_liar_can_make_two_certificates(electors: int) -> None:
    """docs/reliability.md has this as a table."""
    in_one_attempt = [liar for liar in range(electors) if meet_in(electors, liar, one_attempt=True)]
    in_two = [liar for liar in range(electors) if meet_in(electors, liar, one_attempt=False)]
    everybody = list(range(electors))
    assert in_one_attempt == (everybody if electors % 2 else [])
    assert in_two == ([SENIOR] if electors == 2 else everybody)
