"""Who holds an averager: each holder keeps one record of itself in the DHT, renews it while it lives, and
takes it back when it leaves.
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


class Presence(Protocol):
    """The records as matchmaking needs them."""

    async def look(self, timeout_s: float) -> dict[PeerId, Holder]:
        """Every live holder, read afresh. NetworkError when the DHT cannot say."""
        ...


class Permitted:
    """Records without those of peers that are refused: nobody looks for them or waits for them."""

    def __init__(self, presence: Presence, permitted: Callable[[PeerId], bool]) -> None:
        self._presence, self._permitted = presence, permitted

    async def look(self, timeout_s: float) -> dict[PeerId, Holder]:
        return {
            peer: holder
            for peer, holder in (await self._presence.look(timeout_s)).items()
            if self._permitted(peer)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceConfig:
    ttl_s: float = 30.0  # a peer that died without a word is expected by others for this long
    renew_s: float = 10.0  # well below ttl_s: two renewals may get lost
    retry_s: float = 1.0  # after a renewal that nobody took
    store_timeout_s: float = 5.0
    goodbye_timeout_s: float = 0.8  # a node that closes does not wait longer for its callbacks


class DhtPresence:
    """One averager's records in the DHT, under `run.<run>/holders.<averager>`."""

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
            renew_s=config.renew_s,
            retry_s=config.retry_s,
        )

    async def declare(self) -> bool:
        """Store our record once; False when no other peer of the DHT took it."""
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
        return bool(result.replicas > (1 if contact.addresses else 0))  # one copy is our own

    async def renew(self) -> None:
        """Declare again and again, until cancelled."""
        await self._keeper.run()

    async def declared(self, timeout_s: float) -> None:
        """Wait until `renew` has stored the record once, or has failed to."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._keeper.attempted.wait()
        except TimeoutError:
            return

    async def withdraw(self) -> None:
        """Say goodbye: nobody waits for us any more."""
        try:
            await self._dht.delete(
                self._key, subkey=str(self._own().peer_id), timeout_s=self._config.goodbye_timeout_s
            )
        except SwarmError as error:
            _log.debug("the presence record of %s was not withdrawn: %s", self._key, error)

    async def look(self, timeout_s: float) -> dict[PeerId, Holder]:
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
    """A record as its writer stored it; None when it is malformed: its writer's fault, and nobody else's
    business.
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
