"""Every way in which a few peers can go through two rounds, with the real machines (docs/reliability.md)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from averaging.history import certificate, lineage, tally
from averaging.history.chain import Relation
from averaging.history.lineage import Lineage
from averaging.history.tally import Tally
from swarm.testing.identities import stand_in_verify
from swarm.testing.round_peers import InvalidCommitError
from swarm.testing.round_states import StuckError, explore, walk
from swarm.testing.round_tables import RoundSetting
from swarm.testing.vote_states import ForkError

ALL = (0, 1, 2)


@pytest.fixture(autouse=True)
def _stand_in_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate, lineage, tally):
        monkeypatch.setattr(module, "verify", stand_in_verify)


SHORT = [
    RoundSetting(groups=(ALL,), heads=1),
    RoundSetting(groups=((0, 1), (0, 2))),
    RoundSetting(groups=(ALL, (0, 1)), restarts=1, heads=1),
    RoundSetting(groups=((0, 1), (1, 2)), restarts=1, heads=1),
    RoundSetting(groups=((0, 1), (1, 2)), faults=1, heads=1),
    RoundSetting(groups=((0, 1), (1, 2), (0, 2)), heads=1),
    *(RoundSetting(groups=(ALL,), liar=liar, heads=1) for liar in ALL),
    *(RoundSetting(groups=((0, 1), (1, 2)), liar=liar, heads=1) for liar in ALL),
    RoundSetting(groups=((0, 1), (1, 2)), liar=0),
    RoundSetting(groups=((0, 1), (0, 2)), liar=1, restarts=1, heads=1),
]
LONG = [
    RoundSetting(groups=(ALL,)),
    RoundSetting(groups=((0, 2), (1,)), faults=1, heads=1),
    RoundSetting(groups=(ALL, ALL)),
    RoundSetting(groups=(ALL,), restarts=1),
    RoundSetting(groups=((0, 1), (1, 2)), restarts=1),
    RoundSetting(groups=(ALL,), faults=1, heads=1),
    RoundSetting(groups=((0, 1), (1, 2)), faults=2, heads=1),
    RoundSetting(groups=((0, 1), (1, 2)), faults=1),
    RoundSetting(groups=((1, 2), (0, 2)), faults=1, restarts=1, heads=1),
    *(RoundSetting(groups=(ALL,), liar=liar) for liar in ALL),
    *(RoundSetting(groups=((0, 1), (1, 2)), liar=liar) for liar in (1, 2)),
    RoundSetting(groups=(ALL,), faults=1, heads=1, liar=0),
]


@pytest.mark.parametrize(
    "setting", [*SHORT, *(pytest.param(one, marks=pytest.mark.slow) for one in LONG)], ids=str
)
def test_one_head_has_one_certificate_whatever_happens_in_two_rounds(setting: RoundSetting) -> None:
    """From each twentieth state, the honest peers also continue together once nothing fails any more."""
    report = explore(setting, heal_every=20)
    assert report.certified
    assert report.healed


WALKS = [
    RoundSetting(
        peers=4, groups=((0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (0, 3)), heads=1000, faults=9, restarts=2
    ),
    RoundSetting(peers=5, groups=((0, 1, 2), (2, 3, 4), (0, 1, 2, 3, 4)), heads=1000, faults=9),
    RoundSetting(peers=4, groups=((0, 1, 2, 3), (0, 1, 2)), heads=1000, faults=9, liar=3),
    RoundSetting(peers=5, groups=((0, 1, 2), (2, 3, 4)), heads=1000, faults=9, restarts=2, liar=0),
]


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(one, marks=pytest.mark.slow) for one in range(2, 250))]
)
@pytest.mark.parametrize("setting", WALKS, ids=str)
def test_one_head_has_one_certificate_in_random_rounds(setting: RoundSetting, seed: int) -> None:
    """The long form takes a million steps: ten minutes of processor time."""
    assert walk(setting, seed, count=300 if seed < 2 else 1000).steps


def _any_result(one: Tally) -> bytes | None:
    return next(iter(one.results), None)


MUTANTS: dict[str, tuple[RoundSetting, Callable[[pytest.MonkeyPatch], None]]] = {
    "a peer forgets what it voted for": (
        RoundSetting(groups=((0, 1), (1, 2)), faults=1, heads=1),
        lambda patch: patch.setattr(Lineage, "promise", lambda *_, **__: None),
    ),
    "a peer that restarted votes": (
        RoundSetting(groups=((0, 1), (1, 2)), restarts=1, heads=1),
        lambda patch: patch.setattr(Lineage, "abstains", False),
    ),
    "any attempt that failed here frees its vote": (
        RoundSetting(groups=((0, 1), (1, 2)), faults=1, heads=1),
        lambda patch: patch.setattr(Tally, "is_dead", lambda _: True),
    ),
    "no quorum of electors is needed": (
        RoundSetting(groups=((0, 2), (1,)), heads=1),
        lambda patch: patch.setattr(tally, "is_quorum", lambda *_: True),
    ),
    "one contributor is enough": (
        RoundSetting(peers=2, groups=((0, 1),), heads=1),
        lambda patch: patch.setattr(
            Tally, "majority", property(_any_result, lambda one, result: None), raising=False
        ),
    ),
    "a peer that is behind follows nobody": (
        RoundSetting(groups=((0, 1),), heads=1),
        lambda patch: patch.setattr(Lineage, "relation", lambda *_: Relation.LOSES),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_finds_a_rule_that_is_broken(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, break_it = MUTANTS[mutant]
    break_it(monkeypatch)
    with pytest.raises((ForkError, InvalidCommitError, StuckError)):
        explore(setting)


@pytest.mark.parametrize(
    "mutant", ["a peer forgets what it voted for", "any attempt that failed here frees its vote"]
)
def test_random_rounds_find_a_rule_that_is_broken(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant][1](monkeypatch)
    with pytest.raises((ForkError, InvalidCommitError, StuckError)):
        _ = [walk(setting, seed, count=500) for seed in range(10) for setting in WALKS[:2]]
