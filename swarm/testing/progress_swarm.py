"""A simulated run of any size whose peers exchange their progress: production trackers, fake trainers, and
a table in place of the DHT.

A trainer makes a step a second, reports it, and continues with the next epoch a moment after its tracker has
found the current one full. The table answers like the DHT, after a delay, and counts reads and writes;
`operations` measures, on production DHT services of the same number of peers, the messages for one read and
one write of such a dictionary. (A thousand production services under this load verify twenty thousand signed
dictionaries in a virtual minute, which takes a quarter of an hour.)
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from averaging.optim.exchange import REPORT
from averaging.optim.progress.logic.shards import bits_for
from averaging.optim.progress.tracker import Tracker
from swarm.core.ids import Key, PeerId
from swarm.dht.service.dht_service import Entry
from swarm.testing.chance import Chance
from swarm.testing.dht_swarm import LazySwarm
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.simulated_node import SimulatedNode
from swarm.testing.virtual_loop import run_virtual

RUN = "a" * 20
ROUND_S = 0.5  # between an epoch's end and the next one's first step
LINK = LinkConfig(delay_s=0.04, jitter=0.5)
READ_S = 0.15  # duration of a read or a write of the DHT
SAMPLE = 20  # reads and writes by which their cost is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressFigures:
    """Costs of the exchange of progress for one peer in a minute."""

    peers: int
    shards: int
    reads: float  # reads of the DHT by a peer, on average
    writes: float
    operations_most: float  # reads and writes together, of the busiest peer
    entries_most: int  # entries of the largest dictionary that was read
    readers_most: float  # reads of the dictionary that is read most: what its replicas answer
    reports: float  # messages to other peers directly, on average
    report_bytes: float
    epochs: int  # epochs completed in the measured time
    gathered: tuple[float, ...]  # the true samples of these epochs, as a share of the target
    spread_s: float  # between the first and the last peer that begins an epoch, on average


class ProgressTable:
    """The dictionaries of the simulated DHT."""

    def __init__(self) -> None:
        self.records: dict[Key, dict[str, Entry]] = {}
        self.reads: Counter[PeerId] = Counter()
        self.writes: Counter[PeerId] = Counter()
        self.readers: Counter[Key] = Counter()
        self.entries_most = 0

    def forget_counts(self) -> None:
        for counter in (self.reads, self.writes, self.readers):
            counter.clear()
        self.entries_most = 0


class TableDht:
    """One peer's view of the table: the part of `DhtService` that a tracker uses."""

    def __init__(self, table: ProgressTable, peer: SimulatedPeer) -> None:
        self._table, self._peer = table, peer

    async def store(self, key: Key, value: object, *, ttl_s: float, subkey: str, timeout_s: float) -> None:
        await asyncio.sleep(READ_S * (0.5 + self._peer.chance.random()))
        self._table.writes[self._peer.peer_id] += 1
        now_s, writer = self._peer.clock.swarm_s(), self._peer.peer_id
        entry = Entry(value=value, subkey=subkey, writer=writer, issued_at=now_s, expiration=now_s + ttl_s)
        self._table.records.setdefault(key, {})[subkey] = entry

    async def get(self, key: Key, *, timeout_s: float, latest: bool = False) -> dict[str, Entry]:
        await asyncio.sleep(READ_S * (0.5 + self._peer.chance.random()))
        table, now_s = self._table, self._peer.clock.swarm_s()
        live = {
            subkey: entry for subkey, entry in table.records.get(key, {}).items() if entry.expiration > now_s
        }
        table.records[key] = dict(live)
        table.reads[self._peer.peer_id] += 1
        table.readers[key] += 1
        table.entries_most = max(table.entries_most, len(live))
        return live

    async def delete(self, key: Key, *, subkey: str, timeout_s: float) -> None:
        self._table.records.get(key, {}).pop(subkey, None)


class Trainer:
    """One peer. `lie` maps its samples to the number that it reports."""

    def __init__(
        self, run: ProgressRun, peer: SimulatedPeer, rate: float, lie: Callable[[int], int] | None = None
    ) -> None:
        node = SimulatedNode(
            lambda: peer.contact, peer.clock, TableDht(run.table, peer), channels=peer.caller
        )
        self.run, self.peer, self.rate, self.lie = run, peer, rate, lie
        self.tracker = Tracker(node, RUN, run.target)
        self.epoch = self.samples = 0
        peer.handlers.unary(REPORT, self.tracker.on_report)

    @property
    def peer_id(self) -> PeerId:
        return self.peer.peer_id

    async def train(self) -> None:
        """Make a step each second, until cancelled."""
        chance, owed = self.peer.chance, 0.0
        await asyncio.sleep(chance.random())
        while True:
            await asyncio.sleep(0.9 + 0.2 * chance.random())
            owed += self.rate
            whole = int(owed)
            owed -= whole
            self.samples += whole
            claimed = self.samples if self.lie is None else self.lie(self.samples)
            full = self.tracker.update_own(claimed, self.rate if self.lie is None else claimed / 1.0)
            ahead = self.tracker.swarm_epoch()
            if full or ahead > self.epoch:
                self.run.ended(self)
                self.epoch = max(self.epoch + 1 if full else 0, ahead)
                self.samples, owed = 0, 0.0
                self.tracker.begin_epoch(self.epoch)
                await asyncio.sleep(ROUND_S)


