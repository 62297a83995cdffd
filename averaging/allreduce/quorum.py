"""The membership of a running round as one member sees it: which members are alive, what each holds, and the
verdict.

Heartbeats and votes travel on the control connections, apart from the tensors. Of two members that can both
be dialed the one earlier in group order calls; a member that cannot be dialed always calls. The reply to a
vote waits until the called member has voted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from averaging.allreduce.commit import Ballot, Next, Verdict, Votes
from averaging.allreduce.config import REASON_CHARACTERS_MAX, VOTE, RoundConfig
from averaging.allreduce.liveness import FailureDetector
from averaging.allreduce.pacing import StragglerDetector
from averaging.allreduce.vigil import FailureDetectorDriver, FailureListener
from averaging.allreduce.voting import ballot_of, vote_of
from averaging.matchmaking.logic.group import Group, can_dial
from swarm.core.clock import Clock
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, SwarmError
from swarm.net.rpc import Caller
from swarm.wire.reduce_pb2 import HeartbeatReply, Vote, VoteReply, VoteRequest

_VOTE_RETRY_S = 0.05
_VOTE_WAIT_S = 60.0  # longest time that a vote call waits for news
# after an exchange of votes, before asking for the next: nearly always the round is over by then
_LINGER_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The callbacks by which a membership reports to its round."""

    dead: Callable[[int, str], None]  # this member died, or gave up
    doing: Callable[[int], str]  # what a member was at, for sentences
    # most others committed this digest, which is not ours: take it from these
    elsewhere: Callable[[bytes, tuple[int, ...]], None]
    resolve: Callable[[], None]  # members hold different averages: take what most hold, then call `recast`
    overtaken: Callable[[], None]  # most others hold everything already


