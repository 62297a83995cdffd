"""PowerSGD of several members, with the mean on one machine instead of the network: the textbook's
result, and nothing lost.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.reduction import powersgd
from averaging.reduction.devices import Queues
from averaging.reduction.lowrank import PowerSgd, expand
from averaging.reduction.powersgd import LowRank
from averaging.reduction.vector import HOST, FlatVector, HollowVector
from swarm.compression import find
from swarm.core.errors import UsageError
from swarm.testing.codec_contract import decoded, encoded
from swarm.testing.devices import LateFetch, LateQueue
from swarm.testing.metal import on_metal
from tests.averaging.optim.allocations import Allocations

Shapes = list[tuple[int, ...]]
SHAPES: Shapes = [(24, 40), (40,), (16, 5, 3), (2, 2)]
TERMS = PowerSgd(rank=2, saving_min=1.0)


class Members:
    """Each with tensors of its own, and error feedback; `round` is what two all-reduces do to them."""

    def __init__(
        self, count: int, shapes: Shapes = SHAPES, terms: PowerSgd = TERMS, codec: str = "float32"
    ) -> None:
        self.codec = find(codec)
        self.tensors = [[torch.zeros(shape) for shape in shapes] for _ in range(count)]
        self.states = [LowRank(mine, terms, self.codec, seed=b"test") for mine in self.tensors]

    def fill(self, seed: int, make: Any = torch.randn) -> list[list[torch.Tensor]]:
        """New values for everybody; copies of them."""
        chance = torch.Generator().manual_seed(seed)
        for tensor in (tensor for mine in self.tensors for tensor in mine):
            tensor.copy_(make(tensor.shape, generator=chance))
        return [[tensor.clone() for tensor in mine] for mine in self.tensors]

    def mean(self, vectors: list[FlatVector], weights: list[float]) -> torch.Tensor:
        """Return the mean of the decoded contributions, encoded again by the reducer."""
        found = []
        for nth, (state, vector) in enumerate(zip(self.states, vectors, strict=True)):
            values = (
                torch.zeros(vector.numel)
                if isinstance(vector, HollowVector)
                else vector.read(0, vector.numel).clone()
            )
            found.append(
                self.sent(nth, state, values, second=vector.numel == state.layout.second_numel).double()
            )
        total = sum(weight * values for weight, values in zip(weights, found, strict=True)) / sum(weights)
        assert isinstance(total, torch.Tensor)
        return decoded(self.codec, encoded(self.codec, total.float()), total.numel())

    def sent(self, nth: int, state: LowRank, values: torch.Tensor, *, second: bool) -> torch.Tensor:
        """Return the values as the others decode them."""
        opened = state.others.begin() if second else None
        if opened is None:
            return decoded(self.codec, encoded(self.codec, values), values.numel())
        given_ = opened.give(0, values, torch.empty_like(values))
        payload = encoded(self.codec, given_)
        opened.sent(0, given_, payload, torch.empty_like(values))
        self.open.append((nth, opened))
        return decoded(self.codec, payload, values.numel())

    def round(self, weights: list[float], fate: str = "commit", left_out: int | None = None) -> None:
        """`fate`: commit, or fail in the "first" or "second" all-reduce. `left_out`: of the second one's
        average.
        """
        self.open: list[Any] = []
        for state, weight in zip(self.states, weights, strict=True):
            state.take(gives=weight > 0, keeps=False)
        first = self.mean([state.first(alike=True) for state in self.states], weights)
        if fate == "first":
            return
        vectors = [state.second(first) for state in self.states]
        effective = [0.0 if nth == left_out else weight for nth, weight in enumerate(weights)]
        second = self.mean(vectors, effective)
        for nth, opened in self.open:
            if fate == "second":
                opened.roll_back()
                continue
            if weights[nth] == 0.0:
                opened.keep_sender_residual()
            elif nth == left_out:
                opened.undelivered(0, vectors[nth].read(0, vectors[nth].numel))
            opened.commit()
        if fate == "commit":
            for state, weight in zip(self.states, weights, strict=True):
                state.commit(second, sent=weight > 0)
                state.put()


def textbook(
    given_: list[torch.Tensor], weights: list[float], start: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 1 of arXiv 1905.13727 in float64, with torch's QR: the average, p, and q."""
    mean = sum(weight * one.double() for weight, one in zip(weights, given_, strict=True)) / sum(weights)
    assert isinstance(mean, torch.Tensor)
    p, _ = torch.linalg.qr(mean @ start.double())
    q = mean.T @ p[:, :rank]
    return p[:, :rank] @ q.T, p, q


