"""One identity file on two machines: both peers say so."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from averaging.optim.config import OptimizerConfig
from averaging.optim.optimizer import Optimizer
from swarm.node import Node

# What is meant for one of the two reaches the other: groups do not form, and donors do not know leases.
# A step that waits for these says nothing, by default for minutes.
QUICK = OptimizerConfig(round_timeout_s=5.0, load_timeout_s=5.0)
NOTICED_S_MAX = 10.0  # about a second where nothing else runs: both write records every second


def test_two_peers_with_copies_of_one_identity_file_both_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Node(identity=tmp_path / "first", listen="127.0.0.1:0") as node:
        own = node.peer_id
    shutil.copy(tmp_path / "first", tmp_path / "copy")
    found: dict[int, str] = {}
    done = threading.Event()
    with ExitStack() as stack:
        third = stack.enter_context(Node(listen="127.0.0.1:0"))
        nodes = [third] + [
            stack.enter_context(
                Node(bootstrap=third.addresses, identity=tmp_path / name, listen="127.0.0.1:0")
            )
            for name in ("first", "copy")
        ]
        assert nodes[1].peer_id == nodes[2].peer_id == own

        def train(place: int) -> None:
            model = torch.nn.Linear(4, 1)
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            with Optimizer(
                inner,
                node=nodes[place],
                run="copied",
                target_batch_size=64,
                batch_size_per_step=4,
                config=QUICK,
            ) as optimizer:
                while not done.wait(0.02):
                    model(torch.randn(4, 4)).square().mean().backward()
                    report = optimizer.step()
                    optimizer.zero_grad()
                    if "identity" in report.reason:
                        found[place] = report.reason
                        if found.keys() == {1, 2}:
                            done.set()

        threads = [threading.Thread(target=train, args=(place,), daemon=True) for place in range(3)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        while not all(node.dht.identity_problem for node in nodes[1:]):
            assert time.monotonic() < began_s + NOTICED_S_MAX, "replicas show each what the other has written"
            done.wait(0.05)
        done.wait(90)
        done.set()
        for thread in threads:
            thread.join(90)
    assert found.keys() == {1, 2}, found
    assert all(str(own) in reason and "identity file of its own" in reason for reason in found.values())
    said = [record.message for record in caplog.records if "identity file of its own" in record.message]
    assert len(said) == 2, "each says it once"
