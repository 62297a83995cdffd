"""Nodes on loopback that train together while one of them answers nonsense and strangers call all handlers.

Two honest nodes and a liar train a run, hold experts and follow a specification. The liar's answers are
mutated before they leave it, one service's at a time, so the honest nodes' callers read nonsense. Their own
handlers are called with messages that are made from real ones. Whatever comes out of a handler but a refusal
is a failure, and so are an exception in a training loop, a stalled event loop and much more memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from google.protobuf.message import Message

import swarm
from averaging.optim.optimizer import Optimizer, OptimizerConfig
from swarm.core.errors import SwarmError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.net.rpc import Handlers, Stream, StreamHandler, UnaryHandler, copy_into
from swarm.node import Node, NodeConfig
from swarm.run.changes import CHANGE, RunFollower
from swarm.run.directory import RunDirectory
from swarm.run.signed import SignedSpecification, sign
from swarm.run.specification import RunSpecification
from swarm.wire import run_pb2
from tests.fuzz.making import Learned, Maker

BATCH, TARGET = 4, 24
MEMORY_BYTES_MAX = 512 << 20  # growth of the whole process
STALL_S_MAX = 1.0  # of the loop's own processor time
_CALLS_AT_ONCE = 64
_CALL_S = 0.25  # some handlers hold an answer back on purpose
_ADMISSIBLE = 0.85  # share of calls that are not refused for who calls, or about what
_LIES = 0.4  # share of the liar's answers that are mutated
_LIES_S = 2.0  # about one service, and then about the next one
_REDUCTION = "/swarm.Reduce"
_CALM = 1 / 3  # share of the time without calls of strangers: with them, hardly any round ends
_RECORDED_MAX = 60  # of one method
_NAMES = {"run": ["fuzz"], "averager": ["epoch"], "uid": ["ffn.0"]}
_TABLE = {"name": "fuzz", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}


class Recorder:
    """Real messages, which made ones begin with."""

    def __init__(self) -> None:
        self.learned = Learned()
        self.frames: dict[str, deque[bytes]] = {}
        self.openings: dict[str, deque[bytes]] = {}  # the first message of a stream
        self.groups: deque[bytes] = deque(maxlen=4)

    def request(self, request: Message) -> None:
        self.learned.add(request)
        group = getattr(request, "group_id", b"")
        if group and group not in self.groups:
            self.groups.append(group)

    def frame(self, name: str, frame: bytes, *, first: bool) -> None:
        frames = (self.openings if first else self.frames).setdefault(name, deque(maxlen=_RECORDED_MAX))
        frames.append(bytes(frame))

    def admissible(self, message: Message, caller: PeerId, maker: Maker) -> None:
        """Put values into a message without which it is refused at once: who calls, and about what."""
        for field in message.DESCRIPTOR.fields:
            if field.name in ("contact", "sender"):
                getattr(message, field.name).peer_id = caller.to_bytes()
            elif field.name == "seek":
                self.admissible(message.seek, caller, maker)  # type: ignore[attr-defined]
            elif field.name in ("run", "averager", "uid", "schema_digest"):
                known = self.learned.values.get(field.full_name) or _NAMES.get(field.name)
                if known:
                    setattr(message, field.name, maker.rng.choice(known))
            elif field.name == "group_id" and self.groups:
                message.group_id = maker.rng.choice(self.groups)  # type: ignore[attr-defined]

    def stream(self, name: str, maker: Maker) -> list[bytes]:
        """Return the messages of a stream: mostly a real opening, then made ones."""
        openings, frames = list(self.openings.get(name, ())), list(self.frames.get(name, ()))
        first = maker.rng.choice(openings) if openings and maker.rng.random() < 0.6 else maker.raw(openings)
        rest = [maker.raw(frames) for _ in range(maker.rng.choice((0, 1, 2, 5)))]
        return [one for one in (first, *rest) if one]


class TappedStream:
    """A stream whose messages are recorded and, if `lie` is given, exchanged before they are sent."""

    def __init__(self, stream: Stream, name: str, recorder: Recorder, lie: Callable[[bytes], bytes]) -> None:
        self._stream, self._name, self._recorder, self._lie = stream, name, recorder, lie
        self.peer_id = stream.peer_id
        self.finish, self.cancel = stream.finish, stream.cancel
        self._is_first = True

    async def send(self, message: bytes) -> None:
        await self._stream.send(self._lie(bytes(message)))

    async def receive(self) -> bytes | None:
        message = await self._stream.receive()
        if message is not None:
            self._recorder.frame(self._name, message, first=self._is_first)
            self._is_first = False
        return message

    async def receive_into(self, buffer: memoryview) -> int | None:
        return copy_into(await self.receive(), buffer)


class MadeStream:
    """A stranger's end of a stream: sends a few generated messages, and ignores the answers."""

    def __init__(self, peer_id: PeerId, messages: list[bytes]) -> None:
        self.peer_id = peer_id
        self._messages = messages

    async def send(self, message: bytes) -> None:
        await asyncio.sleep(0)

    async def receive(self) -> bytes | None:
        await asyncio.sleep(0)
        return self._messages.pop(0) if self._messages else None

    async def receive_into(self, buffer: memoryview) -> int | None:
        return copy_into(await self.receive(), buffer)

    async def finish(self) -> None:
        return None

    def cancel(self) -> None:
        self._messages.clear()


