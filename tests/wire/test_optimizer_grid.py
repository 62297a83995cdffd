"""Optimizers in a swarm larger than a group, on real sockets: groups of two stand for groups of 64. What such
rounds result in is held by `tests/sim/test_grid_optimizer.py`; here a busy machine may leave a peer out.
"""

from __future__ import annotations

import dataclasses

import pytest

from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import Diloco, Gradients
from tests.wire.trainers import BATCH, QUICK, swarm_of, together

PAIRS = dataclasses.replace(QUICK, group_size_max=2)
EPOCHS = 3


@pytest.mark.parametrize("mode", [Gradients(), Diloco(streaming=2)], ids=["gradients", "streaming"])
def test_four_peers_in_pairs_have_one_history_and_account_for_every_sample(
    mode: ModeSettings,
) -> None:
    with swarm_of(4, "pairs", config=PAIRS, mode=mode) as peers:
        together([lambda peer=peer: peer.opt.wait_for_peers(4) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(EPOCHS) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.history_head for peer in peers}) == 1
        assert len({peer.opt.line for peer in peers}) == 1
        for peer in peers:
            rounds = [report.round for report in peer.reports if report.stepped]
            certificates = [one.certificate for one in rounds if one is not None]
            assert len(certificates) == len(rounds)
            assert all(one is not None and one.proposal.grid_rounds == 2 for one in certificates)
            contributed = sum(report.contributed for report in peer.reports)
            dropped = sum(report.dropped for report in peer.reports)
            assert contributed + dropped + peer.reports[-1].accumulated == BATCH * peer.steps
