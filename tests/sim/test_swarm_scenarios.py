"""Whole swarms under every fault, for a short time; `make sim` is the long form. A failure names the command
that replays it.
"""

from __future__ import annotations

import logging

import pytest

from swarm.dht.logic.storage import Storage
from swarm.dht.service.dht_service import DhtService
from swarm.testing.scenarios import SCENARIOS, ScenarioConfig, ScenarioFailed, run_scenario


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "swarm.dht")  # clocks are wrong here, and each peer logs it


@pytest.mark.parametrize(
    ("name", "seed"),
    [("churn", 2), ("crash", 3), ("clock", 4), ("split", 5), ("loss", 6), ("storm", 7), ("storm", 8)],
)
def test_every_scenario_ends_without_a_violated_invariant(name: str, seed: int) -> None:
    config = ScenarioConfig(seed=seed, peers=30, hours=0.15, name=name, faults_s=300.0, settle_s=240.0)
    report = run_scenario(config)
    assert report.audited
    assert report.heal_s
    assert report.counts.reads > 20
    assert report.messages > 1000


def test_the_same_seed_repeats_the_run() -> None:
    config = ScenarioConfig(
        seed=9, peers=12, hours=0.02, name="crash", faults_s=60.0, settle_s=10.0, every_s=10.0
    )
    assert run_scenario(config).digest == run_scenario(config).digest


def test_a_failure_names_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ScenarioConfig(
        seed=3,
        peers=6,
        hours=0.01,
        name="calm",
        faults_s=30.0,
        settle_s=30.0,
        repair_s=-1.0,
        operations_per_s=5.0,
    )
    with monkeypatch.context() as broken:
        # Claims to store what it discards.
        broken.setattr(Storage, "store", lambda self, *args, **kwargs: None)
        with pytest.raises(ScenarioFailed, match="no peer holds entry") as caught:
            run_scenario(config)
    assert str(caught.value).splitlines()[-1] == "replay: make sim SEED=3 PEERS=6 HOURS=0.01 SCENARIO=calm"
    run_scenario(config)
    with monkeypatch.context() as broken:
        broken.setattr(DhtService, "store", None)
        with pytest.raises(ExceptionGroup) as crashed:
            run_scenario(config)
    assert crashed.value.__notes__ == ["replay: make sim SEED=3 PEERS=6 HOURS=0.01 SCENARIO=calm"]


def test_an_unknown_scenario_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=f"there are {', '.join(SCENARIOS)}"):
        run_scenario(ScenarioConfig(name="flood"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["churn", "storm"])
def test_a_thousand_peers_break_no_promise(name: str) -> None:
    report = run_scenario(ScenarioConfig(seed=1, peers=1000, hours=0.2, name=name, operations_per_s=2.0))
    assert report.audited
