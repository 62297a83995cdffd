"""The recovery from lost reducers, and from averages that differ from those of other members, as
`averaging.allreduce.repair` decides it.

All of it is unary calls that may be repeated, and none of it happens in a round in which nothing fails
(decision 0010).
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from averaging.allreduce.commit import Version, digest_round, winners
from averaging.allreduce.config import Dialer
from averaging.allreduce.contributions import Contributions
from averaging.allreduce.holding import ChunkInventory
from averaging.allreduce.reach import RepairClient
from averaging.allreduce.repair import Ask, Redo, Repair, Take, attempt
from averaging.allreduce.span import RoundContext
from averaging.allreduce.work import Averaged
from averaging.reduction.reduce import ReductionJob
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, SwarmError
from swarm.wire.reduce_pb2 import FetchReply, FetchRequest, HeldReply, HeldRequest

_RETRY_S = 0.1  # before a member that could not be asked is asked again
_FETCHES_MAX = 6  # averages fetched at once when members hold different ones


class Recovery:
    """`run` runs it; `lose`, `mark_failed`, `resolve` and `adopt` say what has happened; the rest answers
    members.
    """

    def __init__(self, shared: RoundContext, caller: Dialer, halt: Callable[[bool], Awaitable[None]]) -> None:
        self._shared = shared
        self._kernels, self._assembly, self._quorum = shared.kernels, shared.assembly, shared.quorum
        self._plan, self._own = shared.kernels.plan, shared.own
        self._reach = RepairClient(shared, caller)
        self.contributions = Contributions(shared, self._reach, self.wake)
        self._halt = halt
        self._members = shared.quorum.group.members
        self._dialable = [place for place in range(len(self._members)) if shared.quorum.can_dial(place)]
        self._repairs: dict[int, Repair] = {}
        self._lost_s: dict[int, float] = {}
        self._changed = asyncio.Event()
        self._jobs: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._repairing: list[asyncio.Task[None]] = []
        self.adopting = False  # others have ended the round, and we take what they made of it
        self.lost: dict[int, str] = {}  # reducers, and why
        self.holding = ChunkInventory(shared.assembly, shared.kernels.averages)

    # ---- what has happened

    def lose(self, reducer: int, reason: str, *, trusted: bool) -> None:
        """Nothing more comes on this reducer's stream. `trusted`: it may be asked for what it has."""
        repair = self._repairs.get(reducer)
        if repair is None:
            self.lost[reducer] = f"{self._quorum.name(reducer)} was lost as a reducer: {reason}"
            repair = self._begin(reducer, trusted)
        elif not trusted:
            repair.distrust()
        self.wake()

    def give_up_own(self, reason: str) -> None:
        """Our own shard was taken over: reduce it no more, and take it from the others."""

        async def give_up() -> None:
            await self._halt(False)
            self.lose(self._own, reason, trusted=False)
            self._shared.progressed()

        self._do(give_up)

    def mark_failed(self, place: int) -> None:
        """A member died, or gave up."""
        for repair in self._repairs.values():
            repair.mark_failed(place)
        self._reach.mark_failed(place)
        self.wake()

    def resolve(self) -> None:
        """Members hold different averages: take what most hold, and vote again."""
        self._do(self._resolve)

    def adopt(self, digest: bytes, places: tuple[int, ...]) -> None:
        """Most others have committed what these hold, and we hold something else: take it."""
        self._do(functools.partial(self._adopt, digest, places))

    def wake(self) -> None:
        """Something has changed."""
        self._changed.set()

    def pace(self, now_s: float) -> None:
        """Do not wait for ever for a reducer that lives, and whose stream broke."""
        for reducer, repair in self._repairs.items():
            if (
                repair.trusted
                and repair.lacking
                and now_s - self._lost_s[reducer] > self._shared.config.pacing.reducer_s
            ):
                repair.distrust()
                self.wake()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._reach.tasks = tasks
            while True:
                while self._jobs:
                    tasks.create_task(self._jobs.popleft()())
                if not self.adopting:
                    for repair in self._repairs.values():
                        self._poll(repair, tasks)
                self._repairing = [task for task in self._repairing if not task.done()]
                await self._change()

    # ---- repair of a shard

    def _begin(self, reducer: int, trusted: bool) -> Repair:
        repair = Repair(
            reducer, own=self._own, dialable=self._dialable, members=len(self._members), trusted=trusted
        )
        for place in self._quorum.dead:
            repair.mark_failed(place)
        self._repairs[reducer] = repair
        self._lost_s[reducer] = self._quorum.now_s
        return repair

    def _poll(self, repair: Repair, tasks: asyncio.TaskGroup) -> None:
        if not self._members[self._own].auxiliary or repair.owned:
            repair.lack(self._assembly.lacking(repair.reducer))
        for chunk in repair.lacking:
            if chunk in self._assembly.held:
                repair.on_held(chunk)
        for action in repair.poll():
            work = {Ask: self._ask, Take: self._take, Redo: self._redo}[type(action)]
            self._repairing.append(tasks.create_task(work(repair, action)))  # type: ignore[operator]

    async def _ask(self, repair: Repair, action: Ask) -> None:
        known, known_sealed = repair.known(action.place)
        request = HeldRequest(
            group_id=self._quorum.group.group_id,
            reducer=repair.reducer,
            wait=action.wait,
            known=known,
            known_sealed=known_sealed,
        )
        try:
            held, reply = await self._reach.table(action.place, request)
        except SwarmError as error:
            if isinstance(error, NetworkError) and not isinstance(error, DeadlineExceeded):
                self._quorum.suspect(action.place, f"its connection broke ({error})")
            await asyncio.sleep(_RETRY_S)
            repair.on_silence(action.place)
        else:
            for chunk in reply.wanted:
                await self.contributions.offer(action.place, chunk)
            repair.on_report(action.place, held, reply.sealed)
        self.wake()

    async def _take(self, repair: Repair, action: Take) -> None:
        if not await self._reach.fetch(action.place, action.chunk, action.version):
            repair.on_failed(action)
        else:
            repair.on_held(action.chunk)
            self._shared.progressed()
        self.wake()

    async def _redo(self, repair: Repair, action: Redo) -> None:
        """Reduce a chunk again, with the contributions of the live members."""
        chunk = self._plan.chunks[action.chunk]
        found = await self.contributions.collect(chunk)
        job = ReductionJob(chunk, found, own=self._shared.contributes)
        while True:
            done = (
                self._kernels.nothing(chunk)
                if job.empty
                else (await self._shared.labour.work(self._kernels.reduce, [job]))[0]
            )
            if isinstance(done, Averaged):
                break
            if not done.places:
                return self._quorum.fail(f"the sum of chunk {chunk.index} overflows float32")
            for place in done.places:
                if place == self._own:
                    await self._shared.labour.work(self._kernels.exclude_self_for, chunk)
                else:
                    flaw = self._kernels.flaw(chunk, job.contributions, place)
                    self.contributions.leave_out(
                        place, f"its values of chunk {chunk.index} cannot be averaged: {flaw}"
                    )
            job = job.without(done.places, self._own)
        made = attempt(repair.reducer, self._own, len(self._members))
        self._assembly.settle(chunk.index, Version(made, done.contributors, done.digest, done.clipped))
        self.contributions.forget(chunk.index)
        repair.on_held(chunk.index)
        self._shared.progressed()
        self.wake()
        return None

    # ---- averages that differ

    async def _resolve(self) -> None:
        """Take of every chunk the version that most of those who are asked hold, as far as they can be asked,
        and vote again.
        """
        if self._members[self._own].auxiliary:
            return self._quorum.recast(b"")
        asked = [place for place in sorted(self._quorum.votes.electorate) if place in self._dialable]
        tables: dict[int, Mapping[int, Version]] = {}

        async def one(place: int) -> None:
            try:
                tables[place], _ = await self._reach.table(place, self._reach.everything())
            except NetworkError as error:
                self._quorum.suspect(place, f"its connection broke ({error})")
            except PeerError:
                return  # it has nothing to say about this

        async with asyncio.TaskGroup() as tasks:
            for place in asked:
                if place == self._own:
                    tables[place] = dict(self._assembly.held)
                else:
                    tasks.create_task(one(place))
        await self._take_over(winners(tables, range(len(self._plan.chunks))))
        self._quorum.recast(self._assembly.digest())
        return None

    async def _adopt(self, digest: bytes, places: tuple[int, ...]) -> None:
        """Download the averages that others have committed from any member that holds them; the digest proves
        them.
        """
        self.adopting = self._reach.include_failed = True
        for task in self._repairing:
            task.cancel()
        await self._halt(True)
        if self._members[self._own].auxiliary:
            return self._accept(digest)
        why = "nobody can be dialed"
        for place in sorted(
            self._dialable, key=lambda place: (place not in places, place in self._quorum.dead)
        ):
            if place == self._own:
                continue
            try:
                table, _ = await self._reach.table(place, self._reach.everything())
                if len(table) != len(self._plan.chunks) or _digest(table) != digest:
                    raise PeerError("what it holds is not what they committed")
                await self._take_over({chunk: (version, [place]) for chunk, version in table.items()})
                if self._assembly.complete and self._assembly.digest() == digest:
                    return self._accept(digest)
                why = f"{self._quorum.name(place)} could not give all of it"
            except SwarmError as error:
                why = f"{self._quorum.name(place)}: {error}"
        return self._quorum.fail(
            f"others committed without this peer, and their averages cannot be had any more ({why})"
        )

    def _accept(self, digest: bytes) -> None:
        own = self._quorum.votes.cast.get(self._own)
        content = b"" if self._members[self._own].auxiliary else digest
        if own is None:
            self._quorum.cast(content, self.contributions.left_out)
        else:
            self._quorum.recast(content)

    async def _take_over(self, chosen: Mapping[int, tuple[Version, list[int]]]) -> None:
        """Fetch what differs from what we hold, each from one of those who hold it."""
        limit = asyncio.Semaphore(_FETCHES_MAX)

        async def one(chunk: int, version: Version, places: list[int]) -> None:
            async with limit:
                for nth in range(len(places)):
                    if await self._reach.fetch(places[(chunk + nth) % len(places)], chunk, version):
                        return

        async with asyncio.TaskGroup() as tasks:
            for chunk, (version, places) in chosen.items():
                held = self._assembly.held.get(chunk)
                if held is None or not held.same(version):
                    tasks.create_task(one(chunk, version, [place for place in places if place != self._own]))

    # ---- for the service, when members call

    async def answer_held(self, place: int, request: HeldRequest) -> HeldReply:
        """Return the versions of a shard that this member holds, and whether it may still get
        more of them.
        """
        self._check_repairs()
        reducer = request.reducer
        if not request.everything and reducer < len(self._members) and place != reducer:
            self._heed_loss(reducer, place)
        limit_s = self._quorum.now_s + self._shared.config.held_wait_s
        while request.wait and self._quorum.verdict is None and not self._news(place, request):
            try:
                async with asyncio.timeout(max(limit_s - self._quorum.now_s, 0.0)):
                    await self._change()
            except TimeoutError:
                break
        reply = self.holding.tell(request, self._sealed(reducer))
        reply.wanted.extend(self.contributions.wanted(place))
        return reply

    async def answer_fetch(self, request: FetchRequest) -> FetchReply:
        """Return an average, or this member's contribution to a chunk, to the member that takes it over."""
        self._check_repairs()
        if request.chunk >= len(self._plan.chunks):
            raise PeerError(f"there is no chunk {request.chunk}")
        if request.digest:
            reply = self.holding.give(request.chunk, request.digest)
        else:
            if self._quorum.verdict is not None:
                raise PeerError("the round is over")
            reply = FetchReply(payload=await self.contributions.encoded(request.chunk))
        self._shared.traffic.sent += len(reply.payload)
        return reply

    def _check_repairs(self) -> None:
        """PeerError where reducers are audited: who took a shard over could not be."""
        if self._shared.config.audit:
            raise PeerError("this round is audited: nobody takes over what another member reduces")

    def _heed_loss(self, reducer: int, place: int) -> None:
        """A member has lost this reducer: does it live for us?"""
        if reducer in self._repairs or reducer not in self._plan.reducers or reducer == self._own:
            return
        self._quorum.suspect(reducer, f"{self._quorum.name(place)} has lost it")
        # it takes no averages, and so cannot miss any: it may still have to take over
        if self._members[self._own].auxiliary:
            self._begin(reducer, trusted=reducer not in self._quorum.dead)
            self.wake()

    def _sealed(self, reducer: int) -> bool:
        if self._members[self._own].auxiliary and reducer != self._own:
            return True
        if self._assembly.arriving(reducer):
            return False
        repair = self._repairs.get(reducer)
        return (repair is not None and not repair.trusted) or not self._assembly.lacking(reducer)

    def _news(self, place: int, request: HeldRequest) -> bool:
        reducer = request.reducer
        known = (request.known, request.known_sealed)
        return known != (self.holding.count(reducer), self._sealed(reducer)) or bool(
            self.contributions.wanted(place)
        )

    # ---- waiting

    def _do(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._jobs.append(job)
        self.wake()

    async def _change(self) -> None:
        """Until something has changed; check again then. There is no await between a check and this, so no
        change is missed.
        """
        self._changed.clear()
        await self._changed.wait()


def _digest(table: Mapping[int, Version]) -> bytes:
    return digest_round((table[chunk].digest, table[chunk].contributors) for chunk in sorted(table))
