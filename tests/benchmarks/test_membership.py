"""The sections of membership, small runs and attacks, in short forms with real processes."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import (
    attacks,
    membership_costs,
    membership_profile,
    round_costs,
    simulated_attacks,
    small_runs,
)
from benchmarks.__main__ import main
from benchmarks.attacks import ATTACKED_RUNS, CROWDS, AttackedRun, Crowd, Plan
from benchmarks.launch import ROOT
from benchmarks.report import ORDER
from benchmarks.sections import SECTIONS
from swarm.testing.sabotage import SABOTAGE_KINDS


@pytest.mark.slow
def test_peers_of_an_invited_and_an_open_run_are_compared_in_the_short_form() -> None:
    [found] = membership_costs.rows(lambda text: None, membership_costs.SHORT)
    assert [row.identifier for row in found] == [
        "membership-2-processor",
        "membership-2-bytes",
        "membership-2-invite",
        "membership-2-own-processor",
        "membership-2-own-history",
        "membership-2-own-bytes",
    ]
    assert not any(series.reasons for row in found for series in (row.ours, row.peer) if series is not None)
    assert all(row.ratio is not None for row in found[:3])
    assert all(0.0 <= row.ours.samples[0] < 100.0 for row in found[3:])
    assert found[3].ours.samples[0] > 0.0, "the functions of membership are found in the profile"


@pytest.mark.slow
def test_a_small_run_is_measured_while_its_peers_are_killed_and_started_again() -> None:
    changes = (small_runs.Change(1.0, 1, "kill"), small_runs.Change(1.0, 1, "begin"))
    paces = small_runs.Paces()
    run = small_runs.SmallRun(name="short", title="two peers", peers=2, changes=changes, window_s=3.0)
    paces.measure(lambda text: None, run, ROOT)
    assert paces.samples[0] > 0, paces.reasons


def test_rounds_are_counted_in_the_short_form() -> None:
    costs = round_costs.Costs()
    costs.measure(lambda text: None, round_costs.Plan(peers=2, rounds=2), 1, ROOT)
    assert not costs.reasons
    assert 0.0 < costs.processor_s[0] < 1.0
    assert costs.calls[0] > 0


def test_a_peer_begins_again_only_after_it_has_ended() -> None:
    for run in small_runs.RUNS:
        is_there = [True] * run.peers
        assert [change.at_s for change in run.changes] == sorted(change.at_s for change in run.changes)
        for change in run.changes:
            assert is_there[change.peer] is (change.do != "begin")
            is_there[change.peer] = change.do == "begin"
        assert all(change.at_s < run.window_s for change in run.changes)


@pytest.mark.slow
def test_a_crowd_of_several_networks_is_measured_in_the_short_form() -> None:
    attacked = AttackedRun(members=2, crowds=(Crowd(3, 2),), turns=1, window_s=1.0)
    found = attacks.rows(lambda text: None, Plan(floods=(), attacked_runs=(attacked,)))
    assert [row.identifier for row in found] == ["attacks-2-3-2-pace", "attacks-2-3-2-processor"]
    assert not any(row.ours.reasons for row in found)
    assert [crowd.pace_min for crowd in CROWDS] == [0.95, 0.95, 0.95, 0.9]
    assert [(attacked.members, attacked.crowds) for attacked in ATTACKED_RUNS] == [
        (members, CROWDS) for members in (2, 4, 33)
    ]


@pytest.mark.slow
def test_a_member_that_turns_bad_is_measured_in_the_short_form() -> None:
    found = simulated_attacks.rows(lambda text: None, members=2, minutes=1.0)
    assert len(found) == len(SABOTAGE_KINDS) - 1, "each of them, and none for comparison"
    assert all(row.peer.samples[0] > 0.0 for row in found), "epochs that count"
    assert {row.identifier.partition("-")[0] for row in found} <= set(ORDER)
    assert {"attacks", "membership", "small-runs"} <= set(SECTIONS)


def test_profiler_time_is_not_counted_for_the_watched_functions() -> None:
    """Ten calls of a counted function from elsewhere, which calls another one of its module and a third."""
    watched, helper, foreign, other = (
        ("m/a.py", 1, "f"),
        ("m/a.py", 9, "g"),
        ("x.py", 1, "h"),
        ("y.py", 1, "k"),
    )
    overhead = membership_profile.Overhead(inside_s=1.0, outside_s=2.0)
    f_s, g_s, h_s = 0.5, 0.25, 0.125  # their own time, without the profiler, in each call
    h_cum_s = h_s + overhead.inside_s
    g_cum_s = g_s + overhead.inside_s + overhead.outside_s + h_cum_s
    f_cum_s = f_s + overhead.inside_s + overhead.outside_s + g_cum_s
    stats = {
        other: (1, 1, 0.0, 0.0, {}),
        watched: (10, 10, 0.0, 0.0, {other: (10, 10, 0.0, 10 * f_cum_s)}),
        helper: (10, 10, 0.0, 0.0, {watched: (10, 10, 0.0, 10 * g_cum_s)}),
        foreign: (11, 11, 0.0, 0.0, {helper: (10, 10, 0.0, 10 * h_cum_s), other: (1, 1, 0.0, 7.0)}),
    }
    found = membership_profile.seconds(stats, lambda path: path.startswith("m/"), overhead)
    assert found == pytest.approx(10 * (f_s + g_s + h_s))
    found = membership_profile.seconds(
        stats, lambda path: path.startswith("m/"), overhead, is_other=lambda path: path == "x.py"
    )
    assert found == pytest.approx(10 * (f_s + g_s)), "what counts elsewhere counts once"


def test_profiler_time_far_below_a_function_is_not_counted_as_its_own() -> None:
    """A counted function calls one of another module twice, which calls a third one three times."""
    other, watched, middle, low = (("y.py", 1, "k"), ("m/a.py", 1, "f"), ("x.py", 1, "h"), ("x.py", 9, "l"))
    overhead = membership_profile.Overhead(inside_s=1.0, outside_s=2.0)
    low_s = 0.5 + overhead.inside_s
    middle_s = 0.25 + overhead.inside_s + 3 * (low_s + overhead.outside_s)
    watched_s = 0.125 + overhead.inside_s + 2 * (middle_s + overhead.outside_s)
    stats = {
        other: (1, 1, 0.0, 0.0, {}),
        watched: (10, 10, 0.0, 0.0, {other: (10, 10, 0.0, 10 * watched_s)}),
        middle: (20, 20, 0.0, 0.0, {watched: (20, 20, 0.0, 20 * middle_s)}),
        low: (60, 60, 0.0, 0.0, {middle: (60, 60, 0.0, 60 * low_s)}),
    }
    found = membership_profile.seconds(stats, lambda path: path.startswith("m/"), overhead)
    assert found == pytest.approx(10 * (0.125 + 2 * (0.25 + 3 * 0.5)))
    found = membership_profile.seconds(
        stats, lambda path: path.startswith("m/"), overhead, is_other=lambda path: path == "x.py"
    )
    assert found == pytest.approx(10 * 0.125), "what counts elsewhere counts once"


def test_single_attacks_and_single_small_runs_can_be_measured() -> None:
    assert {"bad-4", "bad-8", "crowd-33", "silent_tcp"} <= set(SECTIONS["attacks"].figures)
    assert set(SECTIONS["small-runs"].figures) == {run.name for run in small_runs.RUNS}
    chosen = CliRunner().invoke(main, ["--only", "membership", "--figure", "bad-4"])
    assert chosen.exit_code == 2
    assert "--figure chooses among the figures of the section that --only names" in chosen.output
