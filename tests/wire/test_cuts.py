"""Cuts of seconds between real optimizers: one head and equal parameters soon after they heal."""

from __future__ import annotations

import pytest

from benchmarks.cuts import measure


@pytest.mark.parametrize(
    ("mode", "sizes", "cut_s"),
    [
        ("gradients", (2, 2), 6.0),
        ("diloco", (1, 2), 6.0),
        pytest.param("gradients", (1, 1), 3.0, marks=pytest.mark.slow),
        pytest.param("gradients", (1, 2), 5.0, marks=pytest.mark.slow),
        pytest.param("diloco", (2, 2), 6.0, marks=pytest.mark.slow),
        pytest.param("diloco", (1, 1), 4.0, marks=pytest.mark.slow),
        pytest.param("local", (2, 2), 15.0, marks=pytest.mark.slow),
        pytest.param("gradients-delayed", (1, 2), 6.0, marks=pytest.mark.slow),
        pytest.param("diloco-streaming", (1, 2), 6.0, marks=pytest.mark.slow),
    ],
)
def test_peers_have_one_history_and_equal_states_soon_after_a_cut(
    mode: str, sizes: tuple[int, int], cut_s: float
) -> None:
    outcome = measure(mode, sizes, cut_s)
    assert outcome.agreed_s is not None
    assert outcome.epochs_during >= 2, "the side with a quorum continues"
    assert outcome.epochs_given_up == 0, "the other side waits for longer than this cut lasts"
    assert outcome.rounds_lost <= 1, "that which was running"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "sizes"), [("gradients", (2, 2)), ("diloco", (1, 2))])
def test_the_side_that_continued_by_itself_after_the_grace_gives_its_epochs_up(
    mode: str, sizes: tuple[int, int]
) -> None:
    outcome = measure(mode, sizes, 25.0)
    assert outcome.agreed_s is not None
    assert outcome.epochs_given_up > 0


@pytest.mark.slow
def test_peers_have_one_history_after_a_cut_of_one_direction() -> None:
    outcome = measure("gradients", (1, 2), 6.0, both_ways=False)
    assert outcome.agreed_s is not None
