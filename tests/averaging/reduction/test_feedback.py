"""Error feedback: sent values plus residuals equal the inputs, over any sequence of committed and failed
rounds.
"""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.reduction.feedback import NO_SHARD, Feedback, FeedbackRound, Residual, Shard
from averaging.reduction.partition import Chunk, Plan, plan_chunks
from averaging.reduction.reduce import Contribution, Mean, blocks
from swarm.compression import Codec, find
from swarm.core.errors import UsageError
from swarm.testing.codec_contract import decoded, encoded

LOSSY = ("float16", "int8", "int4", "int2", "sign", "topk")
EPSILON = 2.0**-24


def send(opened: FeedbackRound, codec: Codec, start: int, values: torch.Tensor) -> tuple[torch.Tensor, bytes]:
    """One chunk: what the others decode, and its bytes."""
    given_ = opened.give(start, values, torch.empty(values.numel()))
    payload = encoded(codec, given_)
    opened.sent(start, given_, payload, torch.empty(values.numel()))
    return decoded(codec, payload, values.numel()), payload


rounds_lists = st.lists(
    st.tuples(st.sampled_from(["commit", "fail", "fail early", "left out"]), st.integers(0, 2**32)),
    max_size=12,
)


@given(st.sampled_from(LOSSY), rounds_lists, st.integers(1, 300), st.lists(st.integers(1, 299), max_size=4))
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_over_any_sequence_of_rounds(
    name: str, rounds: list[tuple[str, int]], numel: int, cuts: list[int]
) -> None:
    codec, feedback = find(name), Feedback(numel, find(name))
    edges = [0, *sorted({cut for cut in cuts if cut < numel}), numel]
    chunks = list(itertools.pairwise(edges))
    wanted, got, rounding = (
        torch.zeros(numel).double(),
        torch.zeros(numel).double(),
        torch.zeros(numel).double(),
    )
    for outcome, seed in rounds:
        chance = torch.Generator().manual_seed(seed)
        values = torch.randn(numel, generator=chance) * 10.0 ** float(
            torch.randint(-3, 4, (1,), generator=chance)
        )
        before = feedback.state_dict()["sender"].clone()
        opened = feedback.begin()
        delivered = torch.zeros(numel).double()
        for start, stop in chunks[: 1 if outcome == "fail early" else None]:
            delivered[start:stop] = send(opened, codec, start, values[start:stop])[0].double()
        if outcome == "left out":  # of the first chunk, in a round that is committed
            start, stop = chunks[0]
            opened.undelivered(start, values[start:stop])
            delivered[start:stop] = 0.0
        if outcome.startswith("fail"):
            opened.roll_back()
            assert torch.equal(feedback.state_dict()["sender"], before)
            continue
        opened.commit()
        held = feedback.state_dict()["sender"].double()
        wanted += values.double()
        got += delivered
        rounding += EPSILON * ((values.double() + before.double()).abs() + held.abs()) + 2.0**-148
        assert bool(((wanted - got - held).abs() <= rounding * (1 + 1e-6)).all())
    assert feedback.committed == sum(not outcome.startswith("fail") for outcome, _ in rounds)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "int4", "topk"])
def test_residuals_of_rounding_codecs_are_exact(name: str) -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) ** 3
    feedback = Feedback(50_000, find(name))
    opened = feedback.begin()
    received, _ = send(opened, find(name), 0, values)
    opened.commit()
    assert torch.equal(feedback.state_dict()["sender"].double() + received.double(), values.double())
    assert feedback.norms()[0] > 0


def test_sending_again_gives_the_same_bytes() -> None:
    """A successor of a dead reducer asks for a chunk again: within a round it gets the same."""
    codec, values = find("int4"), torch.randn(5000)
    feedback = Feedback(5000, codec)
    for _ in range(3):
        opened = feedback.begin()
        first = send(opened, codec, 0, values)[1]
        assert send(opened, codec, 0, values)[1] == first
        opened.commit()


def test_the_own_shard_of_a_reducer_loses_nothing() -> None:
    codec = find("sign")
    feedback = Feedback(200, codec)
    opened = feedback.begin()
    send(opened, codec, 0, torch.randn(200))
    opened.commit()
    held = feedback.state_dict()["sender"].clone()
    opened = feedback.begin(Shard(start=100, stop=200, members=b"ab"))
    own = opened.give(100, torch.ones(100), torch.empty(100))
    assert torch.equal(own, 1.0 + held[100:])
    opened.kept(100, 200)
    opened.commit()  # the first half was not staged: it is held as before
    assert torch.equal(feedback.state_dict()["sender"], torch.cat([held[:100], torch.zeros(100)]))


