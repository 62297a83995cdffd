"""The cost of metrics in simulated swarms of 100 and 1,000 peers: for peers that publish them, and for a
monitor.

The production reporter, DHT and collector run on virtual time. Peers publish as in a large run, and none
trains. Traffic beyond the maintenance of the DHT, which is measured first, is the cost of metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Aim, Row, Series
from benchmarks.simulated_dht import Say, simulated_row
from swarm.dht.logic.records import encode_value
from swarm.metrics.record import Metrics, RoundReport
from swarm.metrics.reporter import Reporter
from swarm.monitor.collector import Collector
from swarm.monitor.logic.model import Model
from swarm.monitor.logic.view import MonitorView, RunView
from swarm.testing.chance import Chance
from swarm.testing.dht_swarm import DhtSwarm, SwarmMember, service_of
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.virtual_loop import run_virtual

RUN = "monitoredmonitored22"
_LINK = LinkConfig(delay_s=0.04, jitter=0.5)
_KNOWN_MAX = 64  # maximum number of peers that a trainer counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs per second; bytes are those of requests and replies, without TLS and TCP."""

    peers: int
    record_bytes: float
    peer_messages: float  # sent by an average peer because of metrics
    peer_bytes: float
    busiest_bytes: float  # sent by the peer that sends most, maintenance included
    monitor_messages: float  # sent by the monitor and in reply to it
    monitor_bytes: float
    seen: int  # peers in the monitor's view at the end
    fresh: int
    age_s: float  # age of the oldest values that it shows as fresh
    # real processor time of one look of the monitor: checking, verifying and merging records
    look_cpu_s: float


def metrics_of(number: int, now_s: float) -> Metrics:
    """Return metrics as a trainer publishes them in the middle of a run, with every field filled."""
    rounds = tuple(
        RoundReport(
            kind="epoch",
            epoch=1000 + place,
            at_s=now_s - 60.0 * (4 - place),
            seconds=3.2,
            bytes=4_000_000,
            members=16,
            group=f"{place:016x}",
            digest=f"{place * 7:016x}",
        )
        for place in range(4)
    )
    return Metrics(
        at_s=now_s,
        since_s=now_s - 1000.0,
        every_s=1.0,
        epoch=1003,
        samples_per_s=100.0 + number % 50,
        name=f"volunteer {number}",
        device="cuda (NVIDIA GeForce RTX 4090)",
        reach="direct",
        agent="swarm/0.1.0",
        samples=10_000 + number,
        loss=2.5 + number % 7 / 100,
        validation_loss=2.6,
        contributed_epoch=1003,
        contributed_at_s=now_s - 20.0,
        bytes_up=123_456_789,
        bytes_down=123_456_789,
        drift=1e-5,
        rounds_done=900,
        rounds_failed=3,
        own={"accuracy": 0.5, "tokens": 1e6 + number},
        rounds=rounds,
    )


def costs(peers: int, measured_s: float = 60.0, seed: int = 1) -> Costs:
    """Measure three equal periods in one swarm: at rest, with metrics, and with a monitor as well."""

    async def main() -> Costs:
        network = SimulatedNetwork(seed, _LINK)
        swarm = DhtSwarm(network)
        swarm.settle(peers)
        await asyncio.sleep(30.0)
        rest = await _sent_in(network, measured_s)
        async with asyncio.TaskGroup() as group:
            reporting = [
                group.create_task(_reporter(member, number, peers, seed).run())
                for number, member in enumerate(swarm.members)
            ]
            await asyncio.sleep(30.0)
            publishing = await _sent_in(network, measured_s)
            busiest = (
                max(one.peer.bytes_sent - publishing.before[one.peer.index] for one in swarm.members)
                / measured_s
            )
            collector, monitor = await _monitor(network, swarm)
            watching = group.create_task(collector.run())
            await asyncio.sleep(15.0)
            with _counted(network, monitor) as watched:
                await asyncio.sleep(measured_s)
            view = collector.model.view(collector.clock.swarm_s())
            look_cpu_s = await _look_cpu_s(collector)
            for task in (*reporting, watching):
                task.cancel()
        if network.errors:
            raise network.errors[0]
        await network.close()
        return _costs(peers, (rest, publishing, watched), busiest, view, look_cpu_s, measured_s)

    return run_virtual(main())


@dataclass(frozen=True, slots=True)
class _Sent:
    messages: int
    size_bytes: int
    before: dict[int, int]


