"""Attacks on mutual TLS over real sockets: no peer can pass for another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from grpc import aio

from swarm.core.errors import NetworkError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.net import certificate as tls
from swarm.net.channels import Channels
from swarm.net.rpc import Handlers, Method
from swarm.net.server import Server
from swarm.wire import peer_pb2
from tests.wire.event_loop import run_on_loop

WHO = Method(name="/swarm.Test/WhoAmI", request=peer_pb2.Contact, reply=peer_pb2.Contact)
ALICE, MALLORY, CALLER = Identity.generate(), Identity.generate(), Identity.generate()


async def who(peer_id: PeerId, request: peer_pb2.Contact) -> peer_pb2.Contact:
    return peer_pb2.Contact(peer_id=peer_id.to_bytes())


@asynccontextmanager
async def serving(identity: Identity) -> AsyncIterator[int]:
    handlers, server = Handlers(), Server()
    handlers.unary(WHO, who)
    port = await server.start(identity, handlers, "127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.stop(0)


def contact(peer_id: PeerId, port: int) -> Contact:
    return Contact(peer_id, (Address("127.0.0.1", port),))


async def ask(port: int, anchor: bytes, peer_id: PeerId, key: bytes | None, certificate: bytes | None) -> str:
    """Make one raw call as an attacker would, and return its result as text."""
    options = [
        ("grpc.ssl_target_name_override", tls.tls_name(peer_id)),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    credentials = grpc.ssl_channel_credentials(anchor, key, certificate)
    async with aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        try:
            raw = await channel.unary_unary(WHO.name)(b"", timeout=5)
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return str(PeerId.from_bytes(peer_pb2.Contact.FromString(raw).peer_id))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    run_on_loop(scenario())  # type: ignore[arg-type]


def test_every_handler_gets_the_authenticated_caller() -> None:
    async def scenario() -> None:
        async with serving(ALICE) as port:
            for caller in (CALLER, MALLORY):
                channels = Channels(caller)
                reply = await channels.call(
                    contact(ALICE.peer_id, port), WHO, peer_pb2.Contact(), timeout_s=5
                )
                assert PeerId.from_bytes(reply.peer_id) == caller.peer_id
                await channels.close()

    run(scenario)


def test_an_impostor_is_refused_in_the_handshake() -> None:
    """Mallory listens where Alice is expected; its leaf names Alice, but Alice's key did not sign it."""

    async def scenario() -> None:
        async with serving(MALLORY) as port:
            channels = Channels(CALLER)
            with pytest.raises(NetworkError, match=f"{ALICE.peer_id}.*another peer answers there"):
                await channels.call(contact(ALICE.peer_id, port), WHO, peer_pb2.Contact(), timeout_s=5)
            await channels.close()

    run(scenario)


def test_a_leaf_that_claims_the_name_but_is_signed_by_another_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pretender:
        peer_id = ALICE.peer_id
        private_key = MALLORY.private_key
        sign = MALLORY.sign

    async def scenario() -> None:
        async with serving(Pretender()) as port:  # type: ignore[arg-type]
            channels = Channels(CALLER)
            with pytest.raises(NetworkError, match="another peer answers there"):
                await channels.call(contact(ALICE.peer_id, port), WHO, peer_pb2.Contact(), timeout_s=5)
            await channels.close()

    run(scenario)


def test_the_right_server_under_the_wrong_anchor_is_refused() -> None:
    async def scenario() -> None:
        own = tls.client_certificate(CALLER)
        async with serving(ALICE) as port:
            answer = await ask(
                port, tls.trust_anchor(MALLORY.peer_id), ALICE.peer_id, own.key_pem, own.certificate_pem
            )
            assert answer.startswith("UNAVAILABLE"), answer
            answer = await ask(
                port, tls.trust_anchor(ALICE.peer_id), ALICE.peer_id, own.key_pem, own.certificate_pem
            )
            assert answer == str(CALLER.peer_id)

    run(scenario)


def test_a_caller_without_a_certificate_is_refused() -> None:
    async def scenario() -> None:
        async with serving(ALICE) as port:
            answer = await ask(port, tls.trust_anchor(ALICE.peer_id), ALICE.peer_id, None, None)
            assert answer.startswith("UNAVAILABLE"), answer

    run(scenario)


def test_a_copied_extension_is_refused() -> None:
    """Mallory saw Alice's certificate and put its extension into one for its own key, under the courtesy CA,
    whose key is public.
    """

    async def scenario() -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        stolen = tls.signed_key_extension(ALICE, ec.generate_private_key(ec.SECP256R1()).public_key())
        forged = tls.as_pem(key, tls.courtesy_signed(key.public_key(), stolen))
        async with serving(CALLER) as port:
            answer = await ask(
                port, tls.trust_anchor(CALLER.peer_id), CALLER.peer_id, forged.key_pem, forged.certificate_pem
            )
            assert answer.startswith("UNAUTHENTICATED"), answer
            assert str(ALICE.peer_id) in answer

    run(scenario)


def test_a_copied_certificate_is_useless_without_its_key() -> None:
    async def scenario() -> None:
        stolen, own = tls.client_certificate(ALICE), tls.client_certificate(MALLORY)
        async with serving(CALLER) as port:
            answer = await ask(
                port, tls.trust_anchor(CALLER.peer_id), CALLER.peer_id, own.key_pem, stolen.certificate_pem
            )
            assert answer.startswith("UNAVAILABLE"), answer

    run(scenario)


def test_a_server_certificate_is_refused_from_a_caller() -> None:
    async def scenario() -> None:
        leaf = tls.server_certificate(MALLORY)
        async with serving(ALICE) as port:
            answer = await ask(
                port, tls.trust_anchor(ALICE.peer_id), ALICE.peer_id, leaf.key_pem, leaf.certificate_pem
            )
            assert answer.startswith("UNAVAILABLE"), answer

    run(scenario)


def test_a_connection_without_tls_is_refused() -> None:
    async def scenario() -> None:
        async with serving(ALICE) as port:
            async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(aio.AioRpcError):
                    await channel.unary_unary(WHO.name)(b"", timeout=5)
            channels = Channels(CALLER)  # and the server still serves
            await channels.call(contact(ALICE.peer_id, port), WHO, peer_pb2.Contact(), timeout_s=5)
            await channels.close()

    run(scenario)
