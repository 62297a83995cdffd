"""Modes against plain sequential implementations of the same algorithms."""

from __future__ import annotations

import random

import pytest
import torch

from averaging.optim.modes import ModeSettings
from averaging.optim.modes.local_steps import CARRIED_EPOCHS_MAX
from averaging.optim.modes.outer import OuterSGD, fragments_of
from averaging.optim.modes.settings import Diloco, Gossip, Gradients, Local
from tests.averaging.optim.seats import (
    Seat,
    adamw,
    average,
    backward,
    hold,
    model,
    prepare,
    seat,
    vector,
)

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


class PlainDiloco:
    """DiLoCo as in the paper: K workers, and one outer optimizer of torch over the shared parameters."""

    def __init__(self, workers: int, lr: float, momentum: float, nesterov: bool) -> None:
        self.nets = [model() for _ in range(workers)]
        self.inner = [adamw(net) for net in self.nets]
        self.shared = torch.nn.Parameter(vector(self.nets[0].parameters()))
        self.outer = torch.optim.SGD([self.shared], lr=lr, momentum=momentum, nesterov=nesterov)

    def step(self, worker: int, seed: int, samples: int) -> None:
        backward(self.nets[worker], seed, samples)
        self.inner[worker].step()

    def synchronise(self, weights: list[float], members: list[int] | None = None) -> None:
        members = list(range(len(self.nets))) if members is None else members
        deltas = [
            w * (self.shared.detach() - vector(self.nets[k].parameters()))
            for k, w in zip(members, weights, strict=True)
        ]
        self.shared.grad = torch.stack(deltas).sum(0) / sum(weights)
        self.outer.step()
        for k in members:
            self.put(k, self.shared.detach())

    def put(self, worker: int, values: torch.Tensor) -> None:
        torch.nn.utils.vector_to_parameters(values.float(), self.nets[worker].parameters())


@pytest.mark.parametrize(
    ("settings", "lr", "momentum", "nesterov"),
    [
        (Diloco(), 0.7, 0.9, True),
        (Diloco(outer_lr=0.4, momentum=0.5, nesterov=False), 0.4, 0.5, False),
        (Diloco(outer_lr=1.0, momentum=0.0), 1.0, 0.0, False),
        (Local(), 1.0, 0.0, False),
    ],
)
def test_diloco_matches_the_paper_with_slow_peers_and_weights_by_samples(
    settings: ModeSettings, lr: float, momentum: float, nesterov: bool
) -> None:
    seats, plain, rng = (
        [seat(settings) for _ in range(3)],
        PlainDiloco(3, lr, momentum, nesterov),
        random.Random(1),
    )
    for epoch in range(5):
        samples = [0.0, 0.0, 0.0]
        for worker, steps in enumerate((4, 2, 1)):  # slow peers make fewer steps
            for nth in range(steps):
                seed, size = 100 * epoch + 10 * worker + nth, rng.randint(1, 9)
                seats[worker].step(seed, size)
                plain.step(worker, seed, size)
                samples[worker] += size
        assert [one.mode.learner.samples for one in seats] == samples
        assert hold(seats) == samples
        plain.synchronise(samples)
        for one in seats:
            torch.testing.assert_close(one.theta, plain.shared.detach(), **CLOSE)
            assert torch.equal(one.theta, seats[0].theta), "all peers hold the same bits"
            assert one.mode.learner.samples == 0


