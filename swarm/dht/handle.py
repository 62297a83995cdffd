"""The interface of the DHT for users, `node.dht`: blocking calls that any thread but the network's may make.

A key may be given as text: `namespace/name`, or a name in the namespace `public`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from swarm.core.errors import UsageError
from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import Entry, Value
from swarm.dht.logic.rules import NamespaceRules
from swarm.dht.service.dht_service import DhtService, ManyAnswers, StoreItem
from swarm.dht.service.writer import StoreResult
from swarm.runtime.thread import NetworkThread

T = TypeVar("T")


class Dht:
    """Blocking version of `DhtService`: each method runs the method of the same name on the network thread
    and returns its result.
    """

    def __init__(self, service: DhtService, network: NetworkThread) -> None:
        self.service = service
        self._network = network

    @property
    def clock_problem(self) -> str | None:
        """Return by how much this machine's clock is wrong and what to do about it, as a sentence; None when
        no problem is known.
        """
        return self.service.clock_problem

    @property
    def identity_problem(self) -> str | None:
        """Return that another process uses this peer's identity and what to do about it, as a sentence; None
        when no problem is known.
        """
        return self.service.identity_problem

    def store(
        self, key: str | Key, value: Value, ttl_s: float, subkey: str | None = None, timeout_s: float = 10.0
    ) -> StoreResult:
        """Sign and store a value: see `DhtService.store`."""
        return self._run(
            self.service.store(Key.parse(key), value, ttl_s=ttl_s, subkey=subkey, timeout_s=timeout_s),
            timeout_s,
        )

    def store_many(
        self,
        items: Mapping[str | Key, Value] | Mapping[str, Value] | Iterable[StoreItem],
        ttl_s: float,
        timeout_s: float = 30.0,
    ) -> list[StoreResult]:
        """Store many entries together, given as `{key: value}` or as `StoreItem`s, and return one result per
        entry in their order. See `DhtService.store_many`.
        """
        listed = (
            [StoreItem(key=key, value=value) for key, value in items.items()]
            if isinstance(items, Mapping)
            else list(items)
        )
        return self._run(self.service.store_many(listed, ttl_s=ttl_s, timeout_s=timeout_s), timeout_s)

    def get(
        self,
        key: str | Key,
        writer: PeerId | str | None = None,
        latest: bool = False,
        timeout_s: float = 10.0,
        max_age_s: float | None = None,
    ) -> Entry | dict[str, Entry] | None:
        """Return what is stored under a key: see `DhtService.get`."""
        writer_id = PeerId.parse(writer) if isinstance(writer, str) else writer
        reading = self.service.get(
            Key.parse(key), writer=writer_id, latest=latest, max_age_s=max_age_s, timeout_s=timeout_s
        )
        return self._run(reading, timeout_s)

    def get_all(
        self, key: str | Key, latest: bool = False, timeout_s: float = 10.0, max_age_s: float | None = None
    ) -> list[Entry]:
        """Return every writer's live entries under a key: see `DhtService.get_all`."""
        return self._run(
            self.service.get_all(Key.parse(key), latest=latest, max_age_s=max_age_s, timeout_s=timeout_s),
            timeout_s,
        )

    def get_many(
        self,
        keys: Iterable[str | Key],
        latest: bool = False,
        timeout_s: float = 30.0,
        max_age_s: float | None = None,
    ) -> ManyAnswers:
        """Read many keys together: see `DhtService.get_many`."""
        if isinstance(keys, str | Key):
            raise UsageError("get_many takes several keys, in a list; for one key there is get")
        return self._run(
            self.service.get_many(list(keys), latest=latest, max_age_s=max_age_s, timeout_s=timeout_s),
            timeout_s,
        )

    def delete(self, key: str | Key, subkey: str | None = None, timeout_s: float = 10.0) -> StoreResult:
        """Remove this peer's own entry: see `DhtService.delete`."""
        return self._run(self.service.delete(Key.parse(key), subkey=subkey, timeout_s=timeout_s), timeout_s)

    def register(self, namespace: str, rules: NamespaceRules) -> None:
        """Enforce rules for a namespace on this peer, as replica, reader and writer: see
        `swarm.dht.logic.namespaces`.
        """

        async def register() -> None:
            self.service.register(namespace, rules)

        self._run(register(), 1.0)

    def _run(self, operation: Coroutine[Any, Any, T], timeout_s: float) -> T:
        # The operation ends by its own timeout; the margin covers a busy event loop.
        return self._network.run(operation, timeout_s + 1.0)
