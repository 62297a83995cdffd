"""The sockets of this process, as the system sees them: gRPC shows none of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

Endpoint = tuple[str, int]  # IP and port; IPv4 also where a socket of both families writes it as IPv6


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """An IP socket. `remote` is None for one that listens."""

    descriptor: int
    local: Endpoint
    remote: Endpoint | None


def open_sockets() -> Iterator[OpenSocket]:
    """Yield the IP sockets of this process; none where the system does not list descriptors."""
    for descriptor in _open_descriptors():
        found = _socket_of(descriptor)
        if found is not None:
            yield found


def shut_down(one: OpenSocket) -> None:
    """End a connection: its owner reads the end of it and closes it. Does nothing when the descriptor is
    another connection's by now.
    """
    with contextlib.suppress(OSError):
        view = socket.socket(fileno=one.descriptor)
        try:
            own = view.dup()  # stays with this connection, whatever happens to the descriptor
        finally:
            view.detach()
        with own:
            if _endpoint(own.getpeername()) == one.remote:
                own.shutdown(socket.SHUT_RDWR)


def _open_descriptors() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(folder) if name.isdigit()]
    return []


def _socket_of(descriptor: int) -> OpenSocket | None:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        view = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if view.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        local, remote = _endpoint(view.getsockname()), None
        with contextlib.suppress(OSError):  # a listening socket has no other end
            remote = _endpoint(view.getpeername())
    except OSError:
        return None
    finally:
        view.detach()
    return OpenSocket(descriptor, local, remote)


def _endpoint(name: tuple[str, int]) -> Endpoint:
    return name[0].removeprefix("::ffff:"), name[1]