class Liar:
    """Decides when a node lies. It lies about one service at a time, because a peer that lies about
    everything gets into no round, where its answers would be requested.
    """

    def __init__(self, maker: Maker, names: Iterable[str]) -> None:
        self.maker = maker
        self.told: Counter[str] = Counter()  # lies by method
        others = sorted({_service(name) for name in names} - {_REDUCTION})
        # reduction in every second turn: peers pass a liar over, so that there are few rounds with it
        self._services = [service for other in others for service in (_REDUCTION, other)]
        self._began_s = time.monotonic()

    def lies(self, name: str) -> bool:
        """Return whether an answer of this method, or a message of such a stream, is to be exchanged."""
        turn = int((time.monotonic() - self._began_s) / _LIES_S)
        if _service(name) != self._services[turn % len(self._services)] or self.maker.rng.random() > _LIES:
            return False
        self.told[name] += 1
        return True


def _service(name: str) -> str:
    return name.rpartition("/")[0]


def tap(handlers: Handlers, recorder: Recorder, liar: Liar | None) -> None:
    """Record what handlers get. Those of the `liar` exchange some of their answers."""
    for name in handlers.names():
        handler = handlers.find(name)
        assert handler is not None
        handlers.remove(name)
        if isinstance(handler, UnaryHandler):
            handlers.unary(handler.method, _tapped(handler, recorder, liar))
        else:
            handlers.stream(handler.method, _tapped_stream(handler, recorder, liar))


def _tapped(handler: UnaryHandler, recorder: Recorder, liar: Liar | None) -> Any:
    method = handler.method

    async def answer(caller: PeerId, request: Any) -> Any:
        recorder.request(request)
        reply = await handler.function(caller, request)
        if liar is None or not liar.lies(method.name):
            return reply
        made = Maker(str(liar.maker.rng.random()), Learned(reply)).message(method.reply)
        return made if made.ByteSize() <= method.reply_bytes_max else reply

    return answer


def _tapped_stream(handler: StreamHandler, recorder: Recorder, liar: Liar | None) -> Any:
    name, bytes_max = handler.method.name, handler.method.message_bytes_max

    def lie(message: bytes) -> bytes:
        if liar is None or not liar.lies(name):
            return message
        return liar.maker.mutated(message)[:bytes_max] or b"\x00"

    async def serve(stream: Stream) -> None:
        await handler.function(TappedStream(stream, name, recorder, lie))

    return serve


