"""Presence records: each holder of an averager keeps one record of itself in the DHT, renews it while it
lives, and deletes it when it leaves. In a large swarm the records are divided among dictionaries of bounded
size (`averaging.matchmaking.logic.presence_shards`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from averaging.matchmaking.logic.messages import TEXT_MAX, AveragerName, Holder, VectorSchema
from averaging.matchmaking.logic.presence_shards import (
    BITS_MAX,
    FLAT_MAX,
    SHARDS_COUNTED,
    HolderShard,
    bits_for,
    holders_by_shards,
    holders_estimated,
    place_of,
    shard_at,
)
from averaging.matchmaking.service.wire import SCHEMA_BYTES_MAX
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import Contact, Key, PeerId
from swarm.core.notify import wait_until_set
from swarm.dht.keeper import RecordKeeper

if TYPE_CHECKING:
    from swarm.dht.service.dht_service import DhtService

_Read = TypeVar("_Read")

_log = logging.getLogger(__name__)

TTL_S = 30.0  # a peer that died without leaving is expected by others for this long
_RENEW_S = 10.0  # well below it: two renewals may get lost
STORE_TIMEOUT_S = 5.0  # time limit of one renewal; at most half the time until the next
_RETRY_S = 1.0  # pause after a renewal that no peer accepted
_PLACE_AGE_S_MAX = 5.0  # records that were read for a place are used again for this long
_PLACES_MAX = 8  # shards whose records are kept for places, and whose sizes are kept
# the size of a shard counts in the estimate of all holders for this long. Too large: a swarm that shrinks
# keeps more cells than it can fill
_SIZE_AGE_S_MAX = 60.0
_WITHDRAW_TIMEOUT_S = 0.8  # a node that closes does not wait longer than this for its callbacks


class Presence(Protocol):
    """Source of presence records."""

    @property
    def shard(self) -> HolderShard:
        """Return the shard of holders that this peer belongs to, by its last `read`."""
        ...

    @property
    def total(self) -> int:
        """Return how many holders there are, by the last `read`; in a large swarm an estimate."""
        ...

    async def read(self, timeout_s: float) -> dict[PeerId, Holder]:
        """Read the records of the live holders in this peer's shard from the network; in a small swarm of
        all. Raise NetworkError when the DHT cannot answer.
        """
        ...

    async def read_at(self, place: str, timeout_s: float) -> dict[PeerId, Holder]:
        """Read the records of the live holders in the shard that the name of a place belongs to, or return
        those that were read a moment ago. Raise NetworkError when the DHT cannot answer.
        """
        ...


class PermittedPresence:
    """Presence records without those of peers that are not permitted, so that nobody searches for them or
    waits for them.
    """

    def __init__(self, presence: Presence, is_permitted: Callable[[PeerId], bool]) -> None:
        self._presence, self._is_permitted = presence, is_permitted

    async def read(self, timeout_s: float) -> dict[PeerId, Holder]:
        return self._permitted(await self._presence.read(timeout_s))

    async def read_at(self, place: str, timeout_s: float) -> dict[PeerId, Holder]:
        return self._permitted(await self._presence.read_at(place, timeout_s))

    @property
    def shard(self) -> HolderShard:
        return self._presence.shard

    @property
    def total(self) -> int:
        return self._presence.total

    def _permitted(self, holders: Mapping[PeerId, Holder]) -> dict[PeerId, Holder]:
        return {peer: holder for peer, holder in holders.items() if self._is_permitted(peer)}


class DhtPresence:
    """Presence records of one averager in the DHT, under `run.<run>/holders.<averager>`; in a large swarm
    under `run.<run>/holders.<averager>.<bits>.<prefix>`.
    """

    def __init__(
        self,
        *,
        dht: DhtService,
        name: AveragerName,
        own: Callable[[], Contact],
        schema: VectorSchema,
        group_size: int = 0,
        may_divide: Callable[[Collection[PeerId], int], bool] = lambda peers, size_max: True,
    ) -> None:
        """`group_size`: size of the averager's groups; one dictionary has room for at least two of them.
        `may_divide` says whether holders that are more than a number make a large swarm
        (`RunLedger.may_divide`).
        """
        self._dht = dht
        self._name = name
        self._own = own
        self._schema = schema
        self._place = place_of(own().peer_id.to_bytes())
        self._flat_max = max(FLAT_MAX, 2 * group_size)
        self._may_divide = may_divide
        self._bits = 0
        self._stored: set[Key] = set()  # keys under which this peer's record may stand
        # read for places: the time, and the records
        self._read_at: dict[HolderShard, tuple[float, dict[PeerId, Holder]]] = {}
        # sizes of shards: the time of reading, and the number of holders
        self._sizes: dict[HolderShard, tuple[float, int]] = {}
        self._keeper = RecordKeeper(
            self.declare,
            f"the presence record of {self._key(HolderShard())}",
            renew_s=_RENEW_S,
            retry_s=_RETRY_S,
        )

    @property
    def shard(self) -> HolderShard:
        """Return the shard that this peer is in."""
        return shard_at(self._place, self._bits)

    @property
    def total(self) -> int:
        """Return how many holders there are by the shards that were read a moment ago; 0 before any was."""
        sizes = [size for _, size in self._sizes.values()]
        return holders_by_shards(sizes, self._bits) if sizes else 0

    def _key(self, shard: HolderShard) -> Key:
        return Key(f"run.{self._name.run}", shard.name(self._name.averager))

    async def declare(self) -> bool:
        """Store this peer's record once. Return False when no other peer of the DHT accepted it."""
        shard = self.shard
        stored = await self._store(shard, {})
        if shard.bits and shard.prefix == 0:  # a notice for newcomers
            await self._store(HolderShard(), {"bits": shard.bits})
        return stored

    async def _store(self, shard: HolderShard, notice: dict[str, int]) -> bool:
        contact, key = self._own(), self._key(shard)
        value = {
            **notice,
            "addresses": contact.published,
            "schema": self._schema.digest,
            "text": self._schema.text[:TEXT_MAX],
        }
        self._stored.add(key)
        result = await self._dht.store(
            key,
            value,
            ttl_s=TTL_S,
            subkey=str(contact.peer_id),
            timeout_s=STORE_TIMEOUT_S,
        )
        return bool(result.replicas > (1 if contact.addresses else 0))  # one copy is this peer's own

    def renew_soon(self) -> None:
        """Store the record again soon: this peer has other addresses."""
        self._keeper.renew_soon()

    async def renew(self) -> None:
        """Store the record at regular intervals, until cancelled."""
        await self._keeper.run()

    async def wait_until_declared(self, timeout_s: float) -> None:
        """Wait until `renew` has stored the record once, or has failed to; at most `timeout_s`."""
        await wait_until_set(self._keeper.attempted, timeout_s)

    async def withdraw(self) -> None:
        """Delete the record, so that no peer waits for this one any more. A failure is only logged."""
        own = str(self._own().peer_id)

        async def delete(key: Key) -> None:
            try:
                await self._dht.delete(key, subkey=own, timeout_s=_WITHDRAW_TIMEOUT_S)
            except SwarmError as error:
                _log.debug("the presence record of %s was not withdrawn: %s", key, error)

        async with asyncio.TaskGroup() as tasks:
            for key in self._stored:
                tasks.create_task(delete(key))

    async def read(self, timeout_s: float) -> dict[PeerId, Holder]:
        holders = await (self._read_shard(timeout_s) if self._bits else self._read_flat(timeout_s))
        if self._own().peer_id not in holders:
            self._keeper.renew_soon()
        return holders

    async def _read_flat(self, timeout_s: float) -> dict[PeerId, Holder]:
        """Read the one dictionary of a small swarm. A peer that finds a larger swarm reads its shard."""
        records = await self._records(HolderShard(), timeout_s)
        if not records.keys() - {self._own().peer_id}:
            # new replicas may lack the records, and this peer must not conclude that it is alone
            records = await self._records(HolderShard(), timeout_s, latest=True)
        notices = [bits for _, bits in records.values() if bits]
        total = holders_estimated(len(records) - len(notices), notices)
        if self._may_divide(records.keys(), self._flat_max):
            self._divide(bits_for(total, 0, self._flat_max))
        if self._bits:
            return await self._read_shard(timeout_s)
        self._sizes[HolderShard()] = asyncio.get_running_loop().time(), len(records)
        return {peer: holder for peer, (holder, _) in records.items()}

    async def _read_shard(self, timeout_s: float) -> dict[PeerId, Holder]:
        """Read the records of this peer's shard, and adapt the division to the number of holders. Shards that
        the estimate of that number needs are read, too.
        """
        shard = self.shard
        self._forget_old_sizes()
        needed = [one for one in shard.others(SHARDS_COUNTED - 1) if one not in self._sizes]
        known = len(self._sizes.keys() - {shard})
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(_outcome(self._read_around(shard, timeout_s, latest=True)))
            for other in needed[: max(SHARDS_COUNTED - 1 - known, 0)]:
                tasks.create_task(_outcome(self._read_around(other, timeout_s)))
        holders = reading.result()
        if isinstance(holders, SwarmError):
            raise holders
        self._divide(bits_for(self.total, shard.bits, self._flat_max))
        return holders

    def _forget_old_sizes(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for shard in [one for one, (read_s, _) in self._sizes.items() if now_s - read_s > _SIZE_AGE_S_MAX]:
            del self._sizes[shard]

    async def _read_around(
        self, shard: HolderShard, timeout_s: float, *, latest: bool = False
    ) -> dict[PeerId, Holder]:
        """Read the dictionary of a shard, and those in which peers that assume another division stand."""
        async with asyncio.TaskGroup() as tasks:
            reads = [
                tasks.create_task(_outcome(self._records(one, timeout_s, latest=latest and one == shard)))
                for one in (*shard.neighbours(), shard)
            ]
        *others, own = [read.result() for read in reads]
        if isinstance(own, SwarmError):
            raise own
        found = {
            peer: holder
            for records in (*others, own)
            if not isinstance(records, SwarmError)
            for peer, (holder, _) in records.items()
            if shard.holds(place_of(peer.to_bytes()))
        }
        if shard.bits == self._bits:
            self._sizes.pop(shard, None)
            self._sizes[shard] = asyncio.get_running_loop().time(), len(found)
            while len(self._sizes) > _PLACES_MAX:
                del self._sizes[next(iter(self._sizes))]
        return found

    def _divide(self, bits: int) -> None:
        """Assume another division. This peer's last record is left to expire, so that peers that follow later
        still see it.
        """
        if bits != self._bits:
            _log.info("the holders of %s are divided into %d shards now", self._key(HolderShard()), 1 << bits)
            self._bits = bits
            self._read_at.clear()
            self._sizes.clear()
            self._keeper.renew_soon()

    async def read_at(self, place: str, timeout_s: float) -> dict[PeerId, Holder]:
        shard, now_s = shard_at(place_of(place.encode()), self._bits), asyncio.get_running_loop().time()
        read_s, holders = self._read_at.get(shard, (-math.inf, {}))
        if now_s - read_s > _PLACE_AGE_S_MAX:
            holders = await self._read_around(shard, timeout_s)
            self._read_at[shard] = (now_s, holders)
            while len(self._read_at) > _PLACES_MAX:
                del self._read_at[next(iter(self._read_at))]
        return holders

    async def _records(
        self, shard: HolderShard, timeout_s: float, *, latest: bool = False
    ) -> dict[PeerId, tuple[Holder, int]]:
        """Return the records of a dictionary: each holder, and the number of bits in it, 0 without any.
        `latest`: ask more peers than the replicas.
        """
        key = self._key(shard)
        found = await self._dht.get(key, latest=latest, timeout_s=timeout_s)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise NetworkError(f"{key} does not hold presence records")
        records = {}
        for entry in found.values():
            holder = _holder(entry.writer, entry.value)
            if holder is not None:
                bits = entry.value.get("bits", 0)
                records[entry.writer] = holder, bits if bits in range(BITS_MAX + 1) else 0
        return records


async def _outcome(reading: Coroutine[Any, Any, _Read]) -> _Read | SwarmError:
    """Return what was read, or the error: a group of tasks would wrap an error that is raised."""
    try:
        return await reading
    except SwarmError as error:
        return error


def _holder(writer: PeerId, value: Any) -> Holder | None:
    """Return the holder that a record describes, or None when the record is malformed, which harms only its
    writer.
    """
    if not isinstance(value, dict):
        return None
    schema, text = value.get("schema"), value.get("text")
    if not isinstance(schema, bytes) or len(schema) > SCHEMA_BYTES_MAX or not isinstance(text, str):
        return None
    try:
        contact = Contact.from_record(writer, value.get("addresses"))
    except PeerError:
        return None
    return Holder(contact=contact, schema=schema, schema_text=text[:TEXT_MAX])
