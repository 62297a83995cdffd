"""Gate, dispatch and combination against plain torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from moe.client.logic.dispatch import (
    exclude_known,
    places_of,
    scatter_outputs,
    sum_input_gradients,
    weighted_sum,
)
from moe.client.logic.gate import (
    ProductKeyGate,
    balancing_loss,
    gate_input,
    logits_of,
    softmax_over,
    switch_weights,
)
from swarm.core.errors import UsageError


@pytest.mark.parametrize("seed", range(10))
def test_places_of_equal_a_loop_over_samples(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(-1, 6, (9, 4), generator=generator)
    found = places_of(which, 7)
    assert len(found) == 7
    for expert, places in enumerate(found):
        expected = [(row, column) for row in range(9) for column in range(4) if which[row, column] == expert]
        assert list(zip(places.rows.tolist(), places.columns.tolist(), strict=True)) == expected


def test_places_of_an_empty_batch_are_empty() -> None:
    assert places_of(torch.full((3, 2), -1), 0) == []
    assert [len(places.rows) for places in places_of(torch.zeros(0, 2, dtype=torch.int64), 2)] == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_dispatch_and_combination_equal_the_dense_mixture(seed: int) -> None:
    """Value and gradients of Σ_s w[b, s] · f_e(b, s)(x[b]), computed by dispatching, equal autograd's of the
    sum written out.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, width, experts = 7, 3, 5
    which = torch.stack([torch.randperm(experts, generator=generator)[:width] for _ in range(batch)])
    which[torch.rand(batch, width, generator=generator) < 0.3] = -1
    matrices = torch.randn(experts, 4, 6, generator=generator)
    x = torch.randn(batch, 4, generator=generator, requires_grad=True)
    weights = torch.rand(batch, width, generator=generator, requires_grad=True)
    places = places_of(which, experts)
    answers = [[x[place.rows].detach() @ matrix] for place, matrix in zip(places, matrices, strict=True)]
    outputs = scatter_outputs(batch, width, places, answers, answers[0])[0].requires_grad_()
    answered = which >= 0
    total = weighted_sum(weights * answered, outputs)
    expected = torch.zeros(batch, 6)
    for row, column in itertools.product(range(batch), range(width)):
        if which[row, column] >= 0:
            expected = expected.index_add(
                0, torch.tensor([row]), (weights[row, column] * (x[row] @ matrices[which[row, column]]))[None]
            )
    assert torch.allclose(total, expected, atol=1e-5)
    direction = torch.randn(batch, 6, generator=generator)
    by_weights, by_outputs = torch.autograd.grad((total * direction).sum(), (weights, outputs))
    parts = [
        (place, [by_outputs[place.rows, place.columns] @ matrix.T])
        for place, matrix in zip(places, matrices, strict=True)
    ]
    by_x = sum_input_gradients([x.detach()], parts)[0]
    wanted_weights, wanted_x = torch.autograd.grad((expected * direction).sum(), (weights, x))
    assert torch.allclose(by_weights, wanted_weights, atol=1e-5)
    assert by_x is not None
    assert torch.allclose(by_x, wanted_x, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_exclude_known_equals_a_loop_over_samples(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    which = torch.stack([torch.randperm(8, generator=generator)[:6] for _ in range(7)])
    which[torch.rand(7, 6, generator=generator) < 0.2] = -1
    before = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(7)])
    answered = torch.rand(7, 3, generator=generator) < 0.7
    found = exclude_known(which, which.unsqueeze(2), before.unsqueeze(2), answered, 2)
    for sample in range(7):
        held = {
            place
            for place, is_there in zip(before[sample].tolist(), answered[sample].tolist(), strict=True)
            if is_there
        }
        left = [place for place in which[sample].tolist() if place >= 0 and place not in held]
        assert found[sample].tolist() == [*left, -1, -1][:2]


def test_an_input_without_gradients_gets_none() -> None:
    places = places_of(torch.tensor([[0]]), 1)
    assert sum_input_gradients([torch.zeros(1, 2)], [(places[0], [None])]) == [None]
    assert sum_input_gradients([torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)], []) == [None]


