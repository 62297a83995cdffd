"""The history of charts outlives the monitor: tiers, gaps, restarts, and files that belong to others."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.core.errors import UsageError
from swarm.monitor.history import ChartHistory, Tier
from swarm.monitor.logic.eventlog import EventLog
from swarm.monitor.logic.view import LinkView, MonitorEvent, MonitorView, RunView

RUN = RunView(run_id="a" * 20, name="tiny", version=1)
START_S = 1_000_000.0


def view(at_s: float, loss: float | None = 2.0, *, status: str = "live") -> MonitorView:
    return MonitorView(
        at_s=at_s, run=RUN, link=LinkView(status=status), epoch=3, samples_per_s=10.0, loss=loss, peers_live=2
    )


def event(number: int) -> MonitorEvent:
    return MonitorEvent(
        number=number, at_s=START_S + number, kind="joined", level="good", text=f"event {number}"
    )


def test_a_restarted_monitor_finds_its_history(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.sqlite"
    first = ChartHistory(path, RUN.run_id)
    for at in range(0, 60, 2):
        first.add(view(START_S + at, loss=float(at)), [event(at + 1)])
    first.close()
    second = ChartHistory(path, RUN.run_id)
    found = second.series(START_S - 100, START_S + 100)
    assert found["at"] == [START_S + at for at in range(0, 60, 2)]
    assert found["series"]["loss"] == [float(at) for at in range(0, 60, 2)]
    assert found["series"]["peers"] == [2.0] * 30
    assert [one.number for one in second.events(3)] == [55, 57, 59]
    log = EventLog()
    log.restore(second.events())
    log.add(START_S + 99, "joined", "good", "after the restart")
    assert [one.number for one in log.latest][-2:] == [59, 60]
    assert [one.number for one in log.take()] == [60]
    assert second.began_s() is not None
    second.close()


def test_a_view_that_is_not_live_leaves_a_gap() -> None:
    history = ChartHistory(None, RUN.run_id)
    history.add(view(START_S))
    history.add(view(START_S + 10, status="late"))
    history.add(view(START_S + 20, status="lost"))
    history.add(view(START_S + 30, loss=None))
    found = history.series(START_S, START_S + 60)
    assert found["at"] == [START_S, START_S + 30]
    assert found["series"]["loss"] == [2.0, None]


def test_a_view_is_stored_as_a_whole_or_not_at_all() -> None:
    history = ChartHistory(None, RUN.run_id)
    with pytest.raises(sqlite3.Error):
        history.add(view(START_S), [event(1), replace(event(2), text=object())])  # type: ignore[arg-type]
    history.add(view(START_S + 10), [event(3)])
    assert history.series(START_S, START_S + 60)["at"] == [START_S + 10]
    assert [one.number for one in history.events()] == [3]


def test_long_spans_come_from_coarse_buckets_and_hold_the_same_means() -> None:
    history = ChartHistory(None, RUN.run_id)
    for second in range(0, 7200, 10):
        history.add(view(START_S + second, loss=float(second // 3600)))
    for points in (4, 60, 600):
        found = history.series(START_S, START_S + 7200, points)
        assert len(found["at"]) <= points + 2
        assert found["series"]["loss"][1] == pytest.approx(0.0, abs=0.01)
        assert found["series"]["loss"][-2] == pytest.approx(1.0, abs=0.01)


def test_the_history_stays_within_its_bounds() -> None:
    history = ChartHistory(
        None, RUN.run_id, tiers=(Tier(2.0, 100.0), Tier(30.0, 1000.0), Tier(600.0, 6000.0))
    )
    for number in range(1100):
        history.add(view(START_S + 10.0 * number), [event(number + 1)])
    assert history._connection is not None
    counts = dict(
        history._connection.execute("SELECT tier, count(*) FROM point WHERE name = 'loss' GROUP BY tier")
    )
    assert counts[0] <= 100 / 2 + 500
    assert counts[2] <= 6000 / 600 + 10
    before = replace(view(START_S + 20_000.0), own={})
    history.add(before)
    names = {f"m{place}" for place in range(200)}
    from swarm.monitor.logic.view import OwnView

    history.add(
        replace(before, own={name: OwnView(median=1.0, minimum=1.0, maximum=1.0, peers=1) for name in names})
    )
    (count,) = history._connection.execute("SELECT count(DISTINCT name) FROM point").fetchone()
    assert count <= 48


def test_files_of_others_are_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    held = ChartHistory(path, RUN.run_id)
    with pytest.raises(UsageError, match="another monitor keeps its history"):
        ChartHistory(path, RUN.run_id)
    held.close()
    with pytest.raises(UsageError, match="the history of another run"):
        ChartHistory(path, "b" * 20)
    text = tmp_path / "notes.txt"
    text.write_text("these are my notes, and they are longer than a header of SQLite would be" * 20)
    with pytest.raises(UsageError, match="cannot hold a monitor's history"):
        ChartHistory(text, RUN.run_id)
    assert text.read_text().startswith("these are my notes")


def test_a_damaged_history_is_kept_aside_and_a_new_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    ChartHistory(path, RUN.run_id).close()
    raw = bytearray(path.read_bytes())
    raw[4096:] = bytes(len(raw) - 4096)
    path.write_bytes(raw)
    history = ChartHistory(path, RUN.run_id)
    assert history.damaged == tmp_path / "run.sqlite.damaged"
    assert history.damaged.read_bytes() == raw
    assert history.events() == []
    history.close()
    assert ChartHistory(path, RUN.run_id).damaged is None


def test_a_closed_history_ignores_calls() -> None:
    history = ChartHistory(None, RUN.run_id)
    history.close()
    history.add(view(START_S))
    assert history.series(0, 1)["at"] == []
    assert history.events() == []
