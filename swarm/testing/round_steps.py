"""The steps of the model check of rounds: all possible next events of a few peers with the real machines.

Each head of the history may be extended by given groups. In any order peers begin a round, their messages
arrive, are lost or refused, time passes, a peer restarts from this head or an older one, and a liar gives
each member another average and signs every vote. Undelivered messages and lost ones together are every cut of
the network, also in one direction. The parts of a stream arrive first, because no peer votes before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.values import CallFailure, Statement
from averaging.allreduce.logic.versions import encode_places
from averaging.history.chain import Chain
from averaging.history.lineage import Lineage
from swarm.testing.round_peers import (
    CHUNK_BYTES,
    RUN,
    GroupAttempt,
    Message,
    Round,
    Situation,
    Turn,
    TurnResult,
    average,
    caught_up,
    count_named_votes,
    endorse,
    reading,
    state_of,
    vote_of,
)
from swarm.testing.round_tables import RoundTables, State

_STREAM: Final = ("stream", "average")
_ANSWERS: Final = ("told", "inventory", "endorsed")


class Step(NamedTuple):
    """A possible event. `act` returns its possible results, perhaps none."""

    text: str
    act: Callable[[], Iterable[State]]
    is_fault: bool = False


class RoundSteps:
    """The states of one setting, and the steps between them."""

    def __init__(self, tables: RoundTables) -> None:
        self.tables, self.setting = tables, tables.setting
        self._turns: dict[tuple[Any, ...], tuple[int, tuple[int, ...], int]] = {}

    # ---- one input of one peer

    def _turn(
        self, state: State, peer: int, attempt: int, key: tuple[Any, ...], act: Callable[[Turn], None]
    ) -> State:
        """Let a peer's machine have an input. `key` names the input."""
        place = state.places[peer]
        whole = (peer, place, attempt, *key)
        if whole not in self._turns:
            local, marks = self.tables.locals[place], self.tables.merges
            turn = Turn(peer, self.tables.signers[peer], local, attempt, marks=marks)
            act(turn)
            self._turns[whole] = self._concluded(peer, turn.end())
        return self._moved(state, peer, attempt, *self._turns[whole])

    def _concluded(self, peer: int, outcome: TurnResult) -> tuple[int, tuple[int, ...], int]:
        signed = 0
        for attempt, vote in outcome.signed:
            signed |= self.tables.vote(attempt, vote.result, peer)
        sent = tuple(self.tables.message(message) for message in outcome.sent)
        return self.tables.place(peer, outcome.local), sent, signed

    def _moved(
        self, state: State, peer: int, attempt: int, place: int, sent: tuple[int, ...], signed: int
    ) -> State:
        messages = set(state.messages)
        for number in sent:
            message = self.tables.messages[number]
            if message.kind in ("cancel", "AskVotes"):  # the new call replaces the old one
                messages = {
                    one for one in messages if not self._is_of_call(self.tables.messages[one], message)
                }
            is_idle = message.receiver == self.setting.liar and message.kind in ("average", *_ANSWERS)
            if message.kind != "cancel" and not is_idle:
                messages.add(number)
        places = (*state.places[:peer], place, *state.places[peer + 1 :])
        after = state._replace(places=places, messages=frozenset(messages), signed=state.signed | signed)
        return self._without_idle(after, peer, attempt)

    @staticmethod
    def _is_of_call(one: Message, call: Message) -> bool:
        """Return whether a message belongs to an earlier call of the same peer to the same one."""
        cancels = call.kind == "cancel"
        if one.attempt != call.attempt:
            return False
        if (one.sender, one.receiver) == (call.sender, call.receiver):
            return (cancels and one.kind not in (*_ANSWERS, "average")) or one.kind == "AskVotes"
        back = (one.receiver, one.sender) == (call.sender, call.receiver)
        return back and (one.kind == "told" or (cancels and one.kind in _ANSWERS))

    def _without_idle(self, state: State, peer: int, attempt: int) -> State:
        """Drop messages that have no effect once a round has ended for a peer."""
        found = self.tables.local(state, peer).round_of(attempt)
        if found is None or found.finish is None:
            return state
        kept = frozenset(
            number
            for number in state.messages
            if (one := self.tables.messages[number]).attempt != attempt
            or not (
                (one.sender == peer and one.kind not in ("AskVotes", "average", *_ANSWERS))
                or (one.receiver == peer and one.kind in ("average", *_ANSWERS))
            )
        )
        return state if kept == state.messages else state._replace(messages=kept)

    # ---- steps

    def after(self, state: State) -> Iterator[Step]:
        """Return the possible next steps."""
        eager = next((one for one in sorted(state.messages) if self._is_due(state, one)), None)
        busy = set()  # peers that something still comes to, and those that it comes from
        for number in sorted(state.messages) if eager is None else [eager]:
            message = self.tables.messages[number]
            busy |= {message.sender, message.receiver}
            yield Step(str(message), partial(self.arrivals, state, number))
            if state.faults:
                yield Step(f"{message} is lost", partial(self._fault, self.lost, state, number), True)
        if eager is not None:
            return
        for peer in self.tables.honest:
            if self.tables.local(state, peer).running is None:
                for other in range(self.setting.peers):
                    yield Step(f"{peer} compares with {other}", partial(self.compared, state, peer, other))
            elif peer not in busy:
                yield Step(f"time passes for {peer}", partial(self.ticked, state, peer))
            elif state.faults:
                late = partial(self._fault, self._timed_out, state, peer)
                yield Step(f"{peer} does not wait any longer", late, True)
        yield from self._groups(state)
        yield from self._at_any_time(state)

    @staticmethod
    def _fault(act: Callable[..., Iterable[State]], state: State, *given: Any) -> Iterator[State]:
        for after in act(state, *given):
            yield after._replace(faults=state.faults - 1)

    def _at_any_time(self, state: State) -> Iterator[Step]:
        for peer in self.tables.honest:
            local = self.tables.local(state, peer)
            for one in local.unresolved():
                for other in one.attempt.members:
                    text = f"{peer} asks {other} how it voted in attempt {one.attempt.number}"
                    yield Step(text, partial(self.resolved, state, peer, one, other))
            if self.setting.liar is not None and local.running is not None:
                yield Step(f"a lie for {peer}", partial(self._lies, state, peer, local.running))
            if state.restarts:
                for chain in (local.lineage.chain(), self.tables.past[0]):
                    text = f"{peer} restarts in epoch {chain.epoch}"
                    yield Step(text, partial(self.restarted, state, peer, chain), True)

    def _is_due(self, state: State, number: int) -> bool:
        message = self.tables.messages[number]
        if message.kind not in _STREAM:
            return False
        return self.tables.local(state, message.receiver).round_of(message.attempt) is not None or (
            message.receiver == self.setting.liar
        )

    def _groups(self, state: State) -> Iterator[Step]:
        """Return the groups that may form: each once on every head, of members that are all there, or where
        one of them is not (a fault).
        """
        at_rest = [peer for peer in self.tables.honest if self.tables.local(state, peer).running is None]
        lineages = [self.tables.local(state, peer).lineage for peer in at_rest]
        for head, lineage in {one.head: one for one in lineages}.items():
            if lineage.epoch >= self.tables.past[-1].epoch + self.setting.heads:
                continue
            here = {peer for peer, one in zip(at_rest, lineages, strict=True) if one.head == head}
            for index, members in enumerate(self.setting.groups):
                found = self.tables.attempt(lineage, f"group {index}", members, is_break=False)
                if any((found.number, peer) in state.joined for peer in members):
                    continue
                missing = {*members} - here - {self.setting.liar}
                text = f"{members} begin attempt {found.number}"
                if not missing:
                    yield Step(text, partial(self.formed, state, found, members))
                if not state.faults or len(missing) > 1 or len(members) < 2:
                    continue
                for away in sorted(missing or {*members} - {self.setting.liar}):
                    some = tuple(peer for peer in members if peer != away)
                    yield Step(
                        f"{text} without {away}", partial(self._fault, self.formed, state, found, some), True
                    )

    def formed(self, state: State, attempt: GroupAttempt, members: Iterable[int]) -> Iterator[State]:
        """Let peers begin a round."""
        for peer in members:
            if peer != self.setting.liar:
                state = self._begun(state, peer, attempt)
        away = {(attempt.number, peer) for peer in attempt.members}
        yield state._replace(joined=state.joined | away)

    def _begun(self, state: State, peer: int, attempt: GroupAttempt) -> State:
        """Let a peer begin a round. A liar's values come at once."""
        local = self.tables.local(state, peer)
        rounds = (*local.rounds, Round(attempt))
        place = self.tables.place(peer, replace(local, rounds=rounds))
        state = self._at(state, peer, place)

        def begin(turn: Turn) -> None:
            turn.begin()
            if self.setting.liar in attempt.members:
                turn.stream(attempt.place(self.setting.liar))

        return self._turn(state, peer, attempt.number, ("begin",), begin)

    def ticked(self, state: State, peer: int) -> Iterator[State]:
        """Let time pass for the round of a peer."""
        running = self.tables.local(state, peer).running
        assert running is not None
        yield self._turn(state, peer, running.attempt.number, ("tick",), Turn.tick)

    def _timed_out(self, state: State, peer: int) -> Iterator[State]:
        """Let a peer's round end without the messages in transit to it."""
        while self.tables.local(state, peer).running is not None:
            (state,) = self.ticked(state, peer)
        yield state

    def compared(self, state: State, peer: int, other: int) -> Iterator[State]:
        """Let a peer compare its history with that of another one, and follow it if it should."""
        one, two = self.tables.local(state, peer), self.tables.local(state, other)
        if one.lineage.head == two.lineage.head:
            return
        key = (peer, state.places[peer], "follow", state.places[other])
        if key not in self._turns:
            made = caught_up(one, two.lineage.chain(one.lineage.heads()))
            self._turns[key] = (self.tables.place(peer, made) if made else state.places[peer]), (), 0
        place = self._turns[key][0]
        if place != state.places[peer]:
            yield self._at(state, peer, place)

    def restarted(self, state: State, peer: int, chain: Chain) -> Iterator[State]:
        """Let a peer lose everything but a checkpoint."""
        lineage = Lineage(RUN, self.tables.ids[peer])
        lineage.adopt(chain)
        messages = frozenset(
            number
            for number in state.messages
            if (one := self.tables.messages[number]).sender != peer
            and not (one.receiver == peer and one.kind in ("average", *_ANSWERS))
        )
        after = self._at(state, peer, self.tables.place(peer, Situation(lineage)))
        yield after._replace(messages=messages, restarts=state.restarts - 1)

    @staticmethod
    def _at(state: State, peer: int, place: int) -> State:
        return state._replace(places=(*state.places[:peer], place, *state.places[peer + 1 :]))

    def resolved(self, state: State, peer: int, one: Round, other: int) -> Iterator[State]:
        """Let a peer ask a member of a round that has ended how it voted."""
        if other == peer:
            return
        number = one.attempt.number
        if other == self.setting.liar:
            statements = [Statement((vote,)) for vote in self._lying_votes(state, one.attempt)]
        else:
            found = self.tables.local(state, other).round_of(number)
            if found is None or found.finish is None:
                return
            statements = [reading(found, other).votes.statement()]
        for statement in statements:
            made = count_named_votes(
                self.tables.local(state, peer), peer, number, statement, marks=self.tables.merges
            )
            place = self.tables.place(peer, made)
            if place != state.places[peer]:
                heard = state.heard | self._heard(number, statement)
                yield self._at(state, peer, place)._replace(heard=heard)

    # ---- messages

    def arrivals(self, state: State, number: int) -> Iterator[State]:
        """Return what can come of a message that arrives."""
        message = self.tables.messages[number]
        without = state._replace(messages=state.messages - {number})
        if message.receiver == self.setting.liar:
            yield from self._arrivals_at_liar(without, message)
            return
        there = self.tables.local(state, message.receiver).round_of(message.attempt)
        if there is None and message.kind != "Endorse":
            if message.kind == "ping":
                yield self._answer_ping(without, message, None)
            elif (refused := self._failed(without, message, CallFailure.REFUSED)) is not None:
                yield refused
            return
        arrived = self._arrived(without, message, there)
        if arrived is not None:
            yield arrived

    def _arrived(self, state: State, message: Message, there: Round | None) -> State | None:
        kind, body, number = message.kind, message.body, message.attempt
        attempt = self.tables.attempts[number]
        if kind == "Endorse":
            return self._endorsed(state, message)
        assert there is not None
        back = attempt.place(message.sender) if message.sender in attempt.members else -1
        is_over = there.finish is not None
        if kind in ("stream", "FetchContribution") and is_over:
            return self._failed(state, message, CallFailure.REFUSED)
        if kind == "AskInventory" and there.finish is not None and there.finish.failure is not None:
            return self._failed(state, message, CallFailure.REFUSED)
        if kind == "ping":
            return self._answer_ping(state, message, there)
        key: tuple[Any, ...] = ("arrives", self.tables.message_ids[message])
        if kind == "FetchContribution":
            event = on.ContributionFetched(attempt.place(message.receiver), body.chunk, CHUNK_BYTES)
            return self._fed(state, message.sender, number, key, event)
        if kind == "FetchChunk":
            return self._fetched(state, message)
        if kind == "told":
            heard = state.heard | self._heard(number, body)
            votes_event = on.VotesAnswered(back, body)
            return self._fed(state._replace(heard=heard), message.receiver, number, key, votes_event)
        if kind == "inventory":
            answered = on.InventoryAnswered(back, *body)
            return self._fed(state, message.receiver, number, key, answered)
        if kind == "endorsed":
            endorsed = on.Endorsed(self.tables.ids[message.sender], body)
            return self._fed(state, message.receiver, number, key, endorsed)
        if kind == "AskVotes":
            state = state._replace(heard=state.heard | self._heard(number, body.statement))
        acts: dict[str, Callable[[Turn], None]] = {
            "stream": lambda turn: turn.stream(back),
            "average": lambda turn: turn.average(back, *body),
            "AskVotes": lambda turn: turn.asked_votes(back, body.statement),
            "AskInventory": lambda turn: turn.asked_inventory(back, body),
        }
        return self._turn(state, message.receiver, number, key, acts[kind])

    def _fed(self, state: State, peer: int, attempt: int, key: tuple[Any, ...], event: on.Event) -> State:
        """Give a peer's machine an event, unless its round is over. `key` names the event."""
        found = self.tables.local(state, peer).round_of(attempt)
        if found is None or found.finish is not None:
            return state
        return self._turn(state, peer, attempt, key, lambda turn: turn.feed(event))

    def _answer_ping(self, state: State, message: Message, there: Round | None) -> State:
        place = self.tables.attempts[message.attempt].place(message.receiver)
        event = on.PingAnswered(place, *state_of(there), 0.01)
        key = ("pinged", self.tables.message_ids[message], event.state, event.reason)
        return self._fed(state, message.sender, message.attempt, key, event)

    def _fetched(self, state: State, message: Message) -> State:
        body, attempt = message.body, self.tables.attempts[message.attempt]
        there = self.tables.local(state, message.receiver).round_of(message.attempt)
        assert there is not None
        held = reading(there, message.receiver).assembly.held.get(body.chunk)
        ok = held is not None and held.digest == body.version.digest
        event = on.ChunkFetched(attempt.place(message.receiver), body.chunk, body.version, ok)
        return self._fed(
            state, message.sender, message.attempt, ("fetched", self.tables.message_ids[message], ok), event
        )

    def _endorsed(self, state: State, message: Message) -> State:
        attempt, elector = self.tables.attempts[message.attempt], message.receiver
        local, vote = endorse(
            self.tables.signers[elector], self.tables.local(state, elector), attempt, message.body
        )
        place = self.tables.place(elector, local)
        state = self._at(state, elector, place)
        signed = self.tables.vote(attempt.number, vote.result, elector) if vote is not None else 0
        answer = Message("endorsed", elector, message.sender, attempt.number, vote, str(vote))
        return state._replace(
            messages=state.messages | {self.tables.message(answer)},
            signed=state.signed | signed,
        )

    def lost(self, state: State, number: int) -> Iterator[State]:
        """Let a message be lost, and the peer that waits for it notice that; if none does, it just stays."""
        without = state._replace(messages=state.messages - {number})
        after = self._failed(without, self.tables.messages[number], CallFailure.BROKEN)
        if after is not None:
            yield after

    def _failed(self, state: State, message: Message, failure: CallFailure) -> State | None:
        """Let a call fail for the peer that made it; None: it does not wait for an answer."""
        number, kind, body = message.attempt, message.kind, message.body
        attempt = self.tables.attempts[number]
        is_answer = kind in ("average", *_ANSWERS)
        caller, called = (
            (message.receiver, message.sender) if is_answer else (message.sender, message.receiver)
        )
        found = self.tables.local(state, caller).round_of(number)
        if found is None or found.finish is not None:
            return None
        key: tuple[Any, ...] = ("fails", self.tables.message_ids[message], failure)
        if kind in ("Endorse", "endorsed"):
            return self._fed(state, caller, number, key, on.Endorsed(self.tables.ids[called], None))
        place = attempt.place(called)
        if kind in _STREAM:
            return self._stream_broke(state, caller, called, number)
        if kind == "ping":
            return self._turn(state, caller, number, key, lambda turn: turn.unanswered(body))
        event: on.Event
        if kind == "FetchChunk":
            event = on.ChunkFetched(place, body.chunk, body.version, ok=False)
        elif kind == "FetchContribution":
            event = on.ContributionFetched(place, body.chunk, 0, "it cannot be reached")
        else:
            call: do.AskVotes | do.AskInventory = do.AskVotes(place, Statement())
            if kind in ("AskInventory", "inventory"):
                call = body if kind == "AskInventory" else do.AskInventory(place, body[0])
            event = on.CallFailed(call, failure, "it cannot be reached")
        return self._fed(state, caller, number, key, event)

    def _stream_broke(self, state: State, caller: int, called: int, number: int) -> State:
        attempt = self.tables.attempts[number]
        broken = on.ReducerStreamEnded(attempt.place(called), "it is cut off", broken=True)
        if called != self.setting.liar:
            sender_broke = on.SenderStreamBroke(attempt.place(caller), "it is cut off")
            state = self._fed(state, called, number, ("sender broke", caller), sender_broke)
        streams = {
            one
            for one in state.messages
            if (two := self.tables.messages[one]).attempt == number
            and (two.kind, two.sender, two.receiver) == ("average", called, caller)
        }
        state = state._replace(messages=state.messages - streams)
        return self._fed(state, caller, number, ("reducer broke", called), broken)

    # ---- the liar

    def _arrivals_at_liar(self, state: State, message: Message) -> Iterator[State]:
        attempt, liar = self.tables.attempts[message.attempt], message.receiver
        if message.kind == "stream":
            everybody = encode_places(range(len(attempt.members)), len(attempt.members))
            for version in (0, 1):
                given = everybody, average(attempt.place(liar), everybody, version)
                answer = Message("average", liar, message.sender, attempt.number, given, repr(given))
                yield state._replace(messages=state.messages | {self.tables.message(answer)})
        elif message.kind == "ping":
            event = on.PingAnswered(attempt.place(liar), *state_of(Round(attempt)), 0.01)
            key = ("pinged", self.tables.message_ids[message])
            yield self._fed(state, message.sender, attempt.number, key, event)
        elif message.kind == "Endorse":
            for vote in self._lying_votes(state, attempt):
                if vote.result in (b"", message.body.result):
                    answer = Message("endorsed", liar, message.sender, attempt.number, vote, str(vote))
                    heard = state.heard | self.tables.vote(attempt.number, vote.result, liar)
                    messages = state.messages | {self.tables.message(answer)}
                    yield state._replace(messages=messages, heard=heard)
        refused = self._failed(state, message, CallFailure.REFUSED)
        if refused is not None and message.kind not in ("stream", "ping"):
            yield refused

    def _lying_votes(self, state: State, attempt: GroupAttempt) -> list[Any]:
        """Return the votes that the liar can sign to some effect: for what others voted for, and for none."""
        liar = self.setting.liar
        assert liar is not None
        results = {b""} | {
            result
            for (number, result, _), bit in self.tables.votes.items()
            if number == attempt.number and state.signed & bit
        }
        return [vote_of(self.tables.signers[liar], attempt.proposal, result) for result in sorted(results)]

    def _lies(self, state: State, peer: int, running: Round) -> Iterator[State]:
        attempt, liar = running.attempt, self.setting.liar
        assert liar is not None
        if liar not in attempt.members:
            return
        for vote in self._lying_votes(state, attempt):
            event = on.VotesAnswered(attempt.place(liar), Statement((vote,)))
            heard = state.heard | self.tables.vote(attempt.number, vote.result, liar)
            key = ("lie", attempt.number, vote.result)
            after = self._fed(state, peer, attempt.number, key, event)._replace(heard=heard)
            if after != state:
                yield after

    def _heard(self, attempt: int, statement: Statement) -> int:
        if self.setting.liar is None:
            return 0
        liar = self.tables.ids[self.setting.liar]
        found = 0
        for vote in statement.votes:
            if vote.voter == liar:
                found |= self.tables.vote(attempt, vote.result, self.setting.liar)
        return found
