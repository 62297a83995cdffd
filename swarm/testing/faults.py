"""Faults of a scenario, drawn from the seed; each begins and, after a while, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.testing.chance import Chance
from swarm.testing.dht_swarm import DhtSwarm, SwarmMember

CHURN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """Rates and durations of faults."""

    every_s: float = 30.0  # mean time between two faults
    lasting_s: float = 90.0  # cuts, bursts and frozen peers last up to twice this
    down_s: float = 120.0  # a crashed peer is down for up to twice this
    down_share_max: float = 0.2  # of all peers at a time
    # share of all peers that crash in ten minutes, evenly spread, and are replaced by new peers; in addition
    # to the other faults
    churn_share: float = 0.0


class Faults:
    """Faults of one swarm; `calm` ends all of them."""

    def __init__(
        self, swarm: DhtSwarm, chance: Chance, config: FaultConfig, group: asyncio.TaskGroup
    ) -> None:
        self._swarm = swarm
        self._network = swarm.network
        self._chance = chance
        self._config = config
        self._group = group
        self._quiet_link = swarm.network.config
        self._down: list[SwarmMember] = []
        self._endings: dict[asyncio.Task[None], None] = {}
        self.counts: dict[str, int] = {}

    async def run(self, until_s: float, kinds: Sequence[str]) -> None:
        """Draw faults of these kinds until `until_s`. Faults that are still active then are ended by
        `calm`.
        """
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._chance.expovariate(1.0 / self._config.every_s)
            if loop.time() + wait_s >= until_s:
                await asyncio.sleep(max(until_s - loop.time(), 0.0))
                return
            await asyncio.sleep(wait_s)
            await self.begin(self._chance.choice(kinds))

    async def begin(self, kind: str) -> None:
        """Begin one fault of a kind: crash, freeze, split, one-way, loss, clock. Raise ValueError for any
        other.
        """
        self.counts[kind] = self.counts.get(kind, 0) + 1
        lasting_s = self._config.lasting_s * (0.2 + 1.8 * self._chance.random())
        if kind == "crash":
            await self._crash()
        elif kind == "freeze":
            member = self._chance.choice(self._swarm.live)
            member.peer.frozen = True
            self._later(lasting_s, lambda: setattr(member.peer, "frozen", False))
        elif kind == "split":
            peers = [member.peer for member in self._swarm.members]
            self._chance.shuffle(peers)
            self._network.partition(peers[: 1 + self._chance.below(len(peers) - 1)])
            self._later(lasting_s, self._network.partition)
        elif kind == "one-way":
            peers = [member.peer for member in self._swarm.members]
            sources, targets = (
                self._chance.sample(peers, len(peers) // 3),
                self._chance.sample(peers, len(peers) // 3),
            )
            cut = self._network.cut(sources, targets)
            self._later(lasting_s, lambda: self._network.heal(cut))
        elif kind == "loss":
            self._network.config = replace(
                self._quiet_link,
                loss=0.3 * self._chance.random(),
                duplication=0.1,
                reorder=0.2,
                reorder_s=2.0 * self._chance.random(),
            )
            self._later(lasting_s, self._restore_link)
        elif kind == "clock":
            clock = self._chance.choice(self._swarm.members).peer.clock
            # as if set by a user; the peer corrects it with the clocks of others
            clock.skew_s += self._chance.uniform(-120.0, 120.0)
            clock.drift = self._chance.uniform(-1e-4, 1e-4)
        else:
            raise ValueError(f"no such fault: {kind}")

    async def calm(self) -> None:
        """End all faults: links are healed, and all peers are up again."""
        for task in list(self._endings):
            task.cancel()
        self._network.heal()
        self._restore_link()
        for member in self._swarm.members:
            member.peer.frozen = False
        for member in list(self._down):
            await self._return(member)

    async def churn(self, until_s: float) -> None:
        """Crash peers permanently, `churn_share` of them in ten minutes, and let as many new peers join."""
        loop = asyncio.get_running_loop()
        wait_s = CHURN_S / (self._config.churn_share * len(self._swarm.live))
        while loop.time() + wait_s < until_s:
            await asyncio.sleep(wait_s)
            self.counts["replaced"] = self.counts.get("replaced", 0) + 1
            gone = self._chance.choice(self._swarm.live)
            self._swarm.members.remove(gone)
            await self._network.crash(gone.peer)
            bootstrap = self._chance.sample(self._swarm.live, min(3, len(self._swarm.live)))
            newcomer = self._swarm.add()
            self._group.create_task(newcomer.service.join([member.peer.contact for member in bootstrap]))

    async def _crash(self) -> None:
        live = self._swarm.live
        if len(self._down) >= self._config.down_share_max * len(self._swarm.members) or len(live) < 3:
            return
        member = self._chance.choice(live)
        await self._network.crash(member.peer)
        self._down.append(member)
        down_s = self._config.down_s * (0.1 + 1.9 * self._chance.random())
        task = self._group.create_task(self._return_later(member, down_s))
        self._endings[task] = None
        task.add_done_callback(lambda done: self._endings.pop(done, None))

    async def _return_later(self, member: SwarmMember, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._return(member)

    async def _return(self, member: SwarmMember) -> None:
        """Restart a crashed peer. Half of the restarted peers find the swarm by their peer book on disk only;
        the others get an address.
        """
        if member in self._down:
            self._down.remove(member)
            live = self._swarm.live
            has_book = self._chance.happens(0.5) and self._network.keeps_books
            await self._swarm.restart(
                member, () if has_book or not live else [self._chance.choice(live).peer.contact]
            )

    def _later(self, wait_s: float, end: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(wait_s)
            end()

        task = self._group.create_task(wait())
        self._endings[task] = None
        task.add_done_callback(lambda done: self._endings.pop(done, None))

    def _restore_link(self) -> None:
        self._network.config = self._quiet_link
