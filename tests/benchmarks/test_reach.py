"""The rows of the section about peers behind routers, from samples that are given."""

from __future__ import annotations

import pytest

from benchmarks import reach, relayed_training
from benchmarks.environments import NoEnvironment
from benchmarks.reach_figures import Samples
from benchmarks.report import ORDER
from benchmarks.sections import SECTIONS


def test_a_row_stands_for_each_figure_that_was_measured() -> None:
    samples = Samples()
    samples.add("verdict", 2.0, 4.0, 3.5)
    samples.add("rate-punched", 70.0)
    samples.fail("no relay")
    rows = {row.identifier: row for row in samples.rows(16)}
    assert set(rows) == {"reach-verdict", "reach-rate-punched"}
    assert (rows["reach-verdict"].ours.median, rows["reach-verdict"].met) == (3.5, False)
    assert rows["reach-rate-punched"].met is True
    assert rows["reach-rate-punched"].workload == "16 MiB from one peer to another"
    assert rows["reach-verdict"].ours.reasons == ("no relay",)


def test_the_pace_behind_routers_is_measured_by_that_with_open_ports() -> None:
    ours, opened = relayed_training.Paces(samples=[400.0, 420.0]), relayed_training.Paces(samples=[440.0])
    row = relayed_training.row("relayed", ours, opened)
    assert row.identifier == "reach-training-relayed"
    assert row.ratio == pytest.approx(410.0 / 440.0)
    assert row.met is True


def test_samples_count_from_the_first_epoch_of_the_window_to_its_last() -> None:
    one = [{"epoch": epoch, "samples": 10} for epoch in range(1, 8)]
    other = [{"epoch": epoch, "samples": 1} for epoch in range(3, 9)]
    assert relayed_training.samples_between([one, other], 2, 6) == 44


def test_a_machine_without_namespaces_leaves_the_section_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "missing", lambda: "network namespaces need Linux and root")
    with pytest.raises(NoEnvironment, match="need Linux and root"):
        SECTIONS["reach"].check()
    said: list[str] = []
    assert reach.short(said.append) == []
    assert said == ["left out: reach: network namespaces need Linux and root"]
    assert "reach" in ORDER
