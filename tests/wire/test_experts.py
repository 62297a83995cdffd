"""Experts over real sockets: results equal the local module's, repeated backward passes count once, and bad requests cost nothing."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

import swarm
from moe.asking import Asking
from moe.batching import BatchingConfig
from moe.calls import ExpertCalls, Forwarded, GradientPass
from moe.declarations import Replica
from moe.methods import CALL, EXCHANGE
from moe.uid import ExpertUid
from swarm.errors import NetworkError, NotEnoughPeers, PeerError, UsageError
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertReply, ExpertRequest, TensorHeader

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
        self.replica = Replica(host.contact, server.experts[next(iter(server.experts))].schema.digest)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.guest.network.run(work, 20.0)

    @property
    def calls(self) -> ExpertCalls:
        async def find() -> ExpertCalls:
            return ExpertCalls.of(self.guest)

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


def test_it_learns_as_the_local_module_does() -> None:
    """Within 1e-5 of the recorded version, also when no input needs a gradient."""
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
        return {"scaled": more["x"] * 2 + ids.unsqueeze(1).to(torch.bfloat16), "parts": (ids + 1, more["x"].float())}


def test_several_inputs_and_outputs_nested_and_in_bfloat16() -> None:
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


def test_codecs_for_activations_and_gradients() -> None:
    local = network()
    travel = swarm.Travel(inputs="float16", outputs="int8", gradients="bfloat16", input_gradients="float16")
    with pair({"ffn.0": expert(copy.deepcopy(local))}) as two:
        x = torch.randn(64, 16, requires_grad=True)
        mirror = x.detach().clone().requires_grad_()
        y, expected = two.remote(travel=travel)(x), local(mirror)
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
            forwarded = await calls.forward(two.replica, UID, [x], timeout_s=5.0)
            passed = GradientPass([x], [gradient])
            async with asyncio.TaskGroup() as tasks:
                same = [tasks.create_task(calls.backward(two.replica, UID, forwarded, passed, timeout_s=5.0)) for _ in range(5)]
            again = await calls.backward(two.replica, UID, forwarded, passed, timeout_s=5.0)
            return [again, *(task.result() for task in same)]

        answers = two.run(repeat())
        assert two.server.statistics().experts["ffn.0"].version == 1
        assert len({answer.gradients[0].numpy().tobytes() for answer in answers}) == 1
        assert {answer.version for answer in answers} == {0}


class Writing(torch.nn.Module):
    """Overwrites what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.clone() if torch.is_grad_enabled() else x).mul_(3.0).square()


@pytest.mark.parametrize("forgets", ["nothing", "all", "what was written to"])
def test_inputs_are_sent_again_only_when_the_server_has_them_no_more(forgets: str) -> None:
    module = Writing() if forgets == "what was written to" else torch.nn.Tanh()
    with pair({"ffn.0": expert(module)}) as two:
        remote, x = two.remote(), torch.randn(4, 16, requires_grad=True)
        mirror = x.detach().clone().requires_grad_()
        y = remote(x)
        if forgets == "all":
            service = two.server._service
            for name in list(service._inputs._entries):
                service._inputs.drop(*name)
        y.sum().backward()
        module(mirror.clone()).sum().backward()
        assert x.grad is not None
        assert mirror.grad is not None
        assert torch.equal(x.grad, mirror.grad)
        assert two.server.statistics().experts["ffn.0"].refusals == ({} if forgets == "nothing" else {"EXPERT_FORGOTTEN": 1})
        assert not two.server._service._inputs.size_bytes


class Gated(torch.nn.Module):
    """Computes when it is let."""

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
    made = swarm.Expert(module, (torch.zeros(1, 16),))
    module.entered.clear()
    module.open.clear()
    return module, made


