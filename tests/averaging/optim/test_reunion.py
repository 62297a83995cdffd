"""A peer whose history loses a reunion discards everything that depends on it, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from averaging.history.ahead import Ahead
from averaging.history.certificate import Certificate, RoundKind, make_result
from averaging.history.chain import Chain
from averaging.optim.history import RunHistory
from averaging.optim.modes.settings import Gradients
from swarm.core.clock import SystemClock
from swarm.core.ids import Contact
from swarm.core.standing import PeerStanding
from tests.averaging.history.peers import IDENTITIES, PEERS, RUN, certificate, proposal
from tests.averaging.optim.seats import adamw, average, backward, hold, model, prepare, seat

OWN, OTHER = PEERS[0], PEERS[1]


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("settings", [Gradients(), Gradients(delayed=True)])
def test_gradients_of_a_history_that_lost_are_dropped_and_those_of_one_epoch_ago_count(
    settings: Gradients, parted: bool
) -> None:
    one, other = (seat(settings) for _ in range(2))
    plain = model()
    inner = adamw(plain)

    def step_plain(batches: list[tuple[int, int]]) -> None:
        """Step on the mean gradient over all samples."""
        inner.zero_grad()
        for seed, samples in batches:
            net = model()
            net.load_state_dict(plain.state_dict())
            backward(net, seed, samples)
            for p, mine in zip(plain.parameters(), net.parameters(), strict=True):
                assert mine.grad is not None
                part = mine.grad * samples / sum(samples for _, samples in batches)
                p.grad = part if p.grad is None else p.grad + part
        inner.step()

    one.step(1, 4)
    other.step(2, 4)
    hold([one, other])
    step_plain([(1, 4), (2, 4)])
    if parted:  # both continue alone, and the other side makes one epoch more
        one.step(3, 4)
        hold([one])
        other.step(4, 4)
        hold([other])
        step_plain([(4, 4)])
    one.step(5, 6)
    other.step(6, 4)
    hold([other])
    step_plain([(6, 4)])
    assert other.mode.state.epoch == one.mode.state.epoch + 1

    one.mode.learner.suspend()
    one.mode.state.load(other.mode.state.snapshot().blob)
    assert one.mode.learner.resume(parted=parted) == (6 if parted else 0)
    assert one.mode.learner.has_late_samples is not parted
    one.step(7, 2)
    other.step(8, 4)
    weights = [weight for weight, _ in prepare([one, other])]
    assert weights == ([2.0, 4.0] if parted else [8.0, 4.0])
    average([one.mode, other.mode], weights)
    for peer in (one, other):
        peer.advance([b"\xff"])
    if parted:
        step_plain([(7, 2), (8, 4)])
        for p, expected in zip(one.net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(one.theta, other.theta)


def history() -> RunHistory:
    """Return the history of `OWN` after a round with `OTHER`."""
    node = SimpleNamespace(contact=Contact(OWN, ()), standing=PeerStanding(), clock=SystemClock())
    made = RunHistory(node, RUN, IDENTITIES[0].sign, group_size_max=16)  # type: ignore[arg-type]
    made.commit(certificate(proposal(made.head, (), (OWN, OTHER)), (OWN, OTHER)))
    return made


CASES = {
    # contributors, those whose values came too late, kind of the round, whether this peer's samples count
    "a round of others": ((OTHER,), (), RoundKind.EPOCH, False),
    "a round that failed here": ((OTHER, OWN), (), RoundKind.EPOCH, True),
    "a round without its values": ((OTHER, OWN), (OWN,), RoundKind.EPOCH, False),
    "a round over the state": ((OTHER, OWN), (), RoundKind.STATE, False),
}


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_certificate_of_a_round_that_failed_here_tells_whether_this_peers_samples_are_in_it(
    case: str, goes_on: bool
) -> None:
    """Regression test: a peer that had sent its values, and did not learn in time that the others committed
    the round, brought the same samples to the next one.
    """
    contributors, idle, kind, counts = CASES[case]
    mine = history()
    about = replace(
        proposal(mine.head, (OWN, OTHER), contributors, epoch=2 if kind is RoundKind.EPOCH else 1), kind=kind
    )
    result = make_result(b"r" * 32, [contributors.index(peer) for peer in idle], len(contributors))
    found = [Certificate(proposal=about, result=result, votes={}, goodbyes={})]
    if goes_on:
        found.append(later(found[0].head, epoch=found[0].proposal.epoch + 1, by=1))
    root = mine.root
    chain = Chain(head=root.head, electors=root.electors, certificates=tuple(found), root_epoch=1)
    mine.follow(Ahead(chain, Contact(OTHER, ())))
    mine.settle()
    assert mine.has_counted is counts
    mine.follow(Ahead(mine.root, Contact(OTHER, ())))
    mine.settle()
    assert not mine.has_counted, "it concerns the latest state only"


@pytest.mark.parametrize("counts", [False, True])
def test_a_load_that_ends_with_an_error_tells_whether_this_peers_samples_are_in_the_state(
    counts: bool,
) -> None:
    """Regression test: an error in the replay of rounds, after the state was replaced, left the answer to the
    load before. The samples were carried into the next round, where they counted twice.
    """
    mine = history()
    about = proposal(mine.head, (OWN, OTHER), (OTHER, OWN) if counts else (OTHER,), epoch=2)
    found = Certificate(proposal=about, result=make_result(b"r" * 32, [], 2), votes={}, goodbyes={})
    root = mine.root
    chain = Chain(head=root.head, electors=root.electors, certificates=(found,), root_epoch=1)
    mine.follow(Ahead(chain, Contact(OTHER, ())))
    mine.unfollow()
    assert mine.head == root.head
    assert mine.has_counted is counts
    mine.follow(Ahead(chain, Contact(OTHER, ())))
    mine.settle()
    mine.unfollow()
    assert (mine.head, mine.has_counted) == (found.head, counts), "interrupted once all was loaded"


def later(head: bytes, *, epoch: int, by: int, is_break: bool = False) -> Certificate:
    """Return a round of one peer alone after a round of both."""
    about = proposal(head, (OWN, OTHER), (PEERS[by],), epoch=epoch, is_break=is_break, attempt=by)
    return certificate(about, (PEERS[by],))


@pytest.mark.parametrize("parted", [False, True])
def test_a_history_says_whether_the_loaded_state_follows_from_what_this_peer_did(parted: bool) -> None:
    mine = history()
    root = mine.root
    if parted:
        mine.commit(later(root.head, epoch=2, by=0, is_break=True))
    first = later(root.head, epoch=2, by=1)
    chain = Chain(head=root.head, electors=root.electors, certificates=(first,), root_epoch=1)
    mine.follow(Ahead(chain, Contact(OTHER, ())))
    mine.settle()
    assert mine.has_parted is parted
    assert mine.head == first.head
    mine.follow(Ahead(mine.root, Contact(OTHER, ())))
    mine.settle()
    assert not mine.has_parted, "it concerns the latest state only"
