"""What this peer knows of which experts there are: read from the DHT when it is needed, and kept for a while.

Steps of training ask for the same few prefixes again and again. What is known is used at once; when it is no
longer fresh it is read anew in the background, so that a step waits for the DHT only the first time. Replicas
whose declarations have expired are dropped on the way out, however fresh the rest is, and so are prefixes
that nobody asked for the longest when there are too many.
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
from swarm.core.errors import NetworkError, UsageError
from swarm.runtime.supervise import Supervisor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasConfig:
    """How old knowledge may be."""

    # used as it is; too small: the DHT is read all the time, too large: new servers are found late
    fresh_s: float = 2.0
    stale_s: float = 60.0  # used while it is read anew in the background; older: a step waits for the reading
    empty_s: float = 0.5  # that nothing is declared is believed for this long
    read_timeout_s: float = 5.0
    prefixes_max: int = 4096  # that are remembered

    def __post_init__(self) -> None:
        if not (
            self.empty_s >= 0.0
            and 0.0 <= self.fresh_s <= self.stale_s
            and self.read_timeout_s > 0.0
            and self.prefixes_max >= 1
        ):
            raise UsageError(
                "an atlas needs 0 <= fresh_s <= stale_s, empty_s of at least 0, a read_timeout_s above 0, room for a prefix"
            )


class ReadsBranches(Protocol):
    """`moe.protocol.declarations.Directory`."""

    async def branches(
        self, prefixes: Sequence[ExpertUid], *, timeout_s: float, max_age_s: float | None = None
    ) -> dict[ExpertUid, GridBranch]: ...


@dataclass(slots=True)
class _Known:
    branch: GridBranch
    read_s: float


class ExpertDirectoryCache:
    """Lives on the network loop; shared by all layers of a node."""

    def __init__(
        self,
        directory: ReadsBranches,
        clock: Clock,
        supervisor: Supervisor,
        config: AtlasConfig | None = None,
    ) -> None:
        self._directory, self._clock, self._supervisor = directory, clock, supervisor
        self._config = config or AtlasConfig()
        self._known: OrderedDict[ExpertUid, _Known] = OrderedDict()
        self._refreshing: set[ExpertUid] = set()
        self.reads = 0  # how often the DHT was asked

    async def look(
        self, prefixes: Sequence[ExpertUid], *, timeout_s: float, anew: bool = False
    ) -> dict[ExpertUid, GridBranch]:
        """What lies below each prefix, without what has expired. `anew`: ask the DHT in any case.

        When the DHT does not answer, what was known before is the answer; NetworkError when nothing was.
        """
        now_s = self._clock.monotonic_s()
        unknown, aging = [], []
        for prefix in prefixes:
            known = self._known.get(prefix)
            age_s = now_s - known.read_s if known is not None else float("inf")
            is_empty = known is not None and not known.branch.coordinates
            if anew or age_s > (self._config.empty_s if is_empty else self._config.stale_s):
                unknown.append(prefix)
            elif age_s > self._config.fresh_s and prefix not in self._refreshing:
                aging.append(prefix)
        if aging:
            self._refreshing.update(aging)
            self._supervisor.spawn("reading which experts there are", lambda: self._refresh(aging))
        if unknown:
            try:
                await self._read(unknown, min(timeout_s, self._config.read_timeout_s))
            except NetworkError as error:
                if not any(prefix in self._known for prefix in prefixes):
                    raise
                _log.info("experts as known before are used: %s", error)
        return {prefix: self._live(prefix) for prefix in prefixes}

    async def replicas(
        self, uid: ExpertUid, *, timeout_s: float, anew: bool = False
    ) -> tuple[ExpertReplica, ...]:
        """Who holds this expert."""
        found = await self.look([uid.prefix], timeout_s=timeout_s, anew=anew)
        return found[uid.prefix].experts.get(uid.coordinates[-1], ())

    def __len__(self) -> int:
        return len(self._known)

    def _live(self, prefix: ExpertUid) -> GridBranch:
        known = self._known.get(prefix)
        if known is None:
            return GridBranch()
        self._known.move_to_end(prefix)
        swarm_s = self._clock.swarm_s()
        experts = known.branch.experts
        if all(replica.expiration > swarm_s for replicas in experts.values() for replica in replicas):
            return known.branch
        left = {
            place: tuple(one for one in replicas if one.expiration > swarm_s)
            for place, replicas in experts.items()
        }
        known.branch = GridBranch(
            {place: replicas for place, replicas in left.items() if replicas}, known.branch.deeper
        )
        return known.branch

    async def _refresh(self, prefixes: Sequence[ExpertUid]) -> None:
        try:
            await self._read(prefixes, self._config.read_timeout_s)
        except NetworkError as error:
            _log.debug("experts as known before are used: %s", error)
        finally:
            self._refreshing.difference_update(prefixes)

    async def _read(self, prefixes: Sequence[ExpertUid], timeout_s: float) -> None:
        self.reads += 1
        found: Mapping[ExpertUid, GridBranch] = await self._directory.branches(
            prefixes, timeout_s=timeout_s, max_age_s=self._config.empty_s
        )
        now_s = self._clock.monotonic_s()
        for prefix, branch in found.items():
            self._known[prefix] = _Known(branch, now_s)
            self._known.move_to_end(prefix)
        while len(self._known) > self._config.prefixes_max:
            self._known.popitem(last=False)
