"""The sections of membership, small runs and attacks, in short forms with real processes."""

from __future__ import annotations

from benchmarks import attacks, membership_costs, round_costs, simulated_attacks, small_runs
from benchmarks.attacks import CROWDS, Company, Crowd, Plan
from benchmarks.launch import ROOT
from benchmarks.report import ORDER
from benchmarks.sections import SECTIONS
from swarm.testing.misdeeds import MISDEEDS


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


def test_a_crowd_of_several_networks_is_measured_in_the_short_form() -> None:
    company = Company(members=2, crowds=(Crowd(3, 2),), turns=1)
    found = attacks.rows(lambda text: None, Plan(window_s=1.0, floods=(), companies=(company,)))
    assert [row.identifier for row in found] == ["attacks-2-3-2-pace", "attacks-2-3-2-processor"]
    assert not any(row.ours.reasons for row in found)
    assert [crowd.pace_min for crowd in CROWDS] == [0.95, 0.95, 0.95, 0.9]


def test_a_member_that_turns_bad_is_measured_in_the_short_form() -> None:
    [found] = simulated_attacks.rows(lambda text: None, members=(2,), minutes=1.5)
    assert len(found) == len(MISDEEDS) - 1, "each of them, and none for comparison"
    assert {row.identifier.partition("-")[0] for row in found} <= set(ORDER)
    assert {"attacks", "membership", "small-runs"} <= set(SECTIONS)
