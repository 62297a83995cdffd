"""Several processes as one peer, with torch's own DistributedDataParallel and FSDP2 over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from averaging.optim.process_group import ProcessGroupOptimizer
from swarm.core.errors import UsageError
from tests.wire.trainers import BATCH, TARGET, adam, batch, build, one_more, swarm_of, together

PROGRAM = Path(__file__).with_name("ranked_peer.py")
DONE_S = 150.0


class Ranks:
    """The processes of one peer."""

    def __init__(self, asked: dict[str, Any], size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(asked)],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def read(self, rank: int = 0) -> dict[str, Any]:
        line = self.processes[rank].stdout.readline()
        assert line, self.processes[rank].stderr.read()[-3000:]
        return json.loads(line)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@contextmanager
def ranks(size: int = 2, **asked: Any) -> Iterator[Ranks]:
    started = Ranks({"bootstrap": [], "mode": "gradients", "epochs": 4, **asked}, size)
    try:
        yield started
    finally:
        started.end()


def trained_alone(batches: int, ranks_of: int, epochs: int) -> torch.nn.Module:
    """Return the model after the same batches on one process, with plain torch."""
    net = build()
    inner = adam(net)
    for epoch in range(epochs):
        inner.zero_grad()
        per_epoch = batches // epochs
        for step in range(per_epoch):
            for rank in range(ranks_of):
                loss = backward_part(net, ranks_of * (epoch * per_epoch + step) + rank, per_epoch * ranks_of)
        del loss
        inner.step()
    return net


def backward_part(net: torch.nn.Module, seed: int, parts: int) -> torch.Tensor:
    inputs, targets = batch(seed)
    loss = (net(inputs) - targets).square().mean() / parts
    loss.backward()
    return loss


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_alone_train_as_one_process_with_their_batches(kind: str) -> None:
    with ranks(kind=kind, run=f"alone {kind}") as peer:
        peer.read()
        found = [peer.read(rank) for rank in range(2)]
    assert_trained_alone(found)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_resume_from_their_parts_of_a_state_as_if_they_had_not_stopped(kind: str) -> None:
    with ranks(kind=kind, run=f"resumed {kind}", resumes_at=2) as peer:
        peer.read()
        found = [peer.read(rank) for rank in range(2)]
    assert_trained_alone(found)


def assert_trained_alone(found: list[dict[str, Any]]) -> None:
    """Check that two ranks have the parameters of one process with all their batches, after 4 epochs."""
    assert found[0]["parameters"] == found[1]["parameters"]
    assert found[0]["batches"] * 2 * BATCH == 4 * TARGET
    alone = trained_alone(found[0]["batches"], 2, 4)
    for ours, theirs in zip(found[0]["parameters"], alone.parameters(), strict=True):
        assert torch.tensor(ours) == pytest.approx(theirs.detach().flatten(), abs=1e-5)


@pytest.mark.parametrize("mode", ["gradients", "diloco"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_are_one_peer_beside_another_that_is_one_process(kind: str, mode: str) -> None:
    run = f"beside {kind} {mode}"
    with (
        swarm_of(1, run, mode=mode, scheduler=None) as [plain],
        ranks(
            kind=kind, run=run, mode=mode, bootstrap=plain.node.addresses, number=7, waits=True, epochs=6
        ) as peer,
    ):
        peer.read()
        together([lambda: plain.train_to(6)])
        found = [peer.read(rank) for rank in range(2)]
        assert plain.opt.state_digest() == tuple(found[0]["digest"])
        assert found[0]["contributed"] > 0
        assert any(report.round and len(report.round.peers) == 2 for report in plain.reports)
        assert found[0]["parameters"] == found[1]["parameters"]
        if mode == "gradients":  # with local steps each peer also keeps what it has learned since the round
            for ours, theirs in zip(found[0]["parameters"], plain.net.parameters(), strict=True):
                assert torch.equal(torch.tensor(ours), theirs.detach().flatten())


def test_a_late_peer_of_two_ranks_loads_the_state_and_gives_it_to_others() -> None:
    with swarm_of(1, "late ranks", scheduler=None) as peers:
        peers[0].train_to(3)
        with ranks(
            kind="fsdp", run="late ranks", seed=5, bootstrap=peers[0].node.addresses, epochs=3, waits=True
        ) as peer:
            address = peer.read()["address"]
            found = [peer.read(rank) for rank in range(2)]
            assert [one["loaded"] for one in found] == [True, True]
            assert peers[0].opt.state_digest() == tuple(found[0]["digest"])
            digest = peers[0].opt.state_digest()
            peers[0].opt.close()
            peers[0].node.close()
            reachable: Any = SimpleNamespace(node=SimpleNamespace(addresses=[address]))
            with one_more([reachable], "late ranks", 1, seed=9, scheduler=None) as third:
                assert third.opt.load_state_from_peers(timeout_s=30).loaded
                assert third.opt.state_digest() == digest


@pytest.mark.parametrize(("dead", "left"), [(0, {1, 2}), (1, {1})], ids=["leader", "follower"])
def test_a_rank_that_dies_ends_the_peer_and_the_others_continue(dead: int, left: set[int]) -> None:
    """A peer whose follower died says goodbye; one whose rank 0 died is counted until its report is old."""
    run = f"a rank dies {dead}"
    with (
        swarm_of(1, run, scheduler=None) as [plain],
        ranks(kind="ddp", run=run, bootstrap=plain.node.addresses, epochs=50, dies_at=[dead, 2]) as peer,
    ):
        peer.read()
        together([lambda: plain.train_to(6)])
        living = peer.processes[1 - dead]
        living.wait(DONE_S)
        assert living.returncode == 1
        error = living.stderr.read()
        assert "another process of this peer has ended" in error
        assert len(plain.opt.progress.peers) in left
        plain.train_to(8)
        assert plain.reports[-1].alone


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "unshared"])
def test_ranks_that_do_not_share_their_gradients_are_told_that_only_rank_0_counts(kind: str) -> None:
    with ranks(kind=kind, run=f"told {kind}", epochs=2) as peer:
        peer.read()
        for rank in range(2):
            peer.read(rank)
        errors = [process.communicate(timeout=DONE_S)[1] for process in peer.processes]
    told = [error.count("only those of rank 0 count: wrap the model") for error in errors]
    assert told == [int(kind == "unshared"), 0]


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="torchrun"):
        ProcessGroupOptimizer(adam(build()), node=None, run="none", target_batch_size=TARGET)
