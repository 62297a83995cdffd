"""Find runs by their names in libp2p's DHT (kad-dht). The user gives the servers of the DHT.

Peers of a run that others can call are providers of two keys: one of the run's name and one of its id. A
newcomer that knows the name or the id asks for the providers, and enters through them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from swarm.core.errors import SwarmError
from swarm.core.identity import Identity
from swarm.core.ids import Contact
from swarm.core.notify import ChangeEvent
from swarm.core.wording import counted
from swarm.net.scope import Scope, scope_of
from swarm.reach.on_demand import Libp2p

_RENEW_S = 3600.0  # servers forget a provider after a day, or when they restart
_RETRY_S = 60.0
_SETTLE_S = 1.0  # delay that combines several changes of this peer's addresses


class Rendezvous:
    """Publishes a node under the names of its runs, and finds others. It belongs to the network thread."""

    def __init__(self, libp2p: Libp2p, contact: Callable[[], Contact]) -> None:
        self._libp2p, self._contact = libp2p, contact
        self._changed = ChangeEvent()

    def on_announced(self) -> None:
        """Note that `contact` has changed."""
        self._changed.notify()

    async def run(
        self, runs: Sequence[str], bootstrap: Sequence[Contact], say: Callable[[str], None]
    ) -> None:
        """Provide the keys of these names and ids while this peer can be called, until cancelled. `say` is
        called with a sentence when this starts to work or to fail.
        """
        has_worked: bool | None = None
        while True:
            self._changed.clear()
            works, sentence = await self._try(runs, bootstrap)
            if works is not None and works is not has_worked:
                has_worked = works
                say(sentence)
            await self._changed.wait(_RENEW_S if works else _RETRY_S)
            await asyncio.sleep(_SETTLE_S)

    async def _try(self, runs: Sequence[str], bootstrap: Sequence[Contact]) -> tuple[bool | None, str]:
        """Publish once. Return whether it succeeded (None if nobody there can call this peer), and a sentence
        for the user.
        """
        for own in reaching([self._contact()], bootstrap):
            try:
                servers = await self._provide(runs, own, bootstrap)
            except SwarmError as error:
                return False, f"{runs[0]} cannot be found by its name: {error}"
            at = counted(servers, "server")
            return True, f"others can find {runs[0]} by its name at {at} of the libp2p DHT"
        return None, ""

    async def _provide(self, runs: Sequence[str], own: Contact, bootstrap: Sequence[Contact]) -> int:
        from swarm.libp2p.kad import KadClient
        from swarm.libp2p.logic.kad import run_key

        client = KadClient((await self._libp2p.stack()).host, lambda peers: reaching(peers, bootstrap))
        return min([await client.provide(run_key(run), own, bootstrap) for run in runs])


async def find_peers(run: str, bootstrap: Sequence[Contact]) -> list[Contact]:
    """Return at most 16 peers that claim to take part in a run, given by name or id. Raises NetworkError when
    no server of the DHT answers.
    """
    from swarm.libp2p.host import Host
    from swarm.libp2p.kad import KadClient
    from swarm.libp2p.logic.kad import run_key

    host = Host(Identity.generate())
    await host.start()
    try:
        client = KadClient(host, lambda peers: reaching(peers, bootstrap))
        return reaching(await client.providers(run_key(run), bootstrap), bootstrap)
    finally:
        await host.close()


def reaching(peers: Iterable[Contact], bootstrap: Sequence[Contact]) -> list[Contact]:
    """Return the peers, and their addresses, whose scope is as wide as that of the servers. A DHT on the
    internet must not name addresses in this private network, and must not learn any.
    """
    named = [scope_of(address.host) for one in bootstrap for address in one.addresses]
    least = max((Scope.INTERNET if one is None else one for one in named), default=Scope.INTERNET)
    found = []
    for peer in peers:
        addresses = tuple(
            one for one in peer.addresses if (scope := scope_of(one.host)) is not None and scope >= least
        )
        if addresses:
            found.append(Contact(peer.peer_id, addresses))
    return found
