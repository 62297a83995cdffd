"""The convergence section in short: real rounds of four nodes, a small model, a few steps; and that what was
measured is kept.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import convergence, fourpeers
from benchmarks.convergence import QUARTER, WHOLE, Kept, Section
from benchmarks.fourpeers import Course, Data, in_threads
from benchmarks.report import as_record
from benchmarks.results import Row
from benchmarks.ways import SYNCHRONOUS, WAYS, Outcome, Scale, Way

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
BEGUN = 2.452  # held-out loss after the common steps
SHORT = [
    way
    for way in WAYS
    if way.name in ("local float32", "diloco int4", "gossip float32") or "streaming" in way.name
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of a made-up language, the frequent ones short, in sentences: the same on every machine, with
    much to learn in little time.
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
    monkeypatch.setattr(convergence, "SYNCHRONOUS", Way(name=SYNCHRONOUS.name, mode=SYNCHRONOUS.mode, span=1))
    monkeypatch.setattr(convergence, "SEEDS", (0,))


def short(path: Path, text: Path) -> dict[str, Row]:
    ways = [
        Way(name=way.name, mode=way.mode, codec=way.codec, span=way.span, land_after=way.land_after)
        for way in SHORT
    ]
    data = Data(SCALE, text)
    with fourpeers.four_nodes() as nodes:
        rows = Section(Kept(path), data, SCALE, lambda text: None, ways).rows(in_threads(nodes, data, SCALE))
        return {row.identifier: row for batch in rows for row in batch}


def test_modes_learn_like_one_machine_and_a_second_call_goes_on(
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
        measured[convergence._slug(name)] for name in (WHOLE, QUARTER, SYNCHRONOUS.name)
    )
    assert whole == pytest.approx(BEGUN - 0.141, abs=0.012), (
        "the machine with all batches learns what it learned before"
    )
    assert synchronous == pytest.approx(whole, rel=1e-3), (
        "the synchronous swarm is one machine with all batches"
    )
    for (
        way
        # seeds 0, 1, 2: diloco 0.991 to 0.995 of `whole`, streaming 0.999 to 1.002, local 1.008 to 1.010,
        # gossip 1.011 to 1.015
    ) in SHORT:
        loss = measured[convergence._slug(way.name)]
        assert 0.985 * whole < loss < 1.02 * whole, (way.name, measured)
        assert loss < quarter or "gossip" in way.name, (
            f"{way.name} learns no more than one of its peers alone: {measured}"
        )
    kept = {(one.way, one.seed): one for one in Kept(path)._found}
    assert len(kept) == 3 + len(SHORT)
    assert not any(one.missing > 1e-6 for one in kept.values()), "values of all four are in every round"
    sent = {name: one.sent_bytes / one.parameters for (name, _), one in kept.items() if one.rounds}
    assert sent["synchronous float32"] == pytest.approx(15 * sent["local float32"], rel=0.02)
    assert sent["local float32"] > 7 * sent["diloco int4"]

    def never(*_: object) -> Outcome:
        raise AssertionError("this training was kept")

    monkeypatch.setattr(Section, "_together", never)
    monkeypatch.setattr(Section, "_alone", never)
    again = short(path, text)
    assert {name: row.ours for name, row in again.items()} == {name: row.ours for name, row in rows.items()}


def test_one_curve_is_made_of_four() -> None:
    courses = [
        Course(curve=[(15, 3.0, 10.0), (30, 2.0, 20.0)]),
        Course(curve=[(15, None, 30.0), (30, None, 40.0)]),
    ]
    assert fourpeers.together(courses) == [(15, 3.0, 20.0), (30, 2.0, 30.0)]


def test_bytes_to_a_loss_are_those_of_the_first_look_that_reached_it() -> None:
    outcome = Outcome(
        way="x", seed=0, settings={}, curve=[(1, 3.0, 10.0), (2, 2.0, 20.0), (3, 2.1, 30.0), (4, 1.9, 40.0)]
    )
    assert outcome.bytes_to(2.05) == 20.0
    assert outcome.bytes_to(1.0) is None
    assert outcome.loss == pytest.approx(2.0)


def test_names_and_settings_are_unambiguous() -> None:
    assert len({way.name for way in WAYS}) == len(WAYS)
    assert len({convergence._slug(way.name) for way in WAYS}) == len(WAYS)
    assert len({repr(way.settings) for way in WAYS}) == len(WAYS)
    assert [len(way.seeds) for way in WAYS].count(3) == 4, "four headline rows"
