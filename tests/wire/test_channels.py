"""Tests of connections on real sockets: dialed once, raced, bounded, and dialed again after they broke."""

from __future__ import annotations

import asyncio
import socket
import time

import grpc
import pytest

from swarm.core.errors import DeadlineExceeded, NetworkError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.channels import Channels, ConnectionLimits
from swarm.net.dial import Routes
from swarm.net.server import Server
from swarm.wire import peer_pb2
from tests.wire.call_pair import ECHO, echo, pair, run, until


def test_an_unreachable_peer_is_reported_with_every_address() -> None:
    async def scenario() -> None:
        channels = Channels(Identity.generate())
        peer_id = Identity.generate().peer_id
        contact = Contact(
            peer_id, (Address("127.0.0.1", 1), Address("127.0.0.1", 2), Address("no-such-host.invalid", 3))
        )
        with pytest.raises(NetworkError) as caught:
            await channels.call(contact, ECHO, peer_pb2.Hello(), timeout_s=5)
        text = str(caught.value)
        assert str(peer_id) in text
        assert "/ip4/127.0.0.1/tcp/1/tls/http: connection refused" in text
        assert "/ip4/127.0.0.1/tcp/2/tls/http: connection refused" in text
        assert "no-such-host.invalid/tcp/3/tls/http: the name cannot be resolved" in text
        with pytest.raises(NetworkError, match="has no address that can be dialed"):
            await channels.call(Contact(peer_id), ECHO, peer_pb2.Hello(), timeout_s=5)
        await channels.close()
        with pytest.raises(UsageError, match="closed"):
            await channels.call(contact, ECHO, peer_pb2.Hello(), timeout_s=5)

    run(scenario)