def test_rounds_match_the_published_algorithm() -> None:
    members = Members(3)
    weights = [1.0, 2.0, 0.5]
    held = [torch.zeros(24, 40).double() for _ in range(3)]
    start = members.states[0].state_dict()["starts"][0]
    for nth in range(4):
        before = members.fill(nth)
        given_ = [values[0].double() + residual for values, residual in zip(before, held, strict=True)]
        expected, p, start = textbook(given_, weights, start, 2)
        members.round(weights)
        for mine in members.tensors:
            assert torch.allclose(mine[0].double(), expected, atol=1e-5)
            assert all(torch.equal(one, other) for one, other in zip(mine, members.tensors[0], strict=True))
            whole = (
                sum(weight * values[1].double() for weight, values in zip(weights, before, strict=True)) / 3.5
            )
            assert torch.allclose(mine[1].double(), whole, atol=1e-6)  # no matrix: exact
        held = [one - p @ (p.T @ one) for one in given_]
        for state, residual in zip(members.states, held, strict=True):
            assert torch.allclose(state.state_dict()["held"][0].double(), residual, atol=1e-5)
        assert len({state.start_digest for state in members.states}) == 1


@pytest.mark.parametrize("rank", [5, 7])
def test_a_rank_as_large_as_the_matrix_gives_the_exact_average(rank: int) -> None:
    members = Members(2, [(5, 9), (9, 5), (3, 4, 2)], PowerSgd(rank=rank, saving_min=0.0))
    before = members.fill(1)
    members.round([1.0, 3.0])
    for place, tensor in enumerate(members.tensors[0]):
        expected = (before[0][place] + 3.0 * before[1][place]) / 4.0
        assert torch.allclose(tensor, expected, atol=1e-5)
    # a member may hold what is in nobody's average, because the others hold the opposite
    for held in zip(*(state.state_dict()["held"] for state in members.states), strict=True):
        assert torch.allclose(held[0], -3.0 * held[1], atol=1e-4)


def test_an_average_of_low_rank_is_exact_at_once() -> None:
    members = Members(3, [(60, 80)], PowerSgd(rank=3))
    chance = torch.Generator().manual_seed(3)
    rows = torch.randn(60, 3, generator=chance)
    for mine in members.tensors:
        mine[0].copy_(rows @ torch.randn(3, 80, generator=chance))
    expected = sum(mine[0] for mine in members.tensors) / 3
    members.round([1.0, 1.0, 1.0])
    assert torch.allclose(members.tensors[0][0], expected, atol=1e-4)


def test_rounds_of_one_matrix_add_up_to_it() -> None:
    """Error feedback and the warm start together: the same gradient again and again arrives in the sum."""
    members = Members(2, [(30, 50)], PowerSgd(rank=4))
    members.fill(1)
    fixed = [mine[0].clone() for mine in members.tensors]
    total, errors = torch.zeros(30, 50), []
    for nth in range(1, 61):
        for mine, values in zip(members.tensors, fixed, strict=True):
            mine[0].copy_(values)
        members.round([1.0, 1.0])
        total += members.tensors[0][0]
        mean = (fixed[0] + fixed[1]) / 2
        errors.append(float((total / nth - mean).norm() / mean.norm()))
    assert errors[0] > 0.7
    assert errors[-1] < 0.2


fates = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "first", "second"]),
        st.integers(0, 2**20),
        st.sampled_from([None, None, 0, 1]),
    ),
    max_size=8,
)


@given(
    fates,
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.sampled_from([[1.0, 1.0, 1.0], [1.0, 0.0, 2.5]]),
)
@settings(max_examples=40, deadline=None)
def test_values_sent_and_residual_add_up_to_the_input(
    rounds: list[Any], codec: str, weights: list[float]
) -> None:
    """Over any sequence of rounds, committed, failed in either all-reduce, or committed without a member."""
    members = Members(3, codec=codec)
    wanted = [[torch.zeros(shape).double() for shape in SHAPES] for _ in range(3)]
    got = [torch.zeros(shape).double() for shape in SHAPES]
    for fate, seed, left_out in rounds:
        before = members.fill(seed)
        saved = [state.state_dict() for state in members.states]
        if left_out is not None and weights[left_out] == 0.0:
            left_out = None
        members.round(weights, fate, left_out)
        if fate != "commit":
            for state, was in zip(members.states, saved, strict=True):
                assert _same(state.state_dict(), was)
            assert all(
                torch.equal(a, b)
                for mine, were in zip(members.tensors, before, strict=True)
                for a, b in zip(mine, were, strict=True)
            )
            continue
        for mine, values in zip(wanted, before, strict=True):
            for sum_, value in zip(mine, values, strict=True):
                sum_ += value.double()
        whole = sum(weight for nth, weight in enumerate(weights) if nth != left_out)
        for total, tensor in zip(got, members.tensors[0], strict=True):
            total += tensor.double() * whole
    # what reducers round, kept by nobody here
    tolerance = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}[codec] * (1 + len(rounds))
    for place in range(len(SHAPES)):
        remaining = [_held(state, place) for state in members.states]
        given_ = sum(weight * mine[place] for weight, mine in zip(weights, wanted, strict=True))
        left = sum(weight * held for weight, held in zip(weights, remaining, strict=True))
        assert float((given_ - left - got[place]).abs().max()) < tolerance


