"""The measurement of the cost of metrics runs, and its monitor sees every peer."""

from __future__ import annotations

from benchmarks.simulated_monitoring import costs, rows


def test_the_monitor_sees_every_peer_and_costs_are_counted() -> None:
    found = costs(10, measured_s=8.0)
    assert (found.seen, found.fresh) == (10, 10)
    assert 0 < found.peer_bytes < 20_000
    assert 0 < found.monitor_bytes < 200_000
    assert found.age_s < 10.0
    assert found.record_bytes < 1000


def test_each_swarm_size_has_a_row_for_peers_and_one_for_the_monitor() -> None:
    ((peer, monitor),) = rows(lambda text: None, sizes=(4,))
    assert (peer.identifier, monitor.identifier) == (
        "simulated-4-metrics-peer",
        "simulated-4-metrics-monitor",
    )
    assert peer.ours.samples[0] > 0
