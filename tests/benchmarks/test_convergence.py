"""The convergence section in short: real rounds of four nodes, a small model, few steps, stored outcomes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import convergence, four_peers
from benchmarks.convergence import QUARTER, WHOLE, OutcomeStore, Section
from benchmarks.four_peers import Data, PeerHistory, in_threads
from benchmarks.report import as_record
from benchmarks.results import Row
from benchmarks.training_setups import SETUPS, SYNCHRONOUS, Outcome, Scale, TrainingSetup

SCALE = Scale(
    width=16,
    layers=1,
    heads=2,
    context=16,
    samples=8,
    steps=90,
    common_steps=45,
    rising_steps=10,
    learning_rate=1e-2,
    data_bytes=1 << 18,
    points=6,
)
START_LOSS = 2.452  # held-out loss after the common steps
SHORT = [
    setup
    for setup in SETUPS
    if setup.name in ("local float32", "diloco int4", "gossip float32") or "streaming" in setup.name
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of text in an invented language, the same on every machine and quick to learn.

    Frequent words are short.
    """
    rng, folder = random.Random(6), tmp_path_factory.mktemp("text")
    words = [
        "".join(rng.choices("etaoinshrdlucmfw", k=2 + rank // 40 + rng.randrange(3))) for rank in range(200)
    ]
    weights = [1.0 / rank for rank in range(1, 201)]
    for number in range(20):
        sentences = [
            " ".join(rng.choices(words, weights, k=rng.randrange(4, 12))).capitalize() + ". "
            for _ in range(200)
        ]
        (folder / f"{number:02}.txt").write_text("".join(sentences), encoding="ascii")
    return folder


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        convergence, "SYNCHRONOUS", TrainingSetup(name=SYNCHRONOUS.name, mode=SYNCHRONOUS.mode, local_steps=1)
    )
    monkeypatch.setattr(convergence, "SEEDS", (0,))


def short(path: Path, text: Path) -> dict[str, Row]:
    setups = [
        TrainingSetup(
            name=setup.name,
            mode=setup.mode,
            codec=setup.codec,
            local_steps=setup.local_steps,
            delay_steps=setup.delay_steps,
        )
        for setup in SHORT
    ]
    data = Data(SCALE, text)
    with four_peers.four_nodes() as nodes:
        rows = Section(OutcomeStore(path), data, SCALE, lambda text: None, setups).rows(
            in_threads(nodes, data, SCALE)
        )
        return {row.identifier: row for batch in rows for row in batch}


def test_modes_learn_like_one_machine_and_a_second_call_trains_nothing_again(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "convergence.json"
    rows = short(path, text)
    losses = {
        name.removeprefix("convergence-loss-"): row.ours.median
        for name, row in rows.items()
        if "-loss-" in name
    }
    assert all(as_record(row, "run") for row in rows.values())
    measured = {name: round(loss, 3) for name, loss in losses.items() if loss is not None}
    assert len(measured) == len(losses) == 3 + len(SHORT), losses
    whole, quarter, synchronous = (
        measured[convergence.slug(name)] for name in (WHOLE, QUARTER, SYNCHRONOUS.name)
    )
    assert whole == pytest.approx(START_LOSS - 0.141, abs=0.012), (
        "one machine with all batches reaches the recorded loss"
    )
    assert synchronous == pytest.approx(whole, rel=1e-3), (
        "the synchronous swarm is one machine with all batches"
    )
    # seeds 0, 1, 2: diloco 0.991 to 0.995 of `whole`, streaming 0.999 to 1.002, local 1.008 to 1.010,
    # gossip 1.011 to 1.015
    for setup in SHORT:
        loss = measured[convergence.slug(setup.name)]
        assert 0.985 * whole < loss < 1.02 * whole, (setup.name, measured)
        assert loss < quarter or "gossip" in setup.name, (
            f"{setup.name} learns no more than one of its peers alone: {measured}"
        )
    stored = {(one.setup, one.seed): one for one in OutcomeStore(path).outcomes}
    assert len(stored) == 3 + len(SHORT)
    assert not any(one.missing > 1e-6 for one in stored.values()), "values of all four are in every round"
    sent = {name: one.sent_bytes / one.parameters for (name, _), one in stored.items() if one.rounds}
    assert sent["synchronous float32"] == pytest.approx(15 * sent["local float32"], rel=0.02)
    assert sent["local float32"] > 7 * sent["diloco int4"]

    def never(*_: object) -> Outcome:
        raise AssertionError("this training is stored")

    monkeypatch.setattr(Section, "train_together", never)
    monkeypatch.setattr(Section, "train_alone", never)
    again = short(path, text)
    assert {name: row.ours for name, row in again.items()} == {name: row.ours for name, row in rows.items()}


def test_the_mean_curve_averages_evaluated_losses_and_sent_bytes() -> None:
    histories = [
        PeerHistory(curve=[(15, 3.0, 10.0), (30, 2.0, 20.0)]),
        PeerHistory(curve=[(15, None, 30.0), (30, None, 40.0)]),
    ]
    assert four_peers.mean_curve(histories) == [(15, 3.0, 20.0), (30, 2.0, 30.0)]


def test_bytes_to_a_loss_count_to_the_first_evaluation_that_reaches_it() -> None:
    outcome = Outcome(
        setup="x", seed=0, settings={}, curve=[(1, 3.0, 10.0), (2, 2.0, 20.0), (3, 2.1, 30.0), (4, 1.9, 40.0)]
    )
    assert outcome.bytes_to(2.05) == 20.0
    assert outcome.bytes_to(1.0) is None
    assert outcome.loss == pytest.approx(2.0)


def test_names_and_settings_of_setups_are_unique() -> None:
    assert len({setup.name for setup in SETUPS}) == len(SETUPS)
    assert len({convergence.slug(setup.name) for setup in SETUPS}) == len(SETUPS)
    assert len({repr(setup.settings) for setup in SETUPS}) == len(SETUPS)
    assert [len(setup.seeds) for setup in SETUPS].count(3) == 4, "four headline rows"
