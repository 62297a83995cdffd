"""mDNS on local networks: announce the run that this peer trains, and find runs of others (libp2p's
discovery).

Only interfaces with private IPv4 addresses are used. `logic/lan.py` decides which announcements are read and
trusted.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv4Interface
from typing import TYPE_CHECKING, Any, cast

import psutil

from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import Address, Contact
from swarm.net.listening import WILDCARDS
from swarm.net.logic.lan import (
    PEERS_MAX,
    RUNS_MAX,
    SERVICE,
    Doorkeeper,
    NearbyPeer,
    NearbyRun,
    decode,
    encode,
    grouped,
    is_private,
)

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

_logger = logging.getLogger(__name__)

BROWSE_S = 3.0
_INTERFACES_S = 15.0  # interval at which the machine's addresses are read
_PEERS_MAX = RUNS_MAX * PEERS_MAX  # peers whose announcements are read
_NAME_BYTES = 20  # bytes of the random name of an announcement, which reveals nothing about the peer


def private_interfaces(host: str = "0.0.0.0") -> list[IPv4Interface]:
    """Return this machine's addresses in private networks with multicast, and these networks. Only addresses
    at which a server on `host` can be called are included.
    """
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        if state is None or not state.isup or "pointopoint" in getattr(state, "flags", ""):
            continue
        for entry in entries:
            if entry.family != socket.AF_INET or not entry.netmask:
                continue
            interface = IPv4Interface(f"{entry.address}/{entry.netmask}")
            if is_private(interface.ip) and (host in WILDCARDS or host == entry.address):
                found.append(interface)
    return sorted(found)


async def browse() -> list[NearbyRun]:
    """Return the runs that peers in this machine's private networks announce within this time, the one with
    most peers first. Without such a network there are none. Raises NetworkError when mDNS cannot be used.
    """
    interfaces = private_interfaces()
    if not interfaces:
        return []
    mdns = await _open(interfaces, takes_answers=True)
    try:
        from zeroconf.asyncio import AsyncServiceBrowser

        found = _records(mdns, interfaces)
        browser = AsyncServiceBrowser(mdns.zeroconf, SERVICE, handlers=[lambda **_: None])
        await asyncio.sleep(BROWSE_S)
        await browser.async_cancel()
        return grouped(found.values())
    finally:
        await mdns.async_close()


class LanPresence:
    """Announces on local networks the run that this peer trains. It belongs to the network thread."""

    def __init__(self, peer: NearbyPeer, server: Address) -> None:
        """Announce `peer`; its addresses are replaced by those of this machine. `server`: where the gRPC
        server listens, maybe a wildcard.
        """
        self._peer, self._server = peer, server
        self._mdns: AsyncZeroconf | None = None

    async def run(self) -> None:
        """Announce, in each private network that this machine is in, until cancelled."""
        interfaces: list[IPv4Interface] = []
        while True:
            now = private_interfaces(self._server.host)
            if now != interfaces:
                await self.close()
                interfaces = now
                if now:
                    await self._announce(now)
            await asyncio.sleep(_INTERFACES_S)

    async def close(self) -> None:
        """Withdraw the announcements, if there are any."""
        mdns, self._mdns = self._mdns, None
        if mdns is not None:
            await mdns.async_close()

    async def _announce(self, interfaces: Sequence[IPv4Interface]) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        port, name = self._server.port, secrets.token_hex(_NAME_BYTES)
        addresses = tuple(Address(str(one.ip), port) for one in interfaces)
        said = replace(self._peer, contact=Contact(self._peer.contact.peer_id, addresses))
        self._mdns = await _open(interfaces, takes_answers=False)
        service = AsyncServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            addresses=[one.ip.packed for one in interfaces],
            port=port,
            properties=encode(said),
            server=f"{name}.local.",
        )
        await (await self._mdns.async_register_service(service))


def _records(mdns: AsyncZeroconf, interfaces: Sequence[IPv4Interface]) -> dict[str, NearbyPeer]:
    """Return a table that fills with the peers that announce a run, by the name of their record."""
    from zeroconf import RecordUpdate, RecordUpdateListener, Zeroconf

    found: dict[str, NearbyPeer] = {}

    class Listener(RecordUpdateListener):
        def async_update_records(self, zc: Zeroconf, now: float, records: list[RecordUpdate]) -> None:
            for one in records:
                name, text = one.new.key, getattr(one.new, "text", None)
                if (
                    text is None
                    or not name.endswith(SERVICE)
                    or (name not in found and len(found) >= _PEERS_MAX)
                ):
                    continue
                try:
                    found[name] = decode(text, interfaces)
                except PeerError as error:  # usually a record of another program that uses libp2p
                    _logger.debug("mDNS record %.80s is left out: %s", name, error)

    mdns.zeroconf.async_add_listener(Listener(), None)
    return found


async def _open(interfaces: Sequence[IPv4Interface], *, takes_answers: bool) -> AsyncZeroconf:
    """Return mDNS on these interfaces that reads only what a `Doorkeeper` admits. Raises NetworkError."""
    module = await asyncio.get_running_loop().run_in_executor(
        None, importlib.import_module, "zeroconf.asyncio"
    )
    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)  # zeroconf logs data from strangers
    try:
        mdns: AsyncZeroconf = module.AsyncZeroconf(interfaces=[str(one.ip) for one in interfaces])
        await mdns.zeroconf.async_wait_for_start()
    except OSError as error:
        raise NetworkError(f"mDNS cannot be used: {error.strerror or error}") from error
    doorkeeper = Doorkeeper(interfaces, takes_answers=takes_answers)
    for reader in mdns.zeroconf.engine.readers:
        inner = cast(asyncio.DatagramProtocol, reader.transport.get_protocol())
        reader.transport.set_protocol(_FilteredProtocol(inner, doorkeeper))
    return mdns


class _FilteredProtocol(asyncio.DatagramProtocol):
    """Forwards the datagrams that a `Doorkeeper` admits."""

    def __init__(self, inner: asyncio.DatagramProtocol, doorkeeper: Doorkeeper) -> None:
        self._inner, self._doorkeeper = inner, doorkeeper

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        if self._doorkeeper.admits(data, addr[0], time.monotonic()):
            self._inner.datagram_received(data, addr)

    def error_received(self, exc: Exception) -> None:
        self._inner.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)
