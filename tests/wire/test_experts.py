"""Experts over real sockets: results equal the local module's, repeated backward passes count once, and bad
requests cost nothing.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch

import swarm
from moe.client.replicas.calling import ReplicaCalls
from moe.protocol.calls import GradientPass
from moe.protocol.declarations import Directory
from moe.protocol.names import ExpertUid
from moe.server.hosting import HostingService
from moe.server.logic.caller_cache import CallerCache
from moe.server.pass_runner import INPUT_LIMITS
from swarm.core.errors import NotEnoughPeers, UsageError
from tests.wire.expert_pair import UID, expert, gated, network, pair, sgd


@pytest.mark.parametrize("batch", [1, 32, 9000])  # within a call, and in a stream
def test_a_frozen_expert_equals_the_local_module_bit_by_bit(batch: int) -> None:
    local = network()
    with pair({"ffn.0": expert(copy.deepcopy(local))}, max_batch_size=10_000) as two:
        x = torch.randn(batch, 16, requires_grad=True)
        mirror = x.detach().clone().requires_grad_()
        y, expected = two.remote()(x), local(mirror)
        gradient = torch.randn(batch, 16)
        y.backward(gradient)
        expected.backward(gradient)
        assert torch.equal(y, expected)
        assert x.grad is not None
        assert mirror.grad is not None
        assert torch.equal(x.grad, mirror.grad)


def test_an_expert_learns_as_the_local_module_does() -> None:
    """The result is within 1e-5 of the local one, also when no input needs a gradient."""
    local = network()
    with pair({"ffn.0": expert(copy.deepcopy(local), sgd)}) as two:
        remote, optimizer = two.remote(), sgd(local.parameters())
        for step in range(5):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            local(x).square().sum().backward()
            remote(x).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            assert torch.allclose(remote(x), local(x), atol=1e-5)
        assert two.server.statistics().experts["ffn.0"].version == 5


class Nested(torch.nn.Module):
    def forward(self, ids: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {
            "scaled": more["x"] * 2 + ids.unsqueeze(1).to(torch.bfloat16),
            "parts": (ids + 1, more["x"].float()),
        }


def test_nested_bfloat16_inputs_and_outputs_equal_the_local_module() -> None:
    sample = (torch.zeros(1, dtype=torch.int64), {"x": torch.zeros(1, 3, dtype=torch.bfloat16)})
    with pair({"ffn.0": swarm.Expert(Nested(), sample)}) as two:
        ids, x = torch.tensor([4, 5]), torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        out = two.remote()(ids, {"x": x})
        assert torch.equal(out["parts"][0], ids + 1)
        assert out["scaled"].dtype == torch.bfloat16
        out["scaled"].float().sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((2, 3), 2.0, dtype=torch.bfloat16))
        with pytest.raises(UsageError, match="takes other arguments"):
            two.remote()(ids, x)
        with pytest.raises(UsageError, match="input 1 should be bfloat16"):
            two.remote()(ids, {"x": torch.ones(2, 3)})


def test_codecs_keep_outputs_and_gradients_close() -> None:
    local = network()
    codecs = swarm.WireCodecs(
        inputs="float16", outputs="int8", gradients="bfloat16", input_gradients="float16"
    )
    with pair({"ffn.0": expert(copy.deepcopy(local))}) as two:
        x = torch.randn(64, 16, requires_grad=True)
        mirror = x.detach().clone().requires_grad_()
        y, expected = two.remote(codecs=codecs)(x), local(mirror)
        assert 0 < float((y - expected).detach().abs().max()) < 0.02
        y.sum().backward()
        expected.sum().backward()
        assert x.grad is not None
        assert mirror.grad is not None
        assert 0 < float((x.grad - mirror.grad).abs().max()) < 0.02


def test_a_repeated_backward_pass_is_applied_once() -> None:
    with pair({"ffn.0": expert(optimizer=sgd)}) as two:
        calls, x, gradient = two.calls, torch.randn(4, 16), torch.randn(4, 16)

        async def repeat() -> list[Any]:
            forward_reply = await calls.forward(two.replica, UID, [x], timeout_s=5.0)
            passed = GradientPass([x], [gradient])
            async with asyncio.TaskGroup() as tasks:
                same = [
                    tasks.create_task(calls.backward(two.replica, UID, forward_reply, passed, timeout_s=5.0))
                    for _ in range(5)
                ]
            again = await calls.backward(two.replica, UID, forward_reply, passed, timeout_s=5.0)
            return [again, *(task.result() for task in same)]

        answers = two.run(repeat())
        assert two.server.statistics().experts["ffn.0"].version == 1
        assert len({answer.gradients[0].numpy().tobytes() for answer in answers}) == 1
        assert {answer.version for answer in answers} == {0}


class Writing(torch.nn.Module):
    """A module that overwrites its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.clone() if torch.is_grad_enabled() else x).mul_(3.0).square()


