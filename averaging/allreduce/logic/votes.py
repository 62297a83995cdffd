"""The votes at the end of a round as one member knows them: the votes to send to other members, the time to
answer them, and the result of the votes. Pure.

Of two members that can be dialed the one earlier in group order asks, with its own vote; the answer waits
until the other member knows a certificate, or a vote that the asker does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

from averaging.allreduce.logic.assembly import Assembly
from averaging.allreduce.logic.effects import AnswerVotes, AskVotes, Endorse
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.values import Statement
from averaging.history.certificate import Certificate, Vote
from averaging.history.electors import is_quorum
from averaging.history.tally import Tally
from swarm.core.ids import PeerId

# News is delayed for this long, because a certificate usually follows and then needs no second answer.
_HOLD_S = 0.1
_ENDORSE_AGAIN_S = 2.0
_ASK_AGAIN_S = 0.1  # pause before asking a member again that had no news, or gave no answer
_ENDORSE_NEXT_S = 0.5  # delay between members, in group order, for asking electors outside of the group


@dataclass(frozen=True, slots=True)
class _Question:
    """A call of a member that waits for an answer."""

    place: int
    statement: Statement


class VoteExchange:
    """Votes, intents and reasons of one round."""

    def __init__(self, setup: RoundSetup) -> None:
        self._setup = setup
        self.tally = Tally(setup.proposal, setup.electors, setup.register)
        for elector, signature in setup.goodbyes.items():
            self.tally.add_goodbye(elector, signature)
        # the result for which each member would vote, after repairs and audits
        self.intents: dict[int, bytes] = {}
        self.left_out: dict[int, str] = {}  # according to this member and others
        self.gave_up = ""  # why this member gave up
        self.over = False  # the round has ended here
        self._places = {member.peer_id: place for place, member in enumerate(setup.group.members)}
        self._targets = [place for place in setup.members if setup.calls(setup.own, place)]
        self._own_version = 0  # number of changes of this member's own statement
        self._voted_version = math.inf  # the first version with its vote
        # members with at least one exchange, which receive everything from then on
        self._asked: set[int] = set()
        self._answered: set[int] = set()
        self._asking: dict[int, int] = {}  # calls in progress -> version of the statement that they carry
        # members without news or an answer -> (time, version of this member's statement) before which they
        # are not asked again
        self._paused: dict[int, tuple[float, int]] = {}
        self._abridged: set[int] = set()  # members that once sent only a vote, which was known already
        self._decided: dict[int, bytes] = {}  # members that know a certificate -> its result
        self._questions: dict[int, _Question] = {}
        self._changed_s = setup.begun_s  # time of the latest news
        # electors outside of the group -> time of the last question
        self._endorsing: dict[PeerId, float] = {}
        self._majority_s: float | None = None  # when a majority was reached

    # ---- known votes

    @property
    def own_vote(self) -> Vote | None:
        """Return this member's vote."""
        return self.tally.votes.get(self._setup.peer_id(self._setup.own))

    @property
    def nobody_has_voted(self) -> bool:
        """Return whether no vote is known, and votes can make a certificate."""
        tally = self.tally
        return not (tally.votes or tally.liars or tally.is_dead()) and bool(self._setup.deciders)

    @property
    def has_spoken(self) -> bool:
        """Return whether this member has voted or has an intent."""
        return self._own_version > 0

    @property
    def certificate(self) -> Certificate | None:
        """Return the certificate, once there is one."""
        return self.tally.certificate

    @property
    def majority(self) -> bytes | None:
        """Return the result that more than half of the contributors whose votes count voted for."""
        return self.tally.majority

    def intent_of(self, place: int) -> bytes | None:
        """Return the result that a contributor voted for or intends to vote for; None: unknown; b"": none."""
        vote = self.tally.votes.get(self._setup.peer_id(place))
        return vote.result if vote is not None else self.intents.get(place)

    def is_hopeless(self, live: Set[int]) -> bool:
        """Return whether the live members can no longer make a majority."""
        tally, deciders = self.tally, self._setup.deciders
        votes, liars, peer_id = tally.votes, tally.liars, self._setup.peer_id
        free = [
            place
            for place in deciders
            if (place in live and peer_id(place) not in votes) or (liars and peer_id(place) in liars)
        ]
        return 2 * (tally.most_votes + len(free)) <= len(deciders)

    def voters_of(self, result: bytes) -> list[int]:
        """Return the members that voted for this result, this one aside."""
        own = self._setup.own
        places = [self._places[peer] for peer in self.tally.supporters(result) if peer in self._places]
        return sorted(place for place in places if place != own)

    def missing(self, assembly: Assembly) -> str:
        """Return what is still missing, and from which members, for the message about a missed deadline."""
        setup = self._setup
        lacking = [
            f"{setup.name(place)} has sent {assembly.share(place)}"
            for place in setup.plan.reducers
            if place != setup.own and assembly.outstanding(place) and not setup.own_auxiliary
        ]
        waiting = [
            f"the vote of {setup.name(place)}"
            for place in setup.contributors
            if place != setup.own and setup.peer_id(place) not in self.tally.votes
        ]
        return "; ".join(lacking) or (
            "waiting for " + ", ".join(waiting) if waiting else "the last averages were being reduced"
        )

    def sides(self) -> str:
        """Return which members hold which averages, as a phrase."""
        found: dict[bytes, list[str]] = {}
        for place in self._setup.contributors:
            intended = self.intent_of(place)
            if intended:
                found.setdefault(intended, []).append(self._setup.name(place))
        return "; ".join(f"{digest.hex()[:12]}: {', '.join(names)}" for digest, names in found.items())

    # ---- this member's statements

    def intend(self, result: bytes, now_s: float) -> None:
        """Set this member's intent."""
        self.intents[self._setup.own] = result
        self._own_version += 1
        self._changed_s = now_s

    def add_own(self, vote: Vote, now_s: float) -> None:
        """Add this member's own vote."""
        self.tally.add(vote)
        self._own_version += 1
        self._voted_version = self._own_version
        self._changed_s = now_s

    def silent(self, live: Set[int]) -> list[int]:
        """Return the live contributors whose votes are not known."""
        votes = self.tally.votes
        return [p for p in self._setup.contributors if p in live and self._setup.peer_id(p) not in votes]

    def statement(self, *, own_vote_only: bool = False) -> Statement:
        """Return the statement for a member. `own_vote_only`: the other members send it their votes
        themselves.
        """
        votes = self.tally.votes
        own = self.own_vote
        sent = (own,) if own_vote_only and own is not None else tuple(votes[peer] for peer in sorted(votes))
        return Statement(sent, dict(self.intents), dict(self.left_out), self.gave_up)

    def asks(self, live: Set[int], now_s: float) -> list[AskVotes]:
        """Return the calls to make now: they send what the called members were not sent yet, or ask again."""
        if self.over or self.certificate is not None:
            return []
        found = []
        for place in self._targets:
            until_s, version = self._paused.get(place, (-math.inf, -1))
            is_paused = now_s < until_s and version == self._own_version
            if place in live and self._asking.get(place) != self._own_version and not is_paused:
                both = self._setup.can_dial(place) and self._setup.can_dial(self._setup.own)
                found.append(self._ask(place, own_vote_only=both and place not in self._asked))
        return found

    def ask_all(self, places: Iterable[int]) -> list[AskVotes]:
        """Ask these members, also those that would ask this one in an ordinary round."""
        return [self._ask(place) for place in places if place not in self._asking]

    def farewell(self, live: Set[int]) -> list[AskVotes]:
        """Return the calls that tell members how the round ended here, without members that know it or will
        be told anyway.
        """
        places = self._setup.members if self.gave_up else self._targets
        result = self.majority if self.certificate is not None else None
        return [
            AskVotes(place, self.statement())
            for place in places
            if place in live
            and place != self._setup.own
            and self._setup.can_dial(place)
            and (self.gave_up or self._asking.get(place) != self._own_version)
            and (result is None or self._decided.get(place) != result)
        ]

    # ---- statements of others

    def on_statement(self, place: int, statement: Statement, now_s: float) -> bool:
        """Process a member's statement. Return whether any of it is new. Raise PeerError for an invalid vote;
        nothing after it counts.
        """
        new = False
        try:
            for vote in statement.votes:
                new |= self.tally.add(vote)
        finally:
            for other, intent in statement.intents.items():
                counts = other == place or not (
                    self._setup.can_dial(other) or self._setup.can_dial(self._setup.own)
                )
                if counts and other != self._setup.own and self.intents.get(other) != intent:
                    self.intents[other] = intent
                    new = True
            for other, reason in statement.left_out.items():
                self.left_out.setdefault(other, reason)
            if new:
                self._changed_s = now_s
                # the others will send theirs in a moment
                if self._asking and self._is_own_vote(place, statement):
                    self._paused[place] = now_s + _ASK_AGAIN_S, self._own_version
            elif place not in self._abridged and self._is_own_vote(place, statement):
                self._abridged.add(place)  # it sends the rest when it is asked again
            else:
                # It answers without waiting, because the round is over for it, or because it considers a
                # liar's vote news that this member does not count.
                self._paused[place] = now_s + _ASK_AGAIN_S, self._own_version
        if self._majority_s is None and self.majority is not None:
            self._majority_s = now_s
        return new

    def _is_own_vote(self, place: int, statement: Statement) -> bool:
        """Return whether a statement contains only its sender's own vote."""
        return [vote.voter for vote in statement.votes] == [self._setup.peer_id(place)]

    def on_left_out(self, place: int, reason: str) -> list[AskVotes]:
        """Record why a reducer's averages lack a member: after the commit nobody can ask the reducer."""
        if place in self._setup.members:
            self.left_out.setdefault(place, reason)
        return []

    def on_no_answer(self, place: int, now_s: float) -> None:
        """Record the end of a call without an answer. One on a broken connection fails at once: the member is
        asked again after a pause.
        """
        self._asking.pop(place, None)
        self._paused[place] = now_s + _ASK_AGAIN_S, self._own_version

    def on_answer(self, place: int, statement: Statement) -> None:
        """Record the answer to a call. A member that answers this one's vote with only its own vote knows a
        certificate: otherwise an answer has something that the asker does not know, and all votes
        (`answers`).
        """
        sent_vote = self._asking.pop(place, -1) >= self._voted_version
        if not sent_vote or statement.gave_up or not self._is_own_vote(place, statement):
            return
        if result := statement.votes[0].result:
            self._decided[place] = result

    def on_question(self, call: int, place: int, statement: Statement) -> None:
        """Record that a member waits for an answer."""
        self._questions[call] = _Question(place, statement)

    def on_call_ended(self, call: int) -> None:
        """Record that a member no longer waits for an answer."""
        self._questions.pop(call, None)

    def answers(self, ready: bool, now_s: float) -> list[AnswerVotes]:
        """Return the answers to send now. `ready`: this member has everything that it can get."""
        found: list[AnswerVotes] = []
        if not self._questions:
            return found
        decided = self.over or self.certificate is not None
        for call, question in list(self._questions.items()):
            if decided or question.statement.gave_up or self._has_news(question, ready, now_s):
                del self._questions[call]
                first = question.place not in self._answered and not question.statement.gave_up
                both = self._setup.can_dial(question.place) and self._setup.can_dial(self._setup.own)
                self._answered.add(question.place)
                found.append(AnswerVotes(call, self.statement(own_vote_only=decided and first and both)))
        return found

    def _has_news(self, question: _Question, ready: bool, now_s: float) -> bool:
        own, statement = self._setup.own, question.statement
        if question.place in statement.intents and self.intents.get(own) != statement.intents.get(own):
            return True  # it compares intents and does not know that of this member
        if not ready and self._setup.can_dial(question.place):
            return False
        if now_s - self._changed_s < _HOLD_S:
            return False
        known = {(vote.voter, vote.result) for vote in statement.votes}
        return any((vote.voter, vote.result) not in known for vote in self.tally.votes.values()) or any(
            statement.intents.get(place) != intent
            for place, intent in self.intents.items()
            if place != question.place
            and not self._setup.can_dial(place)
            and not self._setup.can_dial(question.place)
        )

    def _ask(self, place: int, *, own_vote_only: bool = False) -> AskVotes:
        self._asking[place] = self._own_version
        self._asked.add(place)
        return AskVotes(place, self.statement(own_vote_only=own_vote_only))

    # ---- electors outside of the group

    def endorsements(self, live: Set[int], now_s: float) -> list[Endorse]:
        """Return the electors to ask for their votes, once a majority of the contributors has voted and the
        group's own votes are no quorum.
        """
        result = self.majority
        if result is None or self.certificate is not None or self.over:
            return []
        if self._majority_s is None:
            self._majority_s = now_s
        inside = {self._setup.peer_id(place) for place in live}
        supporters, missing = self.tally.supporters(result), self.tally.electors_missing
        waited_s = now_s - self._majority_s
        if waited_s < _ENDORSE_AGAIN_S and is_quorum(
            self._setup.electors, supporters | (inside & set(missing)), self.tally.goodbyes
        ):
            return []
        voters = [place for place in self._setup.contributors if place in live]
        rank = voters.index(self._setup.own) if self._setup.own in voters else len(voters)
        if waited_s < _ENDORSE_NEXT_S * rank:
            return []
        found = []
        for elector in missing:
            asked_s = self._endorsing.get(elector)
            if elector not in self._places and (asked_s is None or now_s - asked_s > _ENDORSE_AGAIN_S):
                self._endorsing[elector] = now_s
                votes = tuple(self.tally.votes[peer] for peer in sorted(supporters))
                found.append(Endorse(elector, result, votes))
        return found