def _held(state: LowRank, place: int) -> torch.Tensor:
    saved = state.state_dict()
    for nth, matrix in enumerate(state.layout.matrices):
        if matrix.place == place:
            shape = SHAPES[place]
            return (
                (saved["held"][nth] if saved["held"] is not None else torch.zeros(matrix.n, matrix.m))
                .double()
                .reshape(shape)
            )
    start = state.layout.other_starts[state.layout.others.index(place)]
    numel = torch.Size(SHAPES[place]).numel()
    held: torch.Tensor = saved["others"]["sender"][start : start + numel]
    return held.double().reshape(SHAPES[place])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and other is not None:
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or {_zeros(one), _zeros(other)} == {True}


def _zeros(value: Any) -> bool:
    """Residuals that are not made yet are zeros."""
    return value is None or (isinstance(value, list) and not any(bool(tensor.any()) for tensor in value))


def test_a_new_member_gets_the_start_matrices_from_its_first_round() -> None:
    members = Members(3)
    weights = [1.0, 1.0, 0.0]
    members.fill(1)
    members.states[2] = LowRank(members.tensors[2], TERMS, members.codec, seed=b"test")
    for state in members.states[:2]:
        state.load_state_dict(
            {**state.state_dict(), "starts": [start.flip(0) for start in state.state_dict()["starts"]]}
        )
    assert members.states[2].start_digest != members.states[0].start_digest
    members.round(weights)
    assert len({state.start_digest for state in members.states}) == 1
    assert members.states[2].norms()[0] == 0.0
    assert torch.equal(members.tensors[2][0], members.tensors[0][0])


def test_differences_are_added_to_tensors_that_moved_on() -> None:
    members = Members(2)
    before = members.fill(5)
    for state in members.states:
        state.take(gives=True, keeps=True)
    first = members.mean([state.first(alike=True) for state in members.states], [1.0, 1.0])
    members.open = []
    vectors = [state.second(first) for state in members.states]
    second = members.mean(vectors, [1.0, 1.0])
    for _, opened in members.open:
        opened.commit()
    for mine, state in zip(members.tensors, members.states, strict=True):
        for tensor in mine:
            tensor.add_(1.0)
        state.commit(second, sent=True)
        state.add_difference()
    for place in range(len(SHAPES)):
        averages = [mine[place] - 1.0 for mine in members.tensors]
        assert torch.allclose(averages[0], averages[1], atol=1e-5)
        if place == 1:
            assert torch.allclose(averages[0], (before[0][1] + before[1][1]) / 2, atol=1e-5)


def test_tensors_of_other_types_and_strides_are_averaged() -> None:
    base = [
        torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).t(),
        torch.randn(30, 20).to(torch.bfloat16),
    ]
    state = LowRank(base, TERMS, find("float32"), seed=b"x")
    before = [tensor.clone() for tensor in base]
    state.take(gives=True, keeps=False)
    first = state.first(alike=True)
    second = state.second(first.read(0, first.numel))
    opened = state.others.begin()
    opened.kept(0, second.numel)
    opened.commit()
    state.commit(second.read(0, second.numel), sent=True)
    state.put()
    held = state.state_dict()["held"]
    assert torch.allclose(base[0] + held[0], before[0], atol=1e-5)
    assert torch.allclose(base[1].float() + held[1], before[1].float(), atol=2e-2)
    assert base[1].dtype == torch.bfloat16


def test_a_restored_state_continues_and_an_invalid_one_is_refused() -> None:
    members, other = Members(2), Members(2)
    for nth in range(2):
        members.fill(nth)
        members.round([1.0, 1.0])
    for state, twin in zip(members.states, other.states, strict=True):
        twin.load_state_dict(state.state_dict())
        assert _same(twin.state_dict(), state.state_dict())
        assert twin.start_digest == state.start_digest
    saved = members.states[0].state_dict()
    nan = [tensor * float("nan") for tensor in saved["held"]]
    for wrong in (
        {"format": 9},
        {"powersgd": [3, 1.0]},
        {"held": saved["held"][:1]},
        {"held": nan},
        {"starts": [start.double() for start in saved["starts"]]},
        {"others": None},
    ):
        with pytest.raises(UsageError):
            other.states[0].load_state_dict({**saved, **wrong})
        assert _same(other.states[0].state_dict(), saved)
    with pytest.raises(UsageError, match="not in int8"):
        LowRank(members.tensors[0], TERMS, find("int8"), seed=b"x")


# ---- devices


