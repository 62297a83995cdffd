"""Optimizers on real sockets: several peers in one process, each with its own node, trained from threads."""

from __future__ import annotations

import asyncio
import copy
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.optim.modes.gradients import GradientsMode
from averaging.optim.optimizer import LoadResult, Optimizer
from averaging.optim.progress.logic.reports import EpochProgress
from averaging.optim.state.donor import Donor
from swarm.core.errors import UsageError
from swarm.node import Node
from tests.wire.trainers import (
    BATCH,
    FEATURES,
    QUICK,
    TARGET,
    Peer,
    adam,
    assert_close,
    backward,
    batch,
    build,
    one_more,
    oracle,
    swarm_of,
    together,
)


def test_a_lone_peer_trains_with_a_large_batch() -> None:
    with swarm_of(1, "alone") as [peer]:
        peer.train_to(3)
        assert len(peer.taken) == 3 * TARGET // BATCH, "an epoch ends exactly at the target"
        assert [report.stepped for report in peer.reports].count(True) == 3
        assert all(report.alone for report in peer.reports if report.stepped)
        assert peer.reports[-1].contributed == TARGET
        assert_close(peer.net, oracle(3, peer.taken), 1e-6)
        loaded = peer.opt.load_state_from_peers(timeout_s=10)
        assert (loaded.loaded, loaded.alone) == (False, True)


def test_three_peers_train_as_one_machine_would() -> None:
    with swarm_of(3, "three") as peers:
        together([lambda peer=peer: peer.train_to(6) for peer in peers])  # type: ignore[misc]
        digests = {peer.opt.state_digest() for peer in peers}
        assert len(digests) == 1, "all hold the same bits"
        assert digests.pop()[0] == 6
        taken = [one for peer in peers for one in peer.taken]
        assert_close(peers[0].net, oracle(6, taken))
        rounds = [
            report.round
            for report in peers[0].reports
            if report.round is not None and not report.round.failed
        ]
        assert any(len(one.peers) == 3 for one in rounds)


def test_a_coarse_codec_with_error_feedback_that_is_saved() -> None:
    with swarm_of(2, "coarse", codec="int2", error_feedback=True) as peers:
        together([lambda peer=peer: peer.train_to(5) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        saved = [peer.opt.state_dict()["swarm"]["feedback"] for peer in peers]
        assert all(state["committed"] >= 3 for state in saved)
        # so small a model has one reducer: the other sends
        assert [bool(state["sender"].any()) for state in saved].count(True) == 1
        assert [bool(state["reducer"].any()) for state in saved].count(True) == 1
        again = copy.deepcopy(peers[0].opt.state_dict())
        with swarm_of(1, "coarse again", codec="int2", error_feedback=True) as [resumed]:
            resumed.opt.load_state_dict(again)
            for side in ("sender", "reducer"):
                assert torch.equal(resumed.opt.state_dict()["swarm"]["feedback"][side], saved[0][side])
        with swarm_of(1, "adaptive", codec="adaptive") as [plain]:
            plain.train_to(1)
            assert plain.opt.state_dict()["swarm"]["feedback"] is None


def test_the_state_is_averaged_and_drift_reported() -> None:
    with swarm_of(2, "sync", state_sync_epochs=2) as peers:
        together([lambda peer=peer: peer.train_to(1) for peer in peers])  # type: ignore[misc]
        with torch.no_grad():
            next(peers[1].net.parameters()).add_(0.01)  # as if its processor calculated differently
        assert len({peer.opt.state_digest() for peer in peers}) == 2
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        last = [peer.reports[-1] for peer in peers]
        assert all(report.state_round is not None and not report.state_round.failed for report in last)
        assert len({report.state_round.digest for report in last if report.state_round}) == 1
        assert all(report.drift is not None and 1e-5 < report.drift < 0.1 for report in last)
        assert len({peer.opt.state_digest() for peer in peers}) == 1


def test_when_one_peer_leaves_the_others_continue() -> None:
    with swarm_of(3, "leaving") as peers:
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        peers[2].opt.close()
        peers[2].node.close()
        together([lambda peer=peer: peer.train_to(4) for peer in peers[:2]])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in peers[:2]}) == 1
        gone = peers[2].opt
        saved = gone.state_dict()
        for call in (
            gone.step,
            lambda: gone.set_target(8),
            lambda: gone.load_state(bytearray()),
            lambda: gone.load_state_dict(saved),
        ):
            with pytest.raises(UsageError, match="closed"):
                call()


