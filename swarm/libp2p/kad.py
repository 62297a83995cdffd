"""A client of libp2p's kad-dht: it queries servers of the DHT, and serves no queries."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence

from swarm.core.errors import NetworkError, SwarmError
from swarm.core.ids import Contact
from swarm.libp2p.host import Host
from swarm.libp2p.logic.kad import (
    KAD_PROTOCOL,
    MESSAGE_BYTES_MAX,
    PROVIDERS_MAX,
    KadAnswer,
    KadKind,
    ServerSearch,
    decode_answer,
    encode_question,
)

QUESTION_S = 5.0  # timeout for dialing a peer and its answer
SEARCH_S = 30.0


class KadClient:
    """Queries to a DHT from one host."""

    def __init__(self, host: Host, dialable: Callable[[Sequence[Contact]], list[Contact]]) -> None:
        """`dialable` filters peers and their addresses: it returns those that may be dialed."""
        self._host, self._dialable = host, dialable

    async def provide(self, key: bytes, own: Contact, bootstrap: Sequence[Contact]) -> int:
        """Register this peer, with the addresses of its gRPC port, as a provider at the servers nearest to a
        key. Return the number of these servers. Raises NetworkError when no bootstrap peer answers.
        """
        lookup, _ = await self._search(KadKind.FIND_NODE, key, bootstrap)
        message = encode_question(KadKind.ADD_PROVIDER, key, own)

        async def tell(peer: Contact) -> bool:
            try:
                async with asyncio.timeout(QUESTION_S):
                    connection = await self._host.connect(peer.peer_id, peer.addresses)
                    stream = await connection.open(KAD_PROTOCOL)
                    await stream.write_message(message)
                    stream.finish()
                    await stream.confirm()  # a server that does not agree has not taken the message
                    # servers do not answer this message; some reset the stream
                    with contextlib.suppress(NetworkError):
                        await stream.read()
                    stream.close()
            except (SwarmError, TimeoutError):
                return False
            return True

        async with asyncio.TaskGroup() as group:
            announcements = [group.create_task(tell(peer)) for peer in lookup.nearest]
        return sum(task.result() for task in announcements)

    async def providers(self, key: bytes, bootstrap: Sequence[Contact]) -> list[Contact]:
        """Return at most 16 peers that claim to provide a key, with the addresses of their gRPC ports. Raises
        NetworkError when no bootstrap peer answers.
        """
        _, found = await self._search(KadKind.GET_PROVIDERS, key, bootstrap)
        return found

    async def _search(
        self, kind: KadKind, key: bytes, bootstrap: Sequence[Contact]
    ) -> tuple[ServerSearch, list[Contact]]:
        lookup, found = ServerSearch(key, bootstrap), dict[bytes, Contact]()
        failures: list[str] = []
        running: set[asyncio.Task[None]] = set()

        async def ask(peer: Contact) -> None:
            try:
                answer = await self._ask(peer, encode_question(kind, key))
            except (SwarmError, TimeoutError) as error:
                failures.append(f"{peer.peer_id.short}: {error or 'no answer in time'}")
                lookup.on_failure(peer.peer_id)
                return
            lookup.on_answer(peer.peer_id, self._dialable(answer.closer))
            for one in answer.providers:
                if len(found) < PROVIDERS_MAX:
                    found.setdefault(one.peer_id.public_key, one)

        try:
            async with asyncio.timeout(SEARCH_S):
                while True:
                    for peer in lookup.due():
                        name = f"question to {peer.peer_id.short}"
                        running.add(self._host.supervisor.spawn(name, functools.partial(ask, peer)))
                    if not running or len(found) >= PROVIDERS_MAX:
                        break
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            for task in running:
                task.cancel()
        if not lookup.nearest:
            raise NetworkError(
                f"no peer of the libp2p DHT answers: {'; '.join(failures[:3]) or 'none given'}"
            )
        return lookup, list(found.values())

    async def _ask(self, peer: Contact, question: bytes) -> KadAnswer:
        async with asyncio.timeout(QUESTION_S):
            connection = await self._host.connect(peer.peer_id, peer.addresses)
            stream = await connection.open(KAD_PROTOCOL)
            try:
                await stream.write_message(question)
                return decode_answer(await stream.read_message(MESSAGE_BYTES_MAX))
            finally:
                stream.close()
