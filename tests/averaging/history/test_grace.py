from __future__ import annotations

from averaging.history.grace import GRACE_S_MIN, SleepWatch


def test_a_process_has_slept_when_its_clock_continued_for_longer_than_the_shortest_grace() -> None:
    now_s = 1000.0
    watch = SleepWatch(lambda: now_s)
    found = []
    for later_s in (SleepWatch.TICK_S, GRACE_S_MIN, GRACE_S_MIN + 1.0, -500.0, SleepWatch.TICK_S):
        now_s += later_s
        found.append(watch.has_slept())
    assert found == [False, False, True, False, False], "a clock that is set back shows no sleep"
