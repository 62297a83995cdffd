"""The services of one node: one instance of each kind, made when it is first asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

OwnerT = TypeVar("OwnerT")
ServiceT = TypeVar("ServiceT")


class Services(Generic[OwnerT]):
    """Holds the services of `owner`, a node or what stands for one in a simulation. Safe to use from any
    thread.
    """

    def __init__(self, owner: OwnerT) -> None:
        self._owner = owner
        self._lock = threading.RLock()  # a service may ask for another one while it is made
        self._instances: dict[Callable[..., Any], Any] = {}

    def get(self, kind: Callable[[OwnerT], ServiceT]) -> ServiceT:
        """Return the one instance of `kind`, made as `kind(owner)` the first time. What its constructor
        raises passes through.
        """
        with self._lock:
            if kind not in self._instances:
                self._instances[kind] = kind(self._owner)
            return cast("ServiceT", self._instances[kind])

    def put(self, kind: Callable[..., ServiceT], instance: ServiceT) -> None:
        """Use `instance` as the one of `kind`, which has not been asked for yet: a simulation makes it with a
        seed.
        """
        with self._lock:
            assert kind not in self._instances
            self._instances[kind] = instance
