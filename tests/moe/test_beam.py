"""Beam search against exhaustive search, in grids with holes; its limits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
import torch

from moe.client.logic.beam import BeamLimits, BeamSearch, Prefix, Selection, compact
from swarm.core.errors import UsageError


def run(search: BeamSearch, alive: Iterable[Prefix], depth: int) -> tuple[Selection, int, int]:
    """Return (result, prefixes opened, steps)."""
    tree: dict[Prefix, set[int]] = {}
    for expert in alive:
        for level in range(depth):
            tree.setdefault(expert[:level], set()).add(expert[level])
    opened = steps = 0
    while wanted := search.wanted():
        assert len(set(wanted)) == len(wanted)
        search.opened({prefix: sorted(tree.get(prefix, ())) for prefix in wanted})
        opened += len(wanted)
        steps += 1
    return search.result(), opened, steps


def exhaustive(
    scores: Sequence[torch.Tensor], dimensions: Sequence[range], alive: Sequence[Prefix], k: int
) -> list[list[float]]:
    """Return for each sample the scores of its k best experts."""
    found = []
    for sample in range(len(scores[0])):
        totals = [
            sum(float(scores[d][sample, e[d] - dimensions[d].start]) for d in range(len(e))) for e in alive
        ]
        found.append(sorted(totals, reverse=True)[:k])
    return found


def found_scores(
    selection: Selection, scores: Sequence[torch.Tensor], dimensions: Sequence[range]
) -> list[list[float]]:
    result = []
    for sample, row in enumerate(selection.indices_BK.tolist()):
        experts = [selection.experts[place] for place in row if place >= 0]
        assert len(set(experts)) == len(experts)
        result.append(
            [
                sum(float(scores[d][sample, e[d] - dimensions[d].start]) for d in range(len(e)))
                for e in experts
            ]
        )
    return result


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_experts_of_an_exhaustive_search(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dimensions = [
        range(start := rng.randrange(3), start + rng.randint(1, 9)) for _ in range(rng.randint(1, 3))
    ]
    everything = list(itertools.product(*dimensions))
    alive = rng.sample(everything, rng.randint(0, len(everything)))
    batch, k = rng.randint(1, 12), rng.randint(1, 6)
    scores = [torch.randn(batch, len(dimension), generator=generator) for dimension in dimensions]
    limits = BeamLimits(
        width=rng.randint(1, 4),
        prefixes_per_step_max=rng.choice([1, 3, 64]),
        elements_max=rng.choice([1, 50, 1 << 22]),
    )
    selection, _, _ = run(BeamSearch(scores, dimensions, k, limits), alive, len(dimensions))
    assert selection.certain
    assert set(selection.experts) <= set(alive)
    expected = exhaustive(scores, dimensions, alive, k)
    assert [pytest.approx(row, abs=1e-5) for row in expected] == found_scores(selection, scores, dimensions)


def test_the_search_opens_few_prefixes_of_a_large_grid() -> None:
    dimensions = [range(256), range(256)]
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(8, 256, generator=generator) for _ in dimensions]
    selection, opened, steps = run(BeamSearch(scores, dimensions, 4), itertools.product(*dimensions), 2)
    assert selection.certain
    assert opened < 1 + 8 * 12
    assert steps <= 4
    sums_BE = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1)
    assert torch.allclose(
        torch.tensor(found_scores(selection, scores, dimensions)), sums_BE.topk(4).values, atol=1e-5
    )


def test_the_best_expert_is_found_when_the_best_prefix_has_a_hole() -> None:
    """A search that keeps the k best prefixes of the first dimension finds (0, 1) here; (1, 0) is better."""
    scores = [torch.tensor([[10.0, 9.0]]), torch.tensor([[5.0, -100.0]])]
    selection, _, _ = run(
        BeamSearch(scores, [range(2), range(2)], 1, BeamLimits(width=1)), [(0, 1), (1, 0)], 2
    )
    assert selection.experts == ((1, 0),)


def test_a_search_ended_by_a_limit_is_not_certain() -> None:
    dimensions = [range(50), range(2)]
    # every prefix promises more than it holds
    scores = [torch.arange(50.0)[None], torch.tensor([[-1000.0, 0.0]])]
    limits = BeamLimits(width=2, prefixes_max=5)
    selection, opened, _ = run(
        BeamSearch(scores, dimensions, 2, limits), [(place, 0) for place in range(50)], 2
    )
    assert not selection.certain
    assert opened == 5


def test_an_empty_grid_and_an_empty_batch_give_empty_selections() -> None:
    selection, opened, _ = run(BeamSearch([torch.zeros(3, 4)], [range(4)], 2), [], 1)
    assert selection.indices_BK.tolist() == [[-1, -1]] * 3
    assert opened == 1
    assert run(BeamSearch([torch.zeros(0, 4)], [range(4)], 2), [(1,)], 1)[0].indices_BK.shape == (0, 2)


def test_compact_drops_experts_that_no_sample_selected() -> None:
    selection = compact([(5,), (6,), (7,)], torch.tensor([[2, -1], [0, 2]]), True)
    assert selection.experts == ((5,), (7,))
    assert selection.indices_BK.tolist() == [[1, -1], [0, 1]]


def test_wrong_arguments_raise_usage_errors() -> None:
    with pytest.raises(UsageError):
        BeamSearch([torch.zeros(1, 3)], [range(4)], 1)
    with pytest.raises(UsageError):
        BeamLimits(width=0)


def test_a_prefix_that_can_only_tie_is_not_opened() -> None:
    search = BeamSearch([torch.zeros(3, 2), torch.zeros(3, 2)], [range(2), range(2)], 1, BeamLimits(width=1))
    assert search.wanted() == [()]
    search.opened({(): [0, 1]})
    (first,) = search.wanted()
    search.opened({first: [0]})
    assert search.wanted() == []
    assert search.result().certain


def test_coordinates_outside_the_grid_are_ignored() -> None:
    """The DHT may hold any coordinates; a negative one would index from the other end."""
    scores = [torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]])]
    search = BeamSearch(scores, [range(2), range(2)], 4)
    search.opened({prefix: [-1, 0, 2] for prefix in search.wanted()})
    search.opened({prefix: [-1, 1, 2] for prefix in search.wanted()})
    assert search.wanted() == []
    assert search.result().experts == ((0, 1),)


def test_no_more_prefixes_are_opened_than_allowed() -> None:
    search = BeamSearch(
        [torch.zeros(1, 4), torch.zeros(1, 2)], [range(4), range(2)], 8, BeamLimits(width=4, prefixes_max=3)
    )
    search.opened({prefix: range(4) for prefix in search.wanted()})
    assert len(search.wanted()) == 2, "one of three is opened already"
    search.opened({prefix: range(2) for prefix in search.wanted()})
    assert search.wanted() == []
    assert not search.result().certain
