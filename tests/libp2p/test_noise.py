"""Tests of the used parts of py-libp2p: the version is checked, and its handshake ends with one sentence for
any input.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.libp2p import noise
from swarm.libp2p.agreement import propose
from swarm.libp2p.noise import HANDSHAKE_BYTES_MAX, PROTOCOL, SOURCES, VERSION, Noise, SecureChannel
from tests.libp2p.memory_pipes import MemoryPipe, memory_pipes

T = TypeVar("T")


def run(test: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await test()

    return asyncio.run(bounded())


async def secured(
    one: Noise, two: Noise, pipes: tuple[MemoryPipe, MemoryPipe]
) -> tuple[SecureChannel, SecureChannel]:
    """Return both ends after the handshake."""
    async with asyncio.TaskGroup() as group:
        client = group.create_task(one.handshake(pipes[0], is_client=True, expected=two.peer_id))
        server = group.create_task(two.handshake(pipes[1], is_client=False, expected=None))
    return client.result(), server.result()


def test_the_installed_library_is_the_one_that_was_tried() -> None:
    noise.check(importlib.metadata.version("libp2p"), SOURCES)
    assert Noise(Identity.generate()).peer_id


def test_another_version_is_refused_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    noise._library.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(UsageError, match=r"version 0\.9\.0.*pip install --force-reinstall libp2p==0\.8\.1"):
        Noise(Identity.generate())


def test_other_source_text_of_the_same_version_is_refused() -> None:
    changed = {**SOURCES, "libp2p.security.noise.patterns": "0" * 64}
    with pytest.raises(UsageError, match=r"changed files \(libp2p\.security\.noise\.patterns\)"):
        noise.check(VERSION, changed)


def test_the_library_writes_nothing_about_strangers() -> None:
    Noise(Identity.generate())
    assert not logging.getLogger("libp2p.security.noise").isEnabledFor(logging.ERROR)


def test_both_ends_know_each_other_after_the_handshake_and_read_what_was_sent() -> None:
    async def test() -> None:
        one, two = Noise(Identity.generate()), Noise(Identity.generate())
        client, server = await secured(one, two, memory_pipes())
        assert (client.peer_id, server.peer_id) == (two.peer_id, one.peer_id)
        assert client.uses_yamux
        assert server.uses_yamux
        await client.write(b"x" * 200_000)
        assert await server.read_exactly(199_999) == b"x" * 199_999
        assert await server.read() == b"x"
        await server.write(b"")
        await server.write(b"answer")
        assert await client.read() == b"answer"

    run(test)


class Crumbling(MemoryPipe):
    """An end of a pipe whose bytes arrive one by one."""

    async def write(self, data: bytes) -> None:
        for one in data:
            await super().write(bytes([one]))


def test_a_message_that_arrives_in_more_than_a_hundred_pieces_is_read_to_its_end() -> None:
    async def test() -> None:  # trap 24
        pipes = Crumbling(), Crumbling()
        pipes[0].other, pipes[1].other = pipes[1], pipes[0]
        one, two = Noise(Identity.generate()), Noise(Identity.generate())
        client, server = await secured(one, two, pipes)
        await client.write(b"x" * 500)
        assert await server.read_exactly(500) == b"x" * 500

    run(test)


def test_another_peer_than_the_expected_one_is_refused_at_both_ends() -> None:
    async def test() -> None:
        one, two, third = (Noise(Identity.generate()) for _ in range(3))
        for expects_third in (True, False):
            pipes = memory_pipes()
            async with asyncio.TaskGroup() as group:
                client = group.create_task(
                    caught(
                        one.handshake(
                            pipes[0], is_client=True, expected=third.peer_id if expects_third else None
                        )
                    )
                )
                server = group.create_task(
                    caught(
                        two.handshake(
                            pipes[1], is_client=False, expected=None if expects_third else third.peer_id
                        )
                    )
                )
            failed = client.result() if expects_third else server.result()
            assert isinstance(failed, PeerError)
            assert "another peer is there" in str(failed)

    run(test)


async def caught(attempt: Awaitable[object]) -> Exception | None:
    try:
        await attempt
    except (PeerError, NetworkError) as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("is_client", [True, False])
def test_a_handshake_with_garbage_is_a_peer_error(seed: int, is_client: bool) -> None:
    async def test() -> Exception | None:
        rng = random.Random(seed)
        noise, (here, there) = Noise(Identity.generate()), memory_pipes()
        await propose(there, PROTOCOL)  # to a client these bytes are an answer
        for _ in range(4):
            data = rng.randbytes(rng.choice([0, 5, 32, 96, 230]))
            await there.write(len(data).to_bytes(2, "big") + data)
        return await caught(noise.handshake(here, is_client=is_client, expected=None))

    failed = run(test)
    assert isinstance(failed, PeerError)
    assert "its Noise handshake failed" in str(failed)


def test_a_handshake_that_ends_is_a_network_error() -> None:
    async def test() -> Exception | None:
        here, there = memory_pipes()
        there.close()
        return await caught(Noise(Identity.generate()).handshake(here, is_client=False, expected=None))

    assert isinstance(run(test), NetworkError)


def test_a_handshake_with_long_messages_is_refused_before_they_are_read() -> None:
    async def test() -> Exception | None:
        here, there = memory_pipes()
        await propose(there, PROTOCOL)
        await there.write(b"\xff\xff" + b"x" * 100)
        return await caught(Noise(Identity.generate()).handshake(here, is_client=False, expected=None))

    failed = run(test)
    assert isinstance(failed, PeerError)
    assert str(HANDSHAKE_BYTES_MAX) in str(failed)


def test_a_peer_with_a_key_of_another_type_is_refused() -> None:
    from libp2p.crypto.secp256k1 import create_new_key_pair
    from libp2p.peer.id import ID

    async def test() -> Exception | None:
        stranger, noise = Noise(Identity.generate()), Noise(Identity.generate())
        pair = create_new_key_pair()
        stranger._key, stranger._own = pair.private_key, ID.from_pubkey(pair.public_key)
        here, there = memory_pipes()
        async with asyncio.TaskGroup() as group:
            group.create_task(caught(stranger.handshake(there, is_client=True, expected=None)))
            refused = group.create_task(caught(noise.handshake(here, is_client=False, expected=None)))
        return refused.result()

    failed = run(test)
    assert isinstance(failed, PeerError)
    assert "not an Ed25519 PeerID" in str(failed)


def test_bytes_that_a_relay_changed_are_noticed() -> None:
    async def test() -> None:
        pipes = memory_pipes()
        client, server = await secured(Noise(Identity.generate()), Noise(Identity.generate()), pipes)
        await client.write(b"pay Alice")
        pipes[1].arrived[10] ^= 1
        with pytest.raises(PeerError, match="did not encrypt"):
            await server.read()

    run(test)
