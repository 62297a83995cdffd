"""A peer that reduces for the trainers of a run and trains nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from averaging.optim.auxiliary import AuxiliaryPeer
from averaging.result import RoundResult
from swarm.core.errors import UsageError
from swarm.node import Node
from tests.wire.trainers import FEATURES, QUICK, Peer, adam, build, swarm_of, together


def wide(seed: int) -> torch.nn.Module:
    """A model that is large enough for three shards."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1))


@contextmanager
def helping(peers: list[Peer], run: str, **options: Any) -> Iterator[tuple[Node, list[RoundResult]]]:
    """An auxiliary peer that takes part in rounds until the end of the `with`, with their results."""
    results: list[RoundResult] = []
    stop = threading.Event()
    net = wide(5)
    before = [p.detach().clone() for p in net.parameters()]
    with (
        Node(peers[0].node.addresses, "127.0.0.1:0") as node,
        AuxiliaryPeer(
            adam(net),
            node=node,
            run=run,
            codec="float32",
            config=QUICK,
            **options,
        ) as helper,
    ):

        def help_trainers() -> None:
            while not stop.is_set():
                result = helper.step(timeout_s=3.0)
                if not result.failed:
                    results.append(result)

        thread = threading.Thread(target=help_trainers, daemon=True)
        thread.start()
        try:
            yield node, results
        finally:
            stop.set()
            thread.join(30)
            assert not thread.is_alive()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("mode", ["gradients", "diloco"])
def test_auxiliary_peer_reduces_in_rounds_of_trainers_and_changes_no_result(mode: str) -> None:
    with (
        swarm_of(2, f"helped {mode}", mode=mode, make=wide) as peers,
        helping(peers, f"helped {mode}", mode=mode) as (node, results),
    ):
        trainers = {peer.node.peer_id for peer in peers}

        def helped() -> list[RoundResult]:
            """Return the helper's rounds of both trainers: beside one alone it has nothing to reduce."""
            return [result for result in results if trainers < set(result.peers)]

        while len(helped()) < 3:  # epochs take milliseconds: the first ones may be over before it looks
            epoch = peers[0].opt.epoch + 2
            assert epoch <= 100
            together([partial(peer.train_to, epoch) for peer in peers])
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        rounds = [report.round for report in peers[0].reports if report.round is not None]
        with_helper = [one for one in rounds if not one.failed and node.peer_id in one.peers]
        assert len(with_helper) >= 3, peers[0].reports
        assert all(set(one.contributions) <= trainers for one in with_helper)
        assert all(result.bytes_sent > 0 for result in helped())
        assert node.peer_id not in peers[0].opt.progress.peers, "it is no trainer"


def test_auxiliary_peer_does_not_keep_a_lone_trainer_from_stepping() -> None:
    with swarm_of(1, "lone", make=wide) as [trainer], helping([trainer], "lone") as (_, results):
        trainer.train_to(3)
        assert all(report.alone for report in trainer.reports if report.stepped)
        assert not results


def test_wrong_use_of_an_auxiliary_peer_raises_usage_error() -> None:
    with Node(listen="127.0.0.1:0") as node:
        for options, complaint in [
            ({"mode": "gossip"}, "has no place"),
            ({"codec": "int1"}, "int1"),
            ({"run": ""}, "run is a name"),
        ]:
            with pytest.raises(UsageError, match=complaint):
                AuxiliaryPeer(adam(build()), **{"node": node, "run": "x", **options})
        with AuxiliaryPeer(adam(build()), node=node, run="x") as helper:
            assert helper.epoch == 0
            assert helper.step(timeout_s=1.0).failed
            with pytest.raises(UsageError, match="timeout_s"):
                helper.step(timeout_s=0.0)
        with pytest.raises(UsageError, match="closed"):
            helper.step()
        helper.close()