def test_local_is_the_mean_of_parameters() -> None:
    seats = [seat(Local()) for _ in range(2)]
    seats[0].step(1, 6)
    seats[1].step(2, 2)
    mean = (6 * seats[0].theta + 2 * seats[1].theta) / 8
    hold(seats)
    torch.testing.assert_close(seats[1].theta, mean, **CLOSE)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_is_that_of_torch(nesterov: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.randn(50)), torch.nn.Parameter(torch.empty(50))
    theirs.data.copy_(ours.data)
    outer = OuterSGD([ours], [ours], lr=0.7, momentum=0.9, nesterov=nesterov)
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=nesterov)
    for _ in range(10):
        ours.grad = torch.randn(50)
        theirs.grad = ours.grad.clone()
        sgd.step()
        outer.step()
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_after_a_round_failed_for_all_the_next_covers_both_periods() -> None:
    seats, plain = [seat(Diloco()) for _ in range(2)], PlainDiloco(2, 0.7, 0.9, True)
    for span in range(4):
        for worker in range(2):
            seats[worker].step(10 * span + worker, 4 + worker)
            plain.step(worker, 10 * span + worker, 4 + worker)
        before = [one.theta for one in seats]
        if span in (0, 2):
            prepare(seats)
            for one, theta in zip(seats, before, strict=True):
                one.mode.failed("round")
                assert torch.equal(one.theta, theta)
        else:
            assert hold(seats) == [8.0, 10.0], "both spans' samples count"
            plain.synchronise([8.0, 10.0])
    torch.testing.assert_close(seats[0].theta, plain.shared.detach(), **CLOSE)


def fetch(late: Seat, donor: Seat) -> int:
    """Do what a download does. Return the number of dropped samples."""
    late.mode.learner.suspend()
    late.mode.learner.suspend()
    assert late.mode.prepare(late.mode.state.epoch)[0] == 0.0, "it takes part in rounds at weight 0 meanwhile"
    late.mode.failed("round")
    late.mode.state.load(donor.mode.state.snapshot().blob)
    return int(late.mode.learner.resume())


def test_a_peer_that_missed_a_round_downloads_the_base_and_keeps_its_progress() -> None:
    seats = [seat(Diloco()) for _ in range(3)]
    for worker, one in enumerate(seats):
        one.step(worker, 4)
    hold(seats)
    for worker, one in enumerate(seats):
        one.step(10 + worker, 4)
    late, others = seats[2], seats[:2]
    old, progress = late.mode.learner.base, late.theta - vector(late.mode.learner.base)
    hold(others)
    assert fetch(late, others[0]) == 0
    assert late.mode.learner.base is old
    assert late.mode.state.snapshot().digest == others[0].mode.state.snapshot().digest
    torch.testing.assert_close(late.theta, others[0].theta + progress, **CLOSE)
    for worker, one in enumerate(seats):
        one.step(20 + worker, 5)
    assert hold(seats) == [5.0, 5.0, 9.0], "the samples of the round that it missed count in the next"
    assert torch.equal(seats[2].theta, seats[0].theta)


def test_progress_on_an_old_base_is_dropped() -> None:
    seats = [seat(Diloco()) for _ in range(2)]
    for one in seats:
        one.step(1, 4)
    hold(seats)
    for _ in range(CARRIED_EPOCHS_MAX + 1):
        for one in seats:
            one.step(2, 4)
        hold(seats[:1])
    assert fetch(seats[1], seats[0]) == 4 * (CARRIED_EPOCHS_MAX + 1)
    assert torch.equal(seats[1].theta, seats[0].theta)


def test_a_newcomers_first_round_has_weight_zero() -> None:
    seats = [seat(Diloco()), seat(Diloco())]
    for one in seats:
        one.step(1, 4)
    hold(seats)
    late = seat(Diloco(), model(5))
    late.step(3, 4)
    assert fetch(late, seats[0]) == 4, "what it learned on parameters of its own is nothing to the swarm"
    assert torch.equal(late.theta, seats[0].theta)
    everybody = [*seats, late]
    for expected in ([6.0, 6.0, 0.0], [6.0, 6.0, 6.0]):
        for worker, one in enumerate(everybody):
            one.step(worker, 6)
        assert hold(everybody) == expected
        assert torch.equal(late.theta, seats[0].theta)


def test_a_round_of_newcomers_only_makes_them_count() -> None:
    donor, late = seat(Diloco()), seat(Diloco())
    donor.step(1, 4)
    hold([donor])
    fetch(late, donor)
    late.step(2, 4)
    assert prepare([late])[0][0] == 0.0
    late.mode.failed("nobody contributes")
    assert prepare([late])[0][0] == 4.0


