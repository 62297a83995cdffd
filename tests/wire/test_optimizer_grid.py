"""Optimizers in swarms larger than a group, on real sockets: groups of two stand for groups of 64."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.optim.modes.settings import Diloco, Gradients
from averaging.optim.state.snapshot import read_header, read_tensors
from tests.wire.trainers import BATCH, QUICK, Peer, assert_close, one_more, oracle, swarm_of, together

PAIRS = dataclasses.replace(QUICK, group_size_max=2)
EPOCHS = 3


def parameters(peer: Peer) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in peer.net.parameters()])


def assert_similar(peers: list[Peer]) -> None:
    """Assert that models differ by no more than cells leave that are not full, which have no exact mean."""
    first = parameters(peers[0])
    for peer in peers[1:]:
        assert float((parameters(peer) - first).norm() / first.norm()) < 0.05


def is_canonical(peer: Peer) -> bool:
    view = peer.opt.state_view()
    view.close()
    return view.canonical


def shared_state(peer: Peer) -> dict[str, torch.Tensor]:
    """Return the tensors that this peer would give to a newcomer."""
    view = peer.opt.state_view()
    view.complete_copy()
    header, start = read_header(view.blob)
    tensors = {name: tensor.clone() for name, tensor in read_tensors(view.blob, header, start).items()}
    view.close()
    return tensors


def electors(peers: list[Peer], before: Peer) -> list[Peer]:
    """Return the peers that decided about the last epoch."""
    last = [report.round for report in before.reports if report.round is not None][-1]
    assert last.certificate is not None
    return [peer for peer in peers if peer.node.peer_id in last.certificate.proposal.contributors]


def test_four_peers_in_groups_of_two_train_as_one_machine_would() -> None:
    with swarm_of(4, "pairs", config=PAIRS) as peers:
        together([lambda peer=peer: peer.opt.wait_for_peers(4) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(EPOCHS) for peer in peers])  # type: ignore[misc]
        taken = [one for peer in peers for one in peer.taken]
        for peer in peers:
            assert_close(peer.net, oracle(EPOCHS, taken))
            rounds = [report.round for report in peer.reports if report.stepped]
            assert all(one is not None and one.certificate is not None for one in rounds)
            assert [one.certificate.proposal.grid_rounds for one in rounds if one and one.certificate] == [
                2
            ] * 3
        assert len({peer.opt.history_head for peer in peers}) == 1
        assert not any(report.resynchronised for peer in peers for report in peer.reports)


def test_the_electors_hold_the_canonical_state_and_peers_far_from_it_fetch_it() -> None:
    with swarm_of(4, "pairs of states", config=PAIRS, state_sync_epochs=2) as peers:
        together([lambda peer=peer: peer.opt.wait_for_peers(4) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(1) for peer in peers])  # type: ignore[misc]
        with torch.no_grad():
            # as if one peer had drifted away: its partner meets it in the first round, all move in the last
            next(peers[-1].net.parameters()).add_(0.4)
        mean = torch.stack([parameters(peer) for peer in peers]).mean(0)
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        deciding = electors(peers, peers[0])
        others = [peer for peer in peers if peer not in deciding]
        assert len(deciding) == 2
        assert len({peer.opt.state_digest() for peer in deciding}) == 1, "the same bits"
        assert all(is_canonical(peer) for peer in deciding)
        assert not any(is_canonical(peer) for peer in others)
        for peer in peers:
            assert math.isclose(float((parameters(peer) - mean).norm() / mean.norm()), 0.0, abs_tol=0.05)
        together([lambda peer=peer: peer.train_to(3) for peer in peers])  # type: ignore[misc]
        for peer in others:
            assert any(report.resynchronised for report in peer.reports), "it had moved by more than 1 %"
        together([lambda peer=peer: peer.train_to(4) for peer in peers])  # type: ignore[misc]
        assert_similar(peers)


def test_a_pair_that_grows_beyond_a_group_goes_on_through_the_grid() -> None:
    with swarm_of(2, "growing pairs", config=PAIRS) as peers, ExitStack() as stack:
        together([lambda peer=peer: peer.opt.wait_for_peers(2) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        for number in (2, 3):
            peers.append(stack.enter_context(one_more(peers, "growing pairs", number, config=PAIRS)))
        together([lambda peer=peer: peer.train_to(8) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.history_head for peer in peers}) == 1
        assert_similar(peers)
        last = [report.round for report in peers[0].reports if report.stepped and report.round][-1]
        assert last.certificate is not None
        assert last.certificate.proposal.grid_rounds == 2


@pytest.mark.parametrize("mode", ["local", "diloco"])
def test_modes_with_local_steps_average_through_the_grid(mode: Any) -> None:
    with swarm_of(4, f"pairs {mode}", config=PAIRS, mode=mode) as peers:
        together([lambda peer=peer: peer.opt.wait_for_peers(4) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(EPOCHS) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.history_head for peer in peers}) == 1
        for peer in peers[1:]:
            assert_close(peer.net, peers[0].net)


@pytest.mark.parametrize(
    "mode",
    [
        Gradients(delayed=True),
        Diloco(streaming=2),
        Diloco(streaming=2, delay_steps=4),
    ],
    ids=["delayed", "streaming", "streaming-steps"],
)
def test_rounds_behind_training_go_through_the_grid_and_leave_one_state(mode: Any) -> None:
    with swarm_of(4, "pairs behind training", config=PAIRS, mode=mode) as peers:
        together([lambda peer=peer: peer.opt.wait_for_peers(4) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(2 * EPOCHS) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.history_head for peer in peers}) == 1
        first = shared_state(peers[0])
        for peer in peers[1:]:
            for name, tensor in shared_state(peer).items():
                assert torch.allclose(tensor.double(), first[name].double(), rtol=1e-4, atol=1e-6), name
        for peer in peers:
            rounds = [report.round for report in peer.reports if report.stepped]
            assert all(one is not None and one.certificate is not None for one in rounds)
            assert not any(report.dropped for report in peer.reports)
            assert sum(report.contributed for report in peer.reports) + peer.reports[-1].accumulated == (
                BATCH * peer.steps
            )


def test_peers_whose_electors_died_go_on_with_a_break_and_one_history() -> None:
    quick = dataclasses.replace(PAIRS, round_timeout_s=5.0)
    with swarm_of(6, "pairs without electors", config=quick) as peers:
        together([lambda peer=peer: peer.opt.wait_for_peers(6) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        dead = electors(peers, peers[0])
        for peer in dead:
            peer.node.close()
        left = [peer for peer in peers if peer not in dead]
        together([lambda peer=peer: peer.train_to(4) for peer in left], timeout_s=150.0)  # type: ignore[misc]
        assert len({peer.opt.history_head for peer in left}) == 1
        assert len({peer.opt.line for peer in left}) == 1
        assert left[0].opt.line, "nobody of those that had to decide was left"
        assert_similar(left)