class RoundMembership:
    """The members of one round. It outlives the round for a while, to answer members that ask late; it holds
    no tensors.
    """

    def __init__(self, group: Group, own: int, *, caller: Caller, clock: Clock, config: RoundConfig) -> None:
        self.group = group
        self.dead: dict[int, str] = {}
        self.excluded: dict[int, str] = {}  # who lives and is not asked any more, and why
        self.votes = Votes(range(len(group.members)), own, self.name, unanimous=config.audit > 0)
        self._own = own
        self._caller = caller
        self.clock = self._clock = clock
        self._config = config
        self._began_s = clock.monotonic_s()
        self.cast_s: float | None = None  # our first vote
        self.deadline_s = math.inf  # of the round, on the clock of `now_s`
        others = [place for place in range(len(group.members)) if place != own]
        self._calls = [place for place in others if self._is_caller(own, place)]
        answers = [place for place in others if self._is_caller(place, own)]
        self._liveness = FailureDetector(self._calls, answers, config.liveness, self._began_s)
        findings = FailureListener(
            dead=self._mark_failed,
            left=functools.partial(self._mark_failed, gave_up=True),
            heed=self._heed,
            over=lambda place: place in self.dead or self._verdict is not None,
            can_dial=self.can_dial,
        )
        self._vigil = FailureDetectorDriver(
            group, self._liveness, findings, caller=caller, clock=clock, config=config.liveness
        )
        self._pacing = StragglerDetector(config.pacing.voter_s, config.pacing, self._began_s)
        self._running: set[int] = set()  # who has said that it runs the round
        self._changed = asyncio.Event()  # somebody voted, died, or there is a verdict
        self._state = 1  # of what our replies to votes tell: our own ballots and the end
        self._hidden_state = 0  # ballots and deaths of members that cannot be dialed, for their like
        self._asking: set[int] = set()
        # the number of our last ballot that each called member has answered
        self._answered_ballots: dict[int, int] = {}
        self._verdict: Verdict | None = None
        self._left_out: Mapping[int, str] = {}
        self._resolving = False
        self._events: Events | None = None
        self._tasks: asyncio.TaskGroup | None = None

    # ---- for the round

    @property
    def now_s(self) -> float:
        return self._clock.monotonic_s()

    def by_s(self, share: float) -> float:
        """When this share of the round's time will be over."""
        return self._began_s + share * (self.deadline_s - self._began_s)

    @property
    def verdict(self) -> Verdict | None:
        """None while the round runs."""
        return self._verdict

    def name(self, place: int) -> str:
        """For sentences."""
        return f"peer {self.group.members[place].peer_id}"

    def can_dial(self, place: int) -> bool:
        """Can this member be called?"""
        return can_dial(self.group.members[place])

    def heard(self, place: int) -> None:
        """Something came from this member."""
        self._liveness.heard(place)

    def sent(self, place: int) -> None:
        """Something was sent to this member."""
        self._liveness.sent(place)

    def starting(self, place: int, starting: bool) -> None:
        """Set whether the member's first tensors are on their way."""
        self._liveness.starting(place, starting)

    def suspect(self, place: int, why: str, if_alive: Callable[[], None] | None = None) -> None:
        """Probe a member now because its connection broke. If it lives and is still in the round, `if_alive`
        is called.
        """
        self._vigil.suspect(place, why, if_alive)

    def cast(self, digest: bytes, left_out: Mapping[int, str]) -> None:
        """Our first vote: everything is in place, with this digest. Without effect when it is cast."""
        if self._own not in self.votes.cast:
            self._left_out = dict(left_out)
            self.recast(digest)

    def recast(self, digest: bytes) -> None:
        """Our next vote."""
        self._resolving = False
        own = self.votes.cast.get(self._own)
        if self._verdict is not None or (own is not None and own.failure is not None):
            return
        self.votes.add(self.votes.next_ballot(digest, self._left_out))
        self.cast_s = self.cast_s or self._clock.monotonic_s()
        self._state += 1
        self._evaluate()

    def fail(self, reason: str) -> None:
        """End the round here as failed; without effect once it has ended."""
        if self._verdict is None:
            number = self.votes.cast[self._own].number if self._own in self.votes.cast else 1
            self.votes.cast[self._own] = Ballot(
                place=self._own,
                number=number,
                failure=reason[:REASON_CHARACTERS_MAX],
                left_out=self._left_out,
            )
            self._end(Verdict(reason))

    async def ended(self) -> None:
        """Returns when there is a verdict."""
        while self._verdict is None:
            await self._change()

    async def watch(self, events: Events) -> None:
        """Send heartbeats, probe and vote until cancelled."""
        self._events = events
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._vigil.run(tasks))
            for place in self._calls:
                tasks.create_task(self._exchange_votes(place))
            while True:
                self._vigil.tick(tasks)
                self._pace(self._clock.monotonic_s())
                await asyncio.sleep(self._config.liveness.heartbeat_interval_s)

    async def announce(self) -> None:
        """Tell those who may not know how it ended."""
        own = self.votes.cast[self._own]
        if own.failure is not None:
            places, limit_s = (
                [place for place, _ in enumerate(self.group.members) if self.can_dial(place)],
                self._config.announce_s,
            )
        # a member that called had its vote delivered with the reply that ended the round, unless there was a
        # later ballot
        else:
            places, limit_s = (
                [place for place in self._calls if self._answered_ballots.get(place, 0) < own.number],
                self._config.farewell_s,
            )
        vote = vote_of(own)
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                for place in places:
                    if place != self._own and place not in self.dead:
                        tasks.create_task(self._tell(place, vote, limit_s))
        except TimeoutError:
            pass  # their streams and heartbeats will report it

    # ---- for the service, when members call

    def answer_heartbeat(self, place: int) -> HeartbeatReply:
        """A member asks whether we live."""
        self.heard(place)
        if self._verdict is None:
            return HeartbeatReply(state=HeartbeatReply.RUNNING)
        if self._verdict.failure is None:
            return HeartbeatReply(state=HeartbeatReply.COMMITTED)
        return HeartbeatReply(
            state=HeartbeatReply.FAILED, reason=self._verdict.failure[:REASON_CHARACTERS_MAX]
        )

    async def answer_vote(self, place: int, request: VoteRequest) -> VoteReply:
        """A member's vote, if it has one; ours, once it is cast and is not what the caller knows already."""
        self.heard(place)
        if request.HasField("vote"):
            if request.vote.place != place:
                raise PeerError(f"a vote for place {request.vote.place} from the member at place {place}")
            self._count(request.vote)
            if request.vote.committed or request.vote.failed:
                return VoteReply()  # it wants to know nothing any more
        hidden = not self.can_dial(place)  # it cannot ask others like it
        while self._own not in self.votes.cast or (
            self._verdict is None and self._state_for(hidden) == request.known
        ):
            await self._change()
        # its first answer tells of all others like it; not of their later ballots, which they cast only once
        # they have heard of ours
        while hidden and not request.known and self._verdict is None and self._unheard():
            await self._change()
        reply = VoteReply(vote=vote_of(self.votes.cast[self._own]), state=self._state_for(hidden))
        if hidden:
            reply.relayed.extend(
                vote_of(ballot) for other, ballot in self.votes.cast.items() if not self.can_dial(other)
            )
            reply.dead.extend(other for other in self.dead if self._config.audit and not self.can_dial(other))
        return reply

    # ---- within

    def _unheard(self) -> bool:
        return any(
            place not in self.votes.cast and not self.can_dial(place) for place in self.votes.electorate
        )

    def _state_for(self, hidden: bool) -> int:
        return self._state + self._hidden_state if hidden else self._state

    def _is_caller(self, caller: int, called: int) -> bool:
        if not self.can_dial(called):
            return False
        return caller < called or not self.can_dial(caller)

    async def _change(self) -> None:
        """Until something has changed; check again then. There is no await between a check and this, so no
        change is missed.
        """
        self._changed.clear()
        await self._changed.wait()

    def _end(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
            if verdict.failure is None:
                self.votes.commit()
            self._state += 1
        self._changed.set()

    def _evaluate(self) -> None:
        """Something is known that was not: is this the end, and if not, what becomes of our vote?"""
        events = self._events
        self._changed.set()
        if self._verdict is not None:
            return
        verdict = self.votes.verdict()
        if verdict is not None and verdict.failure is not None:
            self.fail(verdict.failure)
        elif verdict is not None:
            self._end(verdict)
        elif events is not None and not self._resolving and not self._config.audit:
            if self.votes.overtaken:
                events.overtaken()
            digest = self.votes.elsewhere()
            following = self.votes.next()
            if digest is not None:
                self._resolving = True
                events.elsewhere(
                    digest,
                    tuple(place for place in self.votes.committed if self.votes.cast[place].digest == digest),
                )
            elif following is Next.RESOLVE:
                self._resolving = True
                for place in self.votes.differed():
                    self._exclude(place, "it holds other averages than most, and stays with them")
                events.resolve()
            elif following is Next.VOTE:
                self.recast(self.votes.cast[self._own].digest)

    def _mark_failed(self, place: int, why: str, *, gave_up: bool = False) -> None:
        if place in self.dead or self._verdict is not None:
            return
        doing = self._events.doing(place) if self._events is not None else "beginning"
        reason = f"{self.name(place)} {'gave up' if gave_up else 'died'} while {doing}: {why}"
        if gave_up and self._config.audit:
            self.fail(reason)  # it may have found a liar
            return
        self.dead[place] = reason
        self._liveness.forget(place)
        self.votes.mark_failed(place)
        if not self.can_dial(place):
            self._hidden_state += 1
        if self._events is not None:
            self._events.dead(place, reason)
        self._evaluate()

    def _exclude(self, place: int, why: str) -> None:
        self.excluded.setdefault(place, f"{self.name(place)} was not asked any more: {why}")
        self.votes.exclude(place)

    def _pace(self, now_s: float) -> None:
        """Do not ask members that live and do not vote, once most have. Who audits may take its time, and is
        always asked.
        """
        if self._config.audit:
            return
        own = self.votes.cast.get(self._own)
        missing = self.votes.missing
        waited_for = missing if own is not None and 2 * len(missing) < len(self.votes.electorate) else []
        for place, idle_s in self._pacing.tick(waited_for, now_s):
            self._exclude(place, f"it has not voted {idle_s:.1f} s after most others")
            self._evaluate()

    def _count(self, vote: Vote) -> None:
        ballot = ballot_of(vote, len(self.group.members))
        if not self.votes.add(ballot):
            return
        self._pacing.worked(vote.place)
        if not self.can_dial(vote.place):
            self._hidden_state += 1
        if ballot.failure is not None:
            self._mark_failed(vote.place, ballot.failure, gave_up=True)
        self._evaluate()

    def _heed(self, place: int, reply: HeartbeatReply) -> None:
        """Handle what a living member reports about the round."""
        if reply.state == HeartbeatReply.RUNNING:
            self._running.add(place)
        elif reply.state == HeartbeatReply.FAILED:
            self._mark_failed(place, reply.reason[:REASON_CHARACTERS_MAX], gave_up=True)
        elif reply.state == HeartbeatReply.COMMITTED and self._config.audit:
            if self._own not in self.votes.cast:
                self.fail(
                    f"{self.name(place)} and others committed without this peer, having taken it for dead"
                )
        elif reply.state == HeartbeatReply.COMMITTED:
            known = self.votes.cast.get(place)
            if (
                (known is None or not known.committed)
                and self._tasks is not None
                and place not in self._asking
            ):
                self._asking.add(place)  # how did it end?
                self._tasks.create_task(self._ask_vote(place))
        elif place in self._running:
            self._mark_failed(place, "it has restarted and knows nothing of this round")
        elif self._clock.monotonic_s() - self._began_s > self._config.join_s:
            self._mark_failed(
                place,
                f"it lives, but has not begun this round within {self._config.join_s:g} s",
                gave_up=True,
            )

    async def _ask_vote(self, place: int) -> None:
        """Hear from a member that has committed what it holds."""
        try:
            await self._vote_call(place, 0, self._config.liveness.timeout_s_max)
        except (NetworkError, PeerError):
            pass  # heartbeats ask again
        finally:
            self._asking.discard(place)

    async def _vote_call(self, place: int, known: int, timeout_s: float) -> int:
        """Give our vote to one member and take its own; the state of its reply."""
        own = self.votes.cast.get(self._own)
        request = VoteRequest(
            group_id=self.group.group_id, vote=vote_of(own) if own is not None else None, known=known
        )
        reply = await self._caller.call(self.group.members[place].contact, VOTE, request, timeout_s=timeout_s)
        if reply.vote.place != place:
            raise PeerError(f"it answered with a vote for place {reply.vote.place}")
        self._liveness.heard(place)
        if own is not None:
            self._answered_ballots[place] = own.number
        self._count(reply.vote)
        if not self.can_dial(self._own):
            # what a member that can be dialed says of those that cannot: the only way in which two of these
            # hear of each other
            for vote in reply.relayed:
                if (
                    vote.place != self._own
                    and vote.place < len(self.group.members)
                    and not self.can_dial(vote.place)
                ):
                    self._count(vote)
            for hidden in reply.dead if self._config.audit else ():
                if hidden != self._own and hidden < len(self.group.members) and not self.can_dial(hidden):
                    self._mark_failed(hidden, "so says a member that it was connected to")
        return reply.state

    async def _exchange_votes(self, place: int) -> None:
        """Exchange votes with one member until the end, as often as there is something new."""
        known = 0
        while self._own not in self.votes.cast:
            await self._change()
        while place not in self.dead and self._verdict is None:
            said = self.votes.cast[self._own]
            try:
                async with asyncio.TaskGroup() as tasks:
                    call = tasks.create_task(self._exchange_once(place, known))
                    while not call.done() and self.votes.cast[self._own] is said:
                        change = tasks.create_task(self._change())
                        await asyncio.wait({call, change}, return_when=asyncio.FIRST_COMPLETED)
                        change.cancel()
                    call.cancel()
                if not call.cancelled():
                    known = call.result()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LINGER_S):
                            while self.votes.cast[self._own] is said and self._verdict is None:
                                await self._change()
            except* PeerError as errors:
                self._mark_failed(place, f"it does not vote: {errors.exceptions[0]}", gave_up=True)

    async def _exchange_once(self, place: int, known: int) -> int:
        try:
            return await self._vote_call(place, known, _VOTE_WAIT_S)
        except DeadlineExceeded:
            return known
        except NetworkError as error:
            self.suspect(place, f"its connection broke ({error})")
            await asyncio.sleep(_VOTE_RETRY_S)
            return known

    async def _tell(self, place: int, vote: Vote, timeout_s: float) -> None:
        request = VoteRequest(group_id=self.group.group_id, vote=vote)
        with contextlib.suppress(SwarmError):  # it is told as a courtesy
            await self._caller.call(
                self.group.members[place].contact, VOTE, request, timeout_s=max(timeout_s, 0.001)
            )