class FuzzedNode:
    """A node with every service, and a thread that trains on it."""

    def __init__(self, number: int, signed: SignedSpecification, bootstrap: list[str]) -> None:
        self.number = number
        self.stack = contextlib.ExitStack()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.node = self.stack.enter_context(
            Node(bootstrap, "127.0.0.1:0", config=NodeConfig(preset="local"))
        )
        torch.manual_seed(0)
        self.net = torch.nn.Linear(6, 1)
        inner = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.optimizer = self.stack.enter_context(
            Optimizer(
                inner,
                node=self.node,
                run="fuzz",
                target_batch_size=TARGET,
                batch_size_per_step=BATCH,
                config=OptimizerConfig(round_timeout_s=15.0),
            )
        )
        self.stack.enter_context(
            swarm.ExpertServer(
                self.node,
                {f"ffn.{number}": swarm.Expert(torch.nn.Linear(8, 8), (torch.zeros(1, 8),))},
            )
        )
        directory = RunDirectory(self.node.dht.service, clock=self.node.clock)
        follower = RunFollower(
            signed,
            caller=self.node.channels,
            directory=directory,
            members=self.optimizer.contacts,
            on_newer=lambda newer: None,
        )
        self.node.network.run(self._register(follower), 5.0)
        self._thread = threading.Thread(target=self._train, daemon=True)

    async def _register(self, follower: RunFollower) -> None:
        self.node.handlers.unary(CHANGE, follower.on_change)

    def start(self) -> None:
        self._thread.start()

    def _train(self) -> None:
        chance = torch.Generator().manual_seed(self.number)
        try:
            while not self.stop.is_set():
                x = torch.randn(BATCH, 6, generator=chance)
                self.optimizer.zero_grad()
                (self.net(x) - x.sum(1, keepdim=True)).square().mean().backward()
                self.optimizer.step()
                self.stop.wait(0.01)
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self.stop.set()
        self._thread.join(20)
        self.stack.close()


class Unexpected(logging.Handler):
    """Keeps log records about exceptions that no peer may cause."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, SwarmError):
            text = logging.Formatter().formatException(record.exc_info)  # type: ignore[arg-type]
            self.found.append(f"{record.getMessage()}\n{text}")


async def _stalls(seconds: float, found: list[float]) -> None:
    """Record the processor time of the loop's thread between two turns of this task."""
    end_s, never = time.monotonic() + seconds, asyncio.Event()
    while time.monotonic() < end_s:
        began_s = time.thread_time()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), 0.01)
        found.append(time.thread_time() - began_s)


async def call_handlers(
    victim: Node, seed: str, seconds: float, recorder: Recorder, peers: list[PeerId]
) -> tuple[int, list[str]]:
    """Call the handlers of a node with made messages for some time. Return how many calls there were, and
    what came out that must not.
    """
    rng, number = random.Random(seed), 0
    failures: dict[str, str] = {}
    stalls: list[float] = []
    watch = asyncio.get_running_loop().create_task(_stalls(seconds, stalls))
    end_s = time.monotonic() + seconds

    async def one(name: str, maker: Maker) -> None:
        handler = victim.handlers.find(name)
        caller = rng.choice(peers)
        if handler is None:
            return
        try:
            async with asyncio.timeout(_CALL_S):
                if isinstance(handler, UnaryHandler):
                    request = maker.message(handler.method.request)
                    if maker.rng.random() < _ADMISSIBLE:
                        recorder.admissible(request, caller, maker)
                    if request.ByteSize() > handler.method.request_bytes_max:
                        return
                    request = type(request).FromString(request.SerializeToString())
                    reply = await handler.function(caller, request)
                    assert isinstance(reply, handler.method.reply)
                else:
                    await handler.function(MadeStream(caller, recorder.stream(name, maker)))
        except (SwarmError, TimeoutError):
            return
        except Exception as error:
            failures.setdefault(
                f"{name} {type(error).__name__}", f"{name}: {''.join(traceback.format_exception(error)[-6:])}"
            )

    while time.monotonic() < end_s:
        names = sorted(victim.handlers.names())
        batch = [
            (rng.choice(names), Maker(f"{seed}/{number + at}", recorder.learned))
            for at in range(_CALLS_AT_ONCE)
        ]
        number += len(batch)
        await asyncio.gather(*(one(name, maker) for name, maker in batch))
    await watch
    texts = list(failures.values())
    if max(stalls, default=0.0) > STALL_S_MAX:
        texts.append(f"the event loop of a node stood still for {max(stalls):.1f} s of its processor time")
    return number, texts


