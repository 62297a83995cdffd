"""A server of experts and a caller of it, for tests over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

import swarm
from moe.protocol.calls import ExpertCalls
from moe.protocol.declarations import ExpertReplica
from moe.protocol.names import ExpertUid

T = TypeVar("T")
UID = ExpertUid.parse("ffn.0")


def network(width: int = 16) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.GELU(), torch.nn.Linear(32, width))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Pair:
    """A server and a caller."""

    def __init__(self, host: swarm.Node, guest: swarm.Node, server: swarm.ExpertServer) -> None:
        self.host, self.guest, self.server = host, guest, server
        self.replica = ExpertReplica(host.contact, server.experts[next(iter(server.experts))].schema.digest)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.guest.network.run(work, 20.0)

    @property
    def calls(self) -> ExpertCalls:
        async def find() -> ExpertCalls:
            return self.guest.service(ExpertCalls.from_node)

        return self.run(find())

    def remote(self, uid: str = "ffn.0", **options: Any) -> swarm.RemoteExpert:
        return swarm.RemoteExpert(self.guest, uid, **options)


@contextmanager
def pair(experts: dict[str, swarm.Expert], **options: Any) -> Iterator[Pair]:
    with (
        swarm.Node(listen="127.0.0.1:0") as host,
        swarm.Node(bootstrap=host.addresses, listen="127.0.0.1:0") as guest,
        swarm.ExpertServer(host, experts, **options) as server,
    ):
        yield Pair(host, guest, server)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110  another thread's counters
            await asyncio.sleep(0.005)


def expert(module: torch.nn.Module | None = None, optimizer: Any = None, **options: Any) -> swarm.Expert:
    return swarm.Expert(module or network(), (torch.zeros(1, 16),), optimizer, **options)


class Gated(torch.nn.Module):
    """A module that computes while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.entered = threading.Event(), threading.Event()
        self.calls = 0
        self.open.set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.entered.set()
        assert self.open.wait(10.0)
        return x


def gated() -> tuple[Gated, swarm.Expert]:
    module = Gated()
    hosted = swarm.Expert(module, (torch.zeros(1, 16),))
    module.entered.clear()
    module.open.clear()
    return module, hosted
