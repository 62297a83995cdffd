"""The services of one node: one instance of each kind, created when it is first requested."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

OwnerT = TypeVar("OwnerT")
ServiceT = TypeVar("ServiceT")


class Services(Generic[OwnerT]):
    """The services of `owner`, which is a node or its substitute in a simulation. Safe to use from any
    thread.
    """

    def __init__(self, owner: OwnerT) -> None:
        self._owner = owner
        self._lock = threading.RLock()  # a constructor may request another service
        self._instances: dict[Callable[..., Any], Any] = {}

    def get(self, kind: Callable[[OwnerT], ServiceT]) -> ServiceT:
        """Return the single instance of `kind`, created as `kind(owner)` by the first call. Raises the
        exceptions of its constructor.
        """
        with self._lock:
            if kind not in self._instances:
                self._instances[kind] = kind(self._owner)
            return cast("ServiceT", self._instances[kind])

    def put(self, kind: Callable[..., ServiceT], instance: ServiceT) -> None:
        """Set the instance of `kind` before it is first requested. Simulations use this to create instances
        with a seed.
        """
        with self._lock:
            assert kind not in self._instances
            self._instances[kind] = instance
