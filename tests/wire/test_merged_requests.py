"""Requests of one pass to the experts of one server, which share a message, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import swarm
from moe.client.local import LocalMixtureOfExperts
from moe.protocol.calls import BackwardRequest, ExpertCalls, ForwardReply, ForwardRequest, GradientPass
from moe.protocol.errors import ExpertFailed, ExpertMissing, ExpertOverloaded, ExpertRefused, ExpertStale
from moe.protocol.methods import CALL, EXCHANGE, receive_payload
from moe.protocol.names import ExpertUid
from moe.protocol.parts import PARTS_MAX, announced_bytes
from moe.protocol.schema import ExpertSchema
from moe.server.compute import ComputeThread
from moe.server.hosting import HostingService
from moe.server.jobs import Job
from moe.server.pass_runner import PassRunner
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertReply, ExpertRequest, TensorHeader
from tests.wire.expert_pair import Pair, expert, gated, network, pair, sgd, until

HERE = "127.0.0.1:0"
WIDTH = 16


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Return the list to which all servers of this process add, for each message that they compute, a number
    of the server and the names of the experts.
    """
    found: list[tuple[int, list[str]]] = []
    run_together, run_single = PassRunner.run_together, PassRunner.run

    async def note(
        runner: PassRunner, requests: Mapping[int, Any], payloads: Any, answer: Any, *, is_finite: bool
    ) -> None:
        found.append((id(runner), [one.request.uid for one in requests.values()]))
        await run_together(runner, requests, payloads, answer, is_finite=is_finite)

    async def note_single(runner: PassRunner, request: Any, payload: Any, *, is_finite: bool = False) -> Any:
        found.append((id(runner), [request.request.uid]))
        return await run_single(runner, request, payload, is_finite=is_finite)

    monkeypatch.setattr(PassRunner, "run_together", note)
    monkeypatch.setattr(PassRunner, "run", note_single)
    return found


@contextlib.contextmanager
def grid_of_four_servers(modules: dict[str, torch.nn.Module], rate: float) -> Iterator[swarm.Node]:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate)

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(swarm.Node(listen=HERE))
        nodes = [
            first,
            *(stack.enter_context(swarm.Node(bootstrap=first.addresses, listen=HERE)) for _ in range(4)),
        ]
        for row, node in enumerate(nodes[:4]):
            hosted = {
                name: expert(copy.deepcopy(module), optimizer)
                for name, module in modules.items()
                if name.split(".")[1] == str(row)
            }
            stack.enter_context(swarm.ExpertServer(node, hosted))
        yield nodes[4]


@pytest.mark.parametrize("batch", [24, 2000])
def test_a_step_over_four_servers_makes_four_requests_each_way_and_equals_the_local_one(
    batch: int, messages: list[tuple[int, list[str]]]
) -> None:
    torch.manual_seed(3)
    modules: dict[str, torch.nn.Module] = {
        f"ffn.{row}.{column}": torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, WIDTH)
        )
        for row in range(4)
        for column in range(4)
    }
    with grid_of_four_servers(modules, 0.05) as guest:
        remote = swarm.RemoteMixtureOfExperts(
            guest, WIDTH, grid="ffn.[0:4].[0:4]", k_best=4, k_min=4, backward_k_min=4
        )
        local = LocalMixtureOfExperts(WIDTH, copy.deepcopy(modules), grid="ffn.[0:4].[0:4]", k_best=4)
        local.gate.load_state_dict(remote.gate.state_dict())
        steps = torch.optim.SGD(
            [one for name, one in local.named_parameters() if "gate" not in name], lr=0.05
        )
        for step in range(3):
            messages.clear()
            x = torch.randn(batch, WIDTH).requires_grad_()
            mirror = x.detach().clone().requires_grad_()
            y, expected = remote(x), local(mirror)
            assert isinstance(y, torch.Tensor)
            assert isinstance(expected, torch.Tensor)
            assert torch.allclose(y, expected, atol=1e-4)
            forward = list(messages)
            steps.zero_grad()
            y.square().sum().backward()
            expected.square().sum().backward()
            assert x.grad is not None
            assert mirror.grad is not None
            assert torch.allclose(x.grad, mirror.grad, atol=1e-3)
            steps.step()
            if step:  # in the first pass the schema is asked for
                for found in (forward, messages[len(forward) :]):
                    assert len(found) == 4
                    assert len({server for server, _ in found}) == 4
                    assert sorted(name for _, names in found for name in names) == sorted(modules)


