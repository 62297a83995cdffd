"""Extra tensors of whole numbers, which peers exchange and do not average."""

from __future__ import annotations

import torch

from averaging.optim.state.training_state import TrainingState


def test_integers_become_the_median_which_one_false_peer_does_not_decide() -> None:
    """Regression test: they became the largest value of any peer, which wrapped around in small types, and
    negative ones were never agreed on.
    """
    extras = [
        torch.tensor([-1, 5], dtype=torch.int32),
        torch.tensor([True, False]),
        torch.tensor(3, dtype=torch.uint8),
    ]
    state = TrainingState(torch.optim.SGD([torch.ones(1)], 0.1), extras)
    own = state.extra_counts()
    assert own == [-1, 5, 1, 0, 3]
    state.agree_extras([own, [-2, 7, 1, 0, 4], [(1 << 31) - 1, 99, 0, 1, 255]])
    assert state.extra_counts() == [-1, 7, 1, 0, 4]
    state.agree_extras([[-3, 8, 1, 0, 5], [1 << 40, 8, 1, 0, 5], [0, 8, 2, 0, 5], [0, 8, 1, 0, -1]])
    assert state.extra_counts() == [-3, 8, 1, 0, 5], "values that do not fit are of a false peer"
    state.agree_extras()
    assert state.extra_counts() == [-3, 8, 1, 0, 5]
