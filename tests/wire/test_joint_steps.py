"""Replicas with a target batch make one step for all of them, over real sockets. The oracle is plain torch
with the union of the batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import swarm
from moe.server.expert import JointBatch
from moe.server.logic.lineage import ExpertLineage
from tests.wire.expert_pair import network, sgd

TARGET = 32


class Replicas:
    """Servers of one expert with a target batch, each on a node of its own, and a caller."""

    def __init__(self, stack: contextlib.ExitStack, module: torch.nn.Module | None = None) -> None:
        self._stack, self._module = stack, module or network()
        self.local = copy.deepcopy(self._module)
        self.optimizer = sgd(self.local.parameters())
        self.servers: list[swarm.ExpertServer] = []
        self.experts: list[swarm.Expert] = []
        self.caller = stack.enter_context(swarm.Node(listen="127.0.0.1:0"))

    def new_expert(self) -> swarm.Expert:
        """Return an expert as it was in the beginning."""
        return swarm.Expert(copy.deepcopy(self._module), (torch.zeros(1, 16),), sgd)

    def serve(self, expert: swarm.Expert | None = None) -> swarm.ExpertServer:
        node = self._stack.enter_context(swarm.Node(bootstrap=self.caller.addresses, listen="127.0.0.1:0"))
        expert = expert or self.new_expert()
        expert.target_batch_size = TARGET
        server = swarm.ExpertServer(node, {"ffn.0": expert})
        self._stack.callback(server.close)
        self.servers.append(server)
        self.experts.append(expert)
        return server

    def lose(self, number: int) -> None:
        """Cut the connections of a server off, without a word to the others."""
        self.experts.pop(number)
        self.servers.pop(number).node.close()

    def meet(self) -> None:
        """Wait until all servers know each other."""

        async def all_joint() -> None:
            async with asyncio.timeout(20.0):
                while not all(one.is_joint for one in self.experts):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        self.caller.network.run(all_joint(), 20.0)

    def settle(self, version: int) -> None:
        """Wait until all servers have made that many steps, and know it of each other."""

        def is_settled() -> bool:
            joint = [one for server in self.servers for one in server.joint.experts.values()]
            return all(one.version >= version for one in self.experts) and not any(
                one.is_busy for one in joint
            )

        async def all_there() -> None:
            async with asyncio.timeout(30.0):
                while not is_settled():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        self.caller.network.run(all_there(), 40.0)

    def train(self, x: torch.Tensor, micro_batch_size: int) -> None:
        """Make one batch of passes by the remote expert, and the same by plain torch."""
        remote = swarm.RemoteSequential(self.caller, "ffn.[0:1]", micro_batch_size=micro_batch_size)
        for model in (remote, self.local):
            (model(x) - x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, version: int) -> None:
        self.settle(version)
        assert [one.version for one in self.experts] == [version] * len(self.experts)
        for one in self.experts:
            for found, wanted in zip(one.module.parameters(), self.local.parameters(), strict=True):
                assert torch.allclose(found, wanted, atol=1e-5)
        for one in self.experts[1:]:
            for found, wanted in zip(
                one.module.parameters(), self.experts[0].module.parameters(), strict=True
            ):
                assert torch.equal(found, wanted)


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    with contextlib.ExitStack() as stack:
        yield Replicas(stack)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(TARGET, 16, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("micro_batch_size", [4, 16])
def test_two_replicas_make_one_step_for_the_union_of_their_batches(
    replicas: Replicas, micro_batch_size: int
) -> None:
    """Regression: each replica gathered a whole target batch by itself, and made its own step."""
    for _ in range(2):
        replicas.serve()
    replicas.meet()
    steps = micro_batch_size  # so that sixteen requests or more are drawn: some for each replica
    for x in batches(steps):
        replicas.train(x, micro_batch_size)
    replicas.check(steps)
    assert all(server.statistics().experts["ffn.0"].counts.backward_samples for server in replicas.servers)


@pytest.mark.parametrize("micro_batch_size", [8, 24])
def test_the_number_of_steps_follows_from_the_samples_alone(
    replicas: Replicas, micro_batch_size: int
) -> None:
    """Two callers that do not wait for each other, with batches that do not divide the target."""
    for _ in range(2):
        replicas.serve()
    replicas.meet()
    remotes = [
        swarm.RemoteSequential(replicas.caller, "ffn.[0:1]", micro_batch_size=micro_batch_size)
        for _ in range(2)
    ]

    def train(remote: swarm.RemoteSequential, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(8):
            x = torch.randn(24, 16, generator=generator)
            remote(x).square().mean().backward()

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(train, remote, seed) for seed, remote in enumerate(remotes)]:
            one.result(60.0)
    replicas.settle(2 * 8 * 24 // TARGET)
    assert {one.version for one in replicas.experts} == {2 * 8 * 24 // TARGET}
    assert len({one.lineage.head for one in replicas.experts}) == 1
    first, second = (list(one.module.parameters()) for one in replicas.experts)
    assert all(map(torch.equal, first, second))


def test_a_replica_that_joins_while_others_train_gathers_with_them(replicas: Replicas) -> None:
    replicas.serve()
    data = batches(7)
    for x in data[:2]:
        replicas.train(x, 4)
    replicas.serve()
    replicas.meet()
    for x in data[2:4]:
        replicas.train(x, 4)
    replicas.serve()
    replicas.meet()
    for x in data[4:]:
        replicas.train(x, 4)
    replicas.check(7)


def test_a_replica_whose_other_one_is_lost_continues_alone(replicas: Replicas) -> None:
    for _ in range(2):
        replicas.serve()
    replicas.meet()
    data = batches(6)
    for x in data[:3]:
        replicas.train(x, 4)
    replicas.check(3)
    replicas.lose(1)
    for x in data[3:]:
        replicas.train(x, 4)
    replicas.check(6)


def test_a_replica_that_missed_steps_takes_over_the_state(replicas: Replicas) -> None:
    for _ in range(2):
        replicas.serve()
    replicas.meet()
    replicas.train(batches(1)[0], 4)
    replicas.settle(1)
    late = replicas.experts[1]
    with late.lock:  # as if it had missed the step that the other one made
        late.load_state(replicas.new_expert().state().blob, ExpertLineage())
    for x in batches(3)[1:]:
        replicas.train(x, 4)
    replicas.check(3)


class Inventing(swarm.Expert):
    """A replica that announces whole batches, and brings a gradient that no pass has."""

    is_lying = False

    @property
    def counted(self) -> int:
        return TARGET if self.is_lying else super().counted

    def take_batch(self, into: list[torch.Tensor]) -> JointBatch:
        taken = super().take_batch(into)
        if self.is_lying:
            for tensor in into:
                tensor.fill_(1e3)
            taken = JointBatch(TARGET, TARGET, taken.gradients)
        return taken


def test_a_replica_that_invents_gradients_moves_the_only_other_one_no_further(replicas: Replicas) -> None:
    """Regression: of two replicas one that lied took the other one anywhere in a single step."""
    replicas.serve()
    liar = Inventing(copy.deepcopy(network()), (torch.zeros(1, 16),), sgd)
    replicas.serve(liar)
    replicas.meet()
    data = batches(4)
    for x in data[:2]:
        replicas.train(x, 4)
    replicas.check(2)
    replicas.experts.remove(liar)
    honest = replicas.experts[0]
    before = [one.detach().clone() for one in honest.module.parameters()]
    liar.is_lying = True
    for x in data[2:]:
        replicas.train(x, 4)
        for old, now in zip(before, honest.module.parameters(), strict=True):
            assert (now - old).abs().max() < 1.0
    server = replicas.servers[0]
    joint = next(iter(server.joint.experts.values()))

    async def alone() -> None:
        async with asyncio.timeout(20.0):
            while joint.is_active:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    replicas.caller.network.run(alone(), 20.0)
    assert honest.lineage.version <= 4
    for old, now in zip(before, honest.module.parameters(), strict=True):
        assert (now - old).abs().max() < 1.0


class Complete(swarm.Expert):
    """A replica whose batch is complete as soon as it is `due`."""

    due = True

    @property
    def counted(self) -> int:
        return TARGET if self.due else 0


def test_a_server_that_was_closed_begins_no_step(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a step that was due when its server closed was begun again without end, while its node
    continued: it fails at once, since no thread is left to make it.
    """
    server = replicas.serve(Complete(copy.deepcopy(network()), (torch.zeros(1, 16),), sgd))
    server.close()

    async def look() -> None:
        await server.joint.refresh()
        await asyncio.sleep(0.3)

    server.node.network.run(look(), 10.0)
    assert "a joint step of an expert failed" not in caplog.text


def test_a_step_that_is_due_when_its_server_closes_is_cancelled(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the step was begun, found no thread to run on, and its failure was logged."""
    expert = Complete(copy.deepcopy(network()), (torch.zeros(1, 16),), sgd)
    expert.due = False
    server = replicas.serve(expert)

    async def close() -> None:
        expert.due = True
        for one in server.joint.experts.values():
            await one.refresh(())
        server.joint.close()
        await asyncio.sleep(0.1)

    server.node.network.run(close(), 10.0)
    assert "a joint step of an expert failed" not in caplog.text
