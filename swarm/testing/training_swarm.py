"""A simulated swarm that trains: the production DHT, matchmaking, rounds, progress, histories, states and the
`Optimizer`, on the simulated network and virtual time.

Each peer trains the same tiny model. Its gradient is the distance to a point of its own, so that the
parameters stay bounded and no two rounds have the same average.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from averaging.optim.config import OptimizerConfig
from averaging.optim.optimizer import Optimizer
from averaging.optim.reports import StepReport
from averaging.optim.state.checkpoint import read, write
from swarm.core.ids import Contact, PeerId, open_run_id
from swarm.core.presets import WAN, Timings
from swarm.core.standing import PeerStanding
from swarm.dht.service.dht_service import DhtService
from swarm.net.peerbook import KnownPeer
from swarm.node import NodeConfig
from swarm.runtime.services import Services
from swarm.testing.chance import Chance
from swarm.testing.dht_swarm import service_of
from swarm.testing.green_threads import GreenNetwork
from swarm.testing.network import SimulatedNetwork, SimulatedPeer

ServiceT = TypeVar("ServiceT")

RUN = open_run_id("simulated")
_LATER_EPOCHS_MAX = 4  # that a liar claims
_JOIN_S = 0.2  # longest wait for the first answer of a peer, as in `swarm.Node`
_LEAVE_S = 1.0  # for the goodbyes of one service of a peer that leaves


class GreenDht:
    """The part of `swarm.dht.handle.Dht` that an optimizer uses."""

    def __init__(self, service: DhtService) -> None:
        self.service = service

    @property
    def clock_problem(self) -> str | None:
        return self.service.clock_problem

    @property
    def identity_problem(self) -> str | None:
        return self.service.identity_problem


class GreenNode:
    """A node whose threads are green: the interface of `swarm.Node` that an optimizer uses."""

    def __init__(self, peer: SimulatedPeer, incarnation: int) -> None:
        """`incarnation`: how often this peer has been restarted."""
        self.peer = peer
        self.identity, self.peer_id = peer.identity, peer.peer_id
        self.clock, self.handlers, self.channels = peer.clock, peer.handlers, peer.caller
        self.supervisor = peer.supervisor
        self.timings: Timings = WAN
        self.rng: random.Random = Chance(peer.network.seed, "node", peer.index, incarnation)
        self.config = NodeConfig()
        self.bandwidth = self.config.bandwidth
        self.agent, self.reach, self.closed = "swarm/simulated", "direct", False
        self.join_failures: list[str] = []
        self.introducers: tuple[PeerId, ...] = ()
        self.network = GreenNetwork()
        self.dht = GreenDht(service_of(peer))
        self.standing: PeerStanding = self.dht.service.standing
        self._services = Services(self)
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._at_announced: list[Callable[[], None]] = []
        self.at_close(self.dht.service.leave)

    @property
    def contact(self) -> Contact:
        return self.peer.contact

    def peers(self) -> list[KnownPeer]:
        """Return the entries of the peer book."""
        return self.peer.book.known()

    def service(self, kind: Callable[[GreenNode], ServiceT]) -> ServiceT:
        """Return this node's single instance of a service."""
        return self._services.get(kind)

    def at_close(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Run `callback` when the node leaves; the returned function removes it."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def at_announced(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` when `announce` is called; the returned function removes it."""
        self._at_announced.append(callback)
        return lambda: self._at_announced.remove(callback) if callback in self._at_announced else None

    def announce(self, contact: Contact) -> None:
        """Change the addresses or relays through which this peer is called."""
        self.peer.contact = contact
        for callback in list(self._at_announced):
            callback()

    async def leave(self) -> None:
        """Say goodbye and stop all services."""
        self.closed = True
        for callback in reversed(self._callbacks):
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await callback()
            except TimeoutError:
                continue


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The settings that all peers of a simulated training have in common."""

    target_batch_size: int = 64
    elements: int = 3  # of the model
    mode: Any = "gradients"
    round_timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    group_size_max: int = 64  # a larger swarm averages through the grid


@dataclass(slots=True, eq=False, weakref_slot=True)
class TrainingPeer:
    """One process that trains; a restart makes another one for the same simulated peer."""

    peer: SimulatedPeer
    node: GreenNode
    config: TrainingConfig
    batch: int  # samples of one step
    compute_s: float  # of one step
    on_step: Callable[[TrainingPeer, StepReport, float], None]  # with the duration of the call
    checkpoint: dict[str, Any] | bytearray | None = None  # to begin with: of `save`, or of `save_state`
    parameters: list[torch.Tensor] = field(default_factory=list)
    optimizer: Optimizer | None = None
    stepping_since_s: float | None = None  # None: it computes
    given: int = 0  # samples of all steps
    leaving: bool = False
    hangs: bool = False  # its trainer makes no step, while its network answers
    lies: bool = False  # it claims later epochs, and sends a state that does not belong to its head

    @property
    def index(self) -> int:
        return self.peer.index

    @property
    def restored(self) -> int | None:
        """Return how many samples it has carried over from its checkpoint; None: it is not known."""
        if isinstance(self.checkpoint, bytearray):
            return None
        kept = self.checkpoint["optimizer"]["swarm"]["accumulated"] if self.checkpoint is not None else {}
        return int(kept.get("samples", kept.get("total", 0) - kept.get("counted", 0)))

    @property
    def overlaps(self) -> bool:
        """Return whether rounds run while training continues."""
        mode = self.config.mode
        return bool(getattr(mode, "delayed", False)) or getattr(mode, "streaming", 1) > 1

    def train(self) -> None:
        """Train until the peer leaves; the body of its green thread."""
        chance, loop = Chance(self.peer.network.seed, "trainer", self.index), self.node.network.loop
        goal = torch.tensor([chance.random() for _ in range(self.config.elements)])
        weights = torch.nn.Parameter(torch.zeros_like(goal))
        self.parameters = [weights]
        inner = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        node: Any = self.node
        self.optimizer = optimizer = Optimizer(
            inner,
            node=node,
            run=RUN,
            target_batch_size=self.config.target_batch_size,
            mode=self.config.mode,
            config=OptimizerConfig(
                round_timeout_s=self.config.round_timeout_s,
                load_timeout_s=self.config.load_timeout_s,
                group_size_max=self.config.group_size_max,
                publish_metrics=False,
            ),
        )
        if isinstance(self.checkpoint, bytearray):
            optimizer.load_state(self.checkpoint)
        elif self.checkpoint is not None:
            with torch.no_grad():
                weights.copy_(self.checkpoint["weights"])
            optimizer.load_state_dict(self.checkpoint["optimizer"])
        pause = self.node.network.waits
        if self.lies:
            self._claim_later_epochs(chance)
        while not self.leaving:
            pause.event().wait(self.compute_s * chance.uniform(0.9, 1.1))
            if self.hangs:
                continue
            weights.grad = (weights.detach() - goal) * chance.uniform(0.5, 1.5)
            self.stepping_since_s = began_s = loop.time()
            report = optimizer.step(self.batch)
            self.stepping_since_s = None
            self.given += self.batch
            self.on_step(self, report, loop.time() - began_s)
            if self.lies:
                with torch.no_grad():
                    weights.add_(0.1)
        optimizer.close()
        self.node.network.run(self.node.leave())

    def _claim_later_epochs(self, chance: Chance) -> None:
        """Let this peer's records of progress name epochs that no peer has reached."""
        service: Any = self.node.dht.service
        store = service.store

        async def lying_store(key: Any, value: Any, **options: Any) -> Any:
            if isinstance(value, dict) and isinstance(value.get("epoch"), int):
                value = {**value, "epoch": value["epoch"] + chance.below(_LATER_EPOCHS_MAX)}
            return await store(key, value, **options)

        service.store = lying_store

    def save(self) -> dict[str, Any] | None:
        """Return a checkpoint, or None when there is nothing to save yet."""
        if self.optimizer is None or not self.optimizer.epoch:
            return None
        return {
            "weights": self.parameters[0].detach().clone(),
            "optimizer": self.optimizer.state_dict(),
        }

    def save_state(self, path: Path) -> bytearray:
        """Write a checkpoint as volunteers do, and return what is read from it."""
        assert self.optimizer is not None
        with contextlib.closing(self.optimizer.state_view()) as view:
            write(view, path, ["weights"])
        return read(path).blob


class TrainingSwarm:
    """All peers of a simulated training, those that have ended included."""

    def __init__(
        self,
        network: SimulatedNetwork,
        config: TrainingConfig,
        on_step: Callable[[TrainingPeer, StepReport, float], None],
        group: asyncio.TaskGroup,
        entry_points: Sequence[SimulatedPeer] = (),
    ) -> None:
        """`group`: the parent of all processes. An exception of a trainer ends the group; network failures
        are in reports. `entry_points`: peers that do not train, by which others enter.
        """
        self.network, self.config = network, config
        self._entry_points = tuple(entry_points)
        self.live: dict[PeerId, TrainingPeer] = {}
        self._on_step, self._group = on_step, group
        self._incarnations: dict[PeerId, int] = {}

    async def add(
        self,
        *,
        batch: int = 4,
        compute_s: float = 1.0,
        peer: SimulatedPeer | None = None,
        checkpoint: dict[str, Any] | bytearray | None = None,
        lies: bool = False,
    ) -> TrainingPeer:
        """Start a process: of a new peer, or again of one that has ended."""
        if peer is None:
            peer = self.network.peer()
        else:
            self.network.restart(peer)
        incarnation = self._incarnations.get(peer.peer_id, -1) + 1
        self._incarnations[peer.peer_id] = incarnation
        node = GreenNode(peer, incarnation)
        others = (other.peer for other in self.live.values())
        entries = [other.contact for other in (*self._entry_points, *others) if other.up][:3]
        made = TrainingPeer(peer, node, self.config, batch, compute_s, self._on_step, checkpoint=checkpoint)
        made.lies = lies
        self.live[peer.peer_id] = made
        if entries:
            joining = peer.supervisor.spawn("joining", lambda: node.dht.service.join(entries))
            await asyncio.wait([joining], timeout=_JOIN_S)
        self._group.create_task(self._run(made))
        return made

    async def _run(self, made: TrainingPeer) -> None:
        await made.node.network.run_thread(made.train)
        if self.live.get(made.peer.peer_id) is made:  # it has left
            await self.kill(made)

    async def kill(self, one: TrainingPeer) -> None:
        """Kill a process."""
        self.live.pop(one.peer.peer_id, None)
        one.node.network.kill()
        await self.network.crash(one.peer)

    async def close(self) -> None:
        """Kill all processes."""
        for one in list(self.live.values()):
            await self.kill(one)
        await self.network.close()
