"""A simulated swarm of expert servers and one trainer: production DHT, declarations, calls, layers and
messages in virtual time.

    with ExpertSwarm(seed=3) as swarm:
        server = swarm.serve({"ffn.0.0": torch.nn.Linear(8, 8), …})
        layer = RemoteMixtureOfExperts(swarm.node, in_features=8, grid="ffn.[0:4].[0:4]")
        # a plain training loop, outside the event loop: time passes only while it waits for the network
        loss = layer(x).square().mean()
        loss.backward()
        swarm.sleep(3.0)

The servers are simple: computation takes no processor time but `compute_s` of virtual time, one request after
the other. They follow the protocol: schemas are checked, and a backward pass is applied once for one request
id.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, TypeVar, cast

import torch

from moe.client.replicas.calling import ReplicaCalls
from moe.protocol.declarations import Declarations, ServerLoad
from moe.protocol.methods import CALL, DESCRIBE, EXCHANGE, add_headers, read_headers, receive_payload
from moe.protocol.names import ExpertUid
from moe.protocol.parts import announced_bytes, cut, parts_of
from moe.protocol.schema import ExpertSchema, unflatten
from moe.protocol.tensors import check_headers, decode, encode, join_payloads
from swarm.core.ids import PeerId
from swarm.net.channels import Channels
from swarm.net.rpc import Stream
from swarm.node import Node
from swarm.runtime.services import Services
from swarm.testing.dht_swarm import service_of
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.virtual_loop import VirtualLoop
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import (
    DescribeReply,
    DescribeRequest,
    ExpertDescription,
    ExpertReply,
    ExpertRequest,
)

T = TypeVar("T")

_SIMULATED_S_MAX = 30 * 24 * 3600.0


class SimulatedExperts:
    """One server. Its experts step with plain SGD at `learning_rate` (0: frozen)."""

    def __init__(
        self,
        peer: SimulatedPeer,
        modules: Mapping[str, torch.nn.Module],
        sample: torch.Tensor,
        learning_rate: float,
        compute_s: float,
    ) -> None:
        self.peer, self._sample = peer, sample
        self.learning_rate, self.compute_s = learning_rate, compute_s
        self._hold(modules)
        self.versions: Counter[ExpertUid] = Counter()
        self.forwards: Counter[str] = Counter()  # per expert
        self.backwards: Counter[str] = Counter()  # per expert, repeated ones included
        self.applied: dict[bytes, ExpertReply] = {}
        self.rows: Counter[str] = Counter()  # samples of forward passes, per expert
        self.poisoned: set[str] = set()  # experts that answer NaN
        self.full = False  # refuse every call as overloaded
        self.batch_size_max = 4096  # samples of one request; larger ones are refused
        self.refused = 0  # requests
        self.lose_replies = 0  # number of backward calls that are applied once each but never answered
        self._busy = asyncio.Lock()
        self._declarations: Declarations | None = None
        self._renewing: asyncio.Task[Any] | None = None

    def _hold(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.modules = {ExpertUid.parse(name): module for name, module in modules.items()}
        with torch.no_grad():
            self.schemas = {
                uid: ExpertSchema.from_samples((self._sample,), module(self._sample))
                for uid, module in self.modules.items()
            }

    async def move(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Withdraw the experts, and serve these modules instead, as a server that moves does."""
        if self._renewing is not None and self._declarations is not None:
            self._renewing.cancel()
            await self._declarations.withdraw()
        self._hold(modules)
        await self._declare()

    async def start(self, bootstrap: Sequence[SimulatedPeer]) -> None:
        peer = self.peer
        self.service = service_of(peer)
        peer.handlers.unary(DESCRIBE, self._describe)
        peer.handlers.unary(CALL, self._call)
        peer.handlers.stream(EXCHANGE, self._exchange)
        await self.service.join([one.contact for one in bootstrap])
        await self._declare()

    async def _declare(self) -> None:
        peer = self.peer
        digests = {uid: schema.digest for uid, schema in self.schemas.items()}
        declarations = Declarations(self.service, lambda: peer.contact, digests, ServerLoad)
        self._declarations = declarations
        self._renewing = peer.supervisor.spawn("declaring experts", declarations.renew, restart=True)
        await declarations.declared.wait()

    async def _describe(self, caller: PeerId, request: DescribeRequest) -> DescribeReply:
        reply = DescribeReply()
        for name in request.uids:
            schema = self.schemas.get(ExpertUid.parse(name))
            reply.experts.append(
                ExpertDescription(
                    uid=name, schema=schema.packed if schema else b"", batch_size_max=self.batch_size_max
                )
            )
        return reply

    async def _call(self, caller: PeerId, request: ExpertRequest) -> ExpertReply:
        return await self._answer(request, request.payload)

    async def _exchange(self, stream: Stream) -> None:
        """Answer the requests of a message, as they are computed."""
        message = ExpertRequest.FromString(await stream.receive() or b"")
        requests = parts_of(message)
        payload = await receive_payload(stream, message.payload_bytes)
        cuts = cut(payload, [announced_bytes(part.tensors) for part in requests])

        async def answer(number: int, own: torch.Tensor) -> None:
            reply = copy.deepcopy(await self._answer(requests[number], own.numpy().tobytes()))
            answered = reply.payload
            reply.ClearField("payload")
            reply.payload_bytes, reply.part, reply.parts = len(answered), number, len(requests)
            async with sending:
                await stream.send(reply.SerializeToString())
                if answered:
                    await stream.send(answered)

        sending = asyncio.Lock()
        async with asyncio.TaskGroup() as tasks:
            for number, own in enumerate(cuts):
                tasks.create_task(answer(number, own))

    async def _answer(self, request: ExpertRequest, payload: bytes) -> ExpertReply:
        uid = ExpertUid.parse(request.uid)
        if uid not in self.schemas:
            return ExpertReply(status=expert_pb2.EXPERT_MISSING, reason="it is not hosted here")
        schema = self.schemas[uid].at(request.sequence_length)
        if self.full:
            return ExpertReply(status=expert_pb2.EXPERT_OVERLOADED, reason="full", queued=1000)
        if request.batch > self.batch_size_max:
            self.refused += 1
            reason = f"a request has 1 to {self.batch_size_max} samples, not {request.batch}"
            return ExpertReply(status=expert_pb2.EXPERT_REFUSED, reason=reason)
        is_backward = request.kind == expert_pb2.EXPERT_BACKWARD
        leaves = [*schema.input_leaves, *(schema.gradient_leaves if is_backward else ())]
        headers = read_headers(request.tensors)
        check_headers(headers, leaves, request.batch, absent_from=len(schema.input_leaves))
        tensors = decode(headers, leaves, request.batch, payload)
        (self.backwards if is_backward else self.forwards)[request.uid] += 1
        async with self._busy:
            await asyncio.sleep(self.compute_s)
            if request.request_id not in self.applied:
                answers = self._backward(uid, tensors) if is_backward else self._forward(uid, tensors)
                reply = self._reply(request.uid, answers)
                if not is_backward:
                    self.rows[request.uid] += request.batch
                    return reply
                self.versions[uid] += 1
                self.applied[request.request_id] = reply
        if self.lose_replies:
            self.lose_replies -= 1
            await asyncio.sleep(3600.0)
        return self.applied[request.request_id]

    def _reply(self, name: str, answers: Sequence[torch.Tensor | None]) -> ExpertReply:
        if name in self.poisoned:
            answers = [torch.full_like(answer, float("nan")) for answer in answers if answer is not None]
        payloads = encode(answers, None)
        reply = ExpertReply(version=self.versions[ExpertUid.parse(name)], payload=join_payloads(payloads))
        add_headers(reply.tensors, payloads)
        return reply

    @torch.no_grad()
    def _forward(self, uid: ExpertUid, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        inputs = unflatten(self.schemas[uid].inputs, cast(Sequence[torch.Tensor], tensors))
        return [self.modules[uid](*inputs)]

    def _backward(self, uid: ExpertUid, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        module = self.modules[uid]
        parameters = list(module.parameters())
        with torch.enable_grad():  # may run inside the trainer's backward pass
            given = cast(torch.Tensor, tensors[0]).clone().requires_grad_()
            output = module(given)
            gradient = tensors[1] if tensors[1] is not None else torch.zeros_like(output)
            by_input, *by_parameters = torch.autograd.grad(output, [given, *parameters], gradient)
        with torch.no_grad():
            for parameter, change in zip(parameters, by_parameters, strict=True):
                parameter.sub_(change, alpha=self.learning_rate)
        return [by_input]


class _Thread:
    """A stand-in for a node's network thread: the caller's thread runs the virtual loop until the result is
    there.
    """

    pool = None

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=lambda: VirtualLoop(_SIMULATED_S_MAX))

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return self.runner.run(_within(coroutine, timeout_s))

    def check(self) -> None:
        pass


async def _within(coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    async with asyncio.timeout(timeout_s):
        return await coroutine


class ExpertSwarm:
    """A context manager; `node` is the trainer's, for layers. Servers that serve the same names are
    replicas.
    """

    def __init__(self, seed: int, link: LinkConfig | None = None) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the tensors are small, and waking threads takes longer than the work
        self._thread = _Thread()
        self.network = SimulatedNetwork(seed, link or LinkConfig(delay_s=0.005))
        self.servers: list[SimulatedExperts] = []
        self.trainer = self.network.peer()
        self.node = cast(Node, self._thread.run(self._node_of(self.trainer)))

    def new_node(self) -> Node:
        """Return the node of a further trainer."""
        peer = self.network.peer()
        node = cast(Node, self._thread.run(self._node_of(peer)))
        self.run(node.dht.service.join([self.trainer.contact]))
        return node

    async def _node_of(self, peer: SimulatedPeer) -> object:
        service = service_of(peer)
        node = _TrainersNode(
            peer_id=peer.peer_id,
            network=self._thread,
            channels=cast(Channels, peer.caller),
            clock=peer.clock,
            supervisor=peer.supervisor,
            dht=SimpleNamespace(service=service),
        )
        # seeded, so that a seed replays which replicas are asked
        services: Services[Node] = Services(cast(Node, node))
        node.service = services.get
        services.put(
            ReplicaCalls.from_node, ReplicaCalls.from_node(cast(Node, node), random.Random(self.network.seed))
        )
        return node

    def serve(
        self,
        modules: Mapping[str, torch.nn.Module],
        *,
        sample: torch.Tensor | None = None,
        learning_rate: float = 0.0,
        compute_s: float = 0.002,
    ) -> SimulatedExperts:
        """Start a server with copies of these modules, and wait until it is declared."""
        sample = (
            torch.zeros(1, next(iter(next(iter(modules.values())).parameters())).shape[-1])
            if sample is None
            else sample
        )
        copies = {name: copy.deepcopy(module) for name, module in modules.items()}
        server = SimulatedExperts(self.network.peer(), copies, sample, learning_rate, compute_s)
        self.run(server.start([self.trainer, *(one.peer for one in self.servers if one.peer.up)]))
        self.servers.append(server)
        return server

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.run(asyncio.sleep(seconds))

    @property
    def now_s(self) -> float:
        async def now() -> float:
            return asyncio.get_running_loop().time()

        return self.run(now())

    def crash(self, server: SimulatedExperts) -> None:
        """Kill a server without warning, like kill -9."""
        self.run(self.network.crash(server.peer))

    def restart(self, server: SimulatedExperts) -> None:
        """Restart a server with the same identity and address. Its experts are as they were (a checkpoint);
        its record of requests is lost.
        """
        self.run(self.restarted(server))

    async def restarted(self, server: SimulatedExperts) -> None:
        """Restart a server, called from within the loop."""
        self.network.restart(server.peer)
        server.applied.clear()
        server._busy = asyncio.Lock()
        await server.start([self.trainer])

    def __enter__(self) -> ExpertSwarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self.network.close())
        finally:
            self._thread.runner.close()
            torch.set_num_threads(self._threads)
        if kind is None:
            assert not self.network.errors, self.network.errors


class _TrainersNode(SimpleNamespace):
    """The part of a Node that layers use."""

    __hash__ = object.__hash__  # type: ignore[assignment]