def _costs(
    peers: int,
    sent: tuple[_Sent, _Sent, list[int]],
    busiest: float,
    view: MonitorView,
    look_cpu_s: float,
    measured_s: float,
) -> Costs:
    rest, publishing, watched = sent
    fresh = [peer for peer in view.peers if peer.fresh]
    return Costs(
        peers=peers,
        record_bytes=len(encode_value(metrics_of(1, 1e9).encode())),
        peer_messages=(publishing.messages - rest.messages) / peers / measured_s,
        peer_bytes=(publishing.size_bytes - rest.size_bytes) / peers / measured_s,
        busiest_bytes=busiest,
        monitor_messages=len(watched) / measured_s,
        monitor_bytes=sum(watched) / measured_s,
        seen=len(view.peers),
        fresh=len(fresh),
        age_s=max((peer.age_s for peer in fresh), default=0.0),
        look_cpu_s=look_cpu_s,
    )


def _reporter(member: SwarmMember, number: int, peers: int, seed: int) -> Reporter:
    peer = member.peer
    return Reporter(
        dht=member.service,
        clock=peer.clock,
        own=peer.peer_id,
        run_id=RUN,
        source=lambda: metrics_of(number, peer.clock.swarm_s()),
        peers=lambda: min(peers, _KNOWN_MAX),
        rng=Chance(seed, "reporter", number),
    )


@contextlib.contextmanager
def _counted(network: SimulatedNetwork, peer: SimulatedPeer) -> Iterator[list[int]]:
    """Collect the sizes of all messages from or to a peer within the context."""
    sizes: list[int] = []
    send = network.send

    def counting(
        source: SimulatedPeer, target: SimulatedPeer, what: str, size_bytes: int, arrive: Any
    ) -> None:
        if peer in (source, target):
            sizes.append(size_bytes)
        send(source, target, what, size_bytes, arrive)

    network.send = counting  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        network.send = send  # type: ignore[method-assign]


async def _monitor(network: SimulatedNetwork, swarm: DhtSwarm) -> tuple[Collector, SimulatedPeer]:
    peer = network.peer(dialable=False)
    service = service_of(peer)
    entry = swarm.members[0].peer.contact
    await service.join([entry])
    collector = Collector(
        dht=service,
        clock=peer.clock,
        model=Model(RunView(run_id=RUN, name="monitored", version=1, target=100_000)),
        entry=(entry,),
        known=lambda: list(service.overlay.table),
        remembered=lambda: [known.contact for known in peer.book.known()],
    )
    return collector, peer


async def _sent_in(network: SimulatedNetwork, seconds: float) -> _Sent:
    before = {peer.index: peer.bytes_sent for peer in network.peers.values()}
    messages, size_bytes = sum(peer.messages_sent for peer in network.peers.values()), sum(before.values())
    await asyncio.sleep(seconds)
    return _Sent(
        sum(peer.messages_sent for peer in network.peers.values()) - messages,
        sum(peer.bytes_sent for peer in network.peers.values()) - size_bytes,
        before,
    )


async def _look_cpu_s(collector: Collector) -> float:
    """Return the processor time to read, verify and merge one look, and to make a view.

    It includes the simulated peers' answers.
    """
    begun_s = time.process_time()
    await collector.poll()
    collector.model.view(collector.clock.swarm_s())
    return time.process_time() - begun_s


def rows(say: Say, sizes: tuple[int, ...] = (100, 1_000)) -> Iterator[list[Row]]:
    """Yield every figure of the section as soon as it is measured."""
    for peers in sizes:
        say(f"simulated, {peers} peers: metrics and a monitor")
        yield _rows(costs(peers))


def _rows(found: Costs) -> list[Row]:
    title = f"simulated swarm of {found.peers:,} peers, all telling metrics"
    notes = (
        f"a record has {found.record_bytes:.0f} bytes; {found.peer_messages:.2f} messages a second and "
        "peer; the busiest peer sends "
        f"{found.busiest_bytes / 1e3:.1f} kB/s, upkeep included",
    )
    seen = (
        f"{found.fresh} of {found.peers} peers fresh in its view, the oldest {found.age_s:.0f} s",
        f"{found.monitor_messages:.0f} messages a second; a look takes {found.look_cpu_s * 1e3:.0f} ms of "
        "a processor, answers included",
    )
    return [
        simulated_row(
            f"{found.peers}-metrics-peer",
            title,
            "sent by an average peer because of metrics",
            Series(name="swarm: metrics, a peer", unit="B/s", samples=(found.peer_bytes,)),
            Aim(of="ours", sense="at most", value=2000.0) if found.peers == 1_000 else None,
            notes,
        ),
        simulated_row(
            f"{found.peers}-metrics-monitor",
            title,
            "sent by and to one monitor",
            Series(name="swarm: metrics, a monitor", unit="kB/s", samples=(found.monitor_bytes / 1e3,)),
            Aim(of="ours", sense="at most", value=500.0) if found.peers == 1_000 else None,
            seen,
        ),
    ]
