"""One expert that several servers may host: ask the best of them, a second one when it is slow, another when it fails.

Only a forward pass is asked of several. Its backward pass goes to the server that answered; repeated there, if the answer was lost, it is
applied once. Lives on the network loop; shared by all callers of a node, so that they learn from each other whom to avoid.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from moe.calls import AS_THEY_ARE, Backwarded, Described, ExpertCalls, Forwarded, GradientPass, Travel
from moe.declarations import Directory, Replica
from moe.errors import ExpertApplied, ExpertError, ExpertFailed, ExpertMissing, ExpertRefused
from moe.health import Health, HealthConfig
from moe.schema import Schema
from moe.uid import ExpertUid
from swarm.errors import DeadlineExceeded, NetworkError, NotEnoughPeers, PeerError, SwarmError, UsageError

if TYPE_CHECKING:
    from swarm.node import Node

_lock = threading.Lock()
_asking: weakref.WeakKeyDictionary[Node, Asking] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingConfig:
    """How replicas are found and tried."""

    fresh_s: float = 10.0  # who hosts an expert is read again after this long
    read_timeout_s: float = 5.0
    replicas_tried_max: int = 8  # for one forward pass
    experts_max: int = 65536  # whose replicas are remembered
    backward_tries: int = 3  # when the connection broke, or an answer was lost
    health: HealthConfig = field(default_factory=HealthConfig)


@dataclass(frozen=True, slots=True)
class Answered:
    """A forward pass, and who made it."""

    replica: Replica
    forwarded: Forwarded


@dataclass(slots=True)
class _Found:
    replicas: tuple[Replica, ...]
    read_s: float


class Asking:
    """`of` gives the one of a node."""

    def __init__(
        self,
        calls: Described,
        directory: Directory,
        config: AskingConfig | None = None,
        spawn: Callable[[str, Callable[[], Awaitable[None]]], object] | None = None,
    ) -> None:
        """`spawn`: runs what nobody waits for (a node's supervisor does); without it calls wait while replicas are read again."""
        self.calls, self.directory = calls, directory
        self._spawn = spawn
        self._refreshing: set[ExpertUid] = set()
        self.config = config or AskingConfig()
        self.health = Health(self.config.health)  # by (PeerId, ExpertUid)
        self._found: OrderedDict[ExpertUid, _Found] = OrderedDict()

    @classmethod
    def of(cls, node: Node) -> Asking:
        """The one of this node. To be called on its network loop."""
        with _lock:
            asking = _asking.get(node)
            if asking is None:
                asking = _asking[node] = cls(ExpertCalls.of(node), Directory(node.dht.service), spawn=node.supervisor.spawn)
            return asking

    async def replicas(self, uid: ExpertUid, *, timeout_s: float, fresh: bool = False) -> tuple[Replica, ...]:
        """Who hosts an expert, as far as known. NotEnoughPeers when nobody does; NetworkError when the DHT cannot say."""
        now_s = asyncio.get_running_loop().time()
        found = self._found.get(uid)
        stale = found is not None and now_s - found.read_s > self.config.fresh_s
        if stale and found is not None and found.replicas and not fresh and self._spawn is not None:
            if uid not in self._refreshing:  # those known until now serve meanwhile
                self._refreshing.add(uid)
                self._spawn(f"replicas of {uid}", lambda: self._refresh(uid))
        elif found is None or fresh or stale:
            limit_s = min(timeout_s, self.config.read_timeout_s)
            try:
                read = (await self.directory.replicas([uid], timeout_s=limit_s))[uid]
            except NetworkError:
                if found is None or not found.replicas:
                    raise
                read = found.replicas
            found = _Found(read, now_s)
            if read:
                self.learn(uid, read)
        if not found.replicas:
            raise NotEnoughPeers(f"nobody hosts {uid}: no live declaration of it is in the DHT. Is its server up, and in this swarm?")
        return found.replicas

    async def _refresh(self, uid: ExpertUid) -> None:
        try:
            read = (await self.directory.replicas([uid], timeout_s=self.config.read_timeout_s)).get(uid, ())
        except NetworkError:
            return
        finally:
            self._refreshing.discard(uid)
        if read:
            self.learn(uid, read)
        else:
            self._found.pop(uid, None)

    async def schema(self, uid: ExpertUid, *, timeout_s: float) -> Schema:
        """The expert's, as the first of its replicas says that answers."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        problem: SwarmError | None = None
        for replica in self.ranked(uid, await self.replicas(uid, timeout_s=timeout_s)):
            try:
                return await self.calls.schema_of(replica, uid, timeout_s=max(deadline_s - loop.time(), 0.001))
            except (PeerError, NetworkError) as error:
                self.health.failed((replica.peer_id, uid), loop.time())
                problem = error
        assert problem is not None  # there is at least one replica
        raise problem

    def learn(self, uid: ExpertUid, replicas: Sequence[Replica]) -> None:
        """Somebody has read just now who hosts this expert (a beam search reads many together)."""
        self._found[uid] = _Found(tuple(replicas), asyncio.get_running_loop().time())
        self._found.move_to_end(uid)
        if len(self._found) > self.config.experts_max:
            self._found.popitem(last=False)

    def forget(self, uid: ExpertUid, replica: Replica) -> None:
        """It does not host this expert any more."""
        found = self._found.get(uid)
        if found is not None:
            found.replicas = tuple(one for one in found.replicas if one.peer_id != replica.peer_id)
            if not found.replicas:
                del self._found[uid]

    def ranked(self, uid: ExpertUid, replicas: Sequence[Replica]) -> list[Replica]:
        """Best first: those who failed lately last, then by the wait that they announce and the time that they usually take."""
        now_s = asyncio.get_running_loop().time()

        def rank(replica: Replica) -> tuple[float, float]:
            who = (replica.peer_id, uid)
            avoided_s = self.health.avoided_until_s(who) if self.health.avoided(who, now_s) else 0.0
            return avoided_s, self.health.expected_s(who, now_s) + replica.load.wait_s

        return sorted(replicas, key=rank)

    async def forward(
        self,
        uid: ExpertUid,
        inputs: Sequence[torch.Tensor],
        *,
        timeout_s: float,
        travel: Travel = AS_THEY_ARE,
        keep: bool = False,
    ) -> Answered:
        """The first answer of any replica. What the last of those said that failed is raised when none gives one."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        known = self.ranked(uid, await self.replicas(uid, timeout_s=timeout_s))
        race = _Race(self, uid, inputs, travel, keep)
        try:
            return await race.run(known[: self.config.replicas_tried_max], deadline_s)
        except (NetworkError, ExpertMissing):
            # all that were known may have left since they were read
            if loop.time() >= deadline_s:
                raise
            tried = {replica.peer_id for replica in known}
            fresh = await self.replicas(uid, timeout_s=deadline_s - loop.time(), fresh=True)
            others = [replica for replica in fresh if replica.peer_id not in tried]
            if not others:
                raise
            return await race.run(self.ranked(uid, others)[: self.config.replicas_tried_max], deadline_s)

    async def ask(
        self, replica: Replica, uid: ExpertUid, inputs: Sequence[torch.Tensor], *, timeout_s: float, travel: Travel, keep: bool
    ) -> Answered:
        """One replica; how it went is remembered."""
        loop, who = asyncio.get_running_loop(), (replica.peer_id, uid)
        begun_s = loop.time()
        try:
            forwarded = await self.calls.forward(replica, uid, inputs, timeout_s=timeout_s, travel=travel, keep=keep)
        except UsageError:  # ours; ExpertRefused, too
            raise
        except (PeerError, NetworkError) as error:
            self.health.failed(who, loop.time())
            if isinstance(error, ExpertMissing):
                self.forget(uid, replica)
            raise
        self.health.answered(who, loop.time() - begun_s, loop.time())
        return Answered(replica, forwarded)

    async def backward(
        self, answered: Answered, uid: ExpertUid, tensors: GradientPass, *, timeout_s: float, travel: Travel = AS_THEY_ARE
    ) -> Backwarded:
        """At the replica that answered; tried again while there is time when the network fails or its queue is full."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        pause_s = 0.05
        for left in range(self.config.backward_tries - 1, -1, -1):
            # an answer that was lost is asked for again while there is time for it
            limit_s = (deadline_s - loop.time()) * (0.6 if left else 1.0)
            try:
                return await self.calls.backward(
                    answered.replica, uid, answered.forwarded, tensors, timeout_s=max(limit_s, 0.001), travel=travel
                )
            except (ExpertRefused, ExpertMissing, ExpertApplied, ExpertFailed, UsageError):
                raise
            except (ExpertError, NetworkError) as error:
                if not left or loop.time() + pause_s >= deadline_s:
                    self.health.failed((answered.replica.peer_id, uid), loop.time())
                    raise
                if not isinstance(error, DeadlineExceeded):
                    await asyncio.sleep(pause_s)
                    pause_s *= 2
        raise AssertionError("the last try raises")


class _Race:
    """A forward pass among replicas."""

    def __init__(self, asking: Asking, uid: ExpertUid, inputs: Sequence[torch.Tensor], travel: Travel, keep: bool) -> None:
        self._asking, self._uid, self._inputs, self._travel, self._keep = asking, uid, inputs, travel, keep

    async def run(self, replicas: Sequence[Replica], deadline_s: float) -> Answered:
        """One after the other, the next when those before have failed or are slow; the first answer ends it."""
        loop = asyncio.get_running_loop()
        if len(replicas) == 1:
            return await self._ask(replicas[0], deadline_s)
        left, running, error = list(replicas), set[asyncio.Task[Answered | SwarmError]](), None
        async with asyncio.TaskGroup() as tasks:
            try:
                while left or running:
                    patience_s: float | None = None
                    if left:
                        replica = left.pop(0)
                        running.add(tasks.create_task(self._attempt(replica, deadline_s)))
                        patience_s = self._asking.health.hedge_s((replica.peer_id, self._uid)) if left else None
                    done, running = await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        outcome = task.result()
                        if isinstance(outcome, Answered):
                            return outcome
                        error = outcome
                        if isinstance(outcome, UsageError):
                            left.clear()  # the request's own fault: nobody else would take it
                    if loop.time() >= deadline_s:
                        left.clear()
            finally:
                for task in running:
                    task.cancel()
        assert error is not None
        raise error

    async def _attempt(self, replica: Replica, deadline_s: float) -> Answered | SwarmError:
        try:
            return await self._ask(replica, deadline_s)
        except SwarmError as error:
            return error

    async def _ask(self, replica: Replica, deadline_s: float) -> Answered:
        timeout_s = max(deadline_s - asyncio.get_running_loop().time(), 0.001)
        return await self._asking.ask(replica, self._uid, self._inputs, timeout_s=timeout_s, travel=self._travel, keep=self._keep)
