"""A view as Prometheus metrics: standard names, base units, and fresh values only. docs/metrics.md lists
them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from swarm.core.errors import SwarmError, UsageError
from swarm.monitor.logic.view import MonitorView, PeerView, RelayReport

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_PEERS_MAX = 1000  # limit of peers with time series of their own, because Prometheus stores all of them


class RunCollector:
    """Collector for Prometheus, called at every scrape."""

    def __init__(self, view: Callable[[], MonitorView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield GaugeMetricFamily(
            "swarm_monitor_up",
            "1 while the monitor sees the run; otherwise no other metric of the run is exported",
            float(view.live),
        )
        if view.link.age_s is not None:
            yield GaugeMetricFamily(
                "swarm_monitor_last_look_timestamp_seconds",
                "When peers last answered",
                view.at_s - view.link.age_s,
            )
        run = view.run
        about = {
            "run_id": run.run_id,
            "name": run.name,
            "task": run.task,
            "mode": run.mode,
            "codec": run.codec,
            "version": str(run.version),
        }
        yield InfoMetricFamily("swarm_run", "Description of the run", about)
        if view.live:
            yield from _run(view)
            yield from _peers([peer for peer in view.peers if peer.fresh][:_PEERS_MAX], view.at_s)
            yield from _relays(view.relays)


class MetricsServer:
    """Server of `/metrics` at host:port in a thread of its own, as a context manager. `view` returns the
    current view. Raise UsageError when the port cannot be used.
    """

    def __init__(self, view: Callable[[], MonitorView], address: tuple[str, int]) -> None:
        registry = CollectorRegistry()
        registry.register(RunCollector(view))
        try:
            served: tuple[WSGIServer, threading.Thread] = start_http_server(address[1], address[0], registry)
        except (OSError, SwarmError) as error:
            raise UsageError(f"--prometheus {address[0]}:{address[1]} cannot be served: {error}") from None
        self._server, self._thread = served
        self.url = f"http://{address[0]}:{self._server.server_port}/metrics"

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


def _run(view: MonitorView) -> Iterator[Metric]:
    simple = (
        ("swarm_run_epoch", "Epochs that the swarm has completed", float(view.epoch)),
        ("swarm_run_epoch_samples", "Samples of the present epoch so far", view.samples),
        (
            "swarm_run_epoch_progress_ratio",
            "Fraction of the present epoch's batch that is done",
            view.fraction,
        ),
        ("swarm_run_epoch_remaining_seconds", "Estimated time to the end of the present epoch", view.eta_s),
        ("swarm_run_target_samples", "Samples of a full epoch", view.run.target),
        ("swarm_run_samples_per_second", "Training rate of all peers together", view.samples_per_s),
        ("swarm_run_loss", "Training loss, median over peers", view.loss),
        ("swarm_run_validation_loss", "Loss on held-out data, median over peers", view.validation_loss),
        (
            "swarm_run_drift_ratio",
            "Relative distance of peers' parameters from the averaged state, median",
            view.drift,
        ),
        (
            "swarm_run_sent_bytes_per_second",
            "Sent by all peers in rounds and state transfer",
            view.bytes_per_s,
        ),
        (
            "swarm_run_histories",
            "Histories that peers are in: more than one while the run is divided",
            float(len(view.histories)),
        ),
        ("swarm_run_records_refused", "Malformed records of peers in the last poll", float(view.refused)),
    )
    for name, text, value in simple:
        if value is not None:
            yield GaugeMetricFamily(name, text, float(value))
    states = GaugeMetricFamily("swarm_run_peers", "Peers of the run by state", labels=["state"])
    for state in ("training", "behind", "idle", "quiet"):
        states.add_metric([state], float(sum(peer.state == state for peer in view.peers)))
    yield states
    own = GaugeMetricFamily(
        "swarm_run_reported",
        "Metrics that users report with opt.report, median over peers",
        labels=["metric"],
    )
    for name, metric in view.own.items():
        own.add_metric([name], metric.median)
    yield own
    if view.rounds:
        newest = next((one for one in view.rounds if not one.failed), None)
        if newest is not None:
            yield GaugeMetricFamily(
                "swarm_run_round_duration_seconds", "Duration of the last committed round", newest.seconds
            )
            yield GaugeMetricFamily(
                "swarm_run_round_members", "Members of the last committed round", float(newest.members)
            )
            yield GaugeMetricFamily(
                "swarm_run_round_bytes",
                "Bytes of the last committed round, over all members, both ways",
                newest.bytes,
            )
    load = GaugeMetricFamily(
        "swarm_expert_load_seconds",
        "Wait of a request at an expert, as its servers declare",
        labels=["expert"],
    )
    for expert in view.experts[:_PEERS_MAX]:
        if expert.load is not None:
            load.add_metric([expert.uid], expert.load)
    yield load


def _peers(peers: Iterable[PeerView], now_s: float) -> Iterator[Metric]:
    labels = ["peer", "name"]
    gauges: dict[str, tuple[GaugeMetricFamily, Callable[[PeerView], float | None]]] = {
        name: (GaugeMetricFamily(f"swarm_peer_{name}", text, labels=labels), value)
        for name, text, value in (
            (
                "samples_per_second",
                "Training rate of the peer, as it reports",
                lambda peer: peer.samples_per_s,
            ),
            ("epoch", "Epochs that the peer has completed", lambda peer: float(peer.epoch)),
            ("loss", "The peer's training loss", lambda peer: peer.loss),
            ("validation_loss", "The peer's loss on held-out data", lambda peer: peer.validation_loss),
            (
                "drift_ratio",
                "Relative distance of its parameters from the averaged state",
                lambda peer: peer.drift,
            ),
            (
                "last_contribution_timestamp_seconds",
                "When its samples last went into a round",
                lambda peer: now_s - peer.contributed_ago_s if peer.contributed_ago_s is not None else None,
            ),
            ("accused_by", "Peers that caught it lying as a reducer", lambda peer: float(peer.accused_by)),
            (
                "answers",
                "1 when it answered this monitor's call, 0 when not",
                lambda peer: None if peer.reached is None else float(peer.reached),
            ),
        )
    }
    counters: dict[str, tuple[CounterMetricFamily, Callable[[PeerView], float]]] = {
        name: (CounterMetricFamily(f"swarm_peer_{name}", text, labels=labels), value)
        for name, text, value in (
            (
                "sent_bytes",
                "Sent in rounds and state transfer since it began",
                lambda peer: float(peer.up_bytes),
            ),
            (
                "received_bytes",
                "Received in rounds and state transfer since it began",
                lambda peer: float(peer.down_bytes),
            ),
            (
                "contributed_samples",
                "Samples that went into committed rounds",
                lambda peer: float(peer.samples_given),
            ),
            ("given_up_epochs", "Epochs that it made and gave up", lambda peer: float(peer.epochs_given_up)),
        )
    }
    rounds = CounterMetricFamily(
        "swarm_peer_rounds", "Rounds by how they ended for the peer", labels=[*labels, "result"]
    )
    for peer in peers:
        who = [peer.short, peer.name]
        for gauge, gauge_of in gauges.values():
            value = gauge_of(peer)
            if value is not None:
                gauge.add_metric(who, value)
        for counter, count_of in counters.values():
            counter.add_metric(who, count_of(peer))
        rounds.add_metric([*who, "committed"], float(peer.rounds_done))
        rounds.add_metric([*who, "failed"], float(peer.rounds_failed))
    yield from (gauge for gauge, _ in gauges.values())
    yield from (counter for counter, _ in counters.values())
    yield rounds


def _relays(relays: Iterable[RelayReport]) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, Callable[[RelayReport], int]], ...] = (
        ("reservations", "Peers that can be called through the relay now", lambda relay: relay.reservations),
        ("circuits", "Connections that the relay carries now", lambda relay: relay.circuits),
    )
    counters: tuple[tuple[str, str, Callable[[RelayReport], int]], ...] = (
        (
            "carried_bytes",
            "Carried since it began, both directions together",
            lambda relay: relay.carried_bytes,
        ),
        ("refused_requests", "Requests that it refused since it began", lambda relay: relay.refused),
    )
    for kind, described in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text, value in described:
            family = kind(f"swarm_relay_{name}", text, labels=["relay"])
            for relay in relays:
                family.add_metric([relay.short], float(value(relay)))
            yield family
