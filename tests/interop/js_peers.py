"""Peers of js-libp2p for tests, each a process of Node.js."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swarm.core.ids import Address, Contact, PeerId

_SOURCE = Path(__file__).parent
_FOLDER = _SOURCE.parent.parent / "build" / "interop"
_INSTALL_S_MAX = 300.0
ANSWER_S_MAX = 30.0
_NODE_VERSION_MIN = 20


@functools.cache
def missing() -> str:
    """Install js-libp2p into `build/` if it is not there yet. Return why there is none; empty if there is."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "Node.js and npm are not installed"
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout
    if int(version.strip().lstrip("v").partition(".")[0] or 0) < _NODE_VERSION_MIN:
        return f"Node.js is {version.strip()}, and js-libp2p needs {_NODE_VERSION_MIN}"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    lock, installed = _SOURCE / "package-lock.json", _FOLDER / "installed.json"
    for name in ("package.json", "package-lock.json", "peer.mjs"):
        shutil.copy(_SOURCE / name, _FOLDER)
    if installed.exists() and installed.read_bytes() == lock.read_bytes():
        return ""
    try:
        done = subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=_FOLDER,
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"npm did not install js-libp2p within {_INSTALL_S_MAX:.0f} s"
    if done.returncode:
        return f"npm could not install js-libp2p: {done.stderr.strip()[-300:]}"
    shutil.copy(lock, installed)
    return ""


class JsPeer:
    """A peer of js-libp2p."""

    def __init__(self, process: asyncio.subprocess.Process, peer_id: PeerId) -> None:
        self._process = process
        self.peer_id = peer_id

    async def ask(self, what: str, **fields: object) -> Any:
        """Send it an order, and return the result. Raises AssertionError with its message if it fails."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **fields}).encode() + b"\n")
        answer = await _line(self._process)
        assert "error" not in answer, f"{what} {fields}: {answer['error']}"
        return answer["result"]

    async def contact(self) -> Contact:
        """Return how to reach it directly, by its first TCP address."""
        first = next(one for one in await self.ask("addresses") if "p2p-circuit" not in one)
        _, _, host, _, port, *_ = first.split("/")
        return Contact(self.peer_id, (Address(host, int(port)),))


@asynccontextmanager
async def js_peer(*listen: str, inside: Sequence[str] = (), **settings: bool) -> AsyncIterator[JsPeer]:
    """Run a peer that listens at these multiaddrs, among them maybe `RELAY/p2p-circuit`. `inside`: the words
    before its command. `settings`: those of `peer.mjs`.
    """
    process = await asyncio.create_subprocess_exec(
        *inside,
        "node",
        str(_FOLDER / "peer.mjs"),
        json.dumps({"listen": listen, **settings}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield JsPeer(process, PeerId.parse((await _line(process))["peer"]))
    finally:
        process.kill()
        await process.wait()


def multiaddr(contact: Contact) -> str:
    """Return the address of a libp2p port as libp2p writes it."""
    address = contact.addresses[0]
    return f"/ip4/{address.host}/tcp/{address.port}/p2p/{contact.peer_id}"


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(ANSWER_S_MAX):
        line = await process.stdout.readline()
    assert line, "the process of js-libp2p has ended"
    found: dict[str, Any] = json.loads(line)
    return found