class PlainStreaming:
    """One worker of streaming DiLoCo on flat vectors: a fragment a round, applied `delay` steps after the
    round began.
    """

    def __init__(self, fragments: list[slice]) -> None:
        self.net, self.fragments = model(), fragments
        self.inner = adamw(self.net)
        self.base = vector(self.net.parameters())
        self.momentum = torch.zeros_like(self.base)
        self.theta_sent = self.base.clone()

    @property
    def theta(self) -> torch.Tensor:
        return vector(self.net.parameters())

    def step(self, seed: int, samples: int) -> None:
        backward(self.net, seed, samples)
        self.inner.step()

    def delta(self, epoch: int) -> torch.Tensor:
        self.theta_sent = self.theta
        return (self.base - self.theta_sent)[self.fragments[epoch % len(self.fragments)]]

    def apply(self, epoch: int, delta: torch.Tensor) -> None:
        where = self.fragments[epoch % len(self.fragments)]
        self.momentum[where] = 0.9 * self.momentum[where] + delta
        self.base[where] -= 0.7 * (delta + 0.9 * self.momentum[where])
        moved = self.theta
        moved[where] += self.base[where] - self.theta_sent[where]
        torch.nn.utils.vector_to_parameters(moved.float(), self.net.parameters())


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize(
    "settings", [Diloco(streaming=3), Diloco(delayed=True)], ids=["streaming", "delayed"]
)
def test_rounds_run_while_training_continues_for_fragments_in_turn_or_the_whole_model(
    settings: Diloco, delay: int
) -> None:
    fragments, numel = settings.streaming, sum(p.numel() for p in model().parameters())
    slices = [slice(numel * f // fragments, numel * (f + 1) // fragments) for f in range(fragments)]
    seats = [seat(settings) for _ in range(2)]
    plain = [PlainStreaming(slices) for _ in seats]
    spans = [[0.0, 0.0] for _ in slices]  # per fragment: samples of each since its last round
    for epoch in range(8):
        for worker in range(2):
            for nth in range(3 - worker):
                seats[worker].step(100 * epoch + 10 * worker + nth, 2 + worker)
                plain[worker].step(100 * epoch + 10 * worker + nth, 2 + worker)
                for span in spans:
                    span[worker] += 2 + worker
        weights = [weight for weight, _ in prepare(seats)]
        assert weights == spans[epoch % fragments], "weights are the samples since this fragment's last round"
        assert all(one.mode.learner.samples == 0 for one in seats)
        deltas = [one.delta(epoch) for one in plain]
        spans[epoch % fragments] = [0.0, 0.0]
        average([one.mode for one in seats], weights)
        for nth in range(delay):  # training continues
            for worker in range(2):
                seats[worker].step(1000 + 10 * epoch + nth, 1)
                plain[worker].step(1000 + 10 * epoch + nth, 1)
                for span in spans:
                    span[worker] += 1
        mean = sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)
        for ours, theirs in zip(seats, plain, strict=True):
            ours.advance()
            theirs.apply(epoch, mean)
            torch.testing.assert_close(ours.theta, theirs.theta, **CLOSE)
            torch.testing.assert_close(vector(ours.mode.learner.base), theirs.base, **CLOSE)
            assert ours.mode.learner.samples == delay
    assert seats[0].mode.state.snapshot().digest == seats[1].mode.state.snapshot().digest


@pytest.mark.parametrize(
    "settings", [Diloco(streaming=2), Diloco(delayed=True)], ids=["streaming", "delayed"]
)
def test_a_round_beside_training_that_failed_is_covered_by_the_next(settings: Diloco) -> None:
    seats, other = [seat(settings) for _ in range(2)], [seat(settings) for _ in range(2)]
    for worker in range(2):
        for table in (seats, other):
            table[worker].step(worker, 4)
    prepare(seats)
    for worker in range(2):
        for table in (seats, other):
            table[worker].step(10 + worker, 4)
        seats[worker].mode.failed("round")
        assert seats[worker].mode.learner.samples == 8
    assert hold(seats) == hold(other) == [8.0, 8.0]
    assert torch.equal(seats[0].theta, other[0].theta)


@pytest.mark.parametrize(("numels", "count"), [([10, 1, 0, 5], 3), ([1], 4), ([7, 7, 7], 7), ([100, 3], 1)])
def test_fragments_are_equal_and_cover_everything_once(numels: list[int], count: int) -> None:
    cut = fragments_of(numels, count)
    sizes = [sum(piece.numel for piece in pieces) for pieces in cut]
    assert len(cut) == count
    assert max(sizes) - min(sizes) <= 1
    covered = sorted(
        (piece.place, at) for pieces in cut for piece in pieces for at in range(piece.start, piece.stop)
    )
    assert covered == [(place, at) for place, numel in enumerate(numels) for at in range(numel)]


def test_gossip_matches_noloco() -> None:
    settings = Gossip()
    seats = [seat(settings) for _ in range(4)]
    base = [one.theta for one in seats]
    momentum = [torch.zeros_like(base[0]) for _ in seats]
    rng = random.Random(3)
    for epoch in range(6):
        for worker, one in enumerate(seats):
            for nth in range(1 + worker % 2):
                one.step(100 * epoch + 10 * worker + nth, 4)
        learned = [one.theta - own for one, own in zip(seats, base, strict=True)]
        order = rng.sample(range(4), 4)
        # once two find nobody
        pairs = [order[:2], order[2:]] if epoch != 3 else [order[:2], order[2:3], order[3:]]
        for pair in pairs:
            middle = sum(base[k] for k in pair) / len(pair)
            moved = sum(learned[k] for k in pair) / len(pair)
            for k in pair:
                momentum[k] = 0.5 * momentum[k] + 0.7 * moved + 0.7 * (middle - base[k])
            for k in pair:
                base[k] = base[k] + momentum[k]
            assert hold([seats[k] for k in pair]) == [1.0] * len(pair)
        for one, own in zip(seats, base, strict=True):
            torch.testing.assert_close(one.theta, own, **CLOSE)
    spread = torch.stack(base).std(0).norm() / torch.stack(base).mean(0).norm()
    assert 0 < spread < 0.2, "peers differ, and stay close to one another"


def test_delayed_gradients_step_with_the_epoch_before() -> None:
    seats, plain = [seat(Gradients(delayed=True)) for _ in range(2)], model()
    inner = adamw(plain)
    pending: list[torch.Tensor] = []
    for epoch in range(4):
        sums, total = [torch.zeros_like(p) for p in plain.parameters()], 0
        for worker, one in enumerate(seats):
            for nth in range(2):
                seed, samples = 100 * epoch + 10 * worker + nth, 3 + worker
                one.step(seed, samples)
                backward(plain, seed, samples)
                sums = [
                    s + samples * p.grad
                    for s, p in zip(sums, plain.parameters(), strict=True)
                    if p.grad is not None
                ]
                total += samples
        if epoch:  # the round of the epoch before was held during this one
            for one in seats:
                one.advance([b"\xff"])
            for p, gradient in zip(plain.parameters(), pending, strict=True):
                p.grad = gradient
            inner.step()
            torch.testing.assert_close(seats[0].theta, vector(plain.parameters()), **CLOSE)
        pending = [one / total for one in sums]
        weights = [weight for weight, _ in prepare(seats)]
        assert weights == [6.0, 8.0]
        assert seats[0].mode.learner.samples == 0
        average([one.mode for one in seats], weights)


def test_a_delayed_round_that_failed_gives_its_gradients_back() -> None:
    one, other = seat(Gradients(delayed=True)), seat(Gradients())
    for table in (one, other):
        table.step(1, 4)
    one.mode.prepare(0)
    for table in (one, other):
        table.step(2, 6)
    assert one.mode.learner.samples == 6
    assert one.mode.state_dict()["samples"] == 10, "saved as if that round had not been begun"
    one.mode.failed("round")
    assert one.mode.learner.samples == other.mode.learner.samples == 10
    hold([one])
    hold([other])
    torch.testing.assert_close(one.theta, other.theta, **CLOSE)


GRADIENTS = pytest.mark.parametrize("settings", [Gradients(), Gradients(delayed=True)], ids=["", "delayed"])


def after_one_epoch(settings: Gradients, peers: int) -> list[Seat]:
    seats = [seat(settings) for _ in range(peers)]
    for worker, one in enumerate(seats):
        one.step(worker, 4)
    hold(seats)
    return seats


@GRADIENTS
def test_gradients_that_missed_a_round_count_in_the_next(settings: Gradients) -> None:
    late, *others = seats = after_one_epoch(settings, 3)
    late.step(10, 6)
    gradient = [p.grad.clone() for p in late.net.parameters() if p.grad is not None]
    for worker, one in enumerate(others):
        one.step(20 + worker, 4)
    hold(others)
    assert fetch(late, others[0]) == 0
    assert late.mode.learner.samples == 6
    assert late.mode.learner.has_late_samples
    assert torch.equal(late.theta, others[0].theta)
    others[0].step(30, 4)
    [(own_weight, _), (weight, _), _] = prepare(seats)
    assert (own_weight, weight) == (6.0, 4.0), "weighted by their samples"
    for mean, expected in zip(late.mode.tensors(), gradient, strict=True):
        torch.testing.assert_close(mean, expected)
    average([one.mode for one in seats], [6.0, 4.0, 0.0])
    for one in seats:
        one.advance([b"\xff"])
    assert torch.equal(late.theta, others[0].theta)
    assert not late.mode.learner.has_late_samples
    assert late.mode.learner.samples == 0


@GRADIENTS
def test_late_gradients_survive_the_rounds_that_are_captured_during_the_download(settings: Gradients) -> None:
    late, other = seats = after_one_epoch(settings, 2)
    late.step(10, 6)
    donated = other.mode.state.snapshot().blob
    other.step(20, 4)
    learner = late.mode.learner
    learner.suspend()
    assert [weight for weight, _ in prepare(seats)] == [0.0, 4.0]
    late.mode.failed("round")
    prepare([late])
    average([one.mode for one in seats], [0.0, 4.0])
    captured = late.mode.capture(1, [b"\xff"])
    other.advance([b"\xff"])
    late.mode.state.load(donated)
    late.mode.replay(captured)
    late.mode.state.mark_changed(2)
    assert learner.resume() == 0
    torch.testing.assert_close(late.theta, other.theta)
    assert learner.samples == 6
    assert learner.has_late_samples


@GRADIENTS
@pytest.mark.parametrize("epochs", [0, 2])
def test_gradients_of_a_replaced_state_or_of_two_epochs_ago_are_dropped(
    settings: Gradients, epochs: int
) -> None:
    late, other = after_one_epoch(settings, 2)
    late.step(10, 6)
    for epoch in range(epochs):
        other.step(20 + epoch, 4)
        hold([other])
    assert fetch(late, other) == 6
    assert late.mode.learner.samples == 0
    assert not late.mode.learner.has_late_samples


@GRADIENTS
def test_gradients_that_missed_two_rounds_are_dropped(settings: Gradients) -> None:
    late, other = after_one_epoch(settings, 2)
    late.step(10, 6)
    for expected in (0, 6 + 3):
        other.step(20, 4)
        hold([other])
        assert fetch(late, other) == expected
        if not expected:
            restored = seat(settings)
            restored.mode.load_state_dict(late.mode.state_dict())
            assert restored.mode.learner.has_late_samples, "a checkpoint says so, too"
            late.step(11, 3)


def test_gradients_of_epoch_0_are_dropped_since_its_parameters_may_have_differed() -> None:
    late, other = seat(Gradients(), model(7)), seat(Gradients())
    late.step(10, 6)
    other.step(20, 4)
    hold([other])
    assert fetch(late, other) == 6


@GRADIENTS
def test_gradients_are_kept_when_no_state_could_be_loaded(settings: Gradients) -> None:
    [late] = after_one_epoch(settings, 1)
    late.step(10, 6)
    late.mode.learner.suspend()
    assert prepare([late])[0][0] == 0.0
    late.mode.failed("round")
    assert late.mode.learner.resume() == 0
    assert late.mode.learner.samples == 6
    assert not late.mode.learner.has_late_samples
