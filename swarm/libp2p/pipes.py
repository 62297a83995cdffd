"""Pipes, the transports of secured connections: TCP connections, and streams through relays."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import Protocol

from swarm.core.errors import NetworkError
from swarm.core.ids import Address
from swarm.runtime.sockets import Endpoint

_READ_BYTES_MAX = 256 << 10  # read-ahead buffer of one TCP connection
_PIECE_BYTES = 65_000  # payload of one yamux frame
_REUSE_PORT: int | None = getattr(
    socket, "SO_REUSEPORT", None
)  # None: a listening port cannot be dialed from
_NO_PORT = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EINVAL)


class PortInUse(NetworkError):
    """A connection cannot be made from the given port, because one to that address exists already."""


class Pipe(Protocol):
    """Bytes in both directions. Reading and writing raise NetworkError once it is closed."""

    async def read_exactly(self, size: int) -> bytes:
        """Return `size` bytes."""
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes; wait while the other end accepts none."""
        ...

    def close(self) -> None:
        """End both directions at once."""
        ...


class TcpPipe:
    """A TCP connection. `remote` is its other end; None: it is gone already. `local` is this end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        name = writer.get_extra_info("peername")
        self.remote = Address(name[0], name[1]) if name else None
        own = writer.get_extra_info("sockname")
        self.local: Endpoint = (own[0], own[1]) if own else ("", 0)

    @classmethod
    async def connect(cls, host: str, port: int, source: Endpoint | None = None) -> TcpPipe:
        """Connect; with `source` from this IP address and port of the machine, at which it may listen as well
        (`serve` with `is_shared`), to an IP address of the same version.

        Raises NetworkError when there is no answer, PortInUse when `source` cannot be used. The caller sets a
        time limit.
        """
        try:
            if source is None or _REUSE_PORT is None:
                return cls(*await asyncio.open_connection(host, port, limit=_READ_BYTES_MAX))
            with contextlib.ExitStack() as undo:
                bound = _socket(source, _REUSE_PORT)
                undo.callback(bound.close)
                bound.bind(source)
                await asyncio.get_running_loop().sock_connect(bound, (host, port))
                undo.pop_all()
                return cls(*await asyncio.open_connection(sock=bound, limit=_READ_BYTES_MAX))
        except OSError as error:
            what = f"{host}:{port} does not answer: {error.strerror or error}"
            raise (PortInUse if source is not None and error.errno in _NO_PORT else NetworkError)(
                what
            ) from None

    async def read_exactly(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            raise NetworkError("the connection has ended") from None

    async def read(self) -> bytes:
        """Return the next bytes; none when the other end has finished. Raises NetworkError when it is
        gone.
        """
        try:
            return await self._reader.read(_PIECE_BYTES)
        except OSError:
            raise NetworkError("the connection has ended") from None

    def finish(self) -> None:
        """Send no more; the other end may."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError):  # uvloop raises RuntimeError
            raise NetworkError("the connection has ended") from None

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the event loop is closed already
            self._writer.transport.abort()


async def serve(host: str, port: int, connected: ConnectedFn, *, is_shared: bool = False) -> asyncio.Server:
    """Listen on a TCP port of an IP address, and call `connected` with every connection. `is_shared`: this
    process can dial from that port, too, so that routers see one port in both directions.
    """
    listening = _socket((host, port))
    try:
        if listening.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        if is_shared and _REUSE_PORT is not None:
            # after `bind`: before, it would let two processes listen on one port
            listening.setsockopt(socket.SOL_SOCKET, _REUSE_PORT, 1)
        return await asyncio.start_server(
            lambda reader, writer: connected(TcpPipe(reader, writer)), sock=listening, limit=_READ_BYTES_MAX
        )
    except BaseException:
        listening.close()
        raise


def _socket(address: Endpoint, *options: int) -> socket.socket:
    """Return a TCP socket for an IP address. SO_REUSEADDR of Windows would let others take its port."""
    made = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    for option in (*([socket.SO_REUSEADDR] if os.name == "posix" else []), *options):
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    return made


class ConnectedFn(Protocol):
    """Takes a connection that has come in; returns at once."""

    def __call__(self, pipe: TcpPipe, /) -> None: ...
