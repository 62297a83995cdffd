"""The repair of all reducers that this member has lost in a round: the requests to other members, the chunks
that this member reduces in their place, and its answers to members that repair. Pure.

In a round without failures none of this runs. `Repair` decides for one shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from averaging.allreduce.logic.assembly import Assembly
from averaging.allreduce.logic.effects import (
    AnswerInventory,
    AskInventory,
    Effect,
    FetchChunk,
    FetchContribution,
    OfferContribution,
    Reduce,
)
from averaging.allreduce.logic.repair import Ask, Repair, Take, attempt
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.stragglers import REDUCER_S, SENDER_S, StragglerDetector
from averaging.allreduce.logic.values import Inventory, InventoryQuestion
from averaging.allreduce.logic.versions import Version

_QUESTION_S = 1.0  # how long a question for held averages waits for news
_RETRY_S = 0.1  # pause before a member is asked again that could not be reached or had no news
# Timeout of fetching values again: this share of the round's remaining time, at most FETCH_S.
_FETCH_SHARE = 0.4
FETCH_S = 30.0


@dataclass(slots=True)
class _Takeover:
    """A chunk that this member reduces instead of a lost reducer."""

    waiting: set[int]  # members whose values are missing
    since_s: float
    came: set[int] = field(default_factory=set)
    reducing: bool = False
    inputs: tuple[tuple[int, ...], bool] = ((), False)  # (members, own)


class Repairs:
    """The lost reducers of one round. Members are places in the group."""

    def __init__(self, setup: RoundSetup, assembly: Assembly) -> None:
        self._setup, self._assembly = setup, assembly
        self._dialable = [place for place in setup.members if setup.can_dial(place)]
        self._repairs: dict[int, Repair] = {}  # by reducer
        self._lost_s: dict[int, float] = {}
        self._successors: dict[int, StragglerDetector] = {}  # by reducer
        self._takeovers: dict[int, _Takeover] = {}  # by chunk
        self._retries: list[tuple[float, int, int]] = []  # (when, reducer, place)
        self._offered: set[tuple[int, int]] = set()  # (owner, chunk) pairs that this member has offered
        self.lost: dict[int, str] = {}  # lost reducers -> reason
        self._gone: set[int] = set()  # failed or stalled members, from which nothing is expected
        self.left_out: dict[int, str] = {}  # members that did not send their values again -> reason
        # members that wait for an answer -> deadline
        self._questions: dict[int, tuple[int, InventoryQuestion, float]] = {}
        self.stopped = False  # repairs have ended because the result is decided

    @property
    def any(self) -> bool:
        """Return whether a reducer was lost, here or for another member that asked."""
        return bool(self._repairs)

    @property
    def lacking(self) -> bool:
        """Return whether chunks of lost reducers are still to come."""
        return any(self._assembly.lacking(reducer) for reducer in self._repairs)

    # ---- events

    def lose(self, reducer: int, reason: str, *, trusted: bool, now_s: float) -> None:
        """Start the repair of a reducer whose stream ended. `trusted`: averages that it holds may be
        requested.
        """
        if reducer not in self.lost:
            self.lost[reducer] = f"{self._setup.name(reducer)} was lost as a reducer: {reason}"
        if reducer not in self._repairs:
            self.help(reducer, trusted=trusted, now_s=now_s)
        elif not trusted:
            self._repairs[reducer].distrust()

    def help(self, reducer: int, *, trusted: bool, now_s: float) -> None:
        """Start the repair of a reducer that another member has lost: this member may have to take over."""
        if reducer in self._repairs:
            return
        repair = Repair(
            reducer,
            own=self._setup.own,
            dialable=self._dialable,
            members=len(self._setup.members),
            trusted=trusted,
        )
        for place in self._gone:
            repair.mark_failed(place)
        self._repairs[reducer] = repair
        self._lost_s[reducer] = now_s
        self._successors[reducer] = self._successor_detector(now_s)

    def knows(self, reducer: int) -> bool:
        """Return whether the shard of this reducer is being repaired."""
        return reducer in self._repairs

    def give_up(self, place: int, own: bool, why: str = "it failed") -> list[Effect]:
        """Stop waiting for a member, both for its own values and for chunks of others: it failed, or is alive
        and stalls. Otherwise two stalled members would be waited for as each other's successors.
        """
        self._gone.add(place)
        for repair in self._repairs.values():
            repair.mark_failed(place)
        found: list[Effect] = []
        for chunk in list(self._takeovers):
            found += self._missed(chunk, place, why, own=own)
        return found

    def on_inventory(
        self, place: int, question: InventoryQuestion, inventory: Inventory, now_s: float
    ) -> list[Effect]:
        """Process a member's inventory of a lost reducer's shard."""
        found: list[Effect] = []
        for chunk in inventory.wanted:
            if chunk < len(self._setup.plan.chunks) and (place, chunk) not in self._offered:
                self._offered.add((place, chunk))
                found.append(OfferContribution(place, chunk))
        reducer = question.reducer if question.reducer is not None else -1
        repair = self._repairs.get(reducer)
        if repair is not None:
            known = repair.known(place)
            repair.on_report(place, inventory.versions, inventory.sealed)
            # a member whose round is over answers at once, always the same
            if question.wait and repair.known(place) == known:
                repair.pause(place)
                self._retries.append((now_s + _RETRY_S, reducer, place))
        return found

    def on_offer_ended(self, place: int, chunk: int, taken: bool) -> None:
        """Record that this member's offer was accepted, or must be repeated when the member asks again."""
        if not taken:
            self._offered.discard((place, chunk))

    def on_no_inventory(self, place: int, question: InventoryQuestion, now_s: float) -> None:
        """Record that a member could not be asked, or refused."""
        if question.reducer in self._repairs:
            self._retries.append((now_s + _RETRY_S, question.reducer, place))

    def on_fetched(self, place: int, chunk: int, version: Version, ok: bool) -> None:
        """Record that an average requested by `poll` was settled, or could not be fetched."""
        repair = self._repairs.get(self._setup.plan.chunks[chunk].reducer)
        if repair is None:
            return
        if ok:
            repair.on_held(chunk)
            maker = (repair.reducer + version.attempt) % len(self._setup.members)
            self._successors[repair.reducer].worked(maker)
        else:
            repair.on_failed(Take(chunk, place, version))

    # ---- chunks that this member takes over

    def version_of(self, chunk: int, contributors: bytes, digest: bytes, clipped: bytes) -> Version:
        """Return the version that this member made of a chunk."""
        reducer = self._setup.plan.chunks[chunk].reducer
        made = attempt(reducer, self._setup.own, len(self._setup.members))
        return Version(made, contributors, digest, clipped)

    def takes_over(self, chunk: int) -> bool:
        """Return whether this member reduces the chunk in another's place."""
        return chunk in self._takeovers

    def refusal(self, place: int, chunk: int) -> str:
        """Return why a member's offer is refused; "" if it is welcome."""
        if chunk not in self._takeovers:
            return f"nobody asked for chunk {chunk}"
        if self._setup.can_dial(place) or not self._setup.weights[place]:
            return "only members that contribute and cannot be dialed offer"
        return ""

    def wanted(self, place: int) -> tuple[int, ...]:
        """Return the chunks for which this member's values are wanted, if it cannot be asked for them."""
        if self._setup.can_dial(place) or not self._setup.weights[place]:
            return ()
        return tuple(sorted(chunk for chunk, one in self._takeovers.items() if place in one.waiting))

    def on_contribution(
        self, place: int, chunk: int, size_bytes: int, error: str, *, own: bool
    ) -> list[Effect]:
        """Process the values of a chunk that this member takes over, or the failure to get them."""
        takeover = self._takeovers.get(chunk)
        if takeover is None or place not in takeover.waiting:
            return []
        codec = self._setup.codec
        size = codec.encoded_bytes(self._setup.plan.chunks[chunk].numel)
        if not error and size_bytes != size:
            error = f"{size_bytes} bytes; {codec.name} takes {size}"
        if error:
            return self._missed(chunk, place, error, own=own)
        takeover.waiting.discard(place)
        takeover.came.add(place)
        return self._reduce(chunk, takeover, own)

    def on_reduced(self, chunk: int) -> None:
        """Record that a chunk that this member took over was averaged and settled."""
        self._takeovers.pop(chunk, None)
        repair = self._repairs.get(self._setup.plan.chunks[chunk].reducer)
        if repair is not None:
            repair.on_held(chunk)

    def on_spoiled(self, chunk: int, flaws: Mapping[int, str]) -> list[Effect]:
        """Average a chunk again without these members, whose values made it fail."""
        takeover = self._takeovers[chunk]
        for place, flaw in flaws.items():
            if place != self._setup.own:
                self.left_out.setdefault(place, f"its values of chunk {chunk} cannot be averaged: {flaw}")
        places, own = takeover.inputs
        kept = tuple(place for place in places if place not in flaws)
        takeover.inputs = kept, own and self._setup.own not in flaws
        return [Reduce(chunk, *takeover.inputs)]

    # ---- decisions

    def poll(self, own: bool, now_s: float) -> list[Effect]:
        """Return the actions to take now, each once until its outcome is reported. `own`: this member
        contributes.
        """
        found: list[Effect] = []
        if self.stopped or not self._repairs:
            return found
        for due_s, reducer, place in [one for one in self._retries if one[0] <= now_s]:
            self._retries.remove((due_s, reducer, place))
            self._repairs[reducer].on_silence(place)
        for reducer, repair in self._repairs.items():
            if not self._setup.own_auxiliary or repair.owned:
                repair.lack(self._assembly.lacking(reducer))
            for chunk in repair.lacking:
                if chunk in self._assembly.held:
                    repair.on_held(chunk)
            for action in repair.poll():
                if isinstance(action, Ask):
                    known, sealed = repair.known(action.place)
                    question = InventoryQuestion(reducer, action.wait, known, sealed)
                    found.append(AskInventory(action.place, question))
                elif isinstance(action, Take):
                    found.append(FetchChunk(action.place, action.chunk, action.version))
                else:
                    found += self._take_over(action.chunk, own, now_s)
        return found

    def pace(self, own: bool, now_s: float) -> list[Effect]:
        """Limit the waits: for a live reducer whose stream broke, for its averages on their way to others,
        for a successor, and for offers.
        """
        for reducer, repair in self._repairs.items():
            if repair.lacking and now_s - self._lost_s[reducer] > REDUCER_S:
                if repair.trusted:
                    repair.distrust()
                    self._lost_s[reducer] = now_s  # the others may trust the reducer for equally long
                else:
                    repair.wait_no_more()
            self._pace_successor(reducer, repair, now_s)
        found: list[Effect] = []
        for chunk, takeover in list(self._takeovers.items()):
            if takeover.waiting and now_s - takeover.since_s > SENDER_S:
                for place in sorted(takeover.waiting):
                    if not self._setup.can_dial(place):
                        found += self._missed(chunk, place, "it did not offer them in time", own=own)
        return found

    def sealed(self, reducer: int | None) -> bool:
        """Return whether this member accepts no further averages of this reducer."""
        if reducer is None or (self._setup.own_auxiliary and reducer != self._setup.own):
            return True
        if self._assembly.arriving(reducer):
            return False
        repair = self._repairs.get(reducer)
        return (repair is not None and not repair.trusted) or not self._assembly.lacking(reducer)

    # ---- questions of members for held averages

    def on_question(self, call: int, place: int, question: InventoryQuestion, now_s: float) -> None:
        """Record a member's question."""
        self._questions[call] = place, question, now_s + (_QUESTION_S if question.wait else 0.0)

    def on_call_ended(self, call: int) -> None:
        """Record that a member no longer waits for an answer."""
        self._questions.pop(call, None)

    def answers(self, over: bool, now_s: float) -> list[AnswerInventory]:
        """Return the answers to give now. `over`: the round has ended here."""
        found = []
        for call, (place, question, until_s) in list(self._questions.items()):
            sealed = over or self.sealed(question.reducer)
            wanted = () if over else self.wanted(place)
            count = self._assembly.count(question.reducer) if question.reducer is not None else 0
            known = (question.known, question.known_sealed)
            if over or now_s >= until_s or known != (count, sealed) or wanted:
                del self._questions[call]
                found.append(AnswerInventory(call, sealed, wanted))
        return found

    # ---- internal

    def _take_over(self, chunk: int, own: bool, now_s: float) -> list[Effect]:
        senders = [
            place
            for place in self._setup.contributors
            if place != self._setup.own and place not in self._gone and place not in self.left_out
        ]
        takeover = self._takeovers[chunk] = _Takeover(set(senders), now_s)
        timeout_s = self._fetch_timeout_s(now_s)
        found: list[Effect] = [
            FetchContribution(place, chunk, timeout_s) for place in senders if self._setup.can_dial(place)
        ]
        return found + self._reduce(chunk, takeover, own)

    def _fetch_timeout_s(self, now_s: float) -> float:
        return min(FETCH_S, max(_FETCH_SHARE * (self._setup.deadline_s - now_s), 0.001))

    def _successor_detector(self, now_s: float) -> StragglerDetector:
        """Return a straggler detector for a successor, which gets more time for a chunk than the values of
        other members may take.
        """
        return StragglerDetector(self._fetch_timeout_s(now_s) + SENDER_S, now_s)

    def _pace_successor(self, reducer: int, repair: Repair, now_s: float) -> None:
        """Pass over a live successor that has made nothing for too long. A member that repairs nothing
        itself, such as an auxiliary one, does so only while others ask it as the next successor.
        """
        owner = repair.owner
        waited_for = [] if owner is None or repair.owned else [owner]
        late = self._successors[reducer].tick(waited_for, now_s)
        asked = any(one.reducer == reducer and one.wait for _, one, _ in self._questions.values())
        if late and (repair.needs_successor or asked):
            repair.pass_over()
            self._successors[reducer] = self._successor_detector(now_s)

    def _missed(self, chunk: int, place: int, error: str, *, own: bool) -> list[Effect]:
        takeover = self._takeovers[chunk]
        if place not in takeover.waiting:
            return []
        takeover.waiting.discard(place)
        self.left_out.setdefault(
            place, f"it did not give its values of chunk {chunk}, which another peer takes over: {error}"
        )
        return self._reduce(chunk, takeover, own)

    def _reduce(self, chunk: int, takeover: _Takeover, own: bool) -> list[Effect]:
        if takeover.waiting or takeover.reducing:
            return []
        takeover.reducing = True
        takeover.inputs = tuple(sorted(takeover.came)), own
        return [Reduce(chunk, *takeover.inputs)]