def fuzz_nodes(seed: int, seconds: float) -> tuple[int, list[str]]:
    """Run the swarm for some time. Return how many handlers were called, and one text for each failure."""
    unexpected = Unexpected()
    logging.getLogger().addHandler(unexpected)
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    signed = sign(RunSpecification.from_table(_TABLE, "fuzz"), Identity.generate(), version=1, created_s=1.0)
    recorder, failures = Recorder(), []
    recorder.learned.add(run_pb2.ChangeRequest(run=signed.run_id, specification=signed.blob))
    with _swarm(signed) as nodes:
        *honest, lying = nodes
        liar = Liar(Maker(f"{seed}/lies"), lying.node.handlers.names())
        for one in nodes:
            one.node.network.run(_tap(one.node, recorder, liar if one is lying else None), 5.0)
            one.start()
        stop = threading.Event()
        errors: list[BaseException] = []
        calling = threading.Thread(target=_call_experts, args=(honest[1].node, stop, errors), daemon=True)
        calling.start()
        stop.wait(_CALM * seconds)  # the liar's answers, and real messages to begin with
        peers = [one.node.peer_id for one in nodes[1:]] + [Identity.generate().peer_id]
        victim = honest[0]
        calls, texts = victim.node.network.run(
            call_handlers(victim.node, f"{seed}", (1.0 - _CALM) * seconds, recorder, peers), seconds + 60.0
        )
        failures += texts
        failures += _answers(honest[1].node, victim.node)
        stop.set()
        calling.join(30.0)
        failures += [f"a call of an expert ended with {error!r}" for error in errors]
        failures += [
            f"training on an honest node ended with {one.error!r}" for one in honest if one.error is not None
        ]
    logging.getLogger().removeHandler(unexpected)
    failures += list({text.splitlines()[-1]: text for text in unexpected.found}.values())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before_bytes
    if grown > MEMORY_BYTES_MAX:
        failures.append(f"the process took {grown >> 20} MiB more memory")
    return calls, failures


async def _tap(node: Node, recorder: Recorder, liar: Liar | None) -> None:
    tap(node.handlers, recorder, liar)


@contextlib.contextmanager
def _swarm(signed: SignedSpecification) -> Iterator[list[FuzzedNode]]:
    nodes: list[FuzzedNode] = []
    try:
        for number in range(3):
            nodes.append(FuzzedNode(number, signed, nodes[0].node.addresses if nodes else []))
        yield nodes
    finally:
        for one in nodes:
            one.stop.set()
        for one in reversed(nodes):
            one.close()


def _call_experts(node: Node, stop: threading.Event, errors: list[BaseException]) -> None:
    """Call the experts of the other nodes: small calls, and large ones that take a stream."""
    experts = [swarm.RemoteExpert(node, uid) for uid in ("ffn.0", "ffn.2")]
    number = 0
    while not stop.is_set():
        number += 1
        x = torch.randn(4 if number % 4 else 20_000, 8, requires_grad=True)
        try:
            experts[number % 2](x).square().mean().backward()
        except SwarmError:
            continue
        except BaseException as error:
            errors.append(error)
            return


def _answers(asker: Node, victim: Node) -> list[str]:
    """Return why a node does not answer an honest peer any more; empty if it does."""
    from moe.protocol.methods import DESCRIBE
    from swarm.wire.expert_pb2 import DescribeRequest

    try:
        reply = asker.network.run(
            asker.channels.call(victim.contact, DESCRIBE, DescribeRequest(uids=["ffn.0"]), timeout_s=20.0),
            30.0,
        )
    except SwarmError as error:
        return [f"the node does not answer any more: {error}"]
    return [] if reply.experts[0].schema else ["the node does not know its expert any more"]
