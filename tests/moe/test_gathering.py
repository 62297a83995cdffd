"""Gathering: when a layer has waited long enough for its experts."""

from __future__ import annotations

import pytest
import torch

from moe.client.logic.gathering import Gathering, GatherTimeouts
from swarm.core.errors import UsageError

EXACT = GatherTimeouts(after_k_min_s=0.5)


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_the_additional_wait_starts_when_all_samples_have_k_min_answers() -> None:
    gathering = Gathering(2, 1, EXACT, 0.0, 10.0)
    for expert, batch_rows in enumerate([rows(0), rows(0, 1), rows(1)]):
        gathering.expect(expert, batch_rows, 0.0)
    gathering.answered(0, 1.0)
    assert not gathering.over(9.9)
    assert gathering.rows_below_k_min.tolist() == [1]
    gathering.answered(2, 2.0)
    assert gathering.deadline_s() == 2.5
    assert not gathering.over(2.4)
    assert gathering.over(2.5)
    assert gathering.pending == [1]


def test_gathering_is_over_when_every_expert_has_answered_or_failed() -> None:
    gathering = Gathering(1, 2, EXACT, 0.0, 10.0)
    gathering.expect(0, rows(0), 0.0)
    gathering.expect(1, rows(0), 0.0)
    gathering.answered(0, 0.1)
    gathering.failed(1, 0.2)
    assert gathering.over(0.2)
    assert gathering.rows_below_k_min.tolist() == gathering.unsatisfiable_rows.tolist() == [0]


def test_a_sample_that_can_get_no_more_answers_is_not_waited_for() -> None:
    gathering = Gathering(2, 2, EXACT, 0.0, 10.0)
    gathering.expect(0, rows(0), 0.0)
    gathering.expect(1, rows(0, 1), 0.0)
    gathering.expect(2, rows(1), 0.0)
    gathering.expect(3, rows(1), 0.0)
    gathering.failed(0, 1.0)
    assert gathering.unsatisfiable_rows.tolist() == [0], (
        "known before the others have answered, so that a replacement can be asked"
    )
    gathering.answered(1, 1.1)
    gathering.answered(2, 1.2)
    assert gathering.over(1.7)


def test_a_replacement_restarts_the_additional_wait() -> None:
    gathering = Gathering(1, 1, EXACT, 0.0, 10.0)
    gathering.expect(0, rows(0), 0.0)
    gathering.expect(1, rows(0), 0.0)
    gathering.failed(0, 1.0)
    gathering.answered(1, 1.0)
    gathering.expect(2, rows(0), 1.0)
    assert gathering.deadline_s() == 10.0
    gathering.failed(2, 4.0)
    assert gathering.over(4.0)


def test_gathering_is_over_at_the_deadline() -> None:
    gathering = Gathering(1, 1, EXACT, 5.0, 8.0)
    gathering.expect(0, rows(0), 0.0)
    assert gathering.deadline_s() == 8.0
    assert not gathering.over(7.99)
    assert gathering.over(8.0)


def test_with_k_min_of_0_a_pending_expert_is_awaited_no_longer_than_the_others_took() -> None:
    gathering = Gathering(2, 0, EXACT, 0.0, 10.0)
    gathering.expect(0, rows(0), 0.0)
    gathering.expect(1, rows(1), 0.0, expected_s=1.5)
    assert not gathering.over(9.9), "no answer has arrived: all experts may be slow"
    assert not len(gathering.rows_below_k_min)
    gathering.answered(0, 2.0)
    assert gathering.deadline_s() == 3.5
    assert not gathering.over(3.4)
    assert gathering.over(3.5)


def test_stalled_experts_are_suspected_and_their_answers_still_count() -> None:
    gathering = Gathering(2, 1, EXACT, 0.0, 10.0)
    gathering.expect(0, rows(0), 0.0)
    gathering.expect(1, rows(1), 0.0, expected_s=0.8)
    assert gathering.suspect_at_s() == 0.8
    gathering.answered(0, 0.6)
    assert gathering.suspect_at_s() == 1.4
    assert not len(gathering.unsatisfiable_rows)
    assert gathering.suspect() == [1]
    assert gathering.suspect() == []
    assert gathering.suspect_at_s() is None
    assert gathering.unsatisfiable_rows.tolist() == [1], "a replacement can be asked"
    assert not gathering.over(9.9), "the suspected expert is awaited when there is no replacement"
    gathering.expect(2, rows(1), 1.4)
    assert not len(gathering.unsatisfiable_rows)
    gathering.answered(1, 1.5)
    assert not len(gathering.rows_below_k_min)
    assert gathering.over(2.0)


def test_a_suspected_expert_that_fails_is_no_longer_pending() -> None:
    gathering = Gathering(1, 1, EXACT, 0.0, 10.0)
    gathering.expect(0, rows(0), 0.0)
    gathering.suspect()
    gathering.failed(0, 1.0)
    assert gathering.over(1.0)
    assert gathering.unsatisfiable_rows.tolist() == [0]


def test_unknown_and_repeated_events_change_nothing() -> None:
    gathering = Gathering(1, 1, EXACT, 0.0, 10.0)
    gathering.expect(0, rows(0), 0.0)
    gathering.answered(7, 0.1)
    gathering.answered(0, 0.2)
    gathering.failed(0, 0.3)
    assert not len(gathering.rows_below_k_min)


@pytest.mark.parametrize(("took_s", "expected_s"), [(0.01, 0.1), (0.4, 0.4), (60.0, 5.0)])
def test_the_additional_wait_follows_the_elapsed_time_within_bounds(took_s: float, expected_s: float) -> None:
    assert GatherTimeouts().wait_s(took_s) == expected_s


def test_a_negative_wait_is_refused() -> None:
    with pytest.raises(UsageError):
        GatherTimeouts(after_k_min_s=-1.0)
