"""A cache of the expert directory: prefixes are read from the DHT when they are needed, and kept for a while.

Training steps ask for the same few prefixes again and again. A cached prefix is used at once; when it is no
longer fresh it is read again in the background, so only the first step waits for the DHT. Replicas whose
declarations have expired are removed from answers, however fresh the rest is. When there are too many
prefixes, the one that was not asked for the longest is dropped.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe.protocol.declarations import ExpertReplica, GridBranch
from moe.protocol.names import ExpertUid
from swarm.core.clock import Clock
from swarm.core.errors import NetworkError
from swarm.runtime.supervise import Supervisor

_log = logging.getLogger(__name__)

_READ_TIMEOUT_S = 5.0


# age up to which a cached prefix is used without reading again. Too small: constant DHT reads; too large: new
# servers are found late
FRESH_S = 2.0
STALE_S = 60.0  # used while it is read again in the background; when older, a step waits
EMPTY_S = 0.5  # how long an empty branch is cached
PREFIXES_MAX = 4096  # prefixes in the cache


class BranchReader(Protocol):
    """The reads that the cache needs; `moe.protocol.declarations.Directory` makes them from the DHT, tests
    from a table.
    """

    async def branches(
        self, prefixes: Sequence[ExpertUid], *, timeout_s: float, max_age_s: float | None = None
    ) -> dict[ExpertUid, GridBranch]: ...


@dataclass(slots=True)
class _CachedBranch:
    branch: GridBranch
    read_s: float


class ExpertDirectoryCache:
    """Caches the experts declared below each prefix. Lives on the network loop and is shared by all layers of
    a node.
    """

    def __init__(
        self,
        directory: BranchReader,
        clock: Clock,
        supervisor: Supervisor,
        prefixes_max: int = PREFIXES_MAX,
    ) -> None:
        self._directory, self._clock, self._supervisor = directory, clock, supervisor
        self._prefixes_max = prefixes_max
        self._cached: OrderedDict[ExpertUid, _CachedBranch] = OrderedDict()
        self._refreshing: set[ExpertUid] = set()
        self.reads = 0  # number of DHT reads

    async def branches(
        self, prefixes: Sequence[ExpertUid], *, timeout_s: float, refresh: bool = False
    ) -> dict[ExpertUid, GridBranch]:
        """Return what lies below each prefix, without expired replicas. `refresh` asks the DHT in any case.

        When the DHT does not answer, cached branches are returned. Raises NetworkError when there are none.
        """
        now_s = self._clock.monotonic_s()
        unknown, aging = [], []
        for prefix in prefixes:
            cached = self._cached.get(prefix)
            age_s = now_s - cached.read_s if cached is not None else float("inf")
            is_empty = cached is not None and not cached.branch.coordinates
            if refresh or age_s > (EMPTY_S if is_empty else STALE_S):
                unknown.append(prefix)
            elif age_s > FRESH_S and prefix not in self._refreshing:
                aging.append(prefix)
        if aging:
            self._refreshing.update(aging)
            self._supervisor.spawn("reading the directory of experts", lambda: self._refresh(aging))
        if unknown:
            try:
                await self._read(unknown, min(timeout_s, _READ_TIMEOUT_S))
            except NetworkError as error:
                if not any(prefix in self._cached for prefix in prefixes):
                    raise
                _log.info("the DHT cannot be read, cached experts are used: %s", error)
        return {prefix: self._live(prefix) for prefix in prefixes}

    async def replicas(
        self, uid: ExpertUid, *, timeout_s: float, refresh: bool = False
    ) -> tuple[ExpertReplica, ...]:
        """Return the replicas that host this expert."""
        prefix = uid.prefix
        cached = None if refresh else self._cached.get(prefix)
        if (
            cached is not None
            and cached.branch.coordinates
            and self._clock.monotonic_s() - cached.read_s <= FRESH_S
        ):  # most calls find it so
            return self._live(prefix).experts.get(uid.coordinates[-1], ())
        found = await self.branches([prefix], timeout_s=timeout_s, refresh=refresh)
        return found[prefix].experts.get(uid.coordinates[-1], ())

    def __len__(self) -> int:
        return len(self._cached)

    def _live(self, prefix: ExpertUid) -> GridBranch:
        cached = self._cached.get(prefix)
        if cached is None:
            return GridBranch()
        self._cached.move_to_end(prefix)
        swarm_s = self._clock.swarm_s()
        experts = cached.branch.experts
        if all(replica.expiration > swarm_s for replicas in experts.values() for replica in replicas):
            return cached.branch
        live = {
            place: tuple(one for one in replicas if one.expiration > swarm_s)
            for place, replicas in experts.items()
        }
        cached.branch = GridBranch(
            {place: replicas for place, replicas in live.items() if replicas}, cached.branch.deeper
        )
        return cached.branch

    async def _refresh(self, prefixes: Sequence[ExpertUid]) -> None:
        try:
            await self._read(prefixes, _READ_TIMEOUT_S)
        except NetworkError as error:
            _log.debug("the DHT cannot be read, cached experts are used: %s", error)
        finally:
            self._refreshing.difference_update(prefixes)

    async def _read(self, prefixes: Sequence[ExpertUid], timeout_s: float) -> None:
        self.reads += 1
        found: Mapping[ExpertUid, GridBranch] = await self._directory.branches(
            prefixes, timeout_s=timeout_s, max_age_s=EMPTY_S
        )
        now_s = self._clock.monotonic_s()
        for prefix, branch in found.items():
            self._cached[prefix] = _CachedBranch(branch, now_s)
            self._cached.move_to_end(prefix)
        while len(self._cached) > self._prefixes_max:
            self._cached.popitem(last=False)