def test_a_full_queue_says_so_at_once_and_tells_how_many_wait() -> None:
    module, made = gated()
    batching = BatchingConfig(queued_requests_max=3)
    with pair({"ffn.0": made}, max_batch_size=10_000, config=swarm.ExpertServerConfig(batching=batching)) as two:
        calls = two.calls

        async def flood() -> None:
            async with asyncio.TaskGroup() as tasks:
                waiting = [tasks.create_task(calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0))]
                await asyncio.get_running_loop().run_in_executor(None, module.entered.wait, 10.0)
                for _ in range(3):
                    waiting.append(tasks.create_task(calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0)))
                await until(lambda: two.server.statistics().queued == 3)
                for batch in (1, 5000):  # within a call, and as a stream
                    with pytest.raises(swarm.ExpertOverloaded, match="overloaded, the queue is full: 3 queued") as told:
                        await calls.forward(two.replica, UID, [torch.ones(batch, 16)], timeout_s=10.0)
                    assert told.value.queued == 3
                module.open.set()
            assert all(torch.equal(task.result().outputs[0], torch.ones(1, 16)) for task in waiting)

        two.run(flood())
        statistics = two.server.statistics().experts["ffn.0"]
        assert statistics.refusals == {"EXPERT_OVERLOADED": 2}
        assert (statistics.counts.forward_requests, statistics.counts.forward_batches) == (4, 2)


def test_a_call_that_is_given_up_while_it_waits_is_not_computed() -> None:
    module, made = gated()
    with pair({"ffn.0": made}) as two:
        calls = two.calls

        async def give_up() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0))
                await asyncio.get_running_loop().run_in_executor(None, module.entered.wait, 10.0)
                second = tasks.create_task(calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0))
                await until(lambda: two.server.statistics().queued == 1)
                second.cancel()
                await until(lambda: two.server.statistics().queued == 0)
                module.open.set()

        two.run(give_up())
        assert two.server.statistics().experts["ffn.0"].counts.forward_requests == 1


def good_request(two: Pair) -> ExpertRequest:
    return ExpertRequest(
        uid="ffn.0",
        schema_digest=two.replica.schema,
        batch=2,
        tensors=[TensorHeader(payload_bytes=128)],
        payload=torch.ones(2, 16).numpy().tobytes(),
        request_id=bytes(16),
    )


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"uid": "ffn.7"}, "not hosted here"),
    ({"uid": "\x00" * 500}, "not hosted here"),
    ({"schema_digest": b"other"}, "another schema"),
    ({"batch": 0}, "1 to 4096 samples, not 0"),
    ({"batch": 5000}, "1 to 4096 samples, not 5000"),
    ({"batch": 3}, "has 192 bytes, not 128"),
    ({"tensors": []}, "1 tensors are expected, not 0"),
    ({"tensors": [TensorHeader(payload_bytes=1 << 60)]}, "has 128 bytes, not"),
    ({"tensors": [TensorHeader(absent=True)], "payload": b""}, "input|missing"),
    ({"tensors": [TensorHeader(codec=99, payload_bytes=128)]}, "codec 99"),
    ({"payload": b"\xff" * 128}, "NaN or infinity"),
    ({"payload": bytes(64)}, "ends within"),
    ({"payload": bytes(256)}, "has 256 bytes"),
    ({"reply_codec": 77}, "codec 77"),
    ({"kind": 1}, "2 tensors are expected"),
    ({"kind": 1, "inputs_kept": True}, "not kept here"),
    ({"kind": 1, "request_id": b"short"}, "16 bytes"),
]


