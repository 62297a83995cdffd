"""A stranger that makes calls without end over one connection."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from swarm.core.identity import Identity
from swarm.core.standing import PeerStanding
from swarm.net import certificate as tls
from swarm.net import server as server_module
from swarm.net.calls import BATCH_CALLS_MAX, CALLS_NAME
from swarm.net.logic.stranger_budget import BudgetLimits
from swarm.net.rpc import Method
from swarm.net.server import CallLimits, Server
from swarm.wire import peer_pb2
from swarm.wire.calls_pb2 import AnswerBatch, Call, CallBatch
from tests.wire.call_pair import ECHO, Pair, echo, pair, run

AT_ONCE, PER_S = 60, 20
FLOOD_S = 1.0
EXPERT = Method(
    name="/swarm.Expert/Call",
    request=peer_pb2.Hello,
    reply=peer_pb2.Hello,
    request_bytes_max=1000,
    reply_bytes_max=2000,
)


@pytest.fixture(autouse=True)
def _budget(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = BudgetLimits(
        per_prefix_max=AT_ONCE,
        per_prefix_per_s=PER_S,
        all_max=2 * AT_ONCE,
        all_per_s=2 * PER_S,
        reserved=0.0,
        few_max=0.0,
        few_per_s=0.0,
    )
    monkeypatch.setattr(server_module, "STRANGER_CALLS", limits)


@asynccontextmanager
async def attacked(
    attacker: Identity, *, member: bool, limits: CallLimits | None = None
) -> AsyncIterator[tuple[Pair, grpc.aio.Channel]]:
    """Return a server that knows a member, with an honest caller, and a connection of an attacker, which may
    be that member.
    """
    standing, honest = PeerStanding(), Identity.generate().peer_id
    standing.add_members("run", [attacker.peer_id if member else honest])
    async with pair(Server(standing=standing, limits=limits)) as two:
        two.handlers.unary(ECHO, echo)
        two.handlers.unary(EXPERT, echo)
        own = tls.client_certificate(attacker)
        credentials = grpc.ssl_channel_credentials(
            tls.trust_anchor(two.contact.peer_id), own.key_pem, own.certificate_pem
        )
        options = [("grpc.ssl_target_name_override", tls.tls_name(two.contact.peer_id))]
        address = f"127.0.0.1:{two.contact.addresses[0].port}"
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            await channel.channel_ready()
            yield two, channel


async def flood_stream(channel: grpc.aio.Channel, method: str) -> int:
    """Make calls over the stream of shared calls, and return how many are answered in time."""
    stream, answered = channel.stream_stream(CALLS_NAME)(), 0
    request = peer_pb2.Hello(agent="x").SerializeToString()

    async def write() -> None:
        for first in range(0, 1 << 30, BATCH_CALLS_MAX):
            numbers = range(first, first + BATCH_CALLS_MAX)
            calls = [Call(number=number, method=method, request=request) for number in numbers]
            await stream.write(CallBatch(calls=calls).SerializeToString())

    async def read() -> None:
        nonlocal answered
        while True:
            answered += len(AnswerBatch.FromString(await stream.read()).answers)

    tasks = [asyncio.ensure_future(write()), asyncio.ensure_future(read())]
    await asyncio.wait(tasks, timeout=FLOOD_S)
    for task in tasks:
        task.cancel()
    stream.cancel()
    return answered


async def flood_separately(channel: grpc.aio.Channel, method: str) -> int:
    """The same with a separate call each, forty at a time."""
    call, answered = channel.unary_unary(method), 0
    request = peer_pb2.Hello(agent="x").SerializeToString()

    async def repeat() -> None:
        nonlocal answered
        while True:
            await call(request)
            answered += 1

    tasks = [asyncio.ensure_future(repeat()) for _ in range(40)]
    await asyncio.wait(tasks, timeout=FLOOD_S)
    for task in tasks:
        task.cancel()
    return answered


@pytest.mark.parametrize("flood", [flood_stream, flood_separately])
@pytest.mark.parametrize(
    ("method", "member", "limited"),
    [(ECHO.name, False, True), (ECHO.name, True, False), (EXPERT.name, False, False)],
)
def test_a_stranger_makes_as_many_calls_as_its_network_may_and_members_wait_for_nothing(
    flood: object, method: str, member: bool, limited: bool
) -> None:
    """Regression test: one connection of a stranger was served as fast as it sent."""

    async def scenario() -> None:
        async with attacked(Identity.generate(), member=member) as (_, channel):
            began_s = time.monotonic()
            answered = await flood(channel, method)  # type: ignore[operator]
            most = AT_ONCE + PER_S * (time.monotonic() - began_s)
            assert (answered <= most) is limited
            assert answered >= AT_ONCE

    run(scenario)


def test_a_connection_that_is_refused_more_calls_than_its_budget_has_is_closed() -> None:
    """Nothing else bounds refusals: each costs as much as a call."""

    async def scenario() -> None:
        async with attacked(Identity.generate(), member=False, limits=CallLimits(calls_max=16)) as (
            _,
            channel,
        ):
            call, codes = channel.unary_unary(ECHO.name), Counter[grpc.StatusCode]()
            request = peer_pb2.Hello(agent="x").SerializeToString()

            async def repeat() -> None:
                while not codes[grpc.StatusCode.UNAVAILABLE]:
                    try:
                        await call(request)
                    except grpc.aio.AioRpcError as error:
                        codes[error.code()] += 1

            await asyncio.wait([asyncio.ensure_future(repeat()) for _ in range(40)], timeout=20.0)
            assert codes[grpc.StatusCode.UNAVAILABLE]

    run(scenario)