class NotFinite(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0.0


UIDS = ["ffn.0", "ffn.1", "ffn.2"]


async def forward_together(
    two: Pair,
    calls: ExpertCalls,
    uids: Sequence[str],
    inputs: Mapping[str, torch.Tensor] | None = None,
    keep: bool = False,
) -> dict[str, Any]:
    """Make a forward pass of each expert together, and return their replies, or errors."""
    found: dict[str, Any] = {}
    requests = {}
    for number, uid in enumerate(uids):
        schema = network_schema(two, uid)
        x = (inputs or {}).get(uid, torch.ones(2, WIDTH))
        requests[number] = ForwardRequest(ExpertUid.parse(uid), schema, [x], keep)

    def note(replies: Mapping[int, Any]) -> None:
        found.update((uids[number], reply) for number, reply in replies.items())

    await calls.forward_all(two.replica, requests, note, timeout_s=10.0)
    return found


async def backward_together(
    two: Pair, calls: ExpertCalls, replies: Mapping[str, ForwardReply], staleness_max: int | None = None
) -> dict[str, Any]:
    """Make the backward passes of these forward passes together, and return their replies, or errors."""
    found: dict[int, Any] = {}
    given = GradientPass([torch.ones(2, WIDTH)], [torch.ones(2, WIDTH)], staleness_max)
    requests = {
        number: BackwardRequest(ExpertUid.parse(uid), network_schema(two, uid), reply, given)
        for number, (uid, reply) in enumerate(replies.items())
    }
    await calls.backward_all(two.replica, requests, found.update, timeout_s=10.0)
    return {uid: found[number] for number, uid in enumerate(replies)}


def network_schema(two: Pair, uid: str) -> ExpertSchema:
    """Return the schema of an expert, or for one that is not hosted that of another one."""
    experts = two.server.experts
    return experts.get(ExpertUid.parse(uid), next(iter(experts.values()))).schema


def three(middle: swarm.Expert | None = None) -> dict[str, swarm.Expert]:
    found = {uid: expert(optimizer=sgd) for uid in UIDS}
    return found if middle is None else {**found, "ffn.1": middle}


@pytest.mark.parametrize("case", ["missing", "not finite", "bad input", "overloaded"])
def test_a_part_that_fails_leaves_the_others_alone(
    case: str, messages: list[tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = three(expert(NotFinite()) if case == "not finite" else None)
    if case == "missing":
        del hosted["ffn.1"]
    with pair(hosted) as two:
        bad = torch.full((2, WIDTH), float("nan"))
        if case == "overloaded":
            offer = ComputeThread.offer

            def offer_some(thread: ComputeThread, jobs: Sequence[Job], *, wake: bool = True) -> list[str]:
                free = [job for job in jobs if job.uid != "ffn.1"]
                found = iter(offer(thread, free, wake=wake))
                return ["the queue is full" if job.uid == "ffn.1" else next(found) for job in jobs]

            monkeypatch.setattr(ComputeThread, "offer", offer_some)
        found = two.run(forward_together(two, two.calls, UIDS, {"ffn.1": bad} if case == "bad input" else {}))
        errors: dict[str, type[SwarmError]] = {
            "missing": ExpertMissing,
            "not finite": ExpertFailed,
            "bad input": ExpertRefused,
            "overloaded": ExpertOverloaded,
        }
        assert type(found["ffn.1"]) is errors[case]
        assert "forward of ffn.1" in str(found["ffn.1"])
        for uid in ("ffn.0", "ffn.2"):
            assert isinstance(found[uid], ForwardReply)
            assert torch.allclose(found[uid].outputs[0], network()(torch.ones(2, WIDTH)), atol=1e-5)
        assert len(messages) == 1
        refusals = {uid: one.refusals for uid, one in two.server.statistics().experts.items()}
        assert [uid for uid, counts in refusals.items() if counts] == ([] if case == "missing" else ["ffn.1"])


def test_a_stale_part_is_not_applied_and_the_others_are(messages: list[tuple[int, list[str]]]) -> None:
    with pair(three()) as two:
        calls, ones = two.calls, torch.ones(2, WIDTH)
        replies = two.run(forward_together(two, two.calls, UIDS, keep=True))
        two.remote("ffn.1")(ones).sum().backward()  # somebody else's step
        messages.clear()

        found = two.run(backward_together(two, calls, replies, staleness_max=0))
        assert type(found["ffn.1"]) is ExpertStale
        assert all(found[uid].gradients[0].shape == (2, WIDTH) for uid in ("ffn.0", "ffn.2"))
        assert {uid: one.version for uid, one in two.server.statistics().experts.items()} == dict.fromkeys(
            UIDS, 1
        )
        assert [names for _, names in messages] == [["ffn.0", "ffn.2"]], "the stale one was refused before"


def test_inputs_that_a_server_has_forgotten_are_sent_again_together(
    messages: list[tuple[int, list[str]]],
) -> None:
    with pair(three()) as two:
        calls = two.calls
        replies = two.run(forward_together(two, calls, UIDS, keep=True))
        assert all(reply.kept for reply in replies.values())

        async def forget() -> None:
            for uid in UIDS[1:]:
                runner = two.host.service(HostingService).runner
                runner.input_cache.drop(two.guest.peer_id, (replies[uid].request_id, uid))

        two.host.network.run(forget(), 5.0)
        messages.clear()
        found = two.run(backward_together(two, calls, replies))
        assert all(one.gradients[0].shape == (2, WIDTH) for one in found.values())
        assert [names for _, names in messages] == [["ffn.0"], ["ffn.1", "ffn.2"]]
        experts = two.server.statistics().experts
        assert {uid: one.version for uid, one in experts.items()} == dict.fromkeys(UIDS, 1)


def request_of(two: Pair, uid: str, number: int) -> ExpertRequest:
    """Return a backward request without its payload: two tensors of a sample."""
    return ExpertRequest(
        kind=expert_pb2.EXPERT_BACKWARD,
        uid=uid,
        schema_digest=two.replica.schema,
        batch=1,
        tensors=[TensorHeader(payload_bytes=4 * WIDTH)] * 2,
        request_id=bytes([number]) * 16,
    )


def message_of(two: Pair, uids: Sequence[str]) -> ExpertRequest:
    message, *more = (request_of(two, uid, number) for number, uid in enumerate(uids))
    message.more.extend(more)
    message.payload_bytes = len(uids) * 8 * WIDTH
    return message


async def answers_of(two: Pair, message: ExpertRequest) -> list[tuple[int, bytes]]:
    """Send a message whose tensors are ones, and return the status and the tensors of each answer."""
    found: dict[int, tuple[int, bytes]] = {}
    payload = torch.ones(message.payload_bytes // 4).numpy().tobytes()
    async with two.guest.channels.open_stream(two.replica.contact, EXCHANGE, timeout_s=5.0) as stream:
        await stream.send(message.SerializeToString())
        with contextlib.suppress(NetworkError):  # who refuses the message does not read on
            await stream.send(payload)
        while len(found) <= len(message.more):
            raw = await stream.receive()
            assert raw is not None
            reply = ExpertReply.FromString(raw)
            assert reply.parts == len(message.more) + 1
            tensors = (await receive_payload(stream, reply.payload_bytes)).numpy().tobytes()
            for one in (reply, *reply.more):
                size = announced_bytes(one.tensors)
                found[one.part], tensors = (one.status, tensors[:size]), tensors[size:]
    return [answer for _, answer in sorted(found.items())]


def test_a_repeated_message_is_applied_once() -> None:
    with pair(three()) as two:
        message = message_of(two, UIDS)

        async def three_times() -> list[Any]:
            at_once = await asyncio.gather(*(answers_of(two, message) for _ in range(2)))
            return [*at_once, await answers_of(two, message)]

        first, *others = two.run(three_times())
        assert [status for status, _ in first] == [expert_pb2.EXPERT_OK] * 3
        assert others == [first, first]
        experts = two.server.statistics().experts
        assert {uid: one.version for uid, one in experts.items()} == dict.fromkeys(UIDS, 1)
        assert all(one.counts.backward_requests == 1 for one in experts.values())


def test_malformed_messages_are_refused_and_nothing_is_computed() -> None:
    with pair(three()) as two:

        def statuses(message: ExpertRequest) -> list[int]:
            return [status for status, _ in two.run(answers_of(two, message))]

        with pytest.raises(PeerError, match="at most 64 requests to experts share a message, not 65"):
            statuses(message_of(two, UIDS[:1] * (PARTS_MAX + 1)))
        nested = message_of(two, UIDS)
        nested.more[1].more.add()
        with pytest.raises(PeerError, match="request 3 of 3 in a message has requests or a payload"):
            statuses(nested)
        with pytest.raises(PeerError, match="share a message of a stream, not a call"):
            two.run(two.guest.channels.call(two.replica.contact, CALL, message_of(two, UIDS), timeout_s=5.0))
        refused = expert_pb2.EXPERT_REFUSED
        short = message_of(two, UIDS)
        short.payload_bytes -= 16
        assert statuses(short) == [refused] * 3
        large = message_of(two, UIDS)
        large.more[0].tensors[0].payload_bytes = 1 << 62
        assert statuses(large) == [refused] * 3
        wrong = message_of(two, UIDS)
        wrong.more[0].request_id = b"short"
        assert statuses(wrong) == [expert_pb2.EXPERT_OK, refused, expert_pb2.EXPERT_OK]
        experts = two.server.statistics().experts
        assert {uid: one.version for uid, one in experts.items()} == {"ffn.0": 1, "ffn.1": 0, "ffn.2": 1}


class Wide(torch.nn.Module):
    """Returns 256 KiB for each sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, (256 << 10) // (4 * WIDTH))


def test_a_part_whose_answer_is_too_large_leaves_room_for_later_ones() -> None:
    """All answers together have at most 4 MiB. Before, the size of a refused one counted as well."""
    with pair({uid: expert(Wide()) for uid in UIDS}) as two:
        parts = [
            ExpertRequest(
                uid=uid,
                schema_digest=two.replica.schema,
                batch=batch,
                tensors=[TensorHeader(payload_bytes=4 * WIDTH * batch)],
            )
            for uid, batch in zip(UIDS, (10, 7, 6), strict=True)
        ]
        message = parts[0]
        message.more.extend(parts[1:])
        message.payload_bytes = 4 * WIDTH * (10 + 7 + 6)
        answers = two.run(answers_of(two, message))
        ok, refused = expert_pb2.EXPERT_OK, expert_pb2.EXPERT_REFUSED
        assert [status for status, _ in answers] == [ok, refused, ok]
        assert [len(tensors) >> 18 for _, tensors in answers] == [10, 0, 6]


def test_a_part_that_hangs_does_not_keep_the_answers_of_the_others(
    messages: list[tuple[int, list[str]]],
) -> None:
    module, hanging = gated()
    with pair({"ffn.0": expert(optimizer=sgd), "ffn.1": hanging, "ffn.2": expert(optimizer=sgd)}) as two:
        calls = two.calls

        async def scenario() -> tuple[Any, Any]:
            requests, found = {}, dict[int, Any]()
            for number, uid in enumerate(("ffn.0", "ffn.1")):
                schema = network_schema(two, uid)
                requests[number] = ForwardRequest(ExpertUid.parse(uid), schema, [torch.ones(2, WIDTH)])
            messages.clear()
            work = calls.forward_all(two.replica, requests, found.update, timeout_s=10.0)
            asking = asyncio.ensure_future(work)
            await until(lambda: bool(found))
            assert list(found) == [0]
            module.open.set()
            await asking
            return found[0], found[1]

        quick, slow = two.run(scenario())
        assert torch.allclose(quick.outputs[0], network()(torch.ones(2, WIDTH)), atol=1e-5)
        assert torch.equal(slow.outputs[0], torch.ones(2, WIDTH))
        assert [names for _, names in messages] == [["ffn.0", "ffn.1"]]


def replica_of(two: Pair, uid: str = "ffn.1") -> Any:
    """Return the server as the replica of this expert, whose schema may be another one."""
    return type(two.replica)(two.host.contact, two.server.experts[ExpertUid.parse(uid)].schema.digest)


def test_parts_that_are_given_up_are_not_computed() -> None:
    module, hanging = gated()
    with pair({"ffn.0": hanging, "ffn.1": expert(), "ffn.2": expert()}) as two:
        calls = two.calls

        async def give_up() -> None:
            x, other = torch.ones(2, WIDTH), replica_of(two, "ffn.1")
            asked = asyncio.ensure_future(forward_together(two, calls, ["ffn.0", "ffn.1", "ffn.2"]))
            await asyncio.get_running_loop().run_in_executor(None, module.entered.wait, 10.0)
            await until(lambda: two.server.statistics().queued == 2)
            asked.cancel()
            await until(lambda: two.server.statistics().queued == 0)
            module.open.set()
            await calls.forward(other, ExpertUid.parse("ffn.2"), [x], timeout_s=10.0)

        two.run(give_up())
        counts = {uid: one.counts for uid, one in two.server.statistics().experts.items()}
        assert {uid: one.forward_requests for uid, one in counts.items()} == {
            "ffn.0": 1,
            "ffn.1": 0,
            "ffn.2": 1,
        }
