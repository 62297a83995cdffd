"""`swarm.ExpertServer`: hosts experts in the background of this process, for whoever calls them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from moe.protocol.declarations import Declarations, DeclaringConfig, ServerLoad
from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints
from moe.server.compute import ComputeThread, Counts, Job, Outcome
from moe.server.expert import Expert
from moe.server.hosting import HostingService
from moe.server.logic.batching import BatchingConfig
from moe.server.replicating import Replicating, ReplicatingConfig
from moe.server.requests import Hosted
from swarm.core.errors import DeadlineExceeded, UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["Expert", "ExpertServer", "ExpertServerConfig", "ExpertStatistics", "ServerStatistics"]

_log = logging.getLogger(__name__)

EXPERTS_MAX = 4096
_DECLARE_S = 1.0  # the constructor waits this long at most until others can find the experts
# when the node closes first, which gives its services a second for all of their goodbyes
_DRAIN_WITH_NODE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertServerConfig:
    """Settings that rarely need a change; `batching.batch_samples_max` is the server's `max_batch_size`."""

    batching: BatchingConfig = field(default_factory=BatchingConfig)
    declaring: DeclaringConfig = field(default_factory=DeclaringConfig)
    replicating: ReplicatingConfig = field(default_factory=ReplicatingConfig)
    checkpoints: Path | None = None  # a folder; experts resume from it and are saved to it
    checkpoint_s: float = 60.0  # between saves of what has changed
    drain_s: float = 1.0  # for requests that wait when the server closes


@dataclass(frozen=True, slots=True)
class ExpertStatistics:
    """One expert since the server started."""

    version: int
    counts: Counts
    refusals: dict[str, int]  # by what they were answered with


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """The server as it is now."""

    queued: int
    wait_s: float  # of a request that comes now, expected
    samples_per_s: float  # while it computes
    experts: dict[str, ExpertStatistics]


class ExpertServer:
    """Hosts experts: `{"ffn.0": swarm.Expert(...)}`. It answers as soon as it is made, in the background; a
    context manager.

    Requests of many callers are batched per expert, up to `max_batch_size` samples (also the largest
    request). The experts are declared in the DHT and declarations renewed; `close` finishes what is being
    computed, saves checkpoints and takes the declarations back. UsageError: a name is none, or hosted on this
    node already, or a checkpoint does not fit. `resumed`: experts that came from one.
    """

    def __init__(
        self,
        node: Node,
        experts: Mapping[str, Expert],
        max_batch_size: int = 4096,
        *,
        config: ExpertServerConfig | None = None,
    ) -> None:
        self.config = config or ExpertServerConfig()
        if not 1 <= len(experts) <= EXPERTS_MAX:
            raise UsageError(f"a server hosts 1 to {EXPERTS_MAX} experts, not {len(experts)}")
        if len({id(expert) for expert in experts.values()}) < len(experts):
            raise UsageError("one Expert object cannot be hosted under two names")
        node.network.check()
        batching = replace(
            self.config.batching,
            batch_samples_max=max_batch_size,
            batch_samples_min=min(self.config.batching.batch_samples_min, max_batch_size),
        )
        self.node = node
        self.experts = {ExpertUid.parse(text): expert for text, expert in experts.items()}
        self._checkpoints = (
            ExpertCheckpoints(self.config.checkpoints, self.experts) if self.config.checkpoints else None
        )
        self.resumed = [str(uid) for uid in self._checkpoints.load()] if self._checkpoints else []
        self._saving = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False
        self._compute = ComputeThread(batching, self._deliver)
        self._hosted = [
            Hosted(uid=uid, expert=expert, compute=self._compute, batch_size_max=max_batch_size)
            for uid, expert in self.experts.items()
        ]
        try:
            node.network.run(self._open(), 10.0)
        except BaseException:
            self._compute.stop(1.0)
            raise

    def statistics(self) -> ServerStatistics:
        """Counts and load; any thread."""
        compute = self._compute
        return ServerStatistics(
            queued=compute.queued,
            wait_s=compute.wait_s,
            samples_per_s=compute.samples_per_s,
            experts={
                str(one.uid): ExpertStatistics(
                    version=one.expert.version,
                    counts=replace(compute.counts.get(str(one.uid), Counts())),
                    refusals=dict(one.refusals),
                )
                for one in self._hosted
            },
        )

    def save(self) -> int:
        """Write checkpoints of what has changed, now; how many experts that were."""
        if self._checkpoints is None:
            return 0
        with self._saving:
            try:
                return self._checkpoints.save()
            except OSError as error:
                _log.error("checkpoints of this server's experts were not written: %s", error)
                return 0

    def close(self) -> None:
        """Take the declarations back, finish what is being computed, save. Idempotent; ends with the node at
        the latest.
        """
        if not self.node.network.is_own_process:
            return
        if not self.node.closed:
            try:
                self.node.network.run(self._close_on_loop(self.config.drain_s), self.config.drain_s + 2.0)
            except DeadlineExceeded:
                _log.warning("the server of experts did not end in time")
            self._replicating.close()
        self._compute.stop(0.5)
        self.save()

    def __enter__(self) -> ExpertServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ExpertServer({len(self.experts)} experts{', closed' if self._closed else ''})"

    # --- on the network loop

    async def _open(self) -> None:
        node = self.node
        self._loop = asyncio.get_running_loop()
        self._service = node.service(HostingService)
        self._declarations = Declarations(
            node.dht.service,
            lambda: node.contact,
            {uid: expert.schema.digest for uid, expert in self.experts.items()},
            lambda: ServerLoad(self._compute.wait_s, self._compute.samples_per_s),
            self.config.declaring,
        )
        try:
            self._service.open(self._hosted)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._replicating = Replicating(node, self.experts, self.config.replicating)
        spawn = node.supervisor.spawn
        self._tasks = [
            spawn("declarations of experts", self._declarations.renew, restart=True),
            spawn("averaging with replicas of experts", self._replicating.run, restart=True),
        ]
        if self._checkpoints is not None:
            self._tasks.append(spawn("checkpoints of experts", self._save_now_and_then, restart=True))
        node.at_close(self._close_with_node)
        try:
            async with asyncio.timeout(_DECLARE_S):
                await self._declarations.declared.wait()
        except TimeoutError:
            return

    async def _close_with_node(self) -> None:
        await self._close_on_loop(_DRAIN_WITH_NODE_S)

    async def _close_on_loop(self, drain_s: float) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        for task in self._tasks:
            task.cancel()
        withdrawing = self.node.supervisor.spawn("withdrawing experts", self._declarations.withdraw)
        self._service.close(self._hosted)
        await self._service.drained(self._hosted, drain_s)
        self._compute.halt()
        self._service.dropped(self._hosted, "its server is leaving")
        await asyncio.wait([withdrawing])

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self.config.checkpoint_s)
            await asyncio.get_running_loop().run_in_executor(None, self.save)

    def _deliver(self, done: list[tuple[Job, Outcome]]) -> None:
        """From the computing thread."""
        try:
            self._loop.call_soon_threadsafe(self._service.finished, done)
        except RuntimeError:
            return  # the node was closed meanwhile: nobody waits