@pytest.mark.parametrize("forgets", ["nothing", "all", "what was written to"])
def test_inputs_are_sent_again_only_when_the_server_no_longer_has_them(forgets: str) -> None:
    module = Writing() if forgets == "what was written to" else torch.nn.Tanh()
    with pair({"ffn.0": expert(module)}) as two:
        remote, x = two.remote(), torch.randn(4, 16, requires_grad=True)
        mirror = x.detach().clone().requires_grad_()
        y = remote(x)
        if forgets == "all":
            two.host.service(HostingService).runner.input_cache = CallerCache(
                INPUT_LIMITS, lambda caller: False
            )
        y.sum().backward()
        module(mirror.clone()).sum().backward()
        assert x.grad is not None
        assert mirror.grad is not None
        assert torch.equal(x.grad, mirror.grad)
        assert two.server.statistics().experts["ffn.0"].refusals == (
            {} if forgets == "nothing" else {"EXPERT_FORGOTTEN": 1}
        )
        assert not two.host.service(HostingService).runner.input_cache.size_bytes


def test_calling_an_expert_that_nobody_hosts_raises() -> None:
    with pair({"ffn.0": expert()}) as two, pytest.raises(NotEnoughPeers, match=r"nobody hosts ffn\.5"):
        two.remote("ffn.5")(torch.zeros(1, 16))


def test_when_the_first_replica_is_slow_a_second_answers_and_gets_the_backward_pass() -> None:
    module, slow = gated()
    with (
        pair({"ffn.0": slow}) as two,
        swarm.Node(bootstrap=two.host.addresses, listen="127.0.0.1:0") as other,
        swarm.ExpertServer(
            other, {"ffn.0": swarm.Expert(torch.nn.Identity(), (torch.zeros(1, 16),))}
        ) as second,
    ):
        remote = two.remote()

        async def slow_one_first() -> None:
            calls = two.guest.service(ReplicaCalls.from_node)
            found = await calls.directory.replicas(UID, timeout_s=5.0)
            assert {replica.peer_id for replica in found} == {two.host.peer_id, other.peer_id}
            calls.stats.answered(str(UID), other.peer_id, 1e3)

        two.run(slow_one_first())
        x = torch.ones(2, 16, requires_grad=True)
        y = remote(x)
        assert torch.equal(y, x)
        assert module.entered.is_set()
        y.sum().backward()
        assert second.statistics().experts["ffn.0"].counts.backward_requests == 1
        assert two.server.statistics().experts["ffn.0"].counts.backward_requests == 0
        module.open.set()


def test_another_replica_answers_when_the_first_is_dead() -> None:
    with (
        pair({"ffn.0": expert()}) as two,
        swarm.Node(bootstrap=two.host.addresses, listen="127.0.0.1:0") as other,
        swarm.ExpertServer(other, {"ffn.0": expert()}),
    ):
        remote = two.remote()
        assert remote.schema
        two.host.close()
        for _ in range(4):
            assert remote(torch.zeros(1, 16)).shape == (1, 16)


def test_replicas_are_averaged_and_a_new_one_takes_over_the_parameters() -> None:
    with (
        pair({"ffn.0": expert(optimizer=sgd)}) as two,
        swarm.Node(bootstrap=two.host.addresses, listen="127.0.0.1:0") as other,
    ):
        remote = two.remote()
        remote(torch.randn(4, 16)).square().sum().backward()
        fresh = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        with swarm.ExpertServer(other, {"ffn.0": expert(fresh, sgd)}) as newcomer:
            learned = [tensor.clone() for tensor in two.server.experts[UID].averaged_tensors()]

            async def average(server: swarm.ExpertServer) -> None:
                await server.replicating.average()

            first = two.host.network.submit(average(two.server))
            second = other.network.submit(average(newcomer))
            first.result(20.0)
            second.result(20.0)
            assert two.server.replicating.rounds == newcomer.replicating.rounds == 1
            for one, both, before in zip(
                newcomer.experts[UID].averaged_tensors(),
                two.server.experts[UID].averaged_tensors(),
                learned,
                strict=True,
            ):
                assert torch.allclose(one, before, atol=1e-3)
                assert torch.allclose(both, before, atol=1e-3)
            assert newcomer.experts[UID].version == two.server.experts[UID].version == 2


def test_a_closed_server_is_not_found_and_names_are_hosted_once() -> None:
    with pair({"ffn.0": expert(), "block.3.1": expert()}) as two:
        with pytest.raises(UsageError, match=r"ffn\.0 is hosted on this node already"):
            swarm.ExpertServer(two.host, {"ffn.0": expert()})

        async def found() -> Any:
            return await Directory(two.guest.dht.service).branches(
                [ExpertUid.parse_prefix(text) for text in ("ffn", "block", "block.3")], timeout_s=5.0
            )

        branches = {str(prefix): sorted(branch.coordinates) for prefix, branch in two.run(found()).items()}
        assert branches == {"ffn": [0], "block": [3], "block.3": [1]}
        two.server.close()
        assert all(not branch.coordinates for branch in two.run(found()).values())
        with pytest.raises(swarm.ExpertMissing):
            two.run(two.calls.forward(two.replica, UID, [torch.zeros(1, 16)], timeout_s=5.0))


def test_wrong_arguments_and_use_in_dataset_workers_raise() -> None:
    with pair({"ffn.0": expert()}) as two:
        for wrong in ({}, {"ffn": expert()}, {"ffn.-1": expert()}):
            with pytest.raises(UsageError):
                swarm.ExpertServer(two.host, wrong)
        with pytest.raises(UsageError):
            two.remote(forward_timeout_s=0.0)
        with pytest.raises(UsageError):
            swarm.WireCodecs(inputs="float3")
        same = expert()
        with pytest.raises(UsageError, match="two names"):
            swarm.ExpertServer(two.host, {"a.0": same, "a.1": same})