class ProgressRun:
    """All trainers of a run."""

    def __init__(self, network: SimulatedNetwork, target: int) -> None:
        self.network, self.target = network, target
        self.table = ProgressTable()
        self.trainers: list[Trainer] = []
        self.gathered: dict[int, int] = {}  # true samples of each epoch
        self.ends: dict[int, list[float]] = {}  # when peers left each epoch

    def ended(self, trainer: Trainer) -> None:
        """Record that a trainer leaves its epoch."""
        self.gathered[trainer.epoch] = self.gathered.get(trainer.epoch, 0) + trainer.samples
        self.ends.setdefault(trainer.epoch, []).append(asyncio.get_running_loop().time())

    def add(self, rate: float, lie: Callable[[int], int] | None = None) -> Trainer:
        """Add a peer that makes `rate` samples/s."""
        trainer = Trainer(self, self.network.peer(), rate, lie)
        self.trainers.append(trainer)
        return trainer

    def start(self, group: asyncio.TaskGroup, trainers: list[Trainer]) -> list[asyncio.Task[None]]:
        """Start trackers and trainers, which run until their tasks are cancelled."""
        return [
            group.create_task(work()) for trainer in trainers for work in (trainer.tracker.run, trainer.train)
        ]


def measure(
    peers: int, *, epoch_s: float = 30.0, settle_s: float = 75.0, measured_s: float = 60.0, seed: int = 1
) -> ProgressFigures:
    """Return the figures of a run of `peers` peers of speeds 1, ½ and ¼, divided into shards from the
    start, for `measured_s` after `settle_s`.
    """

    async def scenario() -> ProgressFigures:
        network, chance = SimulatedNetwork(seed, LINK), Chance(seed, "progress")
        speeds = [chance.choice([8.0, 4.0, 2.0]) for _ in range(peers)]
        run = ProgressRun(network, target=round(epoch_s * sum(speeds)))
        async with asyncio.TaskGroup() as group:
            for rate in speeds:
                run.add(rate).tracker.tree.bits = bits_for(peers, 0)
            tasks = run.start(group, run.trainers)
            await asyncio.sleep(settle_s)
            first = max(run.gathered, default=0) + 1
            run.table.forget_counts()
            sent = [(trainer.peer.messages_sent, trainer.peer.bytes_sent) for trainer in run.trainers]
            await asyncio.sleep(measured_s)
            figures = _figures(run, first, sent, 60.0 / measured_s)
            for task in tasks:
                task.cancel()
        if network.errors:
            raise AssertionError(f"a tracker failed: {network.errors[0]!r}")
        await network.close()
        return figures

    return run_virtual(scenario())


def _figures(run: ProgressRun, first: int, sent: list[tuple[int, int]], per_minute: float) -> ProgressFigures:
    peers, table = len(run.trainers), run.table
    whole = sorted(epoch for epoch, ends in run.ends.items() if first <= epoch and len(ends) == peers)
    spreads = [max(run.ends[epoch]) - min(run.ends[epoch]) for epoch in whole]
    messages = sum(
        trainer.peer.messages_sent - before for trainer, (before, _) in zip(run.trainers, sent, strict=True)
    )
    size_bytes = sum(
        trainer.peer.bytes_sent - before for trainer, (_, before) in zip(run.trainers, sent, strict=True)
    )
    return ProgressFigures(
        peers=peers,
        shards=1 << run.trainers[0].tracker.tree.bits,
        reads=table.reads.total() / peers * per_minute,
        writes=table.writes.total() / peers * per_minute,
        operations_most=max((table.reads + table.writes).values()) * per_minute,
        entries_most=table.entries_most,
        readers_most=max(table.readers.values()) * per_minute,
        reports=messages / peers * per_minute,
        report_bytes=size_bytes / peers * per_minute,
        epochs=len(whole),
        gathered=tuple(run.gathered[epoch] / run.target for epoch in whole),
        spread_s=sum(spreads) / len(spreads) if spreads else math.nan,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """Cost of one read and of one write of a dictionary, for all peers together."""

    read_messages: float
    read_bytes: float
    write_messages: float
    write_bytes: float


def operations(peers: int, entries: int, seed: int = 1) -> OperationCost:
    """Measure the costs on production DHT services of `peers` peers, with `entries` reports in the
    dictionary.
    """

    async def scenario() -> OperationCost:
        network = SimulatedNetwork(seed, LINK)
        swarm, chance, key = (
            LazySwarm(network, peers),
            Chance(seed, "operations"),
            Key(f"run.{RUN}", "progress"),
        )
        claim = {"epoch": 100, "samples": 100_000, "rate": 123.4, "at": 1.8e9, "since": 1.8e9}

        async def write(peer: SimulatedPeer) -> None:
            value = {**claim, "at": peer.clock.swarm_s(), "addresses": peer.contact.multiaddrs}
            await swarm.service(peer).store(key, value, ttl_s=15.0, subkey=str(peer.peer_id), timeout_s=5.0)

        async def cost(
            work: Callable[[SimulatedPeer], object], who: list[SimulatedPeer]
        ) -> tuple[float, float]:
            before = _all_sent(network)
            for peer in who:
                await work(peer)  # type: ignore[misc]
            messages, size_bytes = (
                later - earlier for later, earlier in zip(_all_sent(network), before, strict=True)
            )
            return messages / len(who), size_bytes / len(who)

        members = chance.sample(swarm.peers, min(entries, peers))
        for peer in members:
            await write(peer)
        some = members[:SAMPLE]
        writes = await cost(write, some)
        reads = await cost(lambda peer: swarm.service(peer).get(key, timeout_s=5.0), some)
        await network.close()
        return OperationCost(
            read_messages=reads[0], read_bytes=reads[1], write_messages=writes[0], write_bytes=writes[1]
        )

    return run_virtual(scenario())


def _all_sent(network: SimulatedNetwork) -> tuple[int, int]:
    return sum(peer.messages_sent for peer in network.peers.values()), sum(
        peer.bytes_sent for peer in network.peers.values()
    )
