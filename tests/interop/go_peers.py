"""Peers of go-libp2p for tests: the daemon in hivemind's wheel, which a local socket controls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.environments import HIVEMIND_VERSION
from swarm.core.ids import Address, Contact, PeerId
from swarm.libp2p.logic.messages import decode_address, encode_address, fields, varint
from tests.interop.js_peers import ANSWER_S_MAX

_FOLDER = Path(__file__).parent.parent.parent / "build" / "interop"
_DAEMON = _FOLDER / "p2pd"
_DOWNLOAD_S_MAX = 300.0
_IDENTIFY, _CONNECT, _STREAM_OPEN = 0, 1, 2  # requests to the daemon


@functools.cache
def missing() -> str:
    """Download the daemon into `build/` if it is not there. Return why there is none; empty if there is."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "hivemind's wheel has a daemon for Linux on x86-64 only"
    if _DAEMON.exists():
        return ""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = ("download", "--no-deps", "--only-binary=:all:", "-d", ".", f"hivemind=={HIVEMIND_VERSION}")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *wanted],
            cwd=_FOLDER,
            capture_output=True,
            text=True,
            check=False,
            timeout=_DOWNLOAD_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"hivemind's wheel did not come within {_DOWNLOAD_S_MAX:.0f} s"
    if done.returncode:
        return f"hivemind's wheel could not be had: {done.stderr.strip()[-300:]}"
    (wheel,) = _FOLDER.glob(f"hivemind-{HIVEMIND_VERSION}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        partial = _DAEMON.with_suffix(".part")
        partial.write_bytes(archive.read("hivemind/hivemind_cli/p2pd"))
    partial.chmod(0o700)
    partial.replace(_DAEMON)
    wheel.unlink()
    return ""


class GoPeer:
    """A peer of go-libp2p that listens on loopback."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self.contact = Contact(PeerId(bytes(32)))
        self._writers: list[asyncio.StreamWriter] = []

    async def identify(self) -> None:
        """Ask the daemon for its PeerID and addresses, and set `contact`."""
        answer, _, _ = await self._ask(_IDENTIFY)
        said = fields(next(_bytes(value) for number, value in fields(answer) if number == 4))
        parts = [(number, _bytes(value)) for number, value in said]
        addresses = [decode_address(value) for number, value in parts if number == 2]
        here = [one for one in addresses if one.host == "127.0.0.1"]
        self.contact = Contact(PeerId.from_bytes(parts[0][1]), tuple(here))

    async def connect(self, peer_id: PeerId, address: Address) -> None:
        """Let it dial a peer. Raises AssertionError with its message if it fails."""
        body = _field(1, peer_id.to_bytes()) + _field(2, encode_address(address))
        await self._ask(_CONNECT, _field(2, body))

    async def open(self, peer_id: PeerId, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Let it open a stream to a peer that it is connected to."""
        body = _field(1, peer_id.to_bytes()) + _field(2, protocol.encode())
        _, reader, writer = await self._ask(_STREAM_OPEN, _field(3, body))
        return reader, writer

    async def close(self) -> None:
        """Close all connections to the daemon."""
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _ask(
        self, kind: int, body: bytes = b""
    ) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        request = b"\x08" + varint(kind) + body
        async with asyncio.timeout(ANSWER_S_MAX):
            reader, writer = await asyncio.open_unix_connection(self._control)
            self._writers.append(writer)
            writer.write(varint(len(request)) + request)
            size = shift = 0
            while True:
                (byte,) = await reader.readexactly(1)
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            answer = await reader.readexactly(size)
        assert answer.startswith(b"\x08\x00"), f"the daemon answered {answer!r}"
        return answer, reader, writer


@asynccontextmanager
async def go_peer(folder: Path, *options: str) -> AsyncIterator[GoPeer]:
    """Run a daemon with these options. `folder`: for its socket."""
    control = folder / "p2pd.sock"
    process = await asyncio.create_subprocess_exec(
        str(_DAEMON),
        f"-listen=/unix{control}",
        "-hostAddrs=/ip4/127.0.0.1/tcp/0",
        *options,
        stdout=asyncio.subprocess.PIPE,
    )
    peer = GoPeer(control)
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            assert process.stdout is not None
            while not (line := await process.stdout.readline()).startswith(b"Control socket"):
                assert line, "the daemon has ended"
        await peer.identify()
        yield peer
    finally:
        await peer.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


def _field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


def _bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value
