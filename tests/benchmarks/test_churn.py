"""The churn section: kill times follow from a seed, sums are right, and a short form with real processes."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.churn import QUICK, Churn, rows_of, train
from benchmarks.lifetimes import PHASES, STATE, Kill, ProcessLifetime, draw_kills, summarize
from benchmarks.report import as_record


def test_kill_times_follow_from_the_seed_and_have_the_configured_mean() -> None:
    once, again, other = (
        draw_kills(random.Random(seed), peers=4, mean_s=60.0, seconds=300.0) for seed in (1, 1, 2)
    )
    assert once == again != other
    assert once == sorted(once)
    assert all(0.0 < kill.at_s < 300.0 and kill.peer in range(4) for kill in once)
    many = draw_kills(random.Random(3), peers=4, mean_s=60.0, seconds=60_000.0)
    assert len(many) == pytest.approx(4000, rel=0.06)
    gaps = [b.at_s - a.at_s for a, b in pairwise(many)]
    assert statistics.mean(gaps) == pytest.approx(15.0, rel=0.06), "four peers, each killed on its own"
    assert statistics.pstdev(gaps) == pytest.approx(15.0, rel=0.1), "exponential: as wide as it is long"
    assert {kill.peer for kill in many} == set(range(4))


def test_the_default_five_minutes_kill_every_peer() -> None:
    assert {kill.peer for kill in Churn().kills()} == set(range(Churn().peers))
    assert QUICK.kills()


def epoch(samples: int, loss: float | None = None) -> dict[str, Any]:
    return {"event": "epoch", "samples": samples, "validation_loss": loss}


def lived(lifetime: ProcessLifetime, begins_s: float, *moments: float) -> ProcessLifetime:
    """Return the lifetime after one phase per second and epochs of ten samples at `moments`."""
    for number, kind in enumerate(PHASES):
        lifetime.take({"event": kind}, begins_s + 1.0 + number)
    for at_s in moments:
        lifetime.take(epoch(10, 3.0 - at_s / 100.0), at_s)
    return lifetime


def test_only_samples_in_the_window_count_and_dead_time_is_separate() -> None:
    steady = lived(ProcessLifetime(0, 0.0, restarted=False), 0.0, 5.0, 15.0, 25.0, 35.0)
    killed = lived(ProcessLifetime(1, 0.0, restarted=False), 0.0, 5.0, 15.0)
    killed.ended_s = 16.0
    back = lived(ProcessLifetime(1, 16.0, restarted=True), 16.0, 25.0)
    back.take({"event": "state", "seconds": 0.5}, 18.5)
    back.take({"event": "round_failed"}, 21.0)
    back.take({"event": "resynchronised"}, 22.0)
    found = summarize([steady, killed, back], peers=2, since_s=10.0, until_s=30.0)
    assert found.samples_per_s == (20 + 10 + 10) / 20.0, "before the window and after it nothing counts"
    # the second peer trained from 10 to 16 and from 20 to 30
    assert found.trained == (20.0 + 6.0 + 10.0) / 40.0
    assert found.samples_per_peer_s == 40 / 36.0
    assert found.restarts_s == (4.0,)
    assert (found.unfinished, found.failed_rounds, found.resynchronised) == (0, 1, 1)
    assert found.loss == pytest.approx((2.65 + 2.75) / 2), "the last losses of live peers"
    assert back.phases_s == {**dict.fromkeys(PHASES.values(), 1.0), STATE: 0.5}


def test_a_peer_killed_while_it_starts_contributes_nothing() -> None:
    lifetime = ProcessLifetime(0, 12.0, restarted=True)
    lifetime.take({"event": "listening"}, 13.0)
    lifetime.ended_s = 14.0
    assert lifetime.phases_s is None
    found = summarize([lifetime], peers=1, since_s=10.0, until_s=20.0)
    assert (found.samples_per_s, found.trained, found.restarts_s, found.unfinished, found.loss) == (
        0.0,
        0.0,
        (),
        1,
        None,
    )
    assert found.samples_per_peer_s == 0.0


def test_rows_compare_with_a_run_of_equal_time_without_kills() -> None:
    calm = summarize(
        [lived(ProcessLifetime(0, 0.0, restarted=False), 0.0, 15.0, 25.0)],
        peers=1,
        since_s=10.0,
        until_s=30.0,
    )
    first = lived(ProcessLifetime(0, 0.0, restarted=False), 0.0, 11.0)
    first.ended_s = 12.0
    lifetimes = [first, lived(ProcessLifetime(0, 12.0, restarted=True), 12.0, 20.0)]
    stormy = summarize(lifetimes, peers=1, since_s=10.0, until_s=30.0)
    rows = {row.identifier: row for row in rows_of(Churn(peers=1), calm, stormy, lifetimes)}
    assert all(as_record(row, "run") for row in rows.values())
    assert rows["churn-goodput"].ratio == 1.0
    assert rows["churn-goodput-alive"].ratio == pytest.approx(20.0 / 16.0)
    assert rows["churn-restart"].ours.samples == (4.0,)
    assert [row.ours.median for name, row in rows.items() if name.startswith("churn-restart-")] == [
        1.0,
        1.0,
        1.0,
        1.0,
        None,
    ]


@pytest.mark.slow
def test_training_continues_when_peers_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run three volunteers as processes; the creator is killed, and another peer while it starts."""
    monkeypatch.setattr(Churn, "kills", lambda self: [Kill(2.0, 0), Kill(2.5, 1), Kill(3.0, 1)])
    churn = Churn(peers=3, seconds=40.0)
    lifetimes, found = train(churn, lambda text: None, killed=True)
    assert [lifetime.peer for lifetime in lifetimes] == [0, 1, 2, 0, 1, 1]
    assert (len(found.restarts_s), found.unfinished) == (2, 1)
    assert 0.3 < found.samples_per_s / churn.samples_per_s_max <= 1.05
    assert found.loss is not None
    assert found.loss < 4.0