def test_transactions_are_ended_once_and_one_at_a_time() -> None:
    feedback = Feedback(10, find("int8"))
    opened = feedback.begin()
    with pytest.raises(UsageError, match="open: commit it or roll it back"):
        feedback.begin()
    with pytest.raises(UsageError, match="is open: load"):
        feedback.load_state_dict(feedback.state_dict())
    opened.roll_back()
    opened.roll_back()
    assert not opened.open
    for late in (
        opened.commit,
        lambda: opened.kept(0, 10),
        lambda: opened.give(0, torch.ones(10), torch.ones(10)),
    ):
        with pytest.raises(UsageError, match="has ended"):
            late()
    with pytest.raises(UsageError, match="elements 5 to 11 in a vector of 10"):
        feedback.begin(Shard(start=5, stop=11, members=b""))


def test_a_reducers_residual_is_dropped_and_counted_when_its_shard_or_members_change() -> None:
    codec, feedback = find("int2"), Feedback(100, find("int2"))

    def reduce(span: Shard) -> torch.Tensor:
        opened = feedback.begin(span)
        average = torch.linspace(-1, 1, span.stop - span.start)
        opened.correct(span.start, average)
        payload = encoded(codec, average)
        opened.reduced(span.start, average, payload, torch.empty(average.numel()))
        opened.commit()
        return average

    first = Shard(start=0, stop=50, members=b"ab")
    plain = torch.linspace(-1, 1, 50)
    assert torch.equal(reduce(first), plain)
    assert not torch.equal(reduce(first), plain)
    assert feedback.dropped == 0
    assert torch.equal(reduce(Shard(start=0, stop=50, members=b"abc")), plain)
    reduce(Shard(start=0, stop=51, members=b"abc"))
    assert feedback.dropped == 2
    opened = feedback.begin(Shard(start=0, stop=51, members=b"abc"))
    another = torch.ones(40)  # of a dead reducer's shard
    opened.correct(51, another)
    opened.reduced(51, another, encoded(codec, another), torch.empty(40))
    assert torch.equal(another, torch.ones(40))
    opened.roll_back()
    audited = Feedback(100, codec, reduces=False)
    opened = audited.begin(first)
    opened.correct(0, plain)
    opened.reduced(0, plain, encoded(codec, plain), torch.empty(50))
    opened.commit()
    assert audited.norms() == (0.0, 0.0)


# ---- a group: both sides, round by round, as members do it


class Group:
    """Members that average in turn, each with its own feedback."""

    def __init__(self, members: int, numel: int, codec: Codec) -> None:
        self.codec, self.plan = codec, plan_chunks(numel, [1.0] * members, codec, 1 << 12)
        self.feedback = [Feedback(numel, codec) for _ in range(members)]

    def average(self, vectors: list[torch.Tensor], *, fails: bool) -> torch.Tensor:
        """Return the average as all members decode it."""
        opened = [feedback.begin(span_of(self.plan, place)) for place, feedback in enumerate(self.feedback)]
        result = torch.empty(self.plan.numel)
        for chunk in self.plan.chunks:
            result[chunk.start : chunk.stop] = self._reduce(chunk, vectors, opened)
        for one in opened:
            one.roll_back() if fails else one.commit()
        return result

    def _reduce(self, chunk: Chunk, vectors: list[torch.Tensor], opened: list[FeedbackRound]) -> torch.Tensor:
        codec, contributions = self.codec, []
        for place, vector in enumerate(vectors):
            values = vector[chunk.start : chunk.stop]
            if place == chunk.reducer:
                own = opened[place].give(chunk.start, values, torch.empty(chunk.numel))
                opened[place].kept(chunk.start, chunk.stop)
                contributions.append(Contribution(place, 1.0, own))
            else:
                contributions.append(
                    Contribution(place, 1.0, send(opened[place], codec, chunk.start, values)[1])
                )
        mean, reducer = Mean(contributions, codec), opened[chunk.reducer]
        found = []
        for block in blocks(chunk, codec):
            total, scratch = torch.empty(block.stop - block.start), torch.empty(block.stop - block.start)
            mean.compute(block, total, scratch)
            reducer.correct(chunk.start + block.start, total)
            payload = encoded(codec, total)
            reducer.reduced(chunk.start + block.start, total, payload, scratch)
            found.append(decoded(codec, payload, total.numel()))
        return torch.cat(found)


def span_of(plan: Plan, place: int) -> Shard:
    chunks = plan.shard(place)
    return Shard(start=chunks[0].start, stop=chunks[-1].stop, members=b"group") if chunks else NO_SHARD


@pytest.mark.parametrize("name", ["int4", "int2", "sign", "topk"])
def test_neither_senders_nor_reducers_lose_anything(name: str) -> None:
    members, numel = 3, 9000
    group = Group(members, numel, find(name))
    chance = torch.Generator().manual_seed(7)
    wanted, got = torch.zeros(numel).double(), torch.zeros(numel).double()
    for nth in range(24):
        vectors = [torch.randn(numel, generator=chance) + 0.1 for _ in range(members)]
        fails = nth % 4 == 2
        average = group.average(vectors, fails=fails)
        if not fails:
            wanted += sum(vector.double() for vector in vectors) / members
            got += average.double()
        held = sum(feedback.state_dict()["sender"].double() for feedback in group.feedback) / members
        for feedback in group.feedback:
            start, stop, _ = feedback.state_dict()["span"]
            held[start:stop] += feedback.state_dict()["reducer"].double()
        assert float((wanted - got - held).abs().max()) < 24 * 8 * EPSILON * (float(held.abs().max()) + 10)
    assert all(feedback.dropped == 0 for feedback in group.feedback)


