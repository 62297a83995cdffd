"""The members of a running round as one of them sees them: who lives, what each holds, and the verdict on the round.

Beats and votes travel on the control connections, apart from the tensors. Of two members that can both be dialed the one earlier in group
order calls; one that cannot be dialed always calls. A vote's reply waits until the called member's own vote is cast.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from averaging.commit import Ballot, Verdict, Votes
from averaging.group import Group, can_dial
from averaging.liveness import Liveness
from averaging.roundconfig import BEAT, REASON_CHARACTERS_MAX, VOTE, RoundConfig
from swarm.clock import Clock
from swarm.errors import DeadlineExceeded, NetworkError, PeerError, SwarmError
from swarm.net.rpc import Caller
from swarm.wire.reduce_pb2 import BeatReply, BeatRequest, LeftOut, Vote, VoteReply, VoteRequest

_VOTE_RETRY_S = 0.05


class Quorum:
    """One round's members. It outlives the round for a while, to answer those who ask late; it holds no tensors."""

    def __init__(self, group: Group, own: int, *, caller: Caller, clock: Clock, config: RoundConfig) -> None:
        self.group = group
        self.dead: dict[int, str] = {}
        self.votes = Votes(range(len(group.members)), own, self.name)
        self._own = own
        self._caller = caller
        self._clock = clock
        self._config = config
        self._began_s = clock.monotonic_s()
        self.cast_s: float | None = None  # when our own vote was cast
        others = [place for place in range(len(group.members)) if place != own]
        self._calls = [place for place in others if self._is_caller(own, place)]
        answers = [place for place in others if self._is_caller(place, own)]
        self._liveness = Liveness(self._calls, answers, config.liveness, self._began_s)
        self._suspects: asyncio.Queue[tuple[int, str, Callable[[], None] | None]] = asyncio.Queue()
        self._cast = asyncio.Event()  # our own vote was cast
        self._changed = asyncio.Event()  # somebody voted, died, or there is a verdict
        self._verdict: Verdict | None = None
        self._on_dead: Callable[[int, str], None] = lambda place, reason: None
        self._doing: Callable[[int], str] = lambda place: "waiting for the others"

    # ---- for the round

    @property
    def verdict(self) -> Verdict | None:
        """None while the round runs."""
        return self._verdict

    def name(self, place: int) -> str:
        """For sentences."""
        return f"peer {self.group.members[place].peer_id}"

    def heard(self, place: int) -> None:
        """Something came from this member."""
        self._liveness.heard(place)

    def suspect(self, place: int, why: str, if_alive: Callable[[], None] | None = None) -> None:
        """Its connection broke: probe it now. If it lives and is still in the round, `if_alive` is called."""
        if place not in self.dead:
            self._suspects.put_nowait((place, why, if_alive))

    def cast(self, digest: bytes, left_out: Mapping[int, str]) -> None:
        """Our vote: everything is in place, with this digest."""
        if not self._cast.is_set():
            self.votes.add(Ballot(place=self._own, digest=digest, left_out=dict(left_out)))
            self._cast.set()
            self.cast_s = self._clock.monotonic_s()
            self._evaluate()

    def fail(self, reason: str) -> None:
        """End the round here as failed; without effect once it has ended."""
        if self._verdict is None:
            if not self._cast.is_set():
                self.votes.add(Ballot(place=self._own, failure=reason[:REASON_CHARACTERS_MAX]))
                self._cast.set()
            self._end(Verdict(reason))

    async def ended(self) -> None:
        """Returns when there is a verdict."""
        while self._verdict is None:
            self._changed.clear()
            await self._changed.wait()

    async def watch(self, on_dead: Callable[[int, str], None], doing: Callable[[int], str]) -> None:
        """Beat, probe and vote until cancelled. `on_dead(place, reason)` is told of deaths; `doing(place)` says what a member was at."""
        self._on_dead, self._doing = on_dead, doing
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._probe_suspects(tasks))
            tasks.create_task(self._collect_votes(tasks))
            while True:
                beats, dead = self._liveness.tick(self._clock.monotonic_s())
                for place, silent_s in dead:
                    self._bury(place, f"it was silent for {silent_s:.1f} s")
                for place in beats:
                    if self._can_dial(place):
                        tasks.create_task(self._beat(place))
                await asyncio.sleep(self._config.liveness.beat_s)

    async def announce(self) -> None:
        """Tell those who can be dialed and live that the round failed here: they would find out later."""
        own = self.votes.cast[self._own]
        if own.failure is None:
            return  # we had voted for it, and a vote is cast once
        vote = _vote_message(own)
        try:
            async with asyncio.timeout(self._config.announce_s), asyncio.TaskGroup() as tasks:
                for place, _ in enumerate(self.group.members):
                    if place != self._own and place not in self.dead and self._can_dial(place):
                        tasks.create_task(self._tell(place, vote))
        except TimeoutError:
            pass  # they will hear it from their streams and beats

    # ---- for the service, when members call

    def answer_beat(self, place: int) -> BeatReply:
        """A member asks whether we live."""
        self.heard(place)
        if self._verdict is None:
            return BeatReply(state=BeatReply.RUNNING)
        if self._verdict.failure is None:
            return BeatReply(state=BeatReply.COMMITTED)
        return BeatReply(state=BeatReply.FAILED, reason=self._verdict.failure[:REASON_CHARACTERS_MAX])

    async def answer_vote(self, place: int, vote: Vote) -> VoteReply:
        """A member's vote; ours, once it is cast."""
        self.heard(place)
        if vote.place != place:
            raise PeerError(f"a vote for place {vote.place} from the member at place {place}")
        self._count(vote)
        await self._cast.wait()
        reply = VoteReply(vote=_vote_message(self.votes.cast[self._own]))
        if not self._can_dial(place):  # it cannot ask the others of its kind
            while self._verdict is None and any(not self._can_dial(other) for other in self.votes.missing):
                self._changed.clear()
                await self._changed.wait()
            reply.relayed.extend(_vote_message(ballot) for other, ballot in self.votes.cast.items() if not self._can_dial(other))
            reply.dead.extend(other for other in self.dead if not self._can_dial(other))
        return reply

    # ---- within

    def _is_caller(self, caller: int, called: int) -> bool:
        if not self._can_dial(called):
            return False
        return caller < called or not self._can_dial(caller)

    def _can_dial(self, place: int) -> bool:
        return can_dial(self.group.members[place])

    def _end(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
        self._changed.set()

    def _evaluate(self) -> None:
        verdict = self.votes.verdict()
        if verdict is None:
            self._changed.set()
        elif verdict.failure is not None:
            self.fail(verdict.failure)
        else:
            self._end(verdict)

    def _bury(self, place: int, why: str) -> None:
        if place in self.dead or self._verdict is not None:
            return
        reason = f"{self.name(place)} died while {self._doing(place)}: {why}"
        self.dead[place] = reason
        self._liveness.forget(place)
        self.votes.bury(place)
        self._on_dead(place, reason)
        self._evaluate()

    def _count(self, vote: Vote) -> None:
        if vote.place >= len(self.group.members):
            raise PeerError(f"a vote for place {vote.place} in a group of {len(self.group.members)}")
        left_out = {item.place: item.reason[:REASON_CHARACTERS_MAX] for item in vote.left_out if item.place < len(self.group.members)}
        failure = vote.reason[:REASON_CHARACTERS_MAX] if vote.failed else None
        self.votes.add(Ballot(place=vote.place, digest=vote.digest, failure=failure, left_out=left_out))
        self._evaluate()

    async def _probe_suspects(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            place, why, if_alive = await self._suspects.get()
            if place not in self.dead:
                tasks.create_task(self._probe(place, why, if_alive))

    async def _probe(self, place: int, why: str, if_alive: Callable[[], None] | None) -> None:
        """Its connection broke. Dead unless it answers now."""
        if not self._can_dial(place):  # it cannot be asked; its silence will tell
            if if_alive is not None:
                if_alive()
            return
        for last in (False, True):  # the first call may still meet the old, broken connection
            try:
                reply = await self._ask(place, self._config.liveness.probe_s)
            except NetworkError:
                if last:
                    self._bury(place, why)
            except PeerError as error:
                self.fail(f"{self.name(place)} has left the round: {error}")
            else:
                self._heed(place, reply)
                if if_alive is not None and self._verdict is None:
                    if_alive()
                return

    async def _beat(self, place: int) -> None:
        try:
            self._heed(place, await self._ask(place, self._liveness.patience_s(place)))
        except DeadlineExceeded:
            self._liveness.unanswered(place)  # its silence decides
        except NetworkError as error:
            self._liveness.unanswered(place)
            await self._probe(place, f"its connection broke ({error})", None)
        except PeerError as error:
            self.fail(f"{self.name(place)} has left the round: {error}")

    async def _ask(self, place: int, timeout_s: float) -> BeatReply:
        asked_s = self._clock.monotonic_s()
        request = BeatRequest(group_id=self.group.group_id)
        reply = await self._caller.call(self.group.members[place].contact, BEAT, request, timeout_s=timeout_s)
        self._liveness.answered(place, self._clock.monotonic_s() - asked_s)
        return reply

    def _heed(self, place: int, reply: BeatReply) -> None:
        """What a living member says about the round."""
        name = self.name(place)
        if reply.state == BeatReply.FAILED:
            self.fail(f"{name} gave up: {reply.reason[:REASON_CHARACTERS_MAX]}")
        elif reply.state == BeatReply.COMMITTED and not self._cast.is_set():
            self.fail(f"{name} and others committed without this peer, having taken it for dead")
        elif reply.state == BeatReply.UNKNOWN and self._clock.monotonic_s() - self._began_s > self._config.join_s:
            self.fail(f"{name} lives, but has not begun this round within {self._config.join_s:g} s")

    async def _collect_votes(self, tasks: asyncio.TaskGroup) -> None:
        await self._cast.wait()
        for place in self._calls:
            tasks.create_task(self._exchange_votes(place))

    async def _exchange_votes(self, place: int) -> None:
        """Give our vote to one member and take its own, however long that takes while it lives."""
        request = VoteRequest(group_id=self.group.group_id, vote=_vote_message(self.votes.cast[self._own]))
        while place not in self.dead:
            try:
                reply = await self._caller.call(self.group.members[place].contact, VOTE, request, timeout_s=60.0)
                if reply.vote.place != place:
                    raise PeerError(f"it answered with a vote for place {reply.vote.place}")
                self._count(reply.vote)
                self._heed_relayed(reply)
                return
            except DeadlineExceeded:
                continue
            except NetworkError as error:
                self.suspect(place, f"its connection broke ({error})")
                await asyncio.sleep(_VOTE_RETRY_S)
            except PeerError as error:
                self.fail(f"{self.name(place)} does not vote: {error}")
                return

    def _heed_relayed(self, reply: VoteReply) -> None:
        """What a member that can be dialed says of those that cannot: the only way in which two of these hear of each other."""
        hidden = {place for place in range(len(self.group.members)) if place != self._own and not self._can_dial(place)}
        if self._can_dial(self._own):
            return  # we hear them ourselves
        for vote in reply.relayed:
            if vote.place in hidden:
                self._count(vote)
        for place in hidden.intersection(reply.dead):
            self._bury(place, "so says a member that it was connected to")

    async def _tell(self, place: int, vote: Vote) -> None:
        request = VoteRequest(group_id=self.group.group_id, vote=vote)
        with contextlib.suppress(SwarmError):  # it is told as a courtesy
            await self._caller.call(self.group.members[place].contact, VOTE, request, timeout_s=max(self._config.announce_s, 0.001))


def _vote_message(ballot: Ballot) -> Vote:
    left_out = [LeftOut(place=place, reason=reason[:REASON_CHARACTERS_MAX]) for place, reason in ballot.left_out.items()]
    return Vote(place=ballot.place, failed=ballot.failure is not None, reason=ballot.failure or "", digest=ballot.digest, left_out=left_out)
