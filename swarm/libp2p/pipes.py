"""Pipes, over which secured connections run: TCP connections, and streams through relays."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from swarm.core.errors import NetworkError
from swarm.core.ids import Address
from swarm.runtime.sockets import Endpoint

_READ_BYTES_MAX = 256 << 10  # read ahead of one TCP connection
_PIECE_BYTES = 65_000  # that one frame of yamux carries


class Pipe(Protocol):
    """Bytes in both directions. Reading and writing raise NetworkError once it is closed."""

    async def read_exactly(self, size: int) -> bytes:
        """Return `size` bytes."""
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes; wait while the other end takes none."""
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
    async def connect(cls, host: str, port: int) -> TcpPipe:
        """Connect. Raises NetworkError when nobody answers there; the caller sets a time limit."""
        try:
            return cls(*await asyncio.open_connection(host, port, limit=_READ_BYTES_MAX))
        except OSError as error:
            raise NetworkError(f"{host}:{port} does not answer: {error.strerror or error}") from None

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
        except (OSError, RuntimeError):  # RuntimeError: of uvloop
            raise NetworkError("the connection has ended") from None

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the event loop is closed already
            self._writer.transport.abort()


async def serve(host: str, port: int, connected: ConnectedFn) -> asyncio.Server:
    """Listen on a TCP port, and call `connected` with every connection."""
    return await asyncio.start_server(
        lambda reader, writer: connected(TcpPipe(reader, writer)), host, port, limit=_READ_BYTES_MAX
    )


class ConnectedFn(Protocol):
    """Takes a connection that has come in; returns at once."""

    def __call__(self, pipe: TcpPipe, /) -> None: ...