def test_the_gates_logits_are_sums_over_dimensions() -> None:
    gate = ProductKeyGate(5, (3, 4))
    x = torch.randn(6, 5)
    scores = gate(x)
    coordinates = torch.tensor(list(itertools.product(range(3), range(4)))).expand(6, 12, 2)
    full = scores[0][:, :, None] + scores[1][:, None, :]
    assert torch.allclose(logits_of(scores, coordinates), full.flatten(1))
    assert set(gate.state_dict()) == {"projection.weight", "projection.bias"}


def test_the_softmax_covers_only_experts_that_answered() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], requires_grad=True)
    answered = torch.tensor([[True, False, True], [False, False, False]])
    weights = softmax_over(logits, answered)
    alone = torch.tensor([1.0, 3.0], requires_grad=True)
    assert torch.allclose(weights[0, [0, 2]], alone.softmax(0))
    assert weights[1].tolist() == [0.0, 0.0, 0.0]
    assert weights[0, 1] == 0.0
    weights[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    alone.softmax(0)[0].backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert alone.grad is not None
    assert torch.allclose(logits.grad[0, [0, 2]], alone.grad)
    assert logits.grad[0, 1] == 0.0
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0]


def test_switch_weights_are_probabilities_in_the_whole_grid() -> None:
    scores = (torch.randn(5, 3), torch.randn(5, 4))
    full = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1).softmax(-1)
    coordinates = torch.tensor([[1, 2], [0, 3]]).expand(5, 2, 2)
    selected = torch.ones(5, 2, dtype=torch.bool)
    weights = switch_weights(scores, coordinates, selected, selected)
    assert torch.allclose(weights, full[:, [6, 3]], atol=1e-6)
    one_answered = switch_weights(scores, coordinates, selected, torch.tensor([[True, False]] * 5))
    assert torch.allclose(one_answered[:, 0], full[:, 6] + full[:, 3], atol=1e-6), (
        "the probability of failed experts goes to those that answered"
    )
    assert not one_answered[:, 1].any()
    assert not switch_weights(scores, coordinates, selected, ~selected).any()


def test_switch_weights_have_gradients() -> None:
    scores = (
        torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(2, 4, dtype=torch.float64, requires_grad=True),
    )
    coordinates = torch.tensor([[1, 2], [0, 3]]).expand(2, 2, 2)
    selected = torch.ones(2, 2, dtype=torch.bool)
    answered = torch.tensor([[True, False], [True, True]])
    assert torch.autograd.gradcheck(lambda *s: switch_weights(s, coordinates, selected, answered), scores)


def test_the_balancing_loss_equals_its_formula() -> None:
    scores = (torch.randn(8, 3), torch.randn(8, 4))
    used = (torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    by_hand = 0.0
    for score, share in zip(scores, used, strict=True):
        size = len(share)
        for place in range(size):
            mean = (
                sum(math.exp(row[place]) / sum(math.exp(value) for value in row) for row in score.tolist())
                / 8
            )
            by_hand += size * float(share[place]) * mean
    assert float(balancing_loss(scores, used)) == pytest.approx(by_hand, rel=1e-5)
    even = [torch.full((size,), 1.0 / size) for size in (3, 4)]
    assert float(balancing_loss((torch.zeros(2, 3), torch.zeros(2, 4)), even)) == pytest.approx(2.0)


def test_the_gradient_of_the_balancing_loss_favours_unused_coordinates() -> None:
    scores = torch.zeros(4, 2, requires_grad=True)
    balancing_loss([scores], [torch.tensor([0.9, 0.1])]).backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert (scores.grad[:, 0] > 0).all()
    assert (scores.grad[:, 1] < 0).all()


def test_the_gates_input_is_one_vector_per_sample() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    x = torch.randn(3, 5, 2, 4)
    assert torch.allclose(gate_input(x, 4, like), x.double().mean((1, 2)))
    assert gate_input(x[:, 0, 0], 4, like).dtype == torch.float64
    with pytest.raises(UsageError, match=r"\(batch, …, 4\)"):
        gate_input(torch.zeros(3, 5), 4, like)
