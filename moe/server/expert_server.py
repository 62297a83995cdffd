"""`swarm.ExpertServer`: hosts experts in the background of this process, for any caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe.protocol.declarations import Declarations, ServerLoad
from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints
from moe.server.compute import ComputeThread
from moe.server.devices import DeviceFailed
from moe.server.expert import Expert
from moe.server.hosting import HostingService
from moe.server.jobs import Counts, Job, Outcome
from moe.server.joint_steps import JointSteps
from moe.server.links import link_of
from moe.server.logic.batching import BatchLimits
from moe.server.logic.placement import BusyMeter
from moe.server.replicating import Replicating
from moe.server.requests import HostedExpert
from swarm.core.device import is_device_failure
from swarm.core.errors import DeadlineExceeded, SwarmError, UsageError
from swarm.core.notify import wait_until_set
from swarm.runtime.thread import TURN_S_MAX

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["Expert", "ExpertServer", "ExpertServerConfig", "ExpertStatistics", "ServerStatistics"]

_log = logging.getLogger(__name__)

EXPERTS_MAX = 4096
_DECLARE_S = 1.0  # how long the constructor waits until others can find the experts
# how long it waits for states that are taken over; those that take longer arrive in the background
_START_S_MAX = 30.0
# Results of quick experts come together within this time. Too small: threads take turns at Python's lock; too
# large: answers come late.
_DELIVER_S = 0.002
_DRAIN_S = 1.0  # time for waiting requests when the server closes
# when the node closes first: it gives its services one second in all
_DRAIN_WITH_NODE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertServerConfig:
    """Settings of `swarm.ExpertServer` in addition to its arguments."""

    checkpoints: Path | None = None  # folder from which experts resume and to which they are saved
    checkpoint_s: float = 60.0  # time between saves of changed experts
    # time between two averages of experts with their replicas on other servers, the same on all of them; 0:
    # never
    average_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ExpertStatistics:
    """Statistics of one expert since the server started."""

    version: int
    counts: Counts
    refusals: dict[str, int]  # by status of the reply


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """The present state of the server."""

    queued: int  # requests, over all devices
    # expected wait of a new request; the mean over the experts, which may be on several devices
    wait_s: float
    samples_per_s: float  # throughput while computing; the sum over all devices
    experts: dict[str, ExpertStatistics]


class ExpertServer:
    """Hosts experts and answers calls in the background. A context manager.

    If other servers host an expert, too, this server first takes over its state (parameters, optimizer,
    buffers) and serves it from then on as a replica. The constructor waits up to half a minute for that.
    Requests of many callers are batched per expert. Experts may be on several devices, each of which computes
    independently. The experts are declared in the DHT and their declarations renewed. `close` finishes the
    current computations, saves checkpoints and withdraws the declarations. `resumed` lists the experts that
    were restored from a checkpoint.

    Args:
        node: This process as a peer.
        experts: Experts by name: `{"ffn.0": swarm.Expert(...)}`.
        max_batch_size: Samples of the largest batch, and of the largest request.
        config: Checkpoints and averaging with replicas; None: the defaults.

    `ended` is set when the server has ended: it was closed, or a device failed in a way that only a new
    process recovers from, such as an index out of range on a GPU. After such a failure `failed` describes it
    in a sentence (otherwise it is None), all experts are withdrawn, and nothing on that device is saved any
    more.

    Raises:
        UsageError: When a name is invalid or hosted on this node already, or a checkpoint does not fit.
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
        limits = BatchLimits(batch_samples_max=max_batch_size)
        self.node = node
        self.experts = {ExpertUid.parse(text): expert for text, expert in experts.items()}
        self._checkpoints = (
            ExpertCheckpoints(self.config.checkpoints, self.experts) if self.config.checkpoints else None
        )
        self.resumed = [str(uid) for uid in self._checkpoints.load()] if self._checkpoints else []
        self._saving = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False
        self._delivered: list[tuple[Job, Outcome]] = []  # results for the network loop
        self._wakes_in_s: float | None = None  # it will take them after this time; None: it was not woken
        self._taking: asyncio.TimerHandle | None = None
        self.failed: str | None = None
        self.ended = threading.Event()
        self._failed_devices: set[torch.device] = set()
        self._compute = {
            device: ComputeThread(limits, self._deliver, self._device_failed, device, link_of(device))
            for device in dict.fromkeys(expert.device for expert in self.experts.values())
        }
        self._hosted = [
            HostedExpert(
                uid=uid, expert=expert, compute=self._compute[expert.device], batch_size_max=max_batch_size
            )
            for uid, expert in self.experts.items()
        ]
        try:
            node.network.run(self._open(), TURN_S_MAX)
        except BaseException:
            self._stop_computing(1.0)
            raise

    def statistics(self) -> ServerStatistics:
        """Return counts and load. Any thread may call it."""
        load = self._load()
        return ServerStatistics(
            queued=sum(compute.queued for compute in self._compute.values()),
            wait_s=load.wait_s,
            samples_per_s=load.samples_per_s,
            experts={
                str(one.uid): ExpertStatistics(
                    version=one.expert.version,
                    counts=replace(one.compute.counts.get(str(one.uid), Counts())),
                    refusals=dict(one.refusals),
                )
                for one in self._hosted
            },
        )

    def _load(self) -> ServerLoad:
        """Return the load of all devices. The wait is the mean over experts, since a declaration has one
        number for the whole server.
        """
        waits_s = {compute: compute.wait_s for compute in self._compute.values()}
        wait_s = sum(waits_s[one.compute] for one in self._hosted) / len(self._hosted)
        return ServerLoad(wait_s, sum(compute.samples_per_s for compute in self._compute.values()))

    def _declared_load(self) -> ServerLoad:
        """Return the load with how busy the devices are, for declarations. Runs on the network loop."""
        counts = [one for compute in self._compute.values() for one in list(compute.counts.values())]
        busy_s = sum(one.busy_s for one in counts) / len(self._compute)
        return replace(self._load(), busy=self._busy.fraction(busy_s, time.monotonic()))

    def save(self) -> int:
        """Write checkpoints of experts that have changed. Return the number of experts written."""
        if self._checkpoints is None:
            return 0
        with self._saving:
            try:
                return self._checkpoints.save(self._failed_devices)
            except SwarmError as error:
                _log.error("checkpoints of this server's experts were not written: %s", error)
            except DeviceFailed as failure:
                self._device_failed(failure)
            return 0

    def close(self) -> None:
        """Withdraw the declarations, finish what is being computed, and save. May be called again; the server
        is closed with the node at the latest.
        """
        if not self.node.network.is_own_process:
            return
        if not self.node.closed:
            try:
                self.node.network.run(self._close_on_loop(_DRAIN_S), _DRAIN_S + 2.0)
            except DeadlineExceeded:
                _log.warning("the server of experts did not end in time")
            self.ended.wait(_DRAIN_S + 2.0)  # a failed device may be closing the server already
            try:
                self.replicating.close()
                self.joint.close()
            except RuntimeError as error:
                if not is_device_failure(error):
                    raise
        self._stop_computing(0.5)
        self.save()
        self.ended.set()

    def __enter__(self) -> ExpertServer:
        return self

    def __exit__(self, *_: object) -> None:
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
            self._declared_load,
        )
        self._busy = BusyMeter(time.monotonic())
        try:
            self._service.reserve(self._hosted)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self.replicating = Replicating(node, self.experts, self.config.average_s)
        self.joint = JointSteps(node, self.experts)
        self._ready = asyncio.Event()
        self._tasks = [node.supervisor.spawn("opening experts", self._begin, restart=True)]
        node.at_close(self._close_with_node)
        self._forget_addresses = node.at_announced(self._declarations.renew_soon)
        if await wait_until_set(self._ready, _START_S_MAX):
            await wait_until_set(self._declarations.declared, _DECLARE_S)

    async def _begin(self) -> None:
        """Take over the states of replicas, then answer calls and declare the experts."""
        await self.replicating.take_over()
        self._service.open(self._hosted, self.joint.experts if self.config.average_s else {})
        spawn = self.node.supervisor.spawn
        self._tasks += [
            spawn("declarations of experts", self._declarations.renew, restart=True),
            spawn("averaging with replicas of experts", self.replicating.run, restart=True),
        ]
        if self.config.average_s:
            self._tasks.append(spawn("joint steps of experts", self.joint.run, restart=True))
        if self._checkpoints is not None:
            self._tasks.append(spawn("checkpoints of experts", self._save_periodically, restart=True))
        self._ready.set()

    async def _close_with_node(self) -> None:
        await self._close_on_loop(_DRAIN_WITH_NODE_S)

    async def _close_on_loop(self, drain_s: float) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        for task in self._tasks:
            task.cancel()
        self._forget_addresses()
        withdrawing = self.node.supervisor.spawn("withdrawing experts", self._declarations.withdraw)
        self._service.close(self._hosted)
        if self.failed is not None:
            self._service.runner.drop_waiting(
                [one for one in self._hosted if one.expert.device in self._failed_devices], self.failed
            )
        await self._service.runner.drain(self._hosted, drain_s)
        for compute in self._compute.values():
            compute.halt()
        self._service.runner.drop_waiting(self._hosted, self.failed or "its server is leaving")
        await asyncio.wait([withdrawing])
        self.ended.set()

    async def _save_periodically(self) -> None:
        while True:
            await asyncio.sleep(self.config.checkpoint_s)
            await asyncio.get_running_loop().run_in_executor(None, self.save)

    def _device_failed(self, failure: DeviceFailed) -> None:
        """Withdraw everything, so that the owner can end the process. Called on a computing thread, or by a
        thread that saves.
        """
        self._failed_devices.add(failure.device)
        if self.failed is None:
            _log.error("this server of experts ends: %s", failure)
            self.failed = str(failure)
        with contextlib.suppress(RuntimeError):  # the node was closed meanwhile
            self._loop.call_soon_threadsafe(self._end_failed)

    def _end_failed(self) -> None:
        self.node.supervisor.spawn("ending a failed server of experts", self._close_with_node)

    def _stop_computing(self, timeout_s: float) -> None:
        for compute in self._compute.values():
            compute.halt()
        for compute in self._compute.values():
            compute.stop(timeout_s)

    def _deliver(self, done: list[tuple[Job, Outcome]], more_follow: bool) -> None:
        """Hand results to the network loop. Called on a computing thread. The loop is woken once for all
        results that come before it runs, or within `_DELIVER_S` if more follow: the two threads would
        otherwise take turns at Python's lock for every batch of quick experts.
        """
        wait_s = _DELIVER_S if more_follow else 0.0
        with self._lock:
            self._delivered += done
            if self._wakes_in_s is not None and self._wakes_in_s <= wait_s:
                return
            self._wakes_in_s = wait_s
        try:
            self._loop.call_soon_threadsafe(self._take_later if more_follow else self._take_delivered)
        except RuntimeError:
            return  # the node was closed meanwhile: no call waits

    def _take_later(self) -> None:
        if self._taking is None and self._wakes_in_s:
            self._taking = self._loop.call_later(self._wakes_in_s, self._take_delivered)

    def _take_delivered(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None
        with self._lock:
            done, self._delivered, self._wakes_in_s = self._delivered, [], None
        self._service.runner.on_results(done)