@pytest.mark.parametrize("streamed", [False, True])
def test_malformed_requests_are_told_what_is_wrong_and_cost_nothing(streamed: bool) -> None:
    with pair({"ffn.0": expert(optimizer=sgd)}) as two:

        async def ask(request: ExpertRequest) -> ExpertReply:
            channels = two.guest.channels
            if not streamed:
                return await channels.call(two.replica.contact, CALL, request, timeout_s=5.0)
            payload = request.payload
            request.ClearField("payload")
            request.payload_bytes = len(payload)
            async with channels.open_stream(two.replica.contact, EXCHANGE, timeout_s=5.0) as stream:
                await stream.send(request.SerializeToString())
                raw = await stream.receive() if not payload else None
                if payload:
                    await stream.send(payload)
                    raw = await stream.receive()
                assert raw is not None
                return ExpertReply.FromString(raw)

        for change, said in MALFORMED:
            request = good_request(two)
            for name, value in change.items():
                request.ClearField(name)
                if isinstance(value, list):
                    getattr(request, name).extend(value)
                else:
                    setattr(request, name, value)
            try:
                reply = two.run(ask(request))
            except (PeerError, NetworkError):  # a stream that ends before its bytes do, or is refused before it has sent them
                assert streamed
                continue
            assert reply.status in (expert_pb2.EXPERT_REFUSED, expert_pb2.EXPERT_MISSING, expert_pb2.EXPERT_FORGOTTEN), (change, reply)
            assert any(part in reply.reason for part in said.split("|")) or streamed, (change, reply.reason)
        statistics = two.server.statistics().experts["ffn.0"]
        assert statistics.counts.forward_requests == statistics.counts.backward_requests == statistics.version == 0
        assert two.run(ask(good_request(two))).status == expert_pb2.EXPERT_OK


class Unlucky(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 13).any()):
            raise AssertionError("unlucky number")
        return x / (x != 14).to(x.dtype)


def test_a_failing_computation_is_its_callers_alone() -> None:
    with pair({"ffn.0": expert(Unlucky())}) as two:
        remote = two.remote()
        with pytest.raises(swarm.ExpertFailed, match="unlucky number"):
            remote(torch.full((1, 16), 13.0))
        with pytest.raises(swarm.ExpertFailed, match="NaN or infinity"):
            remote(torch.full((1, 16), 14.0))
        assert torch.equal(remote(torch.ones(1, 16)), torch.ones(1, 16))


