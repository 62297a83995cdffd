"""The benchmark of hostile peers in short: a few false gradients ruin the mean, but no robust aggregation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from averaging.reduction.robust import MEAN
from benchmarks import hostile
from benchmarks.report import as_record

STEPS = 30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with hostile.one_thread():
        yield


def train(rule: str, lie: str | None) -> float:
    return hostile.train(
        hostile.RULES[rule], hostile.LIES[lie] if lie else None, steps=STEPS, samples=8, data_bytes=1 << 20
    )


def test_hostile_peers_ruin_the_mean_but_no_robust_aggregation() -> None:
    honest = train("mean", None)
    assert honest < 4.0  # it learns: 5.5 at the beginning
    assert train("mean", "sign-flipped ×10") > 2.0 * honest
    for rule in hostile.ROBUST:
        assert train(rule, "sign-flipped ×10") < 1.08 * honest


def test_the_average_without_hostile_peers_is_the_mean() -> None:
    vectors = [torch.full((5000,), float(place)) for place in range(hostile.PEERS)]
    assert torch.equal(hostile.average(vectors, MEAN), torch.full((5000,), 3.5))
    vectors[0][7] = float("nan")
    vectors[1][7] = float("nan")
    with pytest.raises(hostile.Diverged):
        hostile.average(vectors, MEAN)


def test_hostile_rows_can_be_stored_as_records() -> None:
    messages: list[str] = []
    rows = [
        *hostile.costs(messages.append, elements=5000, rounds=1),
        *hostile.losses(messages.append, steps=0),
    ]
    assert (
        len({row.identifier for row in rows})
        == len(rows)
        == len(hostile.RULES) + 1 + len(hostile.LIES) * len(hostile.RULES)
    )
    assert all(as_record(row, "run")["ours_value"] is not None for row in rows)
    assert all(row.met for row in rows if row.aim is not None)  # no step, no difference
