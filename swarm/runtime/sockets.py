"""The sockets of this process, read from the system because gRPC does not expose its own."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

Endpoint = tuple[str, int]  # IP and port; an IPv4-mapped IPv6 address is written as IPv4


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """An IP socket. `remote` is None for one that listens."""

    descriptor: int
    local: Endpoint
    remote: Endpoint | None


class SocketList:
    """The IP sockets of this process. For a connection that is known already, only the inode is read, because
    hundreds of idle ones are listed every second.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], OpenSocket] = {}  # known connections by (descriptor, inode)

    def open_now(self) -> Iterator[OpenSocket]:
        """Yield the sockets; none if the system does not list descriptors."""
        before, self._known = self._known, {}
        for descriptor in _open_descriptors():
            inode = _inode_of(descriptor)
            found = before.get((descriptor, inode)) or (_socket_of(descriptor) if inode else None)
            if found is not None:
                if found.remote is not None:
                    self._known[descriptor, inode] = found
                yield found


def open_sockets() -> Iterator[OpenSocket]:
    """Yield the IP sockets of this process once; see `SocketList.open_now`."""
    return SocketList().open_now()


def shut_down(one: OpenSocket) -> None:
    """Shut a connection down, so that its owner reads the end of the stream and closes it. Does nothing if
    the descriptor now belongs to another connection.
    """
    with contextlib.suppress(OSError):
        view = socket.socket(fileno=one.descriptor)
        try:
            own = view.dup()  # a duplicate refers to this connection even if the descriptor is reused
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


def _inode_of(descriptor: int) -> int:
    """Return the inode of a socket, which is unique while the socket is open; 0 for anything else."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return 0
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0


def _socket_of(descriptor: int) -> OpenSocket | None:
    try:
        view = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if view.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        local, remote = _endpoint(view.getsockname()), None
        with contextlib.suppress(OSError):  # a listening socket has no remote address
            remote = _endpoint(view.getpeername())
    except OSError:
        return None
    finally:
        view.detach()
    return OpenSocket(descriptor, local, remote)


def _endpoint(name: tuple[str, int]) -> Endpoint:
    return name[0].removeprefix("::ffff:"), name[1]
