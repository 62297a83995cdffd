"""Finding runs: their signed specifications and the list of their names live in the DHT, and every member
keeps them there.

Nothing here is believed because of who wrote it. A listing holds the owner's key and the name, which together
give the run's id. A specification is a blob that its owner signed: one entry of the DHT, whichever member
stored it last, so that the founder may leave for good, a thousand members cost no more than one, and replicas
refuse whatever the owner did not sign (`swarm.dht.logic.blobs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from swarm.core.clock import Clock
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.ids import Key, PeerId
from swarm.run.keeping import KeptSpecifications
from swarm.run.specification import SignedSpecification, newest, run_id_of, specification_key, verified

if TYPE_CHECKING:
    from swarm.dht.service.dht_service import DhtService, Entry

_log = logging.getLogger(__name__)
T = TypeVar("T")

LISTING_KEY = Key("public", "runs")
_TTL_S = 3600.0  # how long a run stays findable after its last member vanished
_REFRESH_S = 180.0  # how soon members notice what the owner has changed; each look costs five calls
_LEFT_S_MIN = _TTL_S / 2  # whoever looks first when less time is left stores it again, for all
_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, order=True)
class RunListing:
    """A run that somebody announces."""

    name: str
    run_id: str

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.run_id}"

    def is_meant_by(self, wanted: str | None) -> bool:
        """`wanted`: a name, `name@id`, an id, or None for any."""
        return wanted in (None, self.name, self.full_name, self.run_id)


class RunDirectory:
    """Publishes and finds runs through one node's DHT. All of it runs on the node's network loop."""

    def __init__(
        self,
        dht: DhtService,
        own: PeerId,
        *,
        clock: Clock,
        rng: random.Random | None = None,
        kept: KeptSpecifications | None = None,
    ) -> None:
        """`kept`: where specifications are kept on disk; None: nowhere."""
        self._dht = dht
        self._clock = clock
        self._own = own
        self._rng = rng or random.Random()
        self._kept = kept

    async def publish(self, signed: SignedSpecification, *, timeout_s: float = 10.0) -> None:
        """Store the specification, and list the run under this peer's name. NetworkError when no peer, not
        even this one, took them.
        """
        listing = {"name": signed.name, "owner": signed.owner.to_bytes()}
        async with asyncio.TaskGroup() as group:
            stored = [
                group.create_task(
                    self._dht.store_blob(
                        specification_key(signed.run_id), signed.blob, ttl_s=_TTL_S, timeout_s=timeout_s
                    )
                ),
                group.create_task(
                    self._dht.store(
                        LISTING_KEY, listing, ttl_s=_TTL_S, subkey=signed.run_id, timeout_s=timeout_s
                    )
                ),
            ]
        if not all(task.result().ok for task in stored):
            raise NetworkError(
                f"no peer stored the specification of {signed.full_name}: is the bootstrap peer alive?"
            )

    async def listings(self, *, timeout_s: float = 10.0) -> list[RunListing]:
        """The runs that this swarm knows, sorted; entries that do not prove themselves are left out."""
        found = set()
        for entry in await self._dht.get_all(LISTING_KEY, latest=True, timeout_s=timeout_s):
            listing = _listing(entry)
            if listing is not None:
                found.add(listing)
        return sorted(found)

    async def kept(self, wanted: str) -> list[SignedSpecification]:
        """The runs that this machine took part in, of this name, `name@id` or id."""
        every = await self._on_disk(KeptSpecifications.all) or []
        return [signed for signed in every if RunListing(signed.name, signed.run_id).is_meant_by(wanted)]

    async def specification(
        self, run_id: str, *, from_disk: bool = True, timeout_s: float = 10.0
    ) -> SignedSpecification:
        """The newest genuine specification of a run, be it the one that this machine kept. PeerError with the
        reasons when there is one that cannot be used here, or none.
        """
        own = await self._on_disk(lambda kept: kept.load(run_id)) if from_disk else None
        try:
            genuine, refused = await self._copies(run_id, timeout_s, latest=True)
        except DeadlineExceeded:
            if own is None:
                raise
            genuine, refused = [], []
        found = newest([signed for _, signed in genuine] + ([own] if own is not None else []))
        if found is None:
            reasons = (
                "; ".join(sorted(set(refused))[:3])
                or "nobody stores it, so its last member has probably left"
            )
            raise PeerError(f"the specification of run {run_id} was not found: {reasons}")
        return found

    async def find(self, wanted: str | None, *, timeout_s: float = 10.0) -> SignedSpecification:
        """The run that `wanted` (a name, `name@id`, or an id) means, or the only one there is. UsageError
        lists what exists otherwise.

        A run that this machine took part in is found by its name although the swarm has forgotten it; never
        without, since it may be another swarm's.
        """
        listings = await self.listings(timeout_s=timeout_s)
        if wanted is not None and not any(listing.is_meant_by(wanted) for listing in listings):
            listings += [RunListing(signed.name, signed.run_id) for signed in await self.kept(wanted)]
        return await self.specification(choose(listings, wanted).run_id, timeout_s=timeout_s)

    async def keep(
        self,
        signed: SignedSpecification,
        on_newer: Callable[[SignedSpecification], Awaitable[None]],
        told: Callable[[], SignedSpecification] | None = None,
    ) -> None:
        """Keep the specification in the DHT for as long as this runs, and take over newer versions of the
        owner's as they appear. What is kept there is kept on disk, too. `told`: the newest that came another
        way.
        """
        await self.save(signed)
        while True:
            try:
                genuine, _ = await self._copies(signed.run_id, 10.0)
                latest = newest(
                    [signed, *([told()] if told is not None else []), *(copy for _, copy in genuine)]
                )
                if latest is not None and latest.version > signed.version:
                    signed = latest
                    await self.save(signed)
                    await on_newer(signed)
                if not self._is_kept([entry for entry, copy in genuine if copy.version >= signed.version]):
                    await self.publish(signed)
            except (NetworkError, PeerError) as error:
                _log.info(
                    "the specification of %s was not refreshed, tried again later: %s",
                    signed.full_name,
                    error,
                )
            await asyncio.sleep(_REFRESH_S * self._rng.uniform(0.7, 1.3))

    async def save(self, signed: SignedSpecification) -> None:
        """Keep it on disk."""
        await self._on_disk(lambda kept: kept.save(signed))

    async def _on_disk(self, work: Callable[[KeptSpecifications], T]) -> T | None:
        """In a thread of the loop's: a disk can take its time. None when nothing is kept on disk."""
        if self._kept is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(None, work, self._kept)

    def _is_kept(self, entries: list[Entry]) -> bool:
        """Does somebody keep the current version, with enough time left?"""
        return any(entry.expiration - self._clock.swarm_s() > _LEFT_S_MIN for entry in entries)

    async def _copies(
        self, run_id: str, timeout_s: float, *, latest: bool = False
    ) -> tuple[list[tuple[Entry, SignedSpecification]], list[str]]:
        genuine, refused = [], []
        for entry in await self._dht.get_all(specification_key(run_id), latest=latest, timeout_s=timeout_s):
            try:
                if not isinstance(entry.value, bytes):
                    raise PeerError("a specification was refused: it is not bytes")
                genuine.append((entry, verified(entry.value, run_id)))
            except PeerError as error:
                refused.append(str(error))
        return genuine, refused


def choose(listings: Iterable[RunListing], wanted: str | None) -> RunListing:
    """Pick the run that is meant; UsageError says what there is when that is not clear."""
    every = list(listings)
    if not every:
        raise UsageError(
            "this swarm announces no run: found one with `swarm start RUN.toml --bootstrap ADDRESS`, or check the address"
        )
    matching = [listing for listing in every if listing.is_meant_by(wanted)]
    if len(matching) == 1:
        return matching[0]
    shown = ", ".join(listing.full_name for listing in (matching or every)[:_SHOWN_MAX])
    if matching:
        raise UsageError(f"{len(matching)} runs could be meant: {shown}. Choose one with --run NAME@ID")
    raise UsageError(f"this swarm has no run {wanted!r}. It has: {shown}")


def _listing(entry: Entry) -> RunListing | None:
    value = entry.value
    with contextlib.suppress(UsageError, TypeError, KeyError):
        if isinstance(value, dict) and isinstance(value["name"], str):
            run_id = run_id_of(PeerId.from_bytes(value["owner"]), value["name"])
            if entry.subkey == run_id:
                return RunListing(value["name"], run_id)
    return None