@pytest.mark.timing
def test_an_unresponsive_address_costs_only_its_timeout() -> None:
    """A listening socket that never answers: TCP connects, but the TLS handshake gets no reply."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as hole:
            channels = Channels(Identity.generate())
            contact = Contact(Identity.generate().peer_id, (Address("127.0.0.1", hole.getsockname()[1]),))
            started_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.3 s"):
                await channels.call(contact, ECHO, peer_pb2.Hello(), timeout_s=0.3)
            assert time.monotonic() - started_s < 2
            await channels.close()

    run(scenario)


@pytest.mark.timing
def test_an_answering_address_wins_over_unresponsive_ones() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as hole:
            async with pair() as two:
                two.handlers.unary(ECHO, echo)
                first = (Address("127.0.0.1", hole.getsockname()[1]), Address("127.0.0.1", 1))
                two.contact = Contact(two.contact.peer_id, first + two.contact.addresses)
                started_s = time.monotonic()
                assert await two.echo("x") == "x"
                assert time.monotonic() - started_s < 3
                took_s = []
                for _ in range(5):  # on a loaded machine any single one may take long
                    await two.channels.forget(two.contact.peer_id)
                    started_s = time.monotonic()
                    assert await two.echo("x") == "x"
                    took_s.append(time.monotonic() - started_s)
                assert min(took_s) < 0.2, "the address that worked goes first"

    run(scenario)


@pytest.mark.timing
def test_a_restarted_peer_is_dialed_at_once() -> None:
    """gRPC by itself would wait for its backoff: a second, and up to two minutes after repeated failures."""

    async def scenario() -> None:
        async with pair() as two:
            two.handlers.unary(ECHO, echo)
            identity = Identity.generate()
            server = Server()
            port = await server.start(identity, two.handlers, "127.0.0.1", 0)
            contact = Contact(identity.peer_id, (Address("127.0.0.1", port),))
            await two.channels.call(contact, ECHO, peer_pb2.Hello(), timeout_s=5)
            took_s = []
            for _ in range(3):  # on a loaded machine any single one may take long
                await server.stop(0)
                for _ in range(3):
                    with pytest.raises(NetworkError, match=str(identity.peer_id)):
                        await two.channels.call(contact, ECHO, peer_pb2.Hello(), timeout_s=5)
                server = Server()
                assert await server.start(identity, two.handlers, "127.0.0.1", port) == port
                started_s = time.monotonic()
                await two.channels.call(contact, ECHO, peer_pb2.Hello(), timeout_s=5)
                took_s.append(time.monotonic() - started_s)
            await server.stop(0)
            assert min(took_s) < 0.5

    run(scenario)


def test_a_peer_that_moved_is_dialed_at_its_new_address() -> None:
    async def scenario() -> None:
        async with pair() as two:
            two.handlers.unary(ECHO, echo)
            identity = Identity.generate()
            for _ in range(2):
                server = Server()
                port = await server.start(identity, two.handlers, "127.0.0.1", 0)
                contact = Contact(identity.peer_id, (Address("127.0.0.1", port),))
                await two.channels.call(contact, ECHO, peer_pb2.Hello(), timeout_s=5)
                await server.stop(0)
                await until(lambda: not two.channels.connected(identity.peer_id))

    run(scenario)


def test_many_callers_share_one_connection_attempt() -> None:
    async def scenario() -> None:
        dialed: list[Address] = []
        async with pair() as two:
            two.handlers.unary(ECHO, echo)
            two.channels._on_connected = lambda contact, address, seconds: dialed.append(address)
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(two.echo(str(number))) for number in range(50)]
            assert [call.result() for call in calls] == [str(number) for number in range(50)]
            assert len(dialed) == 1

    run(scenario)


def test_the_pool_is_bounded_and_closes_idle_connections() -> None:
    async def scenario() -> None:
        async with pair(limits=ConnectionLimits(connections_max=2, idle_s=0.0)) as two:
            two.handlers.unary(ECHO, echo)
            identities = [Identity.generate() for _ in range(4)]
            servers = [Server() for _ in identities]
            for identity, server in zip(identities, servers, strict=True):
                port = await server.start(identity, two.handlers, "127.0.0.1", 0)
                await two.channels.call(
                    Contact(identity.peer_id, (Address("127.0.0.1", port),)),
                    ECHO,
                    peer_pb2.Hello(agent="x"),
                    timeout_s=5,
                )
                assert len(two.channels._links) <= 2
            assert two.channels.connected(identities[3].peer_id)
            assert not two.channels.connected(identities[0].peer_id)
            await asyncio.sleep(0.01)
            await two.channels.close_idle()
            assert not two.channels._links
            assert not two.channels._pooled
            for server in servers:
                await server.stop(0)

    run(scenario)


def test_closing_ends_calls_in_progress_with_a_swarm_error() -> None:
    async def scenario() -> None:
        async with pair() as two:
            entered = asyncio.Event()

            async def slow(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                entered.set()
                await asyncio.Event().wait()
                return request

            two.handlers.unary(ECHO, slow)
            outcome: list[BaseException] = []

            async def one() -> None:
                try:
                    await two.echo("x")
                except NetworkError as error:
                    outcome.append(error)

            async with asyncio.TaskGroup() as group:
                group.create_task(one())
                await entered.wait()
                await two.channels.forget(two.contact.peer_id)
            assert "was closed here" in str(outcome[0])

    run(scenario)


class TunnelTo:
    """Leads to one address, as a tunnel does."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.dials = 0

    async def endpoint(self, contact: Contact) -> Address:
        self.dials += 1
        return self.address

    def failure(self, peer_id: PeerId) -> str:
        return ""


def test_a_retired_tunnel_carries_its_calls_to_their_end_and_takes_no_new_ones() -> None:
    async def scenario() -> None:
        async with pair() as made:
            go_on, calls = asyncio.Event(), 0

            async def slow(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                nonlocal calls
                calls += 1
                if request.agent == "slow":
                    await go_on.wait()
                return request

            made.handlers.unary(ECHO, slow)
            tunnels = TunnelTo(made.contact.addresses[0])
            channels = Channels(Identity.generate(), routes=Routes(tunnels=tunnels))
            relay = Contact(Identity.generate().peer_id, (Address("127.0.0.1", 1),))
            contact = Contact(made.contact.peer_id, (), (relay,))

            async def call(agent: str) -> str:
                return (await channels.call(contact, ECHO, peer_pb2.Hello(agent=agent), timeout_s=20.0)).agent

            running = asyncio.create_task(call("slow"))
            await until(lambda: calls == 1)
            before = channels.connection_to(contact.peer_id)
            await channels.retire(contact.peer_id)
            assert await call("new") == "new"
            after = channels.connection_to(contact.peer_id)
            assert after is not before
            assert tunnels.dials == 2
            assert not running.done()
            go_on.set()
            assert await running == "slow"
            assert before is not None
            await until(lambda: before.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
            assert channels.connection_to(contact.peer_id) is after
            await channels.close()

            # a peer that is called at its address has no better way
            assert await made.echo("direct") == "direct"
            kept = made.channels.connection_to(contact.peer_id)
            await made.channels.retire(contact.peer_id)
            assert made.channels.connection_to(contact.peer_id) is kept

    run(scenario)