def alone(tensors: list[torch.Tensor], queues: Queues | None = None) -> LowRank:
    """A round of one member, written to its tensors."""
    state = LowRank(tensors, TERMS, find("float32"), seed=b"x", queues=queues)
    state.take(gives=True, keeps=False)
    mean_of_one(state)
    state.put()
    return state


def mean_of_one(state: LowRank) -> None:
    """Run a round of one member, from after `take` to the commit."""
    first = state.first(alike=True)
    second = state.second(first.read(0, first.numel).clone())
    mean = second.read(0, second.numel).clone()
    opened = state.others.begin()
    opened.kept(0, second.numel)
    opened.commit()
    state.commit(mean, sent=True)


def drawn(seed: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=chance) for shape in SHAPES]


def test_copies_from_a_device_are_all_begun_before_one_is_waited_for() -> None:
    happened: list[str] = []

    class NotedFetch(LateFetch):
        def wait(self) -> None:
            happened.append("waited")
            super().wait()

    class NotedQueue(LateQueue):
        def fetch(self, source: torch.Tensor, target: torch.Tensor) -> LateFetch:
            happened.append("begun")
            return NotedFetch(self, source, target)

    here, there = drawn(1), drawn(1)
    state = alone(there, Queues([HOST], NotedQueue))
    assert _same(state.state_dict(), alone(here).state_dict())
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    in_steps = ["begun"] * 2 + ["waited"] * 2 + ["begun"] * 4 + ["waited"] * 4
    # first: a factor of each of the two matrices; second: the other factors, and the two other tensors
    assert happened[: len(in_steps)] == in_steps


@pytest.mark.parametrize("delta", [False, True])
def test_the_trainer_neither_waits_for_its_device_nor_pins_memory_and_may_continue_at_once(
    delta: bool,
) -> None:
    """`first`, `second` and `commit` run in threads of the pool; the trainer's are `take` and what lands."""
    queues = Queues([HOST], LateQueue)
    queue = queues.of(HOST)
    assert isinstance(queue, LateQueue)
    here, there = drawn(0), drawn(0)
    states = [
        LowRank(here, TERMS, find("float32"), seed=b"x"),
        LowRank(there, TERMS, find("float32"), seed=b"x", queues=queues),
    ]
    queue.host_allocations.clear()  # made with the object, once
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        for seed in range(3):
            for mine, state in zip((here, there), states, strict=True):
                for tensor, value in zip(mine, drawn(seed), strict=True):
                    tensor.copy_(value)
                state.take(gives=True, keeps=delta)
                for tensor in mine:
                    tensor.fill_(seed)  # the next step of the training
                pool.submit(mean_of_one, state).result()
                (state.add_difference if delta else state.put)()
            assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
            assert _same(states[1].state_dict(), states[0].state_dict())
    assert queue.waits
    assert all(name.startswith("pool") for name in queue.waits)
    assert not queue.host_allocations
    assert len(queue.uploaded) == 6, "both factors of two matrices, and two other tensors, of the last round"
    queue.finish_uploads()  # none of this memory was written while it was being copied


@pytest.mark.parametrize(("nth", "written"), [(0, False), (1, True)])
def test_memory_that_runs_out_before_the_first_tensor_is_written_leaves_all_as_they_were(
    nth: int, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, expansions = drawn(1), iter(range(9))
    state = LowRank(tensors, TERMS, find("float32"), seed=b"x")
    state.take(gives=True, keeps=False)
    mean_of_one(state)

    def expand_if_there_is_room(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        if next(expansions) == nth:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        expand(p, q, out)

    monkeypatch.setattr(powersgd, "expand", expand_if_there_is_room)
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        state.put()
    assert state.written == written
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True)) != written


def test_the_host_works_on_matrices_that_lie_on_mps() -> None:
    here, there = drawn(1), [on_metal(tensor) for tensor in drawn(1)]
    states = [alone(here), alone(there)]
    assert _same(states[1].state_dict(), states[0].state_dict())
    assert all(
        torch.equal(one, other.as_subclass(torch.Tensor)) for one, other in zip(here, there, strict=True)
    )


def test_an_average_that_is_not_made_in_place_takes_a_bounded_temporary() -> None:
    tensors = [torch.zeros(3000, 2500, dtype=torch.bfloat16)]
    state = LowRank(tensors, PowerSgd(rank=1), find("float32"), seed=b"x")
    state.take(gives=False, keeps=False)
    state.second(torch.ones(state.layout.first_numel))
    state.commit(torch.ones(state.layout.second_numel), sent=False)
    with Allocations() as allocated:
        state.put()
    assert max(allocated.sizes) <= 4 << 20 < tensors[0].numel() * 4
    assert bool((tensors[0] == tensors[0][0, 0]).all())
    assert float(tensors[0][0, 0]) == pytest.approx(3000**-0.5, rel=0.01)
