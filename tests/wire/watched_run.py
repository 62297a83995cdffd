"""A small real run for tests of the monitor: two trainers in threads, each with its own node."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from averaging.optim.optimizer import Optimizer, OptimizerConfig
from swarm.node import Node, NodeConfig

HERE = "127.0.0.1:0"
NAME = "watched"
_CONFIG = OptimizerConfig(round_timeout_s=20.0)


def _train(node: Node, stop: threading.Event, rounds: threading.Event) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    opt = Optimizer(
        inner,
        node=node,
        run=NAME,
        target_batch_size=32,
        batch_size_per_step=4,
        state_sync_epochs=2,
        config=_CONFIG,
    )
    with opt:
        while not stop.is_set():
            inputs = torch.randn(4, 4)
            loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            opt.zero_grad()
            loss.backward()
            report = opt.step()
            opt.report(loss=loss.item(), validation_loss=1.5, accuracy=0.9)
            if report.round is not None and not report.round.failed:
                rounds.set()
            stop.wait(0.02)


@contextlib.contextmanager
def watched_run() -> Iterator[list[Node]]:
    """Yield the bootstrap node and the nodes of the two trainers, once these have completed a round."""
    stop, rounds = threading.Event(), [threading.Event(), threading.Event()]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Node(listen=HERE))]
        for name in ("anna", "ben"):
            nodes.append(
                stack.enter_context(
                    Node(
                        bootstrap=nodes[0].addresses,
                        listen=HERE,
                        config=NodeConfig(name=name, preset="local"),
                    )
                )
            )
        threads = [
            threading.Thread(target=_train, args=(node, stop, had))
            for node, had in zip(nodes[1:], rounds, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            assert all(had.wait(30.0) for had in rounds), "the two had no round together"
            yield nodes
        finally:
            stop.set()
            for thread in threads:
                thread.join(25.0)
