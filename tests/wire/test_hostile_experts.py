"""Strangers attack the experts of a grid for invited peers, as callers and as servers, while a member trains:
the loss is that without them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import swarm
from moe.client.replicas.calling import ReplicaCalls
from moe.protocol import methods
from moe.protocol.calls import UNCOMPRESSED
from moe.protocol.states import StateFetching
from swarm.core.errors import SwarmError
from swarm.core.identity import Identity
from swarm.wire.expert_pb2 import ExpertRequest, TensorHeader
from tests.wire.expert_pair import UID, expert, network
from tests.wire.inviting import invite_of

HERE = "127.0.0.1:0"
STEPS = 25
SENDERS_MAX = 8
TASK = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


def learner(module: nn.Module | None = None) -> swarm.Expert:
    return expert(module or network(), partial(torch.optim.Adam, lr=0.02))


def train(call: Callable[[torch.Tensor], torch.Tensor], before_step: Callable[[], object]) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        before_step()
        x = torch.randn(32, 16, generator=generator)
        (call(x) - x @ TASK).square().mean().backward()


def loss_of(one: swarm.Expert) -> float:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return float((one.module(x) - x @ TASK).square().mean())


@cache
def undisturbed() -> tuple[float, float]:
    """Return the losses before and after a training without strangers."""
    one = learner()
    before = loss_of(one)

    def call(x: torch.Tensor) -> torch.Tensor:
        (y,) = one.forward([x])
        y.requires_grad_()
        y.register_hook(lambda gradient: one.backward([(None, [x], [gradient])]) and None)
        return y

    train(call, lambda: None)
    return before, loss_of(one)


class Attack:
    """A stranger, who does something hostile before each of the member's steps."""

    def __init__(self, node: swarm.Node, victim: swarm.Node, digest: bytes) -> None:
        self.node, self.victim, self.digest = node, victim, digest
        self.senders = 0
        self.remote = swarm.RemoteExpert(node, str(UID), forward_timeout_s=5.0, backward_timeout_s=5.0)

    @property
    def calls(self) -> ReplicaCalls:
        return self.node.service(ReplicaCalls.from_node)

    def huge_gradients(self) -> None:
        x = torch.randn(8, 16, requires_grad=True)
        with contextlib.suppress(SwarmError):
            (1e15 * self.remote(x).sum()).backward()

    def small_gradients_upwards(self) -> None:
        """Climb the loss with ordinary gradients."""
        x = torch.randn(8, 16)
        with contextlib.suppress(SwarmError):
            (-(self.remote(x) - x @ TASK).square().mean()).backward()

    def malformed_requests(self) -> None:
        requests = [
            ExpertRequest(uid=str(UID)),
            ExpertRequest(uid=str(UID), kind=1, batch=1 << 31, schema_digest=self.digest),
            ExpertRequest(uid=str(UID), kind=1, batch=4, schema_digest=self.digest, request_id=b"x" * 16),
        ]
        for request in requests:
            self.send(self.node.channels.call(self.victim.contact, methods.CALL, request, timeout_s=5.0))

    def many_calls(self) -> None:
        async def call() -> None:
            deadline_s = self.calls.clock.monotonic_s() + 5.0
            forward = partial(
                self.calls.forward_any, UID, keep=True, deadline_s=deadline_s, codecs=UNCOMPRESSED
            )
            async with asyncio.TaskGroup() as tasks:
                for _ in range(16):
                    tasks.create_task(forward([torch.zeros(64, 16)]))

        self.send(call())

    def slow_senders(self) -> None:
        """Announce the largest request that the expert takes, and send one byte of it."""
        if self.senders == SENDERS_MAX:
            return
        self.senders += 1
        size_bytes = 4096 * 16 * 4
        request = ExpertRequest(
            uid=str(UID),
            schema_digest=self.digest,
            batch=4096,
            tensors=[TensorHeader(payload_bytes=size_bytes)],
            payload_bytes=size_bytes,
        )

        async def begin() -> None:
            sent = asyncio.Event()

            async def announce() -> None:
                opened = self.node.channels.open_stream(self.victim.contact, methods.EXCHANGE, timeout_s=20.0)
                async with opened as stream:
                    await stream.send(request.SerializeToString())
                    await stream.send(b"x")
                    sent.set()
                    await asyncio.Event().wait()  # until the node closes

            self.node.supervisor.spawn("a slow sender", announce)
            async with asyncio.timeout(5.0):
                await sent.wait()

        self.send(begin())

    def states(self) -> None:
        async def fetch() -> None:
            replica = (await self.calls.directory.replicas(UID, timeout_s=5.0))[0]
            await self.node.service(StateFetching.from_node).fetch(replica, UID, 1 << 20)

        self.send(fetch())

    def send(self, work: Any) -> None:
        with contextlib.suppress(SwarmError):
            self.node.network.run(work, 10.0)


CALLERS = [name for name in vars(Attack) if not name.startswith("_") and name not in ("send", "calls")]


@pytest.fixture
def grid() -> Iterator[tuple[swarm.Node, swarm.Expert]]:
    identity, one = Identity.generate(), learner()
    with swarm.Node([invite_of(identity).text()], listen=HERE, identity=identity) as node:
        assert node.membership is not None
        node.membership.guests = "call"
        with swarm.ExpertServer(node, {str(UID): one}, config=swarm.ExpertServerConfig(average_s=0.2)):
            yield node, one


def check_honest(one: swarm.Expert) -> None:
    before, wanted = undisturbed()
    assert wanted < 0.9 * before, "the training is worth something"
    assert one.version == STEPS
    assert loss_of(one) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("kind", CALLERS)
def test_a_hostile_caller_changes_no_loss(kind: str, grid: tuple[swarm.Node, swarm.Expert]) -> None:
    node, one = grid
    with (
        swarm.Node([invite_of(node.identity, node).text()], listen=None) as member,
        swarm.Node(node.addresses, listen=None) as stranger,
    ):
        attack = Attack(stranger, node, one.schema.digest)
        train(swarm.RemoteExpert(member, str(UID)), getattr(attack, kind))
        check_honest(one)


class Zeros(nn.Module):
    """An expert that answers at once, with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16,), 1e6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0 * self.weight


@pytest.mark.parametrize("kind", ["zeros", "other weights", "claims a version"])
def test_a_hostile_server_changes_no_loss(kind: str, grid: tuple[swarm.Node, swarm.Expert]) -> None:
    """The stranger declares a replica, answers, offers its state, and wants to average."""
    node, one = grid
    with (
        swarm.Node([invite_of(node.identity, node).text()], listen=HERE) as member,
        swarm.Node(node.addresses, listen=HERE) as stranger,
    ):
        assert stranger.wait_joined(10.0)
        theirs = learner(Zeros() if kind == "zeros" else None)
        with torch.no_grad():
            for parameter in theirs.module.parameters():
                parameter.add_(100.0)
        if kind == "claims a version":
            theirs.version = 1 << 60
        config = swarm.ExpertServerConfig(average_s=0.2)
        with swarm.ExpertServer(stranger, {str(UID): theirs}, config=config) as server:
            train(swarm.RemoteExpert(member, str(UID)), lambda: None)
            check_honest(one)
            assert not server.statistics().experts[str(UID)].counts.forward_requests
