"""The rows of emulated links: comparisons, omissions, and the least time of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import links
from benchmarks.allreduce import HIVEMIND, Setting
from benchmarks.interleaving import Plan, Tally
from benchmarks.measured_systems import MeasuredSystem, Round
from benchmarks.results import Aim
from swarm.testing.links import Link

OUTCOME = Round(
    ok=True, reason="", whole_s=3.0, reduce_s=2.5, wire_bytes=110_000_000, carried_bytes=101_000_000
)


def setting(messages: list[str]) -> Setting:
    return Setting(
        plan=Plan(passes=1, rounds=1),
        hivemind=Path("/hivemind/python"),
        copy_bytes_per_s=1.0,
        say=messages.append,
    )


def play(
    monkeypatch: pytest.MonkeyPatch, *, round_s: float, broken: str = ""
) -> tuple[list[list[str]], list[str]]:
    """Run the section with a fake clock and fake rounds. Return the systems measured together, and row
    identifiers.

    Every round takes `round_s`, and the system `broken` completes none.
    """
    measured: list[list[str]] = []
    clock = [0.0]

    def interleave(
        makers: Sequence[Callable[[], MeasuredSystem]],
        names: Sequence[str],
        plan: Plan,
        say: Callable[[str], None],
    ) -> list[Tally]:
        assert len(makers) == len(names)
        measured.append(list(names))
        clock[0] += round_s
        return [Tally(name, rounds=[] if broken and name.startswith(broken) else [OUTCOME]) for name in names]

    monkeypatch.setattr(links, "interleave", interleave)
    monkeypatch.setattr(links, "why_not", lambda: None)
    monkeypatch.setattr("benchmarks.links.time.monotonic", lambda: clock[0])
    rows = [row for found in links.rows(setting([])) for row in found]
    return measured, [row.identifier for row in rows]


def test_every_codec_has_a_row_in_every_scenario_with_a_unique_identifier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured, identifiers = play(monkeypatch, round_s=1.0)
    assert len(set(identifiers)) == len(identifiers)
    assert len(measured) == sum(len(scenario.codecs) for scenario in links.SCENARIOS)
    assert {names[0] for names in measured} == {f"swarm {codec}" for codec in links.CODECS}
    assert any(HIVEMIND in name for names in measured for name in names)


def test_rows_that_compare_with_bare_tcp_aim_at_95_per_cent_of_it_at_every_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        links, "interleave", lambda makers, names, *_: [Tally(name, rounds=[OUTCOME]) for name in names]
    )
    monkeypatch.setattr(links, "why_not", lambda: None)
    rows = [row for found in links.rows(setting([])) for row in found if row.identifier.endswith("-tcp")]
    aims = [row.aim for row in rows]
    assert aims == [Aim(of="ours / peer", sense="at least", value=0.95)] * len(rows)
    for link in ("100 Mbit/s, 50 ms", "1 Gbit/s, 20 ms", "20 Mbit/s, 100 ms"):
        sizes = {row.workload.split(" × ")[1].split(",")[0] for row in rows if link in row.workload}
        assert {"1 MiB", "16 MiB"} <= sizes


def test_a_system_without_a_round_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, _ = play(monkeypatch, round_s=1.0, broken=HIVEMIND)
    assert sum(HIVEMIND in name for names in measured for name in names) == 1


def test_only_swarm_is_measured_when_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, identifiers = play(monkeypatch, round_s=links.TOTAL_S / 2)
    assert len(measured) == sum(len(scenario.codecs) for scenario in links.SCENARIOS)
    assert all(len(names) == 1 for names in measured[3:])
    assert identifiers[-1].endswith("-alone")


def test_the_least_time_is_that_of_the_slowest_link_with_the_best_shares() -> None:
    fast = Link.of(mbit_per_s=100)
    assert links.least_s((fast,) * 4, 12.5e6) == pytest.approx(1.5)
    slow = Link.of(mbit_per_s=100, up_mbit_per_s=1)
    # its own values, and nothing to reduce
    assert links.least_s((fast, fast, fast, slow), 125e3) == pytest.approx(1.0)