@pytest.mark.parametrize(("name", "rounds"), [("int2", 40), ("sign", 40), ("topk", 400)])
def test_a_constant_gradient_arrives_in_the_mean(name: str, rounds: int) -> None:
    """Without feedback a coarse codec makes the same error in every round, and it adds up; with it the errors
    cancel.
    """
    codec, chance = find(name), torch.Generator().manual_seed(9)
    vectors = [torch.randn(4096, generator=chance) for _ in range(2)]
    true = (vectors[0] + vectors[1]) / 2
    group, total = Group(2, 4096, codec), torch.zeros(4096)
    for nth in range(rounds):
        total += group.average(vectors, fails=False)
        if nth == 0:
            alone = float((total - true).norm() / true.norm())
    with_feedback = float((total / rounds - true).norm() / true.norm())
    assert with_feedback < alone / 3
    assert with_feedback < 0.2


# ---- state


def test_state_is_saved_and_restored() -> None:
    codec, span = find("int2"), Shard(start=40, stop=90, members=b"ab")
    one, other = Feedback(100, codec), Feedback(100, codec)
    chance = torch.Generator().manual_seed(2)

    def step(feedback: Feedback, values: torch.Tensor) -> bytes:
        opened = feedback.begin(span)
        payload = send(opened, codec, 0, values)[1]
        average = values[40:90].clone()
        opened.correct(40, average)
        payload += encoded(codec, average)
        opened.reduced(40, average, encoded(codec, average), torch.empty(50))
        opened.commit()
        return payload

    for _ in range(3):
        step(one, torch.randn(100, generator=chance))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.committed == 3
    values, saved = torch.randn(100, generator=chance), one.state_dict()["sender"]
    was = saved.clone()
    assert step(one, values) == step(other, values)
    step(one, values)
    assert torch.equal(saved, was)  # a copy that is written to disk later is still valid
    assert other.dropped == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sender": torch.zeros(9)}, r"the sender's residual is 10 elements of torch.float32, not \(9,\)"),
        ({"sender": torch.zeros(10).double()}, "torch.float64"),
        ({"sender": [0.0] * 10}, "not list"),
        ({"sender": torch.full((10,), float("nan"))}, "has NaN or infinity"),
        ({"span": [0, 11, b""]}, "from 0 to 11; the vector has 10"),
        ({"span": [0, 4, b""]}, "the reducer's residual is 4 elements"),
        ({"span": "all"}, "its start, its stop and its members"),
        ({"committed": -1}, "committed is a number of times, not -1"),
        ({"format": 2}, "its format"),
        ({"reducer": ...}, "reducer"),
    ],
)
def test_an_invalid_state_is_refused_and_changes_nothing(change: dict[str, Any], says: str) -> None:
    feedback = Feedback(10, find("int8"))
    opened = feedback.begin()
    send(opened, find("int8"), 0, torch.randn(10))
    opened.commit()
    before = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in feedback.state_dict().items()
    }
    state = {
        key: value
        for key, value in {**Feedback(10, find("int8")).state_dict(), **change}.items()
        if value is not ...
    }
    with pytest.raises(UsageError, match=says):
        feedback.load_state_dict(state)
    after = feedback.state_dict()
    assert torch.equal(after["sender"], before["sender"])
    assert after["committed"] == before["committed"]


def test_ranges_that_were_not_staged_keep_their_residual() -> None:
    residual = Residual(10, 30)
    staged = residual.stage()
    staged.keep(10, torch.arange(20.0), None)
    staged.commit()
    staged, late = residual.stage(), residual.stage()
    staged.keep(15, torch.full((5,), -1.0), None)
    staged.clear(25, 27)
    late.keep(10, torch.zeros(20), None)  # by a thread that works on a round that was given up
    staged.commit()
    late.keep(10, torch.zeros(20), None)
    assert residual.held.tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1, -1, 10, 11, 12, 13, 14, 0, 0, 17, 18, 19]


def test_a_member_that_excludes_itself_keeps_its_residual_and_continues_to_reduce() -> None:
    codec, feedback = find("int2"), Feedback(100, find("int2"))
    opened = feedback.begin()
    send(opened, codec, 0, torch.randn(100))
    opened.commit()
    held = feedback.state_dict()["sender"].clone()
    opened = feedback.begin(Shard(start=0, stop=50, members=b"ab"))
    send(opened, codec, 50, torch.randn(50))
    opened.keep_sender_residual()
    average = torch.linspace(-1, 1, 50)
    opened.reduced(0, average, encoded(codec, average), torch.empty(50))
    opened.commit()
    assert torch.equal(feedback.state_dict()["sender"], held)
    assert feedback.norms()[1] > 0