class GatedUnlucky(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        assert not bool((x == 13).any()), "unlucky number"
        return x * 2


@pytest.mark.parametrize("backward", [False, True])
def test_a_poisonous_request_in_a_batch_is_its_callers_alone(backward: bool) -> None:
    module = GatedUnlucky()
    made = swarm.Expert(module, (torch.zeros(1, 16),))
    with pair({"ffn.0": made}) as two:
        calls = two.calls

        async def one(value: float) -> Any:
            x = torch.full((1, 16), value)
            if not backward:
                return (await calls.forward(two.replica, UID, [x], timeout_s=10.0)).outputs[0]
            passed = GradientPass([x], [torch.ones(1, 16)])
            forwarded = Forwarded(outputs=[x], version=0, request_id=os.urandom(16), wait_s=0.0)
            return (await calls.backward(two.replica, UID, forwarded, passed, timeout_s=10.0)).gradients[0]

        async def together() -> list[Any]:
            await one(0.0)
            module.entered.clear()
            module.open.clear()
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(one(0.0))
                await asyncio.get_running_loop().run_in_executor(None, module.entered.wait, 10.0)
                rest = [tasks.create_task(outcome(one(value))) for value in (1.0, 13.0, 2.0)]
                await until(lambda: two.server.statistics().queued == 3)
                module.open.set()
            return [first.result(), *(task.result() for task in rest)]

        async def outcome(work: Coroutine[Any, Any, Any]) -> Any:
            try:
                return await work
            except swarm.ExpertFailed as error:
                return str(error)

        _, good, bad, also_good = two.run(together())
        assert torch.equal(good, torch.full((1, 16), 2.0))
        assert torch.equal(also_good, torch.full((1, 16), 2.0 if backward else 4.0))
        assert "unlucky number" in bad


def test_nobody_hosts_it() -> None:
    with pair({"ffn.0": expert()}) as two, pytest.raises(NotEnoughPeers, match=r"nobody hosts ffn\.5"):
        two.remote("ffn.5")(torch.zeros(1, 16))


def test_a_second_replica_is_asked_when_the_first_is_slow_and_backward_goes_to_who_answered() -> None:
    module, slow = gated()
    with (
        pair({"ffn.0": slow}) as two,
        swarm.Node(bootstrap=two.host.addresses, listen="127.0.0.1:0") as other,
        swarm.ExpertServer(other, {"ffn.0": swarm.Expert(torch.nn.Identity(), (torch.zeros(1, 16),))}) as second,
    ):

        async def first_asked() -> Asking:
            asking = Asking.of(two.guest)
            found = await asking.replicas(UID, timeout_s=5.0)
            assert {replica.peer_id for replica in found} == {two.host.peer_id, other.peer_id}
            asking.health.answered(
                (other.peer_id, UID), 0.1, asyncio.get_running_loop().time()
            )  # so that the slow one, of which nothing bad is known, comes first
            asking.health.answered((two.host.peer_id, UID), 0.01, asyncio.get_running_loop().time())
            return asking

        two.run(first_asked())
        x = torch.ones(2, 16, requires_grad=True)
        y = two.remote()(x)
        assert torch.equal(y, x)
        assert module.entered.is_set()
        y.sum().backward()
        assert second.statistics().experts["ffn.0"].counts.backward_requests == 1
        assert two.server.statistics().experts["ffn.0"].counts.backward_requests == 0
        module.open.set()


def test_another_replica_answers_when_the_first_is_gone() -> None:
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


def test_replicas_are_averaged_and_a_newcomer_takes_over_what_was_learned() -> None:
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
                await server._replicating.average()

            first = two.host.network.submit(average(two.server))
            second = other.network.submit(average(newcomer))
            first.result(20.0)
            second.result(20.0)
            assert two.server._replicating.rounds == newcomer._replicating.rounds == 1
            for one, both, before in zip(
                newcomer.experts[UID].averaged_tensors(), two.server.experts[UID].averaged_tensors(), learned, strict=True
            ):
                assert torch.allclose(one, before, atol=1e-3)
                assert torch.allclose(both, before, atol=1e-3)
            assert newcomer.experts[UID].version == two.server.experts[UID].version == 2


def test_a_server_that_closes_is_no_longer_found_and_names_are_taken_once() -> None:
    with pair({"ffn.0": expert(), "block.3.1": expert()}) as two:
        with pytest.raises(UsageError, match=r"ffn\.0 is hosted on this node already"):
            swarm.ExpertServer(two.host, {"ffn.0": expert()})

        async def found() -> Any:
            directory = Asking.of(two.guest).directory
            return await directory.branches([ExpertUid.parse_prefix(text) for text in ("ffn", "block", "block.3")], timeout_s=5.0)

        branches = {str(prefix): sorted(branch.coordinates) for prefix, branch in two.run(found()).items()}
        assert branches == {"ffn": [0], "block": [3], "block.3": [1]}
        two.server.close()
        assert all(not branch.coordinates for branch in two.run(found()).values())
        with pytest.raises(swarm.ExpertMissing):
            two.run(two.calls.forward(two.replica, UID, [torch.zeros(1, 16)], timeout_s=5.0))


def test_dataset_workers_and_wrong_arguments() -> None:
    with pair({"ffn.0": expert()}) as two:
        for wrong in ({}, {"ffn": expert()}, {"ffn.-1": expert()}):
            with pytest.raises(UsageError):
                swarm.ExpertServer(two.host, wrong)
        with pytest.raises(UsageError):
            two.remote(forward_timeout_s=0.0)
        with pytest.raises(UsageError):
            swarm.Travel(inputs="float3")
        same = expert()
        with pytest.raises(UsageError, match="two names"):
            swarm.ExpertServer(two.host, {"a.0": same, "a.1": same})
