"""Presence records: each holder of an averager keeps one record of itself in the DHT, renews it while it
lives, and deletes it when it leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from averaging.matchmaking.logic.messages import TEXT_MAX, AveragerName, Holder, VectorSchema
from averaging.matchmaking.service.wire import ADDRESSES_MAX, SCHEMA_BYTES_MAX
from swarm.core.errors import NetworkError, SwarmError, UsageError
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.keeper import RecordKeeper

if TYPE_CHECKING:
    from swarm.dht.service.dht_service import DhtService

_log = logging.getLogger(__name__)

_RENEW_S = 10.0  # well below ttl_s: two renewals may get lost
_RETRY_S = 1.0  # after a renewal that no peer accepted
_WITHDRAW_TIMEOUT_S = 0.8  # a node that closes does not wait longer than this for its callbacks


class Presence(Protocol):
    """Source of presence records."""

    async def read(self, timeout_s: float) -> dict[PeerId, Holder]:
        """Read the records of all live holders from the network. Raise NetworkError when the DHT cannot
        answer.
        """
        ...


class PermittedPresence:
    """Presence records without those of peers that are not permitted, so that nobody searches for them or
    waits for them.
    """

    def __init__(self, presence: Presence, is_permitted: Callable[[PeerId], bool]) -> None:
        self._presence, self._is_permitted = presence, is_permitted

    async def read(self, timeout_s: float) -> dict[PeerId, Holder]:
        return {
            peer: holder
            for peer, holder in (await self._presence.read(timeout_s)).items()
            if self._is_permitted(peer)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceConfig:
    """Timing of presence records."""

    ttl_s: float = 30.0  # a peer that died without leaving is expected by others for this long
    store_timeout_s: float = 5.0


class DhtPresence:
    """Presence records of one averager in the DHT, under `run.<run>/holders.<averager>`."""

    def __init__(
        self,
        *,
        dht: DhtService,
        name: AveragerName,
        own: Callable[[], Contact],
        schema: VectorSchema,
        config: PresenceConfig,
    ) -> None:
        self._dht = dht
        self._key = Key(f"run.{name.run}", f"holders.{name.averager}")
        self._own = own
        self._schema = schema
        self._config = config
        self._keeper = RecordKeeper(
            self.declare,
            f"the presence record of {self._key}",
            renew_s=_RENEW_S,
            retry_s=_RETRY_S,
        )

    async def declare(self) -> bool:
        """Store this peer's record once. Return False when no other peer of the DHT accepted it."""
        contact = self._own()
        value = {
            "addresses": [address.multiaddr for address in contact.addresses[:ADDRESSES_MAX]],
            "schema": self._schema.digest,
            "text": self._schema.text[:TEXT_MAX],
        }
        config = self._config
        result = await self._dht.store(
            self._key,
            value,
            ttl_s=config.ttl_s,
            subkey=str(contact.peer_id),
            timeout_s=config.store_timeout_s,
        )
        return bool(result.replicas > (1 if contact.addresses else 0))  # one copy is this peer's own

    async def renew(self) -> None:
        """Store the record at regular intervals, until cancelled."""
        await self._keeper.run()

    async def wait_until_declared(self, timeout_s: float) -> None:
        """Wait until `renew` has stored the record once, or has failed to; at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._keeper.attempted.wait()
        except TimeoutError:
            return

    async def withdraw(self) -> None:
        """Delete the record, so that no peer waits for this one any more. A failure is only logged."""
        try:
            await self._dht.delete(self._key, subkey=str(self._own().peer_id), timeout_s=_WITHDRAW_TIMEOUT_S)
        except SwarmError as error:
            _log.debug("the presence record of %s was not withdrawn: %s", self._key, error)

    async def read(self, timeout_s: float) -> dict[PeerId, Holder]:
        found = await self._dht.get(self._key, latest=True, timeout_s=timeout_s)
        if found is None:
            found = {}
        if not isinstance(found, dict):
            raise NetworkError(f"{self._key} does not hold presence records")
        holders = {}
        for entry in found.values():
            holder = _holder(entry.writer, entry.value)
            if holder is not None:
                holders[entry.writer] = holder
        if self._own().peer_id not in holders:
            self._keeper.renew_soon()
        return holders


def _holder(writer: PeerId, value: Any) -> Holder | None:
    """Return the holder that a record describes, or None when the record is malformed, which harms only its
    writer.
    """
    if not isinstance(value, dict):
        return None
    addresses, schema, text = value.get("addresses"), value.get("schema"), value.get("text")
    if (
        not isinstance(addresses, list | tuple)
        or len(addresses) > ADDRESSES_MAX
        or not all(isinstance(one, str) for one in addresses)
    ):
        return None
    if not isinstance(schema, bytes) or len(schema) > SCHEMA_BYTES_MAX or not isinstance(text, str):
        return None
    try:
        contact = Contact(writer, tuple(Address.parse(one) for one in addresses))
    except UsageError:
        return None
    return Holder(contact=contact, schema=schema, schema_text=text[:TEXT_MAX])
