"""The pages and their figures: merging runs, wording, and complete clean-up of launches."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks import limiting_factors, pages, report
from benchmarks.launch import Launch, LaunchFailed
from benchmarks.results import Aim, Row, Series

ABOUT = {"machine": {"processor": "2 × test"}, "command": "python -m benchmarks"}


def row(identifier: str, *samples: float, peer: float | None = 2.0, failed: int = 0) -> Row:
    return Row(
        identifier=identifier,
        workload=f"workload {identifier}",
        quantity="whole",
        ours=Series(
            name="swarm: whole",
            unit="s",
            samples=samples,
            failed=failed,
            reasons=("a | reason",) if failed else (),
        ),
        peer=None if peer is None else Series(name="hivemind: whole", unit="s", samples=(peer,)),
        aim=Aim(of="peer / ours", sense="at least", value=4.0),
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (0.1234, "s", "0.123 s"),
        (12.34, "s", "12.3 s"),
        (150e6, "bytes", "150 MB"),
        (5.0, "", "5"),
        (None, "s", "–"),
    ],
)
def test_figures_have_three_digits_and_a_fitting_unit(value: float | None, unit: str, text: str) -> None:
    assert report.figure(value, unit) == text


def test_a_partial_run_leaves_the_other_rows_and_drops_runs_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.json"
    first = report.merge(
        report.load(path), [row("allreduce-64-a", 0.5), row("group-b", 0.1)], run="one", about=ABOUT
    )
    report.save(first, path)
    second = report.merge(report.load(path), [row("group-b", 0.2)], run="two", about=ABOUT)
    assert {name: record["run"] for name, record in second["rows"].items()} == {
        "allreduce-64-a": "one",
        "group-b": "two",
    }
    assert second["rows"]["allreduce-64-a"] == first["rows"]["allreduce-64-a"]
    third = report.merge(second, [row("allreduce-64-a", 0.4)], run="three", about=ABOUT)
    assert sorted(third["runs"]) == ["three", "two"]
    assert list(tmp_path.iterdir()) == [path]


def test_rows_are_ordered_by_section_and_size() -> None:
    rows = [
        row(name, 1.0)
        for name in ("start-x", "group-short", "allreduce-256-a", "allreduce-64-a", "trainer-memory")
    ]
    book = report.merge(report.load(Path("absent")), rows, run="one", about=ABOUT)
    assert list(book["rows"]) == [
        "allreduce-64-a",
        "allreduce-256-a",
        "group-short",
        "trainer-memory",
        "start-x",
    ]


def test_the_pages_name_aims_misses_and_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(limiting_factors.LIMITED_BY, "allreduce-64-slow", "copies.")
    rows = [
        row("allreduce-64-fast", 0.4),
        row("allreduce-64-slow", 1.0, failed=2),
        row("group-none", peer=None),
    ]
    pages.write(report.merge(report.load(Path("absent")), rows, run="2026-01-01", about=ABOUT), tmp_path)
    lines = (tmp_path / "allreduce.md").read_text().splitlines()
    (fast,) = [line for line in lines if line.startswith("| workload allreduce-64-fast | whole")]
    assert "| 5.00× (peer / ours) | ≥ 4× | yes |" in fast
    (slow,) = [line for line in lines if line.startswith("| workload allreduce-64-slow | whole")]
    assert "| **no** |" in slow
    assert "- workload allreduce-64-slow (hivemind): copies." in lines
    assert any("2 (0) / 0 | a \\| reason |" in line for line in lines)
    assert "not measured" in (tmp_path / "group.md").read_text()
    assert not (tmp_path / "group.svg").exists()  # nothing to compare
    index = (tmp_path / "index.md").read_text()
    assert "| [All-reduce](allreduce.md) |" in index
    assert "| 1 | 1 |" in index
    chart = (tmp_path / "allreduce.svg").read_text()
    assert "5×" in chart
    assert "2×" in chart


def test_the_overview_of_stored_figures_is_short_and_names_no_path() -> None:
    book = report.load(Path("benchmarks/figures/measured.json"))
    found = pages.sections(book)
    assert len(pages.index_page(found).splitlines()) <= 100
    for name, records in found.items():
        page = pages.section_page(name, records, book["runs"], charted=True)
        assert page == Path(f"docs/benchmarks/{name}.md").read_text() or not pages.chart_of(name, records)


def test_paths_of_this_machine_are_left_out_of_reasons() -> None:
    text = 'File "/srv/run/main/.venv/lib/queue.py", line 3, in /a/b and 3/4 of 100/s'
    assert report.without_paths(text) == 'File "…/queue.py", line 3, in /a/b and 3/4 of 100/s'


def fake_python(folder: Path, body: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # nobody's child any more, waiting for init
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_a_launch_ends_all_its_processes_even_in_another_session(tmp_path: Path) -> None:
    python = fake_python(tmp_path, 'setsid sleep 100 & echo \'{"kind": "ready"}\'; exec sleep 100')
    with Launch("fake", python=python, module="none", configurations=[{}]) as launch:
        launch.receive("ready", 10.0)
        deadline_s = time.monotonic() + 10.0
        while len(started := launch.processes()) < 2 and time.monotonic() < deadline_s:
            pass
        assert len(started) == 2
    assert all(gone(process.pid) for process in started)


def test_the_error_of_a_worker_that_hangs_or_dies_quotes_its_log(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "echo 'no memory' >&2; exit 3")
    with (
        Launch("fake", python=python, module="none", configurations=[{}]) as launch,
        pytest.raises(LaunchFailed, match="no memory"),
    ):
        launch.receive("ready", 10.0)
    python = fake_python(tmp_path, "exec sleep 100")
    with (
        Launch("fake", python=python, module="none", configurations=[{}]) as launch,
        pytest.raises(LaunchFailed, match="'ready' in time"),
    ):
        launch.receive("ready", 0.05)
