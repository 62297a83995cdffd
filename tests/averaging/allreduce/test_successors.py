"""Live successors of a lost reducer that produce none of its chunks: events in, effects out."""

from __future__ import annotations

from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.values import Inventory, InventoryQuestion, RoundState
from averaging.allreduce.logic.versions import Version, digest_payload, encode_places
from swarm.testing.identities import SeededIdentity
from tests.averaging.allreduce.setups import CHUNK_BYTES, round_setup

IDENTITIES = [SeededIdentity(f"successor {place}") for place in range(4)]
EVERYBODY = encode_places(range(4), 4)
LOST = 2  # its successors are members 3, 0 (which is tested) and 1
QUESTION_S = 1.0  # how long the others let a question wait for news
PATIENCE_MAX_S = 45.0  # in a long round: a successor without results is waited for at most this long


def version(chunk: int, attempt: int = 0) -> Version:
    return Version(attempt, EVERYBODY, digest_payload(bytes([chunk, attempt])))


class Observed:
    """The member at place 0 of four. The others are alive, hold the chunks that the test defines, and
    answer.
    """

    def __init__(self, setup: RoundSetup) -> None:
        self.machine = RoundMachine(setup)
        self.chunks = [chunk.index for chunk in setup.plan.shard(LOST)]
        self.now_s = 0.0
        self.held: dict[int, dict[int, Version]] = {place: {} for place in setup.members}
        self.asked: list[tuple[float, int]] = []  # when a question that may wait was asked, and which member
        self.fetched: dict[int, Version] = {}
        self.unsealed: set[int] = set()  # members that always report averages in transit to them
        self.took_over: dict[int, float] = {}  # by chunk: when the values of others were fetched
        self._waiting: list[tuple[float, do.AskInventory]] = []
        self._perform(self.machine.begin())
        self.step(on.MemoryPrepared())
        for sender in setup.contributors[1:] if self.machine.contributes else setup.contributors:
            self.step(on.SenderOpened(sender))
            for chunk in self.machine.shard.chunks:
                self.step(on.ContributionArrived(sender, chunk.index, CHUNK_BYTES))
        for chunk in self.machine.shard.chunks:
            self.step(on.ChunkReduced(chunk.index, EVERYBODY, version(chunk.index).digest, b""))

    def averages(self, *reducers: int) -> None:
        for chunk in self.machine.setup.plan.chunks:
            if chunk.reducer in reducers:
                self.step(on.AverageArrived(chunk.reducer, chunk.index, EVERYBODY, b"", CHUNK_BYTES))
                self.step(on.AverageChecked(chunk.index, version(chunk.index).digest))

    def lose(self) -> None:
        """The averages of the others arrive, and the first one of the lost reducer is invalid."""
        self.averages(*(place for place in self.machine.setup.plan.reducers if place not in (0, LOST)))
        self.step(on.AverageArrived(LOST, self.chunks[0], EVERYBODY, b"", CHUNK_BYTES))
        self.step(on.AverageChecked(self.chunks[0], None, "element 0 is nan"))

    def step(self, event: on.Event) -> None:
        self._perform(self.machine.step(event, self.now_s))

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            self.now_s = min(self.machine.deadline_s(), until_s)
            self._perform(self.machine.tick(self.now_s))
            self._answer()

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for due_s, ask in waiting:
            sealed = ask.place not in self.unsealed
            known = len(self.held[ask.place]), sealed
            if self.now_s >= due_s or known != (ask.question.known, ask.question.known_sealed):
                inventory = Inventory(dict(self.held[ask.place]), sealed=sealed)
                self.step(on.InventoryAnswered(ask.place, ask.question, inventory))
            else:
                self._waiting.append((due_s, ask))

    def _perform(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.Ping():
                    self.step(on.PingAnswered(effect.place, RoundState.RUNNING, "", 0.01))
                case do.AskInventory():
                    wait_s = QUESTION_S if effect.question.wait else 0.0
                    self._waiting.append((self.now_s + wait_s, effect))
                    if effect.question.wait:
                        self.asked.append((self.now_s, effect.place))
                case do.FetchChunk():
                    self.fetched[effect.chunk] = effect.version
                    self.step(on.ChunkFetched(effect.place, effect.chunk, effect.version, ok=True))
                case do.FetchContribution():
                    self.took_over.setdefault(effect.chunk, self.now_s)


def test_the_next_member_takes_over_from_a_successor_that_makes_nothing() -> None:
    one = Observed(round_setup(IDENTITIES, deadline_s=120.0))
    one.lose()
    one.run(100.0)
    assert [*one.took_over] == one.chunks
    (took_over_s,) = one.took_over.values()
    # not before the successor's own wait for a member's values may have ended
    assert 30.0 < took_over_s < PATIENCE_MAX_S


def test_a_successor_that_makes_chunks_slowly_is_waited_for() -> None:
    one = Observed(round_setup(IDENTITIES, chunks_each=4, deadline_s=200.0))
    one.lose()
    for nth, chunk in enumerate(one.chunks):
        one.run(25.0 * (nth + 1))
        one.held[3][chunk] = version(chunk, attempt=1)
    one.run(120.0)
    assert one.fetched == {chunk: version(chunk, attempt=1) for chunk in one.chunks}
    assert not one.took_over


def test_a_successor_is_passed_over_that_stops_in_the_middle() -> None:
    one = Observed(round_setup(IDENTITIES, chunks_each=2, deadline_s=200.0))
    one.lose()
    one.run(20.0)
    one.held[3][one.chunks[0]] = version(one.chunks[0], attempt=1)
    one.run(110.0)
    assert [*one.took_over] == one.chunks[1:]
    assert 20.0 + 30.0 < one.took_over[one.chunks[1]] < 20.0 + PATIENCE_MAX_S


def test_a_successor_does_not_wait_for_a_member_that_always_reports_incoming_averages() -> None:
    """Before, no chunk of the lost reducer was reduced again until the round failed at its deadline."""
    one = Observed(round_setup(IDENTITIES, clients=[3], deadline_s=60.0))
    one.unsealed = {1}
    one.averages(1)
    one.step(on.PingAnswered(LOST, RoundState.FAILED, "out of memory", 0.01))
    for half_s in range(24):
        one.step(on.Heard(3))  # a client; the successor is member 0
        one.run(half_s / 2)
    assert [*one.took_over] == one.chunks
    assert one.took_over[one.chunks[0]] > 9.0, "its averages may be on their way"


def test_an_average_of_a_successor_that_was_passed_over_is_taken() -> None:
    """Member 0, the next in group order, is a client and cannot: members 3 and 1 take over."""
    one = Observed(round_setup(IDENTITIES, clients=[0], deadline_s=120.0))
    one.lose()
    one.run(60.0)
    last = {place for at_s, place in one.asked if at_s > 55.0}
    assert last == {1, 3}
    assert not one.took_over
    chunk = one.chunks[0]
    one.held[3][chunk] = version(chunk, attempt=1)
    one.run(62.0)
    assert one.fetched == {chunk: version(chunk, attempt=1)}


def test_a_client_that_lacks_nothing_gives_its_values_to_the_next_successor_too() -> None:
    one = Observed(round_setup(IDENTITIES, clients=[0], deadline_s=120.0))
    one.averages(1, 2, 3)
    one.step(on.PingAnswered(LOST, RoundState.FAILED, "out of memory", 0.01))
    one.run(60.0)
    assert {place for at_s, place in one.asked if at_s < 30.0} == {3}
    assert {place for at_s, place in one.asked if at_s > 55.0} == {1, 3}


def test_an_auxiliary_member_takes_over_when_others_ask_it_as_the_next_successor() -> None:
    one = Observed(round_setup(IDENTITIES, auxiliaries=[0], deadline_s=120.0))
    one.step(on.InventoryAsked(1, 1, InventoryQuestion(LOST)))  # as every member is asked once
    one.run(60.0)
    assert not one.took_over  # as far as it knows, the successor is working
    one.step(on.InventoryAsked(2, 1, InventoryQuestion(LOST, wait=True, known_sealed=True)))
    one.run(75.0)
    assert [*one.took_over] == one.chunks


def test_an_auxiliary_member_leaves_a_successor_its_time() -> None:
    one = Observed(round_setup(IDENTITIES, auxiliaries=[0], deadline_s=120.0))
    one.step(on.InventoryAsked(1, 1, InventoryQuestion(LOST)))
    for call in range(2, 30):
        one.step(on.InventoryAsked(call, 1, InventoryQuestion(LOST, wait=True, known_sealed=True)))
        one.run(float(call))
    assert not one.took_over


def test_a_member_that_repeats_its_answer_is_asked_at_most_ten_times_a_second() -> None:
    """A member whose round is over answers every question at once, without waiting for news."""
    one = Observed(round_setup(IDENTITIES))
    one.lose()
    question = InventoryQuestion(LOST, wait=True, known=0, known_sealed=True)
    asked = 0
    for _ in range(50):
        effects = one.machine.step(on.InventoryAnswered(3, question, Inventory({}, sealed=True)), one.now_s)
        asked += any(isinstance(effect, do.AskInventory) and effect.place == 3 for effect in effects)
    assert asked <= 1
    one.run(0.5)
    assert 3 in [place for _, place in one.asked]  # later it is asked again: it may make the chunk
