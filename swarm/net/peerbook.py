"""The peer book: addresses, last contact and round-trip time of known peers. Bounded, with a copy on disk.

The copy lets a peer rejoin when every bootstrap address is dead. Its entries are hints: a peer proves its
PeerID in the handshake, so a wrong entry costs one failed attempt.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarm.core.errors import UsageError
from swarm.core.files import read_json_copy, write_private
from swarm.core.ids import ADDRESSES_MAX, Address, Contact, PeerId

_logger = logging.getLogger(__name__)

_FILE_BYTES_MAX = 4 << 20
_FORMAT = 1
_ROUND_TRIP_WEIGHT = 0.3  # weight of a new measurement in the running mean


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """An entry of the book. `last_seen_s` is Unix time; `round_trip_s` is a running mean, None when never
    measured. `reached`: the address at which this process has connected to the peer, which proved its PeerID
    there; its other addresses are its own claim. `is_met`: this process has heard from the peer; otherwise
    only an earlier process has, and the entry is from its copy on disk.
    """

    contact: Contact
    last_seen_s: float
    round_trip_s: float | None = None
    agent: str = ""
    reached: Address | None = None
    is_met: bool = False

    @property
    def peer_id(self) -> PeerId:
        return self.contact.peer_id


class PeerBook:
    """A bounded table of known peers, usable from any thread. Beyond `entries_max`, the peer seen longest ago
    is forgotten.
    """

    def __init__(
        self, own: PeerId, now_s: Callable[[], float], path: Path | None = None, entries_max: int = 1000
    ) -> None:
        self._own = own
        self._now_s = now_s  # Unix time
        self._paths = [path] if path is not None else []
        self._entries_max = entries_max
        self._peers: dict[PeerId, KnownPeer] = {}
        self._lock = threading.Lock()
        self._changed = False
        if path is not None:
            read_json_copy(path, "peer book", _FILE_BYTES_MAX, self._take)

    def keep_at(self, path: Path) -> None:
        """Keep another copy on disk from now on, for the run of this process, and add its entries from
        earlier processes. Blocks.
        """
        with contextlib.suppress(OSError):  # saving logs it
            path.parent.mkdir(parents=True, exist_ok=True)
        read_json_copy(path, "peer book", _FILE_BYTES_MAX, self._take)
        with self._lock:
            self._paths.append(path)
            self._changed = True
        self.save()

    def record_seen(self, contact: Contact, *, round_trip_s: float | None = None, agent: str = "") -> None:
        """Record addresses that the authenticated peer itself announced. They replace the known ones."""

        def update(old: KnownPeer) -> KnownPeer:
            mean_s = old.round_trip_s if round_trip_s is None else round_trip_s
            if round_trip_s is not None and old.round_trip_s is not None:
                mean_s = old.round_trip_s + _ROUND_TRIP_WEIGHT * (round_trip_s - old.round_trip_s)
            trimmed = replace(contact, addresses=contact.addresses[:ADDRESSES_MAX])
            return KnownPeer(trimmed, self._now_s(), mean_s, agent or old.agent, old.reached)

        self._update(contact.peer_id, update)

    def record_connection(self, peer_id: PeerId, address: Address) -> None:
        """Record that a connection to the peer was made at this address: it is listed first."""

        def update(old: KnownPeer) -> KnownPeer:
            addresses = tuple(dict.fromkeys((address, *old.contact.addresses)))[:ADDRESSES_MAX]
            found = replace(old.contact, addresses=addresses)
            return replace(old, contact=found, last_seen_s=self._now_s(), reached=address)

        self._update(peer_id, update)

    def forget(self, peer_id: PeerId) -> None:
        """Drop the entry."""
        with self._lock:
            self._changed |= self._peers.pop(peer_id, None) is not None

    def contact(self, peer_id: PeerId) -> Contact | None:
        """Return the known addresses of a peer, None when it is not in the book."""
        with self._lock:
            known = self._peers.get(peer_id)
        return known.contact if known is not None else None

    def known(self) -> list[KnownPeer]:
        """Return all entries, the peer seen last first."""
        with self._lock:
            peers = list(self._peers.values())
        return sorted(peers, key=_last_seen, reverse=True)

    def save(self) -> None:
        """Write the copies on disk, if there are any and something changed. Blocks. OSError is logged: a full
        disk must not stop a node.
        """
        with self._lock:
            paths = list(self._paths)
            if not paths or not self._changed:
                return
            self._changed = False
            peers = list(self._peers.values())
        document = {
            "format": _FORMAT,
            "peers": [
                _to_json(peer)
                for peer in sorted(peers, key=_last_seen, reverse=True)
                if peer.contact.addresses or peer.reached is not None
            ],
        }
        raw = json.dumps(document, indent=1).encode()
        for path in paths:
            try:
                write_private(path, raw)
            except OSError as error:
                _logger.warning("the peer book %s cannot be written: %s", path, error)

    def _update(self, peer_id: PeerId, change: Callable[[KnownPeer], KnownPeer]) -> None:
        if peer_id == self._own:
            return
        with self._lock:
            old = self._peers.get(peer_id) or KnownPeer(Contact(peer_id), 0.0)
            new = replace(change(old), is_met=True)
            self._changed |= new != self._peers.get(peer_id)
            self._peers[peer_id] = new
            if len(self._peers) > self._entries_max:
                # Keep the newcomer even if the clock was set back, because a full book must still learn.
                others = (peer for peer in self._peers.values() if peer.peer_id != peer_id)
                del self._peers[min(others, key=_last_seen).peer_id]

    def _take(self, document: Any) -> None:
        """Add the entries of a copy on disk, unless the book is full or has newer ones."""
        peers = [_from_json(item) for item in _checked(document)]
        with self._lock:
            for peer in peers[: self._entries_max]:
                if peer.peer_id == self._own or len(self._peers) >= self._entries_max:
                    continue
                self._peers.setdefault(peer.peer_id, peer)


def reached_peers(path: Path, peers_max: int) -> list[Contact]:
    """Return the peers to which the processes that kept this copy had connected, each with the address where
    they did so last, the peer seen last first. Without a usable copy there are none. Blocks.
    """
    found: list[KnownPeer] = []

    def take(document: Any) -> None:
        found.extend(_from_json(item) for item in _checked(document))

    read_json_copy(path, "peer book", _FILE_BYTES_MAX, take)
    newest = sorted(found, key=_last_seen, reverse=True)
    return [Contact(one.peer_id, (one.reached,)) for one in newest if one.reached is not None][:peers_max]


def _last_seen(peer: KnownPeer) -> float:
    return peer.last_seen_s


def _checked(document: Any) -> list[Any]:
    if (
        not isinstance(document, dict)
        or document.get("format") != _FORMAT
        or not isinstance(document.get("peers"), list)
    ):
        raise UsageError(f"not a peer book of format {_FORMAT}")
    peers: list[Any] = document["peers"]
    return peers


def _to_json(peer: KnownPeer) -> dict[str, Any]:
    return {
        "peer_id": str(peer.peer_id),
        "addresses": [address.multiaddr for address in peer.contact.addresses],
        "last_seen_s": peer.last_seen_s,
        "round_trip_s": peer.round_trip_s,
        "agent": peer.agent,
        "reached": peer.reached.multiaddr if peer.reached is not None else None,
    }


def _from_json(item: dict[str, Any]) -> KnownPeer:
    addresses = tuple(Address.parse(text) for text in item["addresses"][:ADDRESSES_MAX])
    round_trip_s, reached = item.get("round_trip_s"), item.get("reached")
    return KnownPeer(
        Contact(PeerId.parse(item["peer_id"]), addresses),
        float(item["last_seen_s"]),
        float(round_trip_s) if round_trip_s is not None else None,
        str(item.get("agent", "")),
        Address.parse(reached) if reached is not None else None,
    )