def test_a_frozen_peer_stops_nobody_and_resynchronises() -> None:
    with swarm_of(3, "frozen") as peers:
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        thaw = threading.Event()
        # connections stay open, and nothing is said
        peers[2].node.network.loop.call_soon_threadsafe(thaw.wait, 60)
        together([lambda peer=peer: peer.train_to(5) for peer in peers[:2]])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in peers[:2]}) == 1
        thaw.set()
        together([lambda peer=peer: peer.train_to(8) for peer in peers])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        assert any(report.resynchronised and report.resynchronised.loaded for report in peers[2].reports)


def test_a_lone_peer_averages_the_state_with_a_newcomer_in_the_next_epoch() -> None:
    with swarm_of(1, "sync early", state_sync_epochs=2) as peers, ExitStack() as stack:
        peers[0].train_to(1)
        late = stack.enter_context(one_more(peers, "sync early", 3, seed=4, state_sync_epochs=2))
        assert late.opt.load_state_from_peers(timeout_s=30).loaded
        together([lambda peer=peer: peer.train_to(2) for peer in [*peers, late]])  # type: ignore[misc]
        rounds = [peer.reports[-1].state_round for peer in [*peers, late]]
        assert all(one is not None and not one.failed for one in rounds), rounds
        assert len({peer.opt.state_digest() for peer in [*peers, late]}) == 1


def test_a_peer_that_loaded_the_state_is_known_to_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: a founder that read the DHT seldom closed the epoch alone in the second after a
    newcomer had joined it.
    """
    monkeypatch.setattr(EpochProgress, "refresh_s", lambda self, now_s: 9.0)
    with swarm_of(1, "known") as peers, ExitStack() as stack:
        peers[0].train_to(1)
        late = stack.enter_context(one_more(peers, "known", 3, seed=4))
        assert late.opt.load_state_from_peers(timeout_s=30).loaded
        assert peers[0].opt.progress.peers[late.node.peer_id].epoch == 1
        together([lambda peer=peer: peer.train_to(2) for peer in [*peers, late]])  # type: ignore[misc]
        assert all(len(peer.reports[-1].round.peers) == 2 for peer in [*peers, late])
        assert len({peer.opt.state_digest() for peer in [*peers, late]}) == 1


def test_buffers_and_counters_become_equal_with_the_state() -> None:
    def normed(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )

    with ExitStack() as stack:
        peers: list[Peer] = []
        for number in range(2):
            peers.append(
                stack.enter_context(one_more(peers, "buffers", number, make=normed, state_sync_epochs=3))
            )
        together([lambda peer=peer: peer.train_to(3) for peer in peers])  # type: ignore[misc]
        assert all(peer.reports[-1].state_round is not None for peer in peers)
        first, second = (dict(peer.net.named_buffers()) for peer in peers)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert int(first["1.num_batches_tracked"]) >= max(peer.steps for peer in peers), (
            "of two peers the median of counters is the larger one"
        )
        assert len({peer.opt.state_digest() for peer in peers}) == 1


def test_a_late_joiner_downloads_the_state_and_contributes() -> None:
    with swarm_of(2, "late") as peers, ExitStack() as stack:
        together([lambda peer=peer: peer.train_to(3) for peer in peers])  # type: ignore[misc]
        late = stack.enter_context(one_more(peers, "late", 7, seed=99))
        loaded = late.opt.load_state_from_peers(timeout_s=30)
        assert loaded.loaded, loaded
        assert (loaded.epoch, loaded.replayed) == (3, 0)
        assert set(loaded.donors) <= {peer.node.peer_id for peer in peers}
        everybody = [*peers, late]
        assert len({peer.opt.state_digest() for peer in everybody}) == 1
        together([lambda peer=peer: peer.train_to(7) for peer in everybody])  # type: ignore[misc]
        assert len({peer.opt.state_digest() for peer in everybody}) == 1
        assert any(report.contributed for report in late.reports)
        assert_close(late.net, oracle(7, [one for peer in everybody for one in peer.taken]))


def test_a_download_longer_than_an_epoch_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors hold back until the swarm has continued; the newcomer took part in those rounds at weight 0, and
    replays them.
    """
    released, stop = threading.Event(), [10**6]
    on_chunks, capture = Donor.on_chunks, GradientsMode.capture

    async def held(self: Donor, *args: Any) -> None:
        await asyncio.to_thread(released.wait, 30)
        await on_chunks(self, *args)

    with swarm_of(2, "replay") as peers, ExitStack() as stack:
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        late = stack.enter_context(one_more(peers, "replay", 7, seed=99))
        in_a_row: list[int] = []

        def counted(self: GradientsMode, epoch: int, told: Any) -> Any:
            in_a_row.append(peers[0].opt.epoch)
            if len(in_a_row) == 3:
                stop[0] = late.opt._tracker.view().epoch + 4
            return capture(self, epoch, told)

        monkeypatch.setattr(Donor, "on_chunks", held)
        monkeypatch.setattr(GradientsMode, "capture", counted)

        def go_on(peer: Peer) -> None:
            while peer.opt.epoch < stop[0]:
                peer.train_once()
            released.set()

        loads: list[LoadResult] = []
        together(
            [
                lambda: loads.append(late.opt.load_state_from_peers(timeout_s=60)),
                *[lambda peer=peer: go_on(peer) for peer in peers],
            ]
        )  # type: ignore[misc]
        assert loads[0].loaded, loads
        assert loads[0].replayed >= 2
        assert loads[0].epoch == stop[0]
        assert len({peer.opt.state_digest() for peer in [*peers, late]}) == 1


