"""Accumulation of gradients on the host: weighting, refused gradients, failed rounds, and resuming."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.optim.accumulate import GradientAccumulator
from swarm.core.errors import UsageError


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 1000),
)
def test_the_mean_is_weighted_by_samples(batches: list[int], dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    ps = parameters((3, 4), (), (0,), (5,), dtype=dtype)
    accumulator = GradientAccumulator(ps)
    wanted = [torch.zeros(p.shape, dtype=torch.float64) for p in ps]
    for samples in batches:
        for p, total in zip(ps, wanted, strict=True):
            p.grad = torch.randn(p.shape).to(dtype)
            total += p.grad.double() * samples
        assert accumulator.add(samples) is None
        for p in ps:
            assert p.grad is not None
            p.grad.zero_()  # what zero_grad(set_to_none=False) does
    assert accumulator.samples == sum(batches)
    for mean, total in zip(accumulator.average_(), wanted, strict=True):
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean.double(), total / sum(batches), rtol=1e-5, atol=1e-5)


def test_a_failed_round_keeps_what_was_added() -> None:
    (p,) = parameters((4,))
    accumulator = GradientAccumulator([p])
    p.grad = torch.full((4,), 2.0)
    accumulator.add(3)
    assert torch.equal(accumulator.average_()[0], torch.full((4,), 2.0))
    assert torch.equal(accumulator.average_()[0], torch.full((4,), 2.0)), "averaging twice changes nothing"
    p.grad = torch.full((4,), 5.0)
    accumulator.add(6)
    assert torch.equal(accumulator.average_()[0], torch.full((4,), 4.0))
    accumulator.reset()
    assert accumulator.samples == 0
    assert not accumulator.average_()[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_step_with_non_finite_gradients_is_dropped_whole(bad: float) -> None:
    ps = parameters((4,), (4,))
    accumulator = GradientAccumulator(ps)
    for p in ps:
        p.grad = torch.ones(4)
    accumulator.add(2)
    ps[1].grad = torch.tensor([1.0, bad, 1.0, 1.0])
    assert accumulator.add(2) == "non-finite gradients: parameter 1"
    assert accumulator.samples == 2
    assert all(torch.equal(mean, torch.ones(4)) for mean in accumulator.average_())


def test_large_finite_float16_is_not_taken_for_infinity() -> None:
    (p,) = parameters((1000,), dtype=torch.float16)
    p.grad = torch.full((1000,), 60000.0, dtype=torch.float16)
    accumulator = GradientAccumulator([p])
    assert accumulator.add(1000) is None
    assert torch.equal(accumulator.average_()[0], torch.full((1000,), 60000.0))
    assert accumulator.finite()


def test_sums_that_overflow_are_noticed() -> None:
    (p,) = parameters((2,))
    p.grad = torch.full((2,), 3e38)
    accumulator = GradientAccumulator([p])
    accumulator.add(8)
    assert not accumulator.finite()


def test_missing_and_sparse_gradients_are_accumulated() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    other, unused = parameters((3,), (2,))
    accumulator = GradientAccumulator([embedding.weight, other, unused])
    assert accumulator.add(1) == "no parameter has a gradient"
    other.grad = torch.ones(3)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    assert accumulator.add(2) is None
    assert accumulator.touched == [True, True, False]
    table, _, nothing = accumulator.average_()
    assert torch.equal(table, torch.tensor([[0, 0], [2, 2], [0, 0], [0, 0], [1, 1]]).float())
    assert not nothing.any()


def test_touched_parameters_of_all_peers_are_joined() -> None:
    ps = parameters(*[(1,)] * 10)
    one, two = GradientAccumulator(ps), GradientAccumulator(ps)
    ps[9].grad = torch.ones(1)
    one.add(1)
    ps[9].grad, ps[2].grad = None, torch.ones(1)
    two.add(1)
    assert [
        place
        for place, touched in enumerate(one.merge_touched([one.touched_bytes(), two.touched_bytes()]))
        if touched
    ] == [2, 9]
    assert one.merge_touched([b"\xff" * 2])[:10] == [True] * 10
    assert one.merge_touched([b"short field"]) == [True] * 10


def test_state_dict_resumes_in_the_middle_of_an_epoch() -> None:
    (p,) = parameters((3,))
    p.grad = torch.ones(3)
    one, two = GradientAccumulator([p]), GradientAccumulator([p])
    one.add(4)
    one.average_()
    two.load_state_dict(one.state_dict())
    assert two.samples == 4
    assert torch.equal(two.average_()[0], torch.ones(3))
    with pytest.raises(UsageError, match="other shapes"):
        GradientAccumulator(parameters((2,))).load_state_dict(one.state_dict())


def test_an_optimizer_without_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        GradientAccumulator([])


def test_a_reset_clears_whatever_was_written_into_the_buffers() -> None:
    ps = parameters((3, 4), (5,))
    accumulator = GradientAccumulator(ps)

    def gradients() -> None:
        for p in ps:
            p.grad = torch.ones_like(p)
        accumulator.add(3)

    def average_of_a_round_without_own_samples() -> None:
        for buffer in accumulator.average_():
            buffer.fill_(7.0)

    def saved() -> None:
        accumulator.load_state_dict(
            {"samples": 2, "touched": [True, True], "sums": [torch.ones(p.shape) for p in ps]}
        )

    def given_out() -> None:
        for buffer in accumulator.state_dict()["sums"]:
            buffer.fill_(7.0)

    def restore_means() -> None:
        accumulator.restore_means([torch.ones(p.shape) for p in ps], 2, [True, True])

    for written in (gradients, average_of_a_round_without_own_samples, saved, given_out, restore_means):
        written()
        assert any(bool(buffer.any()) for buffer in accumulator.buffers), written
        for _ in range(2):
            accumulator.reset()
            assert not any(bool(buffer.any()) for buffer in accumulator.buffers), written
