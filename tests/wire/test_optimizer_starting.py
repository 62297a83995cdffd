"""Optimizers on real sockets: how peers begin, together and later, and what they say when something is
wrong.
"""

from __future__ import annotations

import copy
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from averaging.optim.capturing import RoundCapture
from swarm.core.clock import SystemClock
from tests.wire.trainers import Peer, build, one_more, swarm_of, together


@pytest.mark.parametrize("count", [2, 3])
def test_frozen_layers_that_differ_become_equal_with_the_state(count: int) -> None:
    """Every peer has initialised its frozen layer differently: no majority holds any of them."""

    def half_frozen(seed: int) -> torch.nn.Module:
        net = build(seed)
        torch.nn.init.constant_(net[0].weight.requires_grad_(False), float(seed))
        return net

    with ExitStack() as stack:
        peers: list[Peer] = []
        for number in range(count):
            one = one_more(peers, "half frozen", number, seed=number, make=half_frozen, state_sync_epochs=2)
            peers.append(stack.enter_context(one))
        together([lambda peer=peer: peer.opt.wait_for_peers(count) for peer in peers])  # type: ignore[misc]
        together([lambda peer=peer: peer.train_to(4) for peer in peers])  # type: ignore[misc]
        frozen = [next(peer.net.parameters()) for peer in peers]
        assert all(torch.equal(frozen[0], other) for other in frozen), frozen
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        loads = [
            report.reason for peer in peers for report in peer.reports if report.resynchronised is not None
        ]
        assert len(loads) == count - 1
        assert all("frozen" in reason for reason in loads), loads


def test_peers_with_different_learning_rates_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with swarm_of(2, "rates", state_sync_epochs=2, scheduler=None) as peers:
        peers[1].opt.param_groups[0]["lr"] *= 2
        together([lambda peer=peer: peer.train_to(2) for peer in peers])  # type: ignore[misc]
        assert "hyperparameter was changed" in peers[1].reports[0].reason
        assert not any(report.reason for report in peers[0].reports)
    said = [record.message for record in caplog.records if "1 of 2 peers have other hyper" in record.message]
    assert len(said) == 2, caplog.text


class AheadClock(SystemClock):
    """A machine's clock that is a minute ahead."""

    def swarm_s(self) -> float:
        return super().swarm_s() + 60.0


def test_peer_that_trains_alone_because_its_clock_is_wrong_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm_of(1, "clock") as peers, ExitStack() as stack:
        peers[0].train_to(1)
        monkeypatch.setattr("swarm.node.SystemClock", AheadClock)
        late = stack.enter_context(one_more(peers, "clock", 1))
        late.node.wait_joined(timeout_s=10)
        while not late.opt.epoch:
            report = late.train_once()
        assert report.alone
        assert "clock of this machine" in report.reason
        assert "set the wrong one" in report.reason


def test_first_epoch_waits_for_as_many_peers_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    def begin(peer: Peer) -> None:
        peer.opt.wait_for_peers(3)
        peer.train_to(2)

    with swarm_of(2, "gathering") as peers, ExitStack() as stack:
        first_steps = [threading.Thread(target=begin, args=(peer,), daemon=True) for peer in peers]
        for thread in first_steps:
            thread.start()
        while caplog.text.count("2 of 3 peers are here") < 2:  # each of the two has said it
            time.sleep(0.05)
        assert not any(peer.reports for peer in peers), "nobody has trained"
        last = stack.enter_context(one_more(peers, "gathering", 2, seed=7))
        assert last.opt.load_state_from_peers(timeout_s=30).loaded, "those that wait give their state"
        together([lambda: begin(last)])
        for thread in first_steps:
            thread.join(60)
        assert not any(report.alone for peer in [*peers, last] for report in peer.reports)
        newcomer = stack.enter_context(one_more(peers, "gathering", 3, seed=8))
        newcomer.opt.wait_for_peers(9)  # the run has begun: it waits for nobody
        assert caplog.text.count("of 9 peers are here") == 0


@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_newcomers_with_one_codec_load_equal_bytes_which_the_next_state_round_makes_exact(codec: str) -> None:
    options: dict[str, Any] = {"state_sync_epochs": 4}
    with swarm_of(2, f"encoded {codec}", **options) as peers, ExitStack() as stack:
        together([lambda peer=peer: peer.train_to(3) for peer in peers])  # type: ignore[misc]
        everybody, loads = list(peers), []
        for number in (2, 3):
            late = stack.enter_context(one_more(peers, f"encoded {codec}", number, seed=9, **options))
            loads.append(late.opt.load_state_from_peers(timeout_s=30, codec=codec))
            everybody.append(late)
        assert all(load.loaded for load in loads), loads
        exact, *rounded = ([*peer.net.parameters()] for peer in everybody[1:])
        assert all(torch.equal(a, b) for a, b in zip(*rounded, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(exact, rounded[0], strict=True))
        for a, b in zip(exact, rounded[0], strict=True):
            torch.testing.assert_close(a, b, rtol=2**-8, atol=1e-7)
        for epoch in (4, 8, 12):  # on a loaded machine, a peer may come too late for a round over the state
            together([partial(peer.train_to, epoch) for peer in everybody])
            averaged = [peer for peer in everybody if has_averaged_state(peer, epoch)]
            assert len({peer.opt.state_digest() for peer in averaged}) == 1
            if len(averaged) == len(everybody):
                break
        assert len(averaged) == len(everybody), [peer.reports[-1] for peer in everybody]


def has_averaged_state(peer: Peer, epoch: int) -> bool:
    """Return whether the round over the state at the beginning of this epoch was committed here."""
    rounds = [report.state_round for report in peer.reports if report.epoch == epoch]
    return any(one is not None and not one.failed for one in rounds)


@pytest.mark.parametrize("mode", ["gradients", "diloco"])
def test_resumed_peer_gives_its_state_before_its_first_step(mode: str) -> None:
    with swarm_of(1, "before", mode=mode) as [first]:
        first.train_to(3)
        saved, weights = copy.deepcopy(first.opt.state_dict()), copy.deepcopy(first.net.state_dict())
    with swarm_of(1, "resumed before", seed=5, mode=mode) as peers, ExitStack() as stack:
        peers[0].net.load_state_dict(weights)
        peers[0].opt.load_state_dict(saved)
        late = stack.enter_context(one_more(peers, "resumed before", 3, seed=4, mode=mode))
        loaded = late.opt.load_state_from_peers(timeout_s=30)
        assert loaded.loaded, loaded
        assert late.opt.state_digest() == peers[0].opt.state_digest()


def test_a_download_that_is_interrupted_leaves_the_history_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: after Ctrl-C a newcomer had the others' head and was in their epoch without their
    state.
    """
    run_during = RoundCapture.run_during

    def interrupted(self: RoundCapture, *args: Any) -> Any:
        run_during(self, *args)
        raise KeyboardInterrupt

    with swarm_of(1, "interrupted") as [founder]:
        founder.train_to(3)
        with one_more([founder], "interrupted", 5, seed=3) as late:
            head = late.opt.history_head
            with monkeypatch.context() as patched:
                patched.setattr(RoundCapture, "run_during", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    late.opt.load_state_from_peers(timeout_s=30)
            assert late.opt.history_head == head
            assert late.opt.progress.epoch == late.opt.epoch == 0
            assert late.opt.load_state_from_peers(timeout_s=30).loaded
            assert late.opt.state_digest() == founder.opt.state_digest()