def test_a_peer_that_finds_the_swarm_ahead_loads_in_its_first_step() -> None:
    with swarm_of(1, "behind") as peers:
        peers[0].train_to(2)
        with one_more(peers, "behind", 5, seed=3) as late:
            report = late.train_once()
            assert report.resynchronised is not None
            assert report.resynchronised.loaded, report
            assert (report.samples, report.dropped, report.epoch) == (0, BATCH, 2)
            assert late.opt.state_digest() == peers[0].opt.state_digest()


def test_non_finite_gradients_are_dropped_and_reported() -> None:
    with swarm_of(1, "nan") as [peer]:
        backward(peer.net, batch(1))
        next(peer.net.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
        report = peer.opt.step()
        assert (report.samples, report.dropped, report.reason) == (
            0,
            BATCH,
            "non-finite gradients: parameter 0",
        )
        peer.train_to(1)
        assert all(bool(p.isfinite().all()) for p in peer.net.parameters())


def test_the_optimizer_is_a_torch_optimizer() -> None:
    with swarm_of(1, "torch", target_batch_size=2 * BATCH) as [peer]:
        opt, net = peer.opt, peer.net
        assert isinstance(opt, torch.optim.Optimizer)
        scaler = torch.amp.GradScaler("cpu")
        seen: list[Any] = []
        opt.register_step_pre_hook(
            lambda inner, args, kwargs: seen.append([p.grad.clone() for p in net.parameters()])
        )
        for seed in (1, 2):
            opt.zero_grad()
            x, y = batch(seed)
            scaler.scale((net(x) - y).square().mean()).backward()
            report = scaler.step(opt)
            scaler.update()
        assert report.stepped
        assert len(seen) == 1, "hooks see the averaged gradients, once an epoch"
        assert opt.step(batch_size=3, closure=lambda: backward(net, batch(4))).loss is not None
        assert opt.step(lambda: backward(net, batch(5))).loss is not None
        with pytest.raises(UsageError, match="agreed on the parameters"):
            opt.add_param_group({"params": []})


def test_resuming_within_an_epoch_changes_nothing() -> None:
    with swarm_of(1, "resume") as [peer]:
        for _ in range(17):
            peer.train_once()
        saved, weights = copy.deepcopy(peer.opt.state_dict()), copy.deepcopy(peer.net.state_dict())
        with swarm_of(1, "resumed", seed=5) as [resumed]:
            resumed.net.load_state_dict(weights)
            resumed.opt.load_state_dict(saved)
            resumed.steps = peer.steps
            assert resumed.opt.epoch == peer.opt.epoch == 1
            peer.train_to(3)
            resumed.train_to(3)
            assert resumed.opt.state_digest() == peer.opt.state_digest()


def test_mistakes_of_the_caller_raise_usage_error() -> None:
    with Node(listen="127.0.0.1:0") as node:
        net = build()

        def make(**options: Any) -> Optimizer:
            return Optimizer(adam(net), **{"node": node, "run": "x", "target_batch_size": 8, **options})

        for options, complaint in [
            ({"mode": "hogwild"}, "there is no mode 'hogwild'; there is: gradients, local, diloco, gossip"),
            ({"codec": "int1"}, "int1"),
            ({"target_batch_size": 0}, "positive whole number"),
            ({"run": ""}, "run is a name"),
            ({"state_sync_epochs": -1}, "state_sync_epochs"),
            ({"config": QUICK, "batch_size_per_step": True}, "positive whole number"),
        ]:
            with pytest.raises(UsageError, match=complaint):
                make(**options)
        with make(state_sync_epochs=0) as opt:
            with pytest.raises(UsageError, match="at least 1"):
                opt.wait_for_peers(0)
            with pytest.raises(UsageError, match="codecs of a state are float32, float16, bfloat16"):
                opt.load_state_from_peers(codec="int8")
            with pytest.raises(UsageError, match="forever"):
                opt.load_state_from_peers(codec="float16")
        with make() as opt:
            with pytest.raises(UsageError, match="already has an Optimizer for run"):
                make()
            with pytest.raises(UsageError, match="how many samples"):
                opt.step()
        make().close()
