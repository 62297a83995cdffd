"""Prometheus metrics: names, units and freshness; the documentation and the dashboard name exactly the
exported ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from swarm.monitor.logic.view import MonitorView, RelayReport
from swarm.monitor.prometheus import RunCollector
from tests.monitor.watched_run import WatchedRun, peer, round_report

DOCS = Path(__file__).parents[2] / "docs"


def exposed(view: MonitorView) -> dict[str, dict[tuple[str, ...], float]]:
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: view))
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def busy() -> WatchedRun:
    watched = WatchedRun(
        3,
        own={"accuracy": 0.5},
        drift=1e-6,
        validation_loss=2.5,
        contributed_at_s=1_000_000.0,
        contributed_epoch=7,
    )
    watched.present[peer(1)] = {
        "name": 'eve "x"',
        "rounds": (round_report(watched.now_s),),
        "rounds_failed": 2,
        "bytes_up": 500,
    }
    relay = RelayReport(
        peer_id=str(peer(9)),
        short=peer(9).short,
        age_s=4.0,
        reservations=3,
        circuits=2,
        carried_bytes=9_000,
        refused=5,
    )
    watched.poll(2.0, relays=(relay,))
    watched.model.on_dialed(peer(1), True)
    return watched


def test_a_live_run_is_exported_in_base_units() -> None:
    found = exposed(busy().view())
    assert found["swarm_monitor_up"] == {(): 1.0}
    assert found["swarm_run_samples_per_second"] == {(): 300.0}
    assert found["swarm_run_peers"][("training",)] == 3.0
    assert found["swarm_run_reported"] == {("accuracy",): 0.5}
    assert found["swarm_peer_rounds_total"][('eve "x"', peer(1).short, "failed")] == 2.0
    assert found["swarm_peer_sent_bytes_total"][('eve "x"', peer(1).short)] == 500.0
    relay = (peer(9).short,)
    assert found["swarm_relay_reservations"] == {relay: 3.0}
    assert found["swarm_relay_circuits"] == {relay: 2.0}
    assert found["swarm_relay_carried_bytes_total"] == {relay: 9_000.0}
    assert found["swarm_relay_refused_requests_total"] == {relay: 5.0}
    unit = re.compile(
        r".*_(total|seconds|bytes|ratio|info|per_second|loss|epoch|samples|up|peers|refused|members"
        r"|reported|by|answers|histories|reservations|circuits)$"
    )
    assert all(unit.fullmatch(name) for name in found), sorted(
        name for name in found if not unit.fullmatch(name)
    )


def test_stale_values_are_not_exported() -> None:
    watched = busy()
    watched.now_s += 100.0
    found = exposed(watched.view())
    assert found["swarm_monitor_up"] == {(): 0.0}
    assert set(found) == {"swarm_monitor_up", "swarm_monitor_last_look_timestamp_seconds", "swarm_run_info"}


def test_the_documentation_and_the_dashboard_name_the_exported_metrics() -> None:
    found = set(exposed(busy().view())) | {
        "swarm_run_epoch_progress_ratio",
        "swarm_run_epoch_remaining_seconds",
        "swarm_expert_load_seconds",
    }
    documented = set(re.findall(r"`(swarm_[a-z_]+)`", (DOCS / "metrics.md").read_text(encoding="utf-8")))
    assert documented == found
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"swarm_[a-z_]+", target["expr"])
    }
    assert asked
    assert asked <= found
