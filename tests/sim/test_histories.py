"""Peers that keep one history through cuts, losses, restarts, goodbyes and a liar, in random plays.

- Two certificates without a break extend one head only if a liar signed, and then its signatures prove it.
- Nobody follows a certificate that is not valid.
- Peers that may vote and are a quorum commit at once when they reach one another.
- Without faults all honest peers soon have one head.
- Nothing grows without bound.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from averaging.history import certificate, lineage, tally
from averaging.history.chain import Chain, Relation
from averaging.history.lineage import Lineage
from swarm.testing.histories import PlayConfig
from swarm.testing.history_ledger import BrokenPromiseError
from swarm.testing.history_plays import RandomPlay, replay_line
from swarm.testing.identities import SeededIdentity, StandInIdentity, stand_in_verify


@pytest.fixture
def _stand_in_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate, lineage, tally):
        monkeypatch.setattr(module, "verify", stand_in_verify)


def play(config: PlayConfig, make_signer: type = StandInIdentity) -> None:
    print("replay:", replay_line(config))
    counts = RandomPlay(config, make_signer).run()
    assert counts["checks of healing"]


def play_seeds(seeds: Iterable[int]) -> None:
    for seed in seeds:
        play(config_of(seed, has_liar=False))


def config_of(seed: int, *, has_liar: bool, steps: int = 2000) -> PlayConfig:
    return PlayConfig(
        seed=seed, electors=3 + seed % 3, newcomers=seed // 3 % 3, steps=steps, has_liar=has_liar
    )


@pytest.mark.usefixtures("_stand_in_signatures")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("has_liar", [False, True], ids=["honest", "liar"])
def test_peers_keep_one_history(seed: int, has_liar: bool) -> None:
    play(config_of(seed, has_liar=has_liar))


@pytest.mark.slow
@pytest.mark.usefixtures("_stand_in_signatures")
@pytest.mark.parametrize("seed", range(1000, 1250))
@pytest.mark.parametrize("has_liar", [False, True], ids=["honest", "liar"])
def test_peers_keep_one_history_for_a_million_steps(seed: int, has_liar: bool) -> None:
    play(config_of(seed, has_liar=has_liar))


@pytest.mark.parametrize("has_liar", [False, True], ids=["honest", "liar"])
def test_peers_keep_one_history_with_real_signatures(has_liar: bool) -> None:
    play(config_of(1, has_liar=has_liar, steps=1000), SeededIdentity)


@pytest.mark.usefixtures("_stand_in_signatures")
def test_the_model_finds_a_fork_when_peers_forget_their_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lineage, "promise", lambda *_: None)
    with pytest.raises(BrokenPromiseError, match="two certificates"):
        play_seeds(range(20))


@pytest.mark.usefixtures("_stand_in_signatures")
def test_the_model_finds_that_histories_stay_apart_when_nobody_yields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relation = Lineage.relation

    def stubborn(self: Lineage, chain: Chain) -> Relation:
        found = relation(self, chain)
        return Relation.LOSES if found is Relation.WINS else found

    monkeypatch.setattr(Lineage, "relation", stubborn)
    with pytest.raises(BrokenPromiseError, match="these heads"):
        play_seeds(range(20))


@pytest.mark.usefixtures("_stand_in_signatures")
def test_equal_seeds_give_equal_plays() -> None:
    config = config_of(5, has_liar=True)
    assert RandomPlay(config, StandInIdentity).run() == RandomPlay(config, StandInIdentity).run()
