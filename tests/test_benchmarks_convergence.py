"""The convergence section in short: real rounds of four nodes, a small model, a few steps; and that what was measured is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import convergence, fourpeers
from benchmarks.convergence import QUARTER, WHOLE, Kept, Section
from benchmarks.report import as_record
from benchmarks.ways import SYNCHRONOUS, WAYS, Outcome, Scale, Way

SCALE = Scale(width=16, layers=1, heads=2, context=16, samples=4, steps=45, learning_rate=1e-2, data_bytes=1 << 19, points=3)
SHORT = [way for way in WAYS if way.name in ("local float32", "diloco int4", "gossip float32") or "streaming" in way.name]


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "SYNCHRONOUS", Way(name=SYNCHRONOUS.name, mode=SYNCHRONOUS.mode, span=1))
    monkeypatch.setattr(convergence, "SEEDS", (0,))


def short(path: Path) -> Section:
    ways = [Way(name=way.name, mode=way.mode, codec=way.codec, span=way.span, land_after=way.land_after) for way in SHORT]
    return Section(Kept(path), SCALE, lambda text: None, ways)


def test_modes_learn_like_one_machine_and_a_second_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "convergence.json"
    rows = {row.identifier: row for batch in short(path).rows() for row in batch}
    losses = {name.removeprefix("convergence-loss-"): row.ours.median for name, row in rows.items() if "-loss-" in name}
    assert all(as_record(row, "run") for row in rows.values())
    assert all(loss is not None and loss < 5.0 for loss in losses.values()), (
        losses
    )  # 5.5 at the beginning; what is read is this Python's own library
    whole, synchronous = (losses[convergence._slug(name)] for name in (WHOLE, SYNCHRONOUS.name))
    assert whole is not None
    assert synchronous == pytest.approx(whole, rel=1e-3), "the synchronous swarm is one machine with all batches"
    assert losses[convergence._slug(QUARTER)] is not None
    kept = {(one.way, one.seed): one for one in Kept(path)._found}
    assert len(kept) == 3 + len(SHORT)
    sent = {name: one.sent_bytes / one.parameters for (name, _), one in kept.items() if one.rounds}
    assert sent["synchronous float32"] == pytest.approx(15 * sent["local float32"], rel=0.02)
    assert sent["local float32"] > 7 * sent["diloco int4"]

    def never(*_: object) -> Outcome:
        raise AssertionError("this training was kept")

    monkeypatch.setattr(fourpeers, "train", never)
    monkeypatch.setattr(fourpeers, "alone", never)
    again = {row.identifier: row for batch in short(path).rows() for row in batch}
    assert {name: row.ours for name, row in again.items()} == {name: row.ours for name, row in rows.items()}


def test_bytes_to_a_loss_are_those_of_the_first_look_that_reached_it() -> None:
    outcome = Outcome(way="x", seed=0, settings={}, curve=[(1, 3.0, 10.0), (2, 2.0, 20.0), (3, 2.1, 30.0), (4, 1.9, 40.0)])
    assert outcome.bytes_to(2.05) == 20.0
    assert outcome.bytes_to(1.0) is None
    assert outcome.loss == pytest.approx(2.0)


def test_names_and_settings_are_unambiguous() -> None:
    assert len({way.name for way in WAYS}) == len(WAYS)
    assert len({convergence._slug(way.name) for way in WAYS}) == len(WAYS)
    assert len({repr(way.settings) for way in WAYS}) == len(WAYS)
    assert [len(way.seeds) for way in WAYS].count(3) == 4, "four headline rows"
