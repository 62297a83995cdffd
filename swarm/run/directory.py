"""Publish and find runs: the DHT holds their signed specifications and a list of their names, and every
member renews both.

No record is trusted because of the peer that stored it. A listing contains the founder's key, the name and
the recovery key, from which the run's id is computed. A specification is a blob that the owner signed. It is
one entry of the DHT, no matter which member stored it last, so the peer that created the run may leave, a
thousand members cost no more than one, and replicas refuse blobs that the owner did not sign
(`swarm.dht.logic.blobs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from swarm.core.clock import Clock
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.dht.keeper import RecordKeeper
from swarm.dht.logic.companions import LISTING_KEY
from swarm.run.catalogue import catalogue_key, entry_value, is_listed
from swarm.run.owned import GRID_PREFIX
from swarm.run.signed import SignedSpecification, newest, run_id_of, specification_key, verified
from swarm.run.specification_store import SpecificationStore

if TYPE_CHECKING:
    from swarm.dht.service.dht_service import DhtService, Entry

T = TypeVar("T")

_TTL_S = 3600.0  # a run can be found for this long after its last member left
_REFRESH_S = 180.0  # interval at which members look for changes; each look costs five calls
_RETRY_S = 30.0  # retry interval after a failure; doubles up to `_REFRESH_S`
_LEFT_S_MIN = _TTL_S / 2  # a member that sees less remaining lifetime stores the specification again
_LISTED_MAX = 20  # runs named in an error message


@dataclass(frozen=True, slots=True, order=True)
class RunListing:
    """Name and id of a run that the swarm lists."""

    name: str
    run_id: str

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.run_id}"

    @property
    def is_grid(self) -> bool:
        """Return whether this is a grid of experts. The id is a hash of the name, so the name cannot be
        forged.
        """
        return self.name.startswith(GRID_PREFIX)

    def matches(self, wanted: str | None) -> bool:
        """Return whether `wanted` (a name, `name@id`, an id, or None for any run) means this run. The name of
        a grid may be written without its first part: `ffn` for `grid.ffn`.
        """
        names = [self.name, self.full_name]
        if self.is_grid:
            names += [name.removeprefix(GRID_PREFIX) for name in names]
        return wanted in (None, self.run_id, *names)


class RunDirectory:
    """Publishes and finds runs through the DHT of one node. All coroutines run on the node's network loop."""

    def __init__(
        self,
        dht: DhtService,
        *,
        clock: Clock,
        rng: random.Random | None = None,
        store: SpecificationStore | None = None,
    ) -> None:
        """`store`: copies of specifications on disk; None: no copies are kept."""
        self._dht = dht
        self._clock = clock
        self._rng = rng or random.Random()
        self._store = store

    async def publish(self, signed: SignedSpecification) -> None:
        """Store the specification in the DHT, and list the run with this peer as the writer.

        Raises NetworkError if no peer stored them, not even this one.
        """
        listing: dict[str, object] = {"name": signed.name, "owner": signed.founder.to_bytes()}
        if signed.specification.recovery_peer is not None:
            listing["recovery_key"] = signed.specification.recovery_peer.to_bytes()
        async with asyncio.TaskGroup() as group:
            stored = [
                group.create_task(
                    self._dht.store_blob(specification_key(signed.run_id), signed.blob, ttl_s=_TTL_S)
                ),
                group.create_task(self._dht.store(LISTING_KEY, listing, ttl_s=_TTL_S, subkey=signed.run_id)),
            ]
            if is_listed(signed):
                group.create_task(self._list(signed))
        if not all(task.result().ok for task in stored):
            raise NetworkError(
                f"no peer stored the specification of {signed.full_name}: is the bootstrap peer alive?"
            )

    async def _list(self, signed: SignedSpecification) -> None:
        """Store the run's entry in the catalogue, without which it is found by its address only."""
        key, value = catalogue_key(signed.founder), entry_value(signed, self._dht.own())
        with contextlib.suppress(NetworkError):
            await self._dht.store(key, value, ttl_s=_TTL_S, subkey=signed.run_id)

    async def listings(self) -> list[RunListing]:
        """Return the runs that this swarm lists, sorted. Entries whose id does not fit their owner and name
        are left out.
        """
        found = set()
        for entry in await self._dht.get_all(LISTING_KEY, latest=True):
            listing = _listing(entry)
            if listing is not None:
                found.add(listing)
        return sorted(found)

    async def stored(self, wanted: str) -> list[SignedSpecification]:
        """Return the specifications on disk that `wanted` (a name, `name@id` or id) means."""
        every = await self._on_disk(SpecificationStore.all) or []
        return [signed for signed in every if RunListing(signed.name, signed.run_id).matches(wanted)]

    async def specification(self, run_id: str, *, from_disk: bool = True) -> SignedSpecification:
        """Return the newest valid specification of a run, from the DHT or from disk.

        Raises PeerError with the reasons if there is none, or none that can be used here.
        """
        own = await self._on_disk(lambda store: store.load(run_id)) if from_disk else None
        try:
            valid, refused = await self._copies(run_id, latest=True)
        except DeadlineExceeded:
            if own is None:
                raise
            valid, refused = [], []
        found = newest([signed for _, signed in valid], held=own)
        if found is None:
            reasons = (
                "; ".join(sorted(set(refused))[:3])
                or "no peer stores it, so its last member has probably left"
            )
            raise PeerError(f"the specification of run {run_id} was not found: {reasons}")
        return found

    async def find(self, wanted: str | None, *, grid: bool = False) -> SignedSpecification:
        """Return the run that `wanted` (a name, `name@id` or an id) means, or the only run if it is None;
        with `grid` the only grid of experts, and otherwise the only run that trains.

        A run whose specification is on disk is found by its name even if the swarm has forgotten it. It is
        not found without a name, since it may belong to another swarm. Raises UsageError with a list of the
        runs if `wanted` is not clear.
        """
        listings = await self.listings()
        if wanted is not None and not any(listing.matches(wanted) for listing in listings):
            listings += [RunListing(signed.name, signed.run_id) for signed in await self.stored(wanted)]
        if wanted is None:
            listings = _of_kind(listings, grid)
        return await self.specification(choose(listings, wanted, grid=grid).run_id)

    async def renew(
        self,
        signed: SignedSpecification,
        on_newer: Callable[[SignedSpecification], Awaitable[None]],
        current: Callable[[], SignedSpecification] | None = None,
    ) -> None:
        """Renew the specification in the DHT and on disk until cancelled, and follow newer versions.

        `on_newer` is called with each newer version that the DHT holds. `current` returns the newest version
        that reached this peer in another way.
        """
        await self.save(signed)

        async def renew_once() -> bool:
            nonlocal signed
            valid, _ = await self._copies(signed.run_id)
            reached = [current()] if current is not None else []
            latest = newest([*reached, *(copy for _, copy in valid)], held=signed)
            if latest is not None and latest.version > signed.version:
                signed = latest
                await self.save(signed)
                await on_newer(signed)
            if not self._is_renewed([entry for entry, copy in valid if copy.version >= signed.version]):
                await self.publish(signed)
            return True

        await RecordKeeper(
            renew_once,
            f"the specification of {signed.full_name}",
            renew_s=lambda: _REFRESH_S * self._rng.uniform(0.7, 1.3),
            retry_s=_RETRY_S,
        ).run()

    async def save(self, signed: SignedSpecification) -> None:
        """Save a copy on disk, if this directory has a store."""
        await self._on_disk(lambda store: store.save(signed))

    async def _on_disk(self, work: Callable[[SpecificationStore], T]) -> T | None:
        """Run `work` in a thread, since a disk may be slow. Return None if there is no store."""
        if self._store is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(None, work, self._store)

    def _is_renewed(self, entries: list[Entry]) -> bool:
        """Return whether one of the entries lives long enough."""
        return any(entry.expiration - self._clock.swarm_s() > _LEFT_S_MIN for entry in entries)

    async def _copies(
        self, run_id: str, *, latest: bool = False
    ) -> tuple[list[tuple[Entry, SignedSpecification]], list[str]]:
        """Return the valid copies in the DHT with their entries, and the reasons why others were refused."""
        valid, refused = [], []
        for entry in await self._dht.get_all(specification_key(run_id), latest=latest):
            try:
                if not isinstance(entry.value, bytes):
                    raise PeerError("a specification was refused: it is not bytes")
                valid.append((entry, verified(entry.value, run_id)))
            except PeerError as error:
                refused.append(str(error))
        return valid, refused


