"""Refusals of a server of experts: bad requests, full queues and failing computations affect only their own
caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

import swarm
from moe.protocol.calls import ForwardReply, GradientPass
from moe.protocol.methods import CALL, EXCHANGE
from moe.protocol.names import ExpertUid
from moe.server.logic.batching import BatchLimits
from moe.server.passes import BatchPass
from swarm.core.errors import NetworkError, PeerError
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertReply, ExpertRequest, TensorHeader
from tests.wire.expert_pair import UID, Gated, Pair, expert, gated, pair, sgd, until


def test_a_full_queue_refuses_at_once_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hosted = gated()
    short = functools.partial(BatchLimits, queued_requests_max=3)
    monkeypatch.setattr("moe.server.expert_server.BatchLimits", short)
    with pair({"ffn.0": hosted}, max_batch_size=10_000) as two:
        calls = two.calls

        async def flood() -> None:
            async with asyncio.TaskGroup() as tasks:
                waiting = [
                    tasks.create_task(calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0))
                ]
                await asyncio.get_running_loop().run_in_executor(None, module.entered.wait, 10.0)
                for _ in range(3):
                    waiting.append(
                        tasks.create_task(
                            calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0)
                        )
                    )
                await until(lambda: two.server.statistics().queued == 3)
                for batch in (1, 5000):  # within a call, and as a stream
                    with pytest.raises(
                        swarm.ExpertOverloaded, match="overloaded, the queue is full: 3 queued"
                    ) as caught:
                        await calls.forward(two.replica, UID, [torch.ones(batch, 16)], timeout_s=10.0)
                    assert caught.value.queued == 3
                module.open.set()
            assert all(torch.equal(task.result().outputs[0], torch.ones(1, 16)) for task in waiting)

        two.run(flood())
        statistics = two.server.statistics().experts["ffn.0"]
        assert statistics.refusals == {"EXPERT_OVERLOADED": 2}
        assert (statistics.counts.forward_requests, statistics.counts.forward_batches) == (4, 2)


def test_a_quick_answer_does_not_wait_for_a_module_that_hangs_behind_it() -> None:
    (first, held), (last, hanging) = gated(), gated()
    with pair({"held.0": held, "ffn.0": expert(torch.nn.Identity()), "hanging.0": hanging}) as two:
        calls = two.calls

        async def call(name: str) -> None:
            await calls.forward(two.replica, ExpertUid.parse(name), [torch.ones(1, 16)], timeout_s=10.0)

        async def scenario() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(call("held.0"))
                await asyncio.get_running_loop().run_in_executor(None, first.entered.wait, 10.0)
                quick = tasks.create_task(call("ffn.0"))
                await until(lambda: two.server.statistics().queued == 1)
                behind = tasks.create_task(call("hanging.0"))
                await until(lambda: two.server.statistics().queued == 2)
                first.open.set()
                await quick
                assert not behind.done()
                last.open.set()

        two.run(scenario())


def test_a_call_cancelled_while_it_waits_is_not_computed() -> None:
    module, hosted = gated()
    with pair({"ffn.0": hosted}) as two:
        calls = two.calls

        async def give_up() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0))
                await asyncio.get_running_loop().run_in_executor(None, module.entered.wait, 10.0)
                second = tasks.create_task(
                    calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0)
                )
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
def test_malformed_requests_get_a_reason_and_are_not_computed(streamed: bool) -> None:
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
            # a stream that ends before its payload, or is refused before it is sent
            except (PeerError, NetworkError):
                assert streamed
                continue
            assert reply.status in (
                expert_pb2.EXPERT_REFUSED,
                expert_pb2.EXPERT_MISSING,
                expert_pb2.EXPERT_FORGOTTEN,
            ), (change, reply)
            assert any(part in reply.reason for part in said.split("|")) or streamed, (change, reply.reason)
        statistics = two.server.statistics().experts["ffn.0"]
        assert (
            statistics.counts.forward_requests
            == statistics.counts.backward_requests
            == statistics.version
            == 0
        )
        assert two.run(ask(good_request(two))).status == expert_pb2.EXPERT_OK


class Unlucky(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 13).any()):
            raise AssertionError("unlucky number")
        return x / (x != 14).to(x.dtype)


def test_a_failing_computation_fails_only_its_caller() -> None:
    with pair({"ffn.0": expert(Unlucky())}) as two:
        remote = two.remote()
        with pytest.raises(swarm.ExpertFailed, match="unlucky number"):
            remote(torch.full((1, 16), 13.0))
        with pytest.raises(swarm.ExpertFailed, match="NaN or infinity"):
            remote(torch.full((1, 16), 14.0))
        assert torch.equal(remote(torch.ones(1, 16)), torch.ones(1, 16))


class Exiting(torch.nn.Module):
    """A module that ends its thread on request, forward or backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 13).any()):
            raise SystemExit("the module left")
        return ExitInBackward.apply(x) if bool((x == 14).any()) else x  # type: ignore[no-any-return]


class ExitInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise SystemExit("the module left")


def test_a_module_that_exits_fails_only_its_caller() -> None:
    """Regression: the computing thread ended permanently, while the server continued declaring its
    experts.
    """
    with pair({"ffn.0": expert(Exiting())}) as two:
        remote = two.remote()
        with pytest.raises(swarm.ExpertFailed, match="SystemExit: the module left"):
            remote(torch.full((1, 16), 13.0))
        with pytest.raises(swarm.ExpertFailed, match="SystemExit"):
            remote(torch.full((1, 16), 14.0, requires_grad=True)).sum().backward()
        assert torch.equal(remote(torch.ones(1, 16)), torch.ones(1, 16))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_computing_thread_that_fails_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair({"ffn.0": expert()}) as two:
        calls = two.calls

        def fail(*_: object) -> None:
            raise SystemExit("a bug")

        monkeypatch.setattr(BatchPass, "compute", fail)
        with pytest.raises((swarm.ExpertMissing, swarm.ExpertFailed, NetworkError), match="a bug"):
            two.run(calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=10.0))
        assert two.server.ended.wait(10.0)
        assert two.server.failed is not None
        assert "a bug" in two.server.failed


class GatedUnlucky(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        assert not bool((x == 13).any()), "unlucky number"
        return x * 2


@pytest.mark.parametrize("backward", [False, True])
def test_a_bad_request_in_a_batch_fails_only_its_caller(backward: bool) -> None:
    module = GatedUnlucky()
    hosted = swarm.Expert(module, (torch.zeros(1, 16),))
    with pair({"ffn.0": hosted}) as two:
        calls = two.calls

        async def one(value: float) -> Any:
            x = torch.full((1, 16), value)
            if not backward:
                return (await calls.forward(two.replica, UID, [x], timeout_s=10.0)).outputs[0]
            passed = GradientPass([x], [torch.ones(1, 16)])
            forward_reply = ForwardReply(outputs=[x], version=0, request_id=os.urandom(16), wait_s=0.0)
            return (await calls.backward(two.replica, UID, forward_reply, passed, timeout_s=10.0)).gradients[
                0
            ]

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


def test_announcements_of_slow_senders_lock_nobody_out() -> None:
    """Regression: two identities that announced 1,024 MiB and sent a byte now and then made every larger call
    of others hear "overloaded".
    """
    width, batch = 16384, 4096
    announced = batch * width * 4
    hosted = swarm.Expert(torch.nn.Identity(), (torch.zeros(1, width),))
    with contextlib.ExitStack() as stack:
        both = stack.enter_context(pair({"ffn.0": hosted}))
        request = ExpertRequest(
            uid="ffn.0",
            schema_digest=both.replica.schema,
            batch=batch,
            tensors=[TensorHeader(payload_bytes=announced)],
            payload_bytes=announced,
        )
        senders = [
            stack.enter_context(swarm.Node(bootstrap=both.host.addresses, listen=None)) for _ in range(2)
        ]

        async def announce(node: swarm.Node, sent: asyncio.Event, done: asyncio.Event) -> None:
            stream_of = node.channels.open_stream(both.host.contact, EXCHANGE, timeout_s=20.0)
            async with stream_of as stream:
                await stream.send(request.SerializeToString())
                await stream.send(b"x")
                sent.set()
                await done.wait()

        async def slowly(node: swarm.Node) -> tuple[asyncio.Event, list[asyncio.Task[None]]]:
            done, tasks = asyncio.Event(), []
            for _ in range(2):
                sent = asyncio.Event()
                tasks.append(asyncio.get_running_loop().create_task(announce(node, sent, done)))
                await sent.wait()
            return done, tasks

        async def end(done: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
            done.set()
            await asyncio.gather(*tasks, return_exceptions=True)

        held = [(node, *node.network.run(slowly(node), 20.0)) for node in senders]
        x = torch.randn(32, width)  # 2 MiB: a stream
        y = both.remote(forward_timeout_s=10.0)(x)
        assert torch.equal(y, x)
        for node, done, tasks in held:
            assert not any(task.done() for task in tasks), "they are still being received"
            node.network.run(end(done, tasks), 20.0)
