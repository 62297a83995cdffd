"""Work that takes longer than a second is shown while it lasts."""

from __future__ import annotations

import queue
import threading

import pytest

from swarm.core import working as module
from swarm.core.working import Work, shown_by, working

WAIT_S = 20.0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show work from its beginning."""
    monkeypatch.setattr(module, "SHOWN_AFTER_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_work_is_shown_with_how_far_it_is_until_it_is_over() -> None:
    shown: queue.Queue[Work] = queue.Queue()
    with shown_by(shown.put):
        with working("downloading the state", unit="bytes") as update:
            update(120_000_000, 480_000_000)
            while (first := shown.get(timeout=WAIT_S)).total == 0:
                pass
        last = first
        while not last.is_over:
            last = shown.get(timeout=WAIT_S)
    assert first.text.startswith("downloading the state: 120 MB of 480 MB, 0.")
    assert not first.is_over
    assert last.is_over
    assert shown.empty(), "nothing is shown after the end"


def test_work_that_is_short_is_not_shown() -> None:
    shown: list[Work] = []
    with shown_by(shown.append), working("loading torch"):
        pass
    assert not shown


@pytest.mark.usefixtures("at_once")
def test_without_a_command_line_nothing_watches_the_work() -> None:
    before = threading.active_count()
    with working("loading torch") as update:
        update(1, 2)
        assert threading.active_count() == before


@pytest.mark.usefixtures("at_once")
def test_work_that_outlives_the_display_is_not_shown_there_any_more() -> None:
    shown: queue.Queue[Work] = queue.Queue()
    with shown_by(shown.put):
        work = working("saving epoch 3")
        work.__enter__()
        shown.get(timeout=WAIT_S)
    while not shown.empty():
        shown.get()
    later: list[Work] = []
    with shown_by(later.append):  # another display: it has not seen the beginning
        work.__exit__(None, None, None)
    assert shown.empty()
    assert not later
    assert Work(what="x", seconds=3.0, done=2, total=10).text == "x: 2 of 10, 3.0 s"
    assert Work(what="x", seconds=3.0).text == "x: 3.0 s"
