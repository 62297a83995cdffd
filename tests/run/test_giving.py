"""Contributions of volunteers are summed by day and run, also by several processes and after damage of the
file.
"""

from __future__ import annotations

import threading
from datetime import date
from pathlib import Path

import pytest

from swarm.run.contributions import ContributionLog, Given
from swarm.run.events import ContributionSums, Event, Notice
from swarm.run.giving import RECORD_S, Giving
from swarm.run.stats import TrainingStats

MONDAY = date(2026, 11, 30)
TUESDAY = date(2026, 12, 1)


class Machine:
    """A volunteer's process in virtual time."""

    def __init__(self, log: ContributionLog | None, run: str = "bytelm@abc") -> None:
        self.now_s, self.day, self.traffic = 0.0, MONDAY, (0, 0)
        self.joules: float | None = 1000.0
        self.stats = TrainingStats()
        self.events: list[Event] = []
        self.giving = Giving(
            log,
            run,
            traffic=lambda: self.traffic,
            joules=lambda: self.joules,
            emit=self.events.append,
            now=lambda: (self.day, self.now_s),
        )

    def train(self, seconds: float, samples: int, sent: int, received: int, joules: float) -> None:
        self.now_s += seconds
        self.stats.samples += samples
        self.stats.rounds += 1
        self.traffic = (self.traffic[0] + sent, self.traffic[1] + received)
        if self.joules is not None:
            self.joules += joules
        self.giving.record()


def test_sums_are_of_the_day_the_month_and_the_run(tmp_path: Path) -> None:
    log = ContributionLog(tmp_path / "contributions.sqlite")
    one = Machine(log)
    one.giving.start(one.stats)
    one.train(RECORD_S, samples=100, sent=5, received=7, joules=50.0)
    one.day = TUESDAY
    one.train(RECORD_S, samples=10, sent=1, received=2, joules=5.0)
    assert one.giving.bytes_spent() == (3, 3), "a new month began"
    assert log.total(since=MONDAY) == Given(
        samples=110, rounds=2, seconds=20.0, sent_bytes=6, received_bytes=9, joules=55.0
    )
    assert log.total(since=TUESDAY).samples == 10
    other = Machine(log, "other@def")
    other.day = TUESDAY
    other.giving.start(other.stats)
    other.train(RECORD_S, samples=1, sent=100, received=100, joules=0.0)
    last = other.events[-1]
    assert isinstance(last, ContributionSums)
    assert (last.today.samples, last.altogether.samples) == (11, 1)
    one.now_s += RECORD_S
    one.giving.record()
    assert one.giving.bytes_spent() == (203, 203), "a budget is of all runs on this machine"
    log.add(date(2026, 12, 2), "other@def", Given(samples=1))
    assert list(log.by_run()) == ["other@def", "bytelm@abc"], "the run that was given to last comes first"
    log.add(date(2026, 12, 3), "bytelm@abc", Given(samples=1))
    assert list(log.by_run()) == ["bytelm@abc", "other@def"]


def test_a_pause_takes_no_time_and_energy_and_traffic_counts_before_it_is_recorded(tmp_path: Path) -> None:
    one = Machine(ContributionLog(tmp_path / "contributions.sqlite"))
    one.giving.start(one.stats)
    one.train(1.0, samples=4, sent=30, received=12, joules=3.0)
    assert one.giving.bytes_spent() == (42, 42)
    one.giving.stop()
    one.now_s += 5000.0
    one.joules = 1e9
    one.giving.start(one.stats)
    one.train(2.0, samples=4, sent=0, received=0, joules=4.0)
    one.joules = 0.0  # the counter began again
    one.giving.stop()
    total = ContributionLog(tmp_path / "contributions.sqlite").total()
    assert (total.samples, total.seconds) == (8, 3.0)
    assert total.joules == pytest.approx(7.0)


def test_without_energy_or_tally_the_rest_is_counted(tmp_path: Path) -> None:
    one = Machine(None)
    one.joules = None
    one.giving.start(one.stats)
    one.train(RECORD_S, samples=4, sent=30, received=12, joules=0.0)
    one.giving.stop()
    assert one.giving.bytes_spent() == (42, 42)
    assert one.events == []


def test_a_damaged_file_is_said_once_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "contributions.sqlite").write_bytes(b"no database" * 1000)
    one = Machine(ContributionLog(tmp_path / "contributions.sqlite"))
    one.giving.start(one.stats)
    for _ in range(3):
        one.train(RECORD_S, samples=4, sent=30, received=12, joules=0.0)
    assert [type(event) for event in one.events] == [Notice]
    assert "contributions.sqlite" in one.events[0].text  # type: ignore[attr-defined]
    assert one.giving.bytes_spent() == (126, 126)


def test_several_processes_add_to_one_file(tmp_path: Path) -> None:
    def add() -> None:
        for _ in range(25):
            ContributionLog(tmp_path / "contributions.sqlite").add(MONDAY, "bytelm@abc", Given(samples=1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ContributionLog(tmp_path / "contributions.sqlite").by_run() == {"bytelm@abc": Given(samples=100)}
