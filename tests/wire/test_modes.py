"""The modes on real sockets: several peers in one process, against one machine that does the same in
sequence.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from averaging.optim.epoch_averager import EpochAverager
from averaging.optim.modes import ModeSettings
from averaging.optim.modes.diloco import DilocoMode
from averaging.optim.modes.local_steps import LocalSteps
from averaging.optim.optimizer import Diloco, Gossip, Gradients, Local, StepReport
from benchmarks import unequal_speeds
from swarm.core.errors import UsageError
from tests.wire.trainers import (
    BATCH,
    QUICK,
    Peer,
    adam,
    assert_close,
    batch,
    build,
    halving,
    one_more,
    swarm_of,
    together,
)

ATTEMPTS_MAX = 4


@contextmanager
def trained(count: int, run: str, train: Callable[[Peer], object], **options: Any) -> Iterator[list[Peer]]:
    """Return peers after a training in which every round had all values of all peers: on a busy machine some
    continue without a peer, or without a part of what it sent.
    """
    for attempt in range(ATTEMPTS_MAX):
        with swarm_of(count, f"{run} {attempt}", **options) as peers:
            together([lambda peer=peer: train(peer) for peer in peers])  # type: ignore[misc]
            if not any(is_incomplete(report) for peer in peers for report in peer.reports):
                yield peers
                return
    raise AssertionError(f"each of {ATTEMPTS_MAX} trainings had a round without one of the peers")


def is_incomplete(report: StepReport) -> bool:
    """Return whether a peer, or a part of its values, was missing in a round of this step."""
    missing = report.round is not None and (
        report.round.left_out or any(share < 1.0 for share in report.round.contributions.values())
    )
    return bool(report.resynchronised or report.alone or report.rounds_failed or missing)


def plain_diloco(
    epochs: int, peers: list[Peer], lr: float, momentum: float, newcomer: int = -1
) -> list[torch.Tensor]:
    """Make all peers' local steps in sequence, and an outer step of torch's SGD on the mean by samples.
    Return the parameters.
    """
    nets = {peer.number: build() for peer in peers}
    inner = {number: adam(net) for number, net in nets.items()}
    schedules = [halving(one) for one in inner.values()]
    shared = [torch.nn.Parameter(p.detach().clone()) for p in build().parameters()]
    outer = torch.optim.SGD(shared, lr=lr, momentum=momentum, nesterov=momentum > 0)
    for epoch in range(epochs):
        samples: dict[int, int] = defaultdict(int)
        for peer in peers:
            net = nets[peer.number]
            for seed in [one.seed for one in peer.taken if one.epoch == epoch]:
                inner[peer.number].zero_grad()
                (net(batch(seed)[0]) - batch(seed)[1]).square().mean().backward()
                inner[peer.number].step()
                samples[peer.number] += BATCH
        for place, p in enumerate(shared):
            deltas = [
                samples[n] * (p.detach() - list(net.parameters())[place].detach()) for n, net in nets.items()
            ]
            p.grad = torch.stack(deltas).sum(0) / sum(samples.values())
        outer.step()
        for net in nets.values():
            for p, own in zip(shared, net.parameters(), strict=True):
                own.data.copy_(p.detach())
        for schedule in schedules:
            schedule.step()
    return [p.detach() for p in shared]


@pytest.mark.parametrize(
    ("mode", "lr", "momentum"), [("local", 1.0, 0.0), (Diloco(outer_lr=0.6, momentum=0.8), 0.6, 0.8)]
)
def test_peers_with_local_steps_equal_one_machine_in_sequence(
    mode: str | ModeSettings, lr: float, momentum: float
) -> None:
    with trained(3, f"sequence {lr}", lambda peer: peer.train_to(5), mode=mode) as peers:
        assert len({peer.opt.state_digest() for peer in peers}) == 1, "all hold the same base and momentum"
        assert all(report.dropped == 0 for peer in peers for report in peer.reports)
        expected = plain_diloco(5, peers, lr, momentum)
        for ours, theirs in zip(peers[0].net.parameters(), expected, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-5, atol=1e-5)
        weights = [sum(report.contributed for report in peer.reports if report.stepped) for peer in peers]
        assert weights == [BATCH * len(peer.taken) for peer in peers]


@pytest.mark.parametrize(
    ("codec", "mode", "rounds"),
    [
        ("int4", Diloco(streaming=3), [3, 2, 2]),
        ("int2", Diloco(streaming=3), [3, 2, 2]),
        ("int2", Diloco(delayed=True), [7]),
    ],
    ids=["int4-streaming", "int2-streaming", "int2-delayed"],
)
def test_rounds_overlap_with_training_and_states_stay_equal(
    codec: str, mode: Diloco, rounds: list[int]
) -> None:
    seen: list[bool] = []

    def train(peer: Peer) -> None:
        while peer.opt.epoch < 7:
            seen.append(peer.opt.has_background_round)
            peer.train_once()

    run = f"overlapped {codec} {mode.delayed}"
    with trained(3, run, train, mode=mode, codec=codec, error_feedback=True) as peers:
        assert any(seen), "training continued during rounds"
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        for peer in peers:
            done = [report for report in peer.reports if report.stepped]
            assert [report.epoch for report in done] == list(range(1, 8))
            assert all(report.dropped == 0 for report in peer.reports)
            state = peer.opt.state_dict()["swarm"]
            counts, feedback = state["accumulated"], state["feedback"]
            assert counts["total"] == BATCH * len(peer.reports)
            assert sum(report.contributed for report in done) == counts["counted"], "every sample counts once"
            feedbacks = feedback if isinstance(feedback, list) else [feedback]
            committed = [one["committed"] for one in feedbacks]
            assert committed == rounds, "each fragment has a feedback of its own"


def test_streaming_rounds_can_be_applied_after_a_fixed_number_of_steps() -> None:
    with trained(
        2, "fixed delay", lambda peer: peer.train_to(4), mode=Diloco(streaming=2, delay_steps=3)
    ) as peers:
        for peer in peers:
            flown = [0]
            for report in peer.reports:
                flown.append(0 if report.stepped else flown[-1] + 1)
            landed = [nth for nth, report in enumerate(peer.reports) if report.stepped and not report.alone]
            assert landed
            assert all(report.accumulated == 3 * BATCH for report in (peer.reports[nth] for nth in landed))


def test_delayed_gradients_equal_one_machine_in_sequence() -> None:
    # peer: (epoch of the parameters, epoch it counts for, seed)
    noted: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def train(peer: Peer) -> None:
        noted[peer.number] = []
        while peer.opt.epoch < 5:
            seed, epoch = 1000 * peer.number + peer.steps, peer.opt.epoch
            noted[peer.number].append((epoch, epoch + peer.opt.has_background_round, seed))
            peer.train_once()

    with trained(2, "delayed", train, mode=Gradients(delayed=True)) as peers:
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        batches = [one for found in noted.values() for one in found]
        assert any(computed < counts for computed, counts, _ in batches), (
            "gradients were computed during rounds"
        )
        assert all(counts - 1 <= computed <= counts for computed, counts, _ in batches), (
            "delayed by one step at most"
        )
        net = build()
        inner, versions = adam(net), []
        schedule = halving(inner)
        for epoch in range(5):
            versions.append([p.detach().clone() for p in net.parameters()])
            own = [(computed, seed) for computed, counts, seed in batches if counts == epoch]
            sums = [torch.zeros_like(p) for p in net.parameters()]
            probe = build()
            for computed, seed in own:
                probe.zero_grad()
                for p, value in zip(probe.parameters(), versions[computed], strict=True):
                    p.data.copy_(value)
                (probe(batch(seed)[0]) - batch(seed)[1]).square().mean().backward()
                sums = [
                    one + p.grad
                    for one, p in zip(sums, probe.parameters(), strict=True)
                    if p.grad is not None
                ]
            for p, one in zip(net.parameters(), sums, strict=True):
                p.grad = one / len(own)
            inner.step()
            schedule.step()
        assert_close(peers[0].net, net)


def test_gossip_rounds_are_in_changing_pairs() -> None:
    with swarm_of(4, "gossip", mode="gossip") as peers:
        together([lambda peer=peer: peer.opt.wait_for_peers(4) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(6) for peer in peers])  # type: ignore[misc]
        partners: dict[int, set[object]] = {}
        for peer in peers:
            rounds = [
                report.round
                for report in peer.reports
                if report.stepped and report.round is not None and not report.round.failed
            ]
            assert rounds
            assert all(len(one.peers) == 2 for one in rounds)
            assert all(report.state_round is None for report in peer.reports)
            partners[peer.number] = {
                other for one in rounds for other in one.peers if other != peer.node.peer_id
            }
        assert max(len(found) for found in partners.values()) >= 2, "others each time"
        vectors = torch.stack(
            [torch.nn.utils.parameters_to_vector(peer.net.parameters()).detach() for peer in peers]
        )
        start = torch.nn.utils.parameters_to_vector(build().parameters()).detach()
        assert vectors.std(0).norm() < 0.5 * (vectors.mean(0) - start).norm(), "they moved together"
        with pytest.raises(UsageError, match="averages parameters themselves"):
            swarm_of(1, "coarse gossip", mode=Gossip(), codec="int4").__enter__()


def test_a_peer_without_a_partner_proceeds_alone() -> None:
    with swarm_of(3, "odd one out", mode="gossip") as peers:
        together([lambda peer=peer: peer.train_to(3) for peer in peers])  # type: ignore[misc]
        done = [report for peer in peers for report in peer.reports if report.stepped]
        assert any(report.alone for report in done)
        assert any(report.round is not None and not report.round.failed for report in done)
        assert not any(report.resynchronised for peer in peers for report in peer.reports)


@pytest.mark.parametrize("mode", [Diloco(), Diloco(streaming=2)], ids=["plain", "streaming"])
def test_a_late_joiner_loads_base_and_momentum_and_counts_from_its_second_round(
    mode: Diloco, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"late {mode.streaming}"
    with swarm_of(2, run, mode=mode) as peers, ExitStack() as stack:
        together([lambda peer=peer: peer.train_to(3) for peer in peers])  # type: ignore[misc]
        late = stack.enter_context(one_more(peers, run, 7, seed=99, mode=mode))
        assert late.opt.load_state_from_peers(timeout_s=30).loaded
        everybody = [*peers, late]
        assert len({peer.opt.state_digest() for peer in everybody}) == 1
        weights: list[float] = []
        first, prepare = next(late.net.parameters()), DilocoMode.prepare

        def recorded(mode: DilocoMode, epoch: int) -> Any:
            prepared = prepare(mode, epoch)
            if mode.learner.weights[0] is first:
                weights.append(prepared[0])
            return prepared

        monkeypatch.setattr(DilocoMode, "prepare", recorded)
        together([lambda peer=peer: peer.train_to(6) for peer in everybody])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in everybody}) == 1
        assert weights[0] == 0.0
        assert all(weight > 0 for weight in weights[1:]), weights
        assert late.opt.inner.param_groups[0]["lr"] == peers[0].opt.inner.param_groups[0]["lr"], (
            "the schedule came with the state"
        )


def test_a_frozen_peer_adds_its_progress_to_the_base_that_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with swarm_of(3, "left out", mode="diloco") as peers:
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        late, others = peers[2], peers[:2]
        parameters = list(late.net.parameters())
        base = [p.detach().clone() for p in parameters]  # equal to the parameters when an epoch begins
        late.train_once()
        progress = [p.detach() - one for p, one in zip(parameters, base, strict=True)]
        thaw = threading.Event()
        late.node.network.loop.call_soon_threadsafe(thaw.wait, 60)
        together([lambda peer=peer: peer.train_to(4) for peer in others])  # type: ignore[misc]
        thaw.set()
        carried: list[list[torch.Tensor]] = []
        set_weights = LocalSteps.set_weights

        def noted(learner: LocalSteps, given: Sequence[torch.Tensor] | None) -> None:
            set_weights(learner, given)
            if learner.weights[0] is parameters[0]:
                carried.append(learner.progress() if given is not None else [])

        monkeypatch.setattr(LocalSteps, "set_weights", noted)
        report = late.train_once()
        while report.resynchronised is None:
            report = late.train_once()
        assert report.resynchronised.loaded, report
        assert report.dropped == 0, "nothing that it learned is lost"
        assert carried[0], "its progress was added to the state that it loaded"
        assert report.accumulated >= BATCH
        before, after = (torch.cat([one.flatten() for one in parts]) for parts in (progress, carried[0]))
        assert torch.nn.functional.cosine_similarity(before, after, dim=0) > 0.3, (
            "it is what it had learned, and a step or two more"
        )
        together([lambda peer=peer: peer.train_to(6) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in peers}) == 1


def test_peers_that_began_with_different_weights_become_equal() -> None:
    with ExitStack() as stack:
        peers: list[Peer] = []
        for number in range(2):
            peers.append(
                stack.enter_context(
                    one_more(peers, "apart", number, seed=number, mode="diloco", state_sync_epochs=None)
                )
            )
        together([lambda peer=peer: peer.train_to(3) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        assert all(any(report.drift for report in peer.reports) for peer in peers)


def test_a_round_that_fails_for_all_is_covered_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.Event()
    failing.set()
    with swarm_of(2, "failing", mode="diloco") as peers:
        begin = EpochAverager.begin

        def broken(*arguments: Any, **named: Any) -> Any:
            flight = begin(*arguments, **named)
            if failing.is_set():
                flight.cancel()
            return flight

        monkeypatch.setattr(EpochAverager, "begin", broken)

        # the epoch of a peer that comes late would be full at its first step
        side_by_side = threading.Barrier(2)

        def train(peer: Peer) -> None:
            for _ in range(12):
                side_by_side.wait(60.0)
                peer.train_once()

        together([functools.partial(train, peer) for peer in peers])
        assert all(peer.opt.epoch == 0 for peer in peers)
        failed = [sum(report.rounds_failed for report in peer.reports) for peer in peers]
        assert all(1 <= count <= 12 for count in failed)
        assert all(len(peer.reports) > count for peer, count in zip(peers, failed, strict=True)), (
            "training continues between two attempts"
        )
        failing.clear()
        together([lambda peer=peer: peer.train_to(1) for peer in peers])  # type: ignore[misc]
        assert all(peer.reports[-1].contributed == BATCH * len(peer.reports) for peer in peers), (
            "no step of theirs is lost"
        )
        expected = plain_diloco(1, peers, 0.7, 0.9)
        for ours, theirs in zip(peers[0].net.parameters(), expected, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-5, atol=1e-5)


def test_peers_with_other_settings_do_not_meet() -> None:
    hasty = {"config": QUICK}
    with ExitStack() as stack:
        peers: list[Peer] = []
        for number, mode in enumerate((Diloco(), Diloco(outer_lr=0.5))):
            peers.append(stack.enter_context(one_more(peers, "settings", number, mode=mode, **hasty)))
        reports = []

        def train(peer: Peer) -> None:
            while not peer.reports or not peer.reports[-1].rounds_failed:
                peer.train_once()
            reports.append(peer.reports[-1])

        together([lambda peer=peer: train(peer) for peer in peers])  # type: ignore[misc]
        assert any(
            "outer_lr=0.7" in report.reason or "outer_lr=0.5" in report.reason for report in reports
        ), reports
        assert all(peer.opt.epoch == 0 for peer in peers)


def test_a_mode_is_given_by_name_or_as_settings() -> None:
    with swarm_of(1, "named", mode=Local()) as [peer]:
        assert peer.opt.mode == "local"
        assert "mode local" in repr(peer.opt)
    with swarm_of(1, "named", mode="gradients") as [peer]:
        assert peer.opt.mode == "gradients"


@pytest.mark.timing
@pytest.mark.parametrize("name", ["gradients", "diloco-streaming"])
def test_peers_of_different_speed_reach_nearly_the_sum_of_their_speeds(name: str) -> None:
    found: list[float] = []
    while len(found) < 3 and max(found, default=0.0) < 0.6:  # what else runs on the machine can only lower it
        reached, (fast, middle, slow) = unequal_speeds.share(
            unequal_speeds.MODES[name], epochs=2, epoch_s=1.5
        )
        found.append(reached)
        assert fast > middle > slow, "nobody waits for the slowest to make as many steps"
    assert max(found) > 0.6, f"{found}; 0.9 and more on a quiet machine: make bench ARGS='--only slowdown'"