def choose(
    listings: Iterable[RunListing], wanted: str | None, *, grid: bool = False, by_option: bool = True
) -> RunListing:
    """Return the run that `wanted` means. Raise UsageError with a list of the runs if that is not clear. For
    the sentence, `grid`: whether the user means a grid of experts; `by_option`: whether a user who has named
    no run names it by an option of the command, not by its argument.
    """
    every = list(listings)
    what, option = ("grid", "--grid") if grid else ("run", "--run")
    if not every and grid:
        raise UsageError(
            "this swarm announces no grid of experts: create one with `swarm serve ADDRESS GRID.toml` or "
            "`--experts`, or check the address"
        )
    if not every:
        raise UsageError(
            "this swarm announces no run: create one with `swarm start RUN.toml --bootstrap ADDRESS`, "
            "or check the address"
        )
    matching = [listing for listing in every if listing.matches(wanted)]
    if len(matching) == 1:
        return matching[0]
    shown = ", ".join(listing.full_name for listing in (matching or every)[:_LISTED_MAX])
    if matching:
        named = wanted is not None or not by_option
        advice = "Name one of them, as it stands here" if named else f"Choose one with {option} NAME@ID"
        raise UsageError(f"{len(matching)} {what}s match: {shown}. {advice}")
    raise UsageError(f"this swarm has no {what} {wanted!r}. It has: {shown}")


def _of_kind(listings: list[RunListing], grid: bool) -> list[RunListing]:
    """Return the grids, or the runs that train. Raise UsageError if there are only the others."""
    fitting = [listing for listing in listings if listing.is_grid == grid]
    if listings and not fitting:
        shown = ", ".join(listing.full_name for listing in listings[:_LISTED_MAX])
        if grid:
            raise UsageError(
                f"this swarm announces no grid of experts, but the run {shown}: create a grid with "
                "--experts, or train the run with `swarm join`"
            )
        raise UsageError(
            f"this swarm announces no run that trains, but the grid {shown}: list its experts with "
            "`swarm experts`, or host them with `swarm serve`"
        )
    return fitting


def _listing(entry: Entry) -> RunListing | None:
    value = entry.value
    with contextlib.suppress(UsageError, TypeError, KeyError):
        if isinstance(value, dict) and isinstance(value["name"], str):
            recovery = value.get("recovery_key")
            recovery = PeerId.from_bytes(recovery) if recovery is not None else None
            run_id = run_id_of(PeerId.from_bytes(value["owner"]), value["name"], recovery)
            if entry.subkey == run_id:
                return RunListing(value["name"], run_id)
    return None
