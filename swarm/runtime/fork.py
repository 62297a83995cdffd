"""Release the node's sockets in a forked child (a DataLoader worker).

A child inherits them. While it lives, the kernel keeps its parent's connections open even after the parent
was killed, and peers would continue to wait for a dead process. The child therefore replaces them with
/dev/null. It does not close them, because gRPC's objects, which it inherited too, still refer to those
descriptor numbers. The parent's connections are not affected.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from swarm.runtime.sockets import Endpoint, open_sockets


@dataclass(frozen=True, slots=True)
class NodeSockets:
    """The sockets of a node: the addresses it listens on, and the (IP, port) pairs it has dialed."""

    listening: tuple[Endpoint, ...]
    dialed: frozenset[Endpoint]


_owners: dict[int, Callable[[], NodeSockets]] = {}
_next_number = 0
_registered = False
_WILDCARDS = ("0.0.0.0", "::", "")


def close_after_fork(sockets: Callable[[], NodeSockets]) -> Callable[[], None]:
    """Make forked children drop the sockets that `sockets()` describes at the time of the fork. Returns a
    function that ends this. `sockets` must take no locks.
    """
    global _next_number, _registered
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_drop_sockets)
        _registered = True
    _next_number += 1
    number = _next_number
    _owners[number] = sockets
    return lambda: _owners.pop(number, None) and None


def _drop_sockets() -> None:
    if not _owners:
        return
    nodes = [owner() for owner in _owners.values()]
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for one in list(open_sockets()):
            if any(_matches(one.local, one.remote, node) for node in nodes):
                with contextlib.suppress(OSError):
                    os.dup2(null, one.descriptor, inheritable=False)
    finally:
        os.close(null)


def _matches(local: Endpoint, remote: Endpoint | None, node: NodeSockets) -> bool:
    if remote is not None and remote in node.dialed:
        return True
    return any(
        local[1] == port and (host in _WILDCARDS or local[0] == host or local[0] in _WILDCARDS)
        for host, port in node.listening
    )
