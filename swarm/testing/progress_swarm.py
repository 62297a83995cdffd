"""A simulated run of any size whose peers tell one another their progress: production trackers on production DHT services, fake trainers.

A trainer makes a step a second, reports it, and goes on to the next epoch a moment after its tracker has called the present one full. What
is measured is what the messages of the DHT and of the trackers cost, and whether epochs begin when the true samples reach the target.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from averaging.training.progress import ProgressConfig
from averaging.training.runexchange import REPORT
from averaging.training.tracker import Tracker, TrackerServices
from swarm.ids import PeerId
from swarm.testing.chance import Chance
from swarm.testing.dht_swarm import DhtSwarm, Member
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.virtual_loop import run_virtual

RUN = "a" * 20
ROUND_S = 0.5  # between an epoch's end and the next one's first step
LINK = LinkConfig(delay_s=0.04, jitter=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressFigures:
    """What telling progress costs a peer in a minute, the DHT's own upkeep not counted."""

    peers: int
    shards: int
    messages: float  # requests and replies that a peer sends, on average
    messages_most: float  # that the busiest one sends
    size_bytes: float  # of these, protobuf without TLS and TCP
    epochs: int  # that were completed in the measured time
    overshoot: float  # true samples of the epochs over their target, on average, less one
    spread_s: float  # between the first and the last peer that begins an epoch, on average


class Trainer:
    """One peer. `lie`: what it claims to have, from what it has."""

    def __init__(self, run: ProgressRun, member: Member, rate: float, lie: Callable[[int], int] | None = None) -> None:
        peer = member.peer
        services = TrackerServices(
            own=lambda: peer.contact,
            dht=member.service,
            caller=peer.caller,
            clock=peer.clock,
            loop=asyncio.get_running_loop(),
        )
        self.run, self.member, self.rate, self.lie = run, member, rate, lie
        self.tracker = Tracker(services, RUN, run.target, run.config)
        self.epoch = self.samples = 0
        peer.handlers.unary(REPORT, self.tracker.on_report)

    @property
    def peer_id(self) -> PeerId:
        return self.member.peer.peer_id

    async def train(self) -> None:
        """Steps of a second, until cancelled."""
        chance, owed = self.member.peer.chance, 0.0
        await asyncio.sleep(chance.random())
        while True:
            await asyncio.sleep(0.9 + 0.2 * chance.random())
            owed += self.rate
            whole = int(owed)
            owed -= whole
            self.samples += whole
            claimed = self.samples if self.lie is None else self.lie(self.samples)
            full = self.tracker.report(claimed, self.rate if self.lie is None else claimed / 1.0)
            ahead = self.tracker.swarm_epoch()
            if full or ahead > self.epoch:
                self.run.ended(self)
                self.epoch = max(self.epoch + 1 if full else 0, ahead)
                self.samples, owed = 0, 0.0
                self.tracker.begin_epoch(self.epoch)
                await asyncio.sleep(ROUND_S)


class ProgressRun:
    """All trainers of a run."""

    def __init__(self, network: SimulatedNetwork, target: int, config: ProgressConfig | None = None) -> None:
        self.network, self.target, self.config = network, target, config or ProgressConfig()
        self.dht = DhtSwarm(network)
        self.trainers: list[Trainer] = []
        self.gathered: dict[int, int] = {}  # true samples of each epoch
        self.ends: dict[int, list[float]] = {}  # when peers left each epoch

    def ended(self, trainer: Trainer) -> None:
        """A trainer leaves its epoch."""
        self.gathered[trainer.epoch] = self.gathered.get(trainer.epoch, 0) + trainer.samples
        self.ends.setdefault(trainer.epoch, []).append(asyncio.get_running_loop().time())

    def add(self, member: Member, rate: float, lie: Callable[[int], int] | None = None) -> Trainer:
        trainer = Trainer(self, member, rate, lie)
        self.trainers.append(trainer)
        return trainer

    def start(self, group: asyncio.TaskGroup, trainers: list[Trainer]) -> list[asyncio.Task[None]]:
        """Let trackers and trainers run until their tasks are cancelled."""
        return [group.create_task(work()) for trainer in trainers for work in (trainer.tracker.run, trainer.train)]


def measure(peers: int, *, epoch_s: float = 30.0, settle_s: float = 90.0, measured_s: float = 60.0, seed: int = 1) -> ProgressFigures:
    """A run of so many peers of speeds 1, ½ and ¼, joined within some seconds, watched after it has settled."""

    async def scenario() -> ProgressFigures:
        network = SimulatedNetwork(seed, LINK)
        chance = Chance(seed, "progress")
        speeds = [chance.choice([8.0, 4.0, 2.0]) for _ in range(peers)]
        run = ProgressRun(network, target=round(epoch_s * sum(speeds)))
        run.dht.settle(peers)
        before_s = settle_s / 3
        await asyncio.sleep(before_s)
        idle = _sent(run.dht.members)
        await asyncio.sleep(before_s)
        idle_per_s = [(later - earlier) / before_s for earlier, later in zip(idle[0], _sent(run.dht.members)[0], strict=True)]
        idle_bytes_per_s = [(later - earlier) / before_s for earlier, later in zip(idle[1], _sent(run.dht.members)[1], strict=True)]
        async with asyncio.TaskGroup() as group:
            tasks = run.start(group, [run.add(member, rate) for member, rate in zip(run.dht.members, speeds, strict=True)])
            await asyncio.sleep(settle_s)
            first = max(run.gathered, default=0) + 1
            begun = _sent(run.dht.members)
            await asyncio.sleep(measured_s)
            ended = _sent(run.dht.members)
            shards = 1 << run.trainers[0].tracker.bits
            for task in tasks:
                task.cancel()
        per_minute = 60.0 / measured_s
        messages = [
            (later - earlier - idle_s * measured_s) * per_minute
            for earlier, later, idle_s in zip(begun[0], ended[0], idle_per_s, strict=True)
        ]
        sizes = [
            (later - earlier - idle_s * measured_s) * per_minute
            for earlier, later, idle_s in zip(begun[1], ended[1], idle_bytes_per_s, strict=True)
        ]
        whole = [epoch for epoch, ends in run.ends.items() if first <= epoch and len(ends) == peers]
        if network.errors:
            raise AssertionError(f"a tracker failed: {network.errors[0]!r}")
        await network.close()
        return ProgressFigures(
            peers=peers,
            shards=shards,
            messages=sum(messages) / peers,
            messages_most=max(messages),
            size_bytes=sum(sizes) / peers,
            epochs=len(whole),
            overshoot=sum(run.gathered[epoch] / run.target - 1.0 for epoch in whole) / len(whole) if whole else math.nan,
            spread_s=sum(max(run.ends[epoch]) - min(run.ends[epoch]) for epoch in whole) / len(whole) if whole else math.nan,
        )

    return run_virtual(scenario())


def _sent(members: list[Member]) -> tuple[list[int], list[int]]:
    return [member.peer.messages_sent for member in members], [member.peer.bytes_sent for member in members]
