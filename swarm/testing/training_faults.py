"""Faults of a simulated training, drawn from the seed; each begins and, after a while, ends."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from swarm.testing.chance import Chance
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingPeer, TrainingSwarm

_PEERS_MIN = 2  # that faults leave alive
_DOWN_S_MAX = 10.0  # of a process that starts again
_CROWD_MIN = 2

ENDS = ("kill", "restart", "checkpoint", "leave", "mass")  # of processes
ONE_PEER = ("freeze", "hang", "slow")
FAULTS = (*ENDS, "join", "crowd", *ONE_PEER, "split", "one-way", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFaultConfig:
    """Rates and durations of faults."""

    crowd_max: int  # newcomers that come at once
    kinds: tuple[str, ...] = FAULTS
    every_s: float = 15.0  # mean time between two faults
    lasting_s: float = 30.0  # cuts, freezes and bursts last up to twice this
    batch: int = 4  # samples of a step of each peer
    peers_max: int = 16


class TrainingFaults:
    """Faults of one training; `calm` ends all of them."""

    def __init__(
        self,
        swarm: TrainingSwarm,
        checks: TrainingChecks,
        chance: Chance,
        config: TrainingFaultConfig,
        say: Callable[[str], None],
        group: asyncio.TaskGroup,
    ) -> None:
        """`group`: parent of the tasks that end faults. `say` is called with a line of text for each
        fault.
        """
        self._swarm, self._network, self._checks = swarm, swarm.network, checks
        self._chance, self._config, self._say, self._group = chance, config, say, group
        self._link = swarm.network.config
        self._endings: dict[asyncio.Task[None], None] = {}
        self.counts: Counter[str] = Counter()

    async def add(self, **how: Any) -> TrainingPeer:
        """Add a peer of a random speed."""
        compute_s = self._chance.uniform(0.7, 1.4)
        made = await self._swarm.add(batch=self._config.batch, compute_s=compute_s, **how)
        if made.lies:
            self._checks.liars.add(made.peer.peer_id)
        return made

    async def run(self, until_s: float) -> None:
        """Draw faults until `until_s`."""
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._chance.expovariate(1.0 / self._config.every_s)
            await asyncio.sleep(min(wait_s, max(until_s - loop.time(), 0.0)))
            if loop.time() >= until_s:
                return
            await self.begin(self._chance.choice(self._config.kinds))

    async def begin(self, kind: str) -> None:
        """Begin one fault of a kind of `FAULTS`. Raise ValueError for any other."""
        self.counts[kind] += 1
        self._checks.faults_s = math.inf
        lasting_s = self._config.lasting_s * (0.1 + 1.9 * self._chance.random())
        if kind in ENDS:
            await self._end_some(kind, lasting_s)
        elif kind in ("join", "crowd"):
            count = 1 if kind == "join" else self._crowd()
            count = max(min(count, self._config.peers_max - len(self._swarm.live)), 0)
            self._say(f"{kind}: {count} more")
            for _ in range(count):
                await self.add()
        elif kind in ONE_PEER:
            self._disturb_one(kind, lasting_s)
        elif kind in ("split", "one-way"):
            self._cut_links(kind, lasting_s)
        elif kind == "loss":
            self._say(f"loss for {lasting_s:.0f} s")
            loss = 0.2 * self._chance.random()
            self._network.config = replace(self._link, loss=loss, duplication=0.1, reorder=0.2)
            self._later(lasting_s, self._restore_link)
        else:
            raise ValueError(f"no such fault: {kind}")

    async def _end_some(self, kind: str, lasting_s: float) -> None:
        live = list(self._swarm.live.values())
        count = len(live) // 2 + 1 if kind == "mass" else 1
        chosen = self._chance.sample(live, min(count, max(len(live) - _PEERS_MIN, 0)))
        self._say(f"{kind}: {[one.index for one in chosen]}")
        for one in chosen:
            self._checks.ledger.read(one, asyncio.get_running_loop().time())
            if kind == "leave":
                one.leaving = True
                continue
            checkpoint = one.save() if kind == "checkpoint" else None
            await self._swarm.kill(one)
            if kind in ("restart", "checkpoint"):
                await asyncio.sleep(min(lasting_s, _DOWN_S_MAX))
                await self.add(peer=one.peer, checkpoint=checkpoint, lies=one.lies)

    def _crowd(self) -> int:
        return _CROWD_MIN + self._chance.below(self._config.crowd_max - _CROWD_MIN + 1)

    def _disturb_one(self, kind: str, lasting_s: float) -> None:
        one = self._chance.choice(list(self._swarm.live.values()))
        self._say(f"{kind}: {one.index} for {lasting_s:.0f} s")
        if kind == "freeze":
            one.peer.frozen = True
        elif kind == "hang":
            one.hangs = True
        else:
            one.peer.slowness = 2.0 + 18.0 * self._chance.random()
        self._later(lasting_s, lambda: _calm(one))

    def _cut_links(self, kind: str, lasting_s: float) -> None:
        live, chance = list(self._swarm.live.values()), self._chance
        if kind == "split":
            chance.shuffle(live)
            size = 1 + chance.below(max(len(live) - 1, 1))
            side = live[:size]
            self._say(f"split: {sorted(one.index for one in side)} apart for {lasting_s:.0f} s")
            self._network.partition([one.peer for one in side])
            self._later(lasting_s, self._rejoin)
            return
        third = max(len(live) // 3, 1)
        sources, targets = chance.sample(live, third), chance.sample(live, third)
        names = f"{[one.index for one in sources]} -> {[one.index for one in targets]}"
        self._say(f"one-way: {names} for {lasting_s:.0f} s")
        cut = self._network.cut([one.peer for one in sources], [one.peer for one in targets])
        self._later(lasting_s, lambda: self._network.heal(cut))

    async def calm(self) -> None:
        """End all faults."""
        for task in list(self._endings):
            task.cancel()
        self._rejoin()
        self._network.heal()
        self._restore_link()
        for one in self._swarm.live.values():
            _calm(one)

    def _rejoin(self) -> None:
        self._network.partition()

    def _restore_link(self) -> None:
        self._network.config = self._link

    def _later(self, wait_s: float, end: Callable[[], object]) -> None:
        task = self._group.create_task(_after(wait_s, end))
        self._endings[task] = None
        task.add_done_callback(lambda done: self._endings.pop(done, None))


async def _after(wait_s: float, end: Callable[[], object]) -> None:
    await asyncio.sleep(wait_s)
    end()


def _calm(one: TrainingPeer) -> None:
    one.peer.frozen, one.hangs, one.peer.slowness = False, False, 1.0
