"""The unary calls of one round: heartbeats, votes, and the calls of repairs. Each ends with an event, even
when its member failed meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from averaging.allreduce import wire
from averaging.allreduce.config import (
    ENDORSE,
    FETCH,
    HEARTBEAT,
    INVENTORY,
    OFFER,
    REASON_CHARACTERS_MAX,
    VOTE,
)
from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.effects import Effect
from averaging.allreduce.logic.repairs import FETCH_S
from averaging.allreduce.logic.values import CallFailure, Inventory
from averaging.allreduce.offload import OutOfMemory
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, SwarmError, UsageError
from swarm.wire.reduce_pb2 import FetchRequest, HeartbeatRequest, OfferRequest, VoteRequest

if TYPE_CHECKING:
    from averaging.allreduce.driver import RoundDriver

T = TypeVar("T")

# timeout of a request for votes before it is repeated, because the request or its answer may be lost;
# otherwise two members that have voted would wait for one another until the round's deadline
_VOTE_S = 5.0
_INVENTORY_S = 31.0  # a second of waiting for news, plus time for the answer on a slow link
_ENDORSE_S = 5.0


class RoundCalls:
    """The calls of one round; each is performed in a task of its own."""

    def __init__(self, driver: RoundDriver) -> None:
        self._driver = driver
        self._tasks: asyncio.TaskGroup | None = None
        self._by_place: dict[int, set[asyncio.Task[None]]] = {}
        self._votes: dict[int, asyncio.Task[None]] = {}

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Start performing calls to the members of this group."""
        self._tasks = tasks

    async def finish(self, timeout_s: float) -> None:
        """End all calls but those that carry votes, and wait for these, at most `timeout_s`."""
        votes = set(self._votes.values())
        for calls in self._by_place.values():
            for call in calls - votes:
                call.cancel()
        if votes:
            await asyncio.wait(votes, timeout=timeout_s)
        self.close()

    def close(self) -> None:
        """End all calls."""
        self._tasks = None
        for calls in self._by_place.values():
            for call in list(calls):
                call.cancel()

    def perform(self, effect: Effect) -> None:
        """Begin a call."""
        match effect:
            case do.Ping():
                self._start(effect.place, self._ping, effect)
            case do.AskVotes():
                if effect.place in self._votes:
                    self._votes[effect.place].cancel()
                task = self._start(effect.place, self._ask_votes, effect)
                if task is not None:
                    self._votes[effect.place] = task
                    task.add_done_callback(functools.partial(self._vote_ended, effect.place))
            case do.AskInventory():
                self._start(effect.place, self._ask_inventory, effect)
            case do.FetchChunk():
                self._start(effect.place, self._fetch_chunk, effect)
            case do.FetchContribution():
                self._start(effect.place, self._fetch_contribution, effect)
            case do.OfferContribution():
                self._start(effect.place, self._offer, effect)
            case do.Endorse():
                self._start(-1, self._endorse, effect)
            case do.CancelCalls():
                for call in list(self._by_place.get(effect.place, ())):
                    call.cancel("the member failed")
            case _:
                raise AssertionError(f"no such effect: {effect}")

    def _start(
        self, place: int, work: Callable[[T], Awaitable[None]], effect: T
    ) -> asyncio.Task[None] | None:
        if self._tasks is None:
            return None
        task = self._tasks.create_task(self._guarded(work, effect))
        calls = self._by_place.setdefault(place, set())
        calls.add(task)
        task.add_done_callback(calls.discard)
        return task

    def _vote_ended(self, place: int, task: asyncio.Task[None]) -> None:
        if self._votes.get(place) is task:
            del self._votes[place]

    async def _guarded(self, work: Callable[[T], Awaitable[None]], effect: T) -> None:
        """Run this work. End the round when the node was closed meanwhile, or has no memory left."""
        driver = self._driver
        name = driver.machine.setup.name(driver.machine.setup.own)
        try:
            await work(effect)
        except UsageError as error:
            driver.feed(on.GiveUp(f"{name} cannot continue: {error}"))
        except OutOfMemory as error:
            driver.feed(on.GiveUp(f"{name} {error}"))

    # ---- the calls

    async def _ping(self, ping: do.Ping) -> None:
        driver = self._driver
        asked_s = driver.network.now_s
        request = HeartbeatRequest(group_id=driver.group_id)
        try:
            reply = await driver.network.call(
                driver.contact(ping.place), HEARTBEAT, request, timeout_s=ping.timeout_s
            )
            state, reason = wire.state_from_wire(reply)
        except (NetworkError, PeerError) as error:
            driver.feed(on.CallFailed(ping, _failure(error), str(error)))
        else:
            driver.feed(on.PingAnswered(ping.place, state, reason, driver.network.now_s - asked_s))

    async def _ask_votes(self, ask: do.AskVotes) -> None:
        driver = self._driver
        request = VoteRequest(group_id=driver.group_id, statement=wire.statement_to_wire(ask.statement))
        try:
            reply = await driver.network.call(driver.contact(ask.place), VOTE, request, timeout_s=_VOTE_S)
            members = len(driver.machine.setup.members)
            driver.feed(on.VotesAnswered(ask.place, wire.statement_from_wire(reply.statement, members)))
        except (NetworkError, PeerError) as error:
            driver.feed(on.CallFailed(ask, _failure(error), str(error)))

    async def _ask_inventory(self, ask: do.AskInventory) -> None:
        driver = self._driver
        request = wire.question_to_wire(driver.group_id, ask.question)
        versions = {}
        try:
            while True:
                reply = await driver.network.call(
                    driver.contact(ask.place), INVENTORY, request, timeout_s=_INVENTORY_S
                )
                versions.update(wire.versions_from_wire(request, reply, driver.machine.setup.plan))
                if not reply.more or not reply.versions:
                    break
                request.first_chunk = reply.versions[-1].chunk + 1
                request.wait = False
        except asyncio.CancelledError:
            driver.feed(on.CallFailed(ask, CallFailure.SILENT, "it failed meanwhile"))
            raise
        except (NetworkError, PeerError) as error:
            driver.feed(on.CallFailed(ask, _failure(error), str(error)))
            return
        inventory = Inventory(versions, reply.sealed, tuple(reply.wanted))
        driver.feed(on.InventoryAnswered(ask.place, ask.question, inventory))

    async def _fetch_chunk(self, fetch: do.FetchChunk) -> None:
        driver, version = self._driver, fetch.version
        ended = on.ChunkFetched(fetch.place, fetch.chunk, version, ok=False)
        payload = memoryview(b"")
        try:
            if not version.empty:
                request = FetchRequest(group_id=driver.group_id, chunk=fetch.chunk, digest=version.digest)
                reply = await driver.network.call(
                    driver.contact(fetch.place), FETCH, request, timeout_s=FETCH_S
                )
                driver.machine.assembly.check(fetch.chunk, version.contributors, len(reply.payload))
                payload = memoryview(reply.payload)
                driver.bytes_received += len(payload)
            ok = await driver.keep_fetched(fetch.chunk, payload, version)
            ended = on.ChunkFetched(fetch.place, fetch.chunk, version, ok)
        except (NetworkError, PeerError):
            pass
        finally:
            driver.feed(ended)

    async def _fetch_contribution(self, fetch: do.FetchContribution) -> None:
        driver = self._driver
        request = FetchRequest(group_id=driver.group_id, chunk=fetch.chunk)
        size_bytes, failure = 0, "it failed meanwhile"
        try:
            reply = await driver.network.call(
                driver.contact(fetch.place), FETCH, request, timeout_s=fetch.timeout_s
            )
            driver.keep_value(fetch.place, fetch.chunk, memoryview(reply.payload))
            size_bytes, failure = len(reply.payload), ""
        except (NetworkError, PeerError) as error:
            failure = str(error)
        finally:
            driver.feed(on.ContributionFetched(fetch.place, fetch.chunk, size_bytes, failure))

    async def _offer(self, offer: do.OfferContribution) -> None:
        driver = self._driver
        request = OfferRequest(group_id=driver.group_id, chunk=offer.chunk)
        taken = False
        try:
            try:
                request.payload = await driver.encoded(offer.chunk)
            except PeerError as error:
                request.withdrawn = str(error)[:REASON_CHARACTERS_MAX]
            await driver.network.call(driver.contact(offer.place), OFFER, request, timeout_s=FETCH_S)
            taken = True
        except SwarmError:
            pass  # the caller asks again, or has failed
        finally:
            driver.feed(on.OfferEnded(offer.place, offer.chunk, taken))

    async def _endorse(self, endorse: do.Endorse) -> None:
        driver = self._driver
        vote = None
        try:
            contact = await driver.voter.find_contact(endorse.elector)
            if contact is not None:
                proposal = driver.machine.setup.proposal
                request = wire.endorsement_to_wire(proposal, endorse.result, endorse.votes)
                reply = await driver.network.call(contact, ENDORSE, request, timeout_s=_ENDORSE_S)
                vote = wire.vote_from_wire(reply.vote) if reply.HasField("vote") else None
            driver.feed(on.Endorsed(endorse.elector, vote))
        except (NetworkError, PeerError):
            driver.feed(on.Endorsed(endorse.elector, None))


def _failure(error: SwarmError) -> CallFailure:
    if isinstance(error, PeerError):
        return CallFailure.REFUSED
    return CallFailure.SILENT if isinstance(error, DeadlineExceeded) else CallFailure.BROKEN
