"""Optimizers in swarms larger than a group, on real sockets: groups of two stand for groups of 64."""

from __future__ import annotations

import dataclasses

import pytest

from tests.wire.trainers import QUICK, assert_close, oracle, swarm_of, together

PAIRS = dataclasses.replace(QUICK, group_size_max=2)


@pytest.mark.parametrize("mode", ["gradients"])
def test_four_peers_in_groups_of_two_train_as_one_machine_would(mode: str) -> None:
    with swarm_of(4, "pairs", config=PAIRS, mode=mode) as peers:
        together([lambda peer=peer: peer.opt.wait_for_peers(4) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(3) for peer in peers])  # type: ignore[misc]
        taken = [one for peer in peers for one in peer.taken]
        assert {peer.opt.epoch for peer in peers} == {3}
        for peer in peers:
            assert_close(peer.net, oracle(3, taken))
        assert len({peer.opt.history_head for peer in peers}) == 1
        assert not any(report.resynchronised for peer in peers for report in peer.reports)
