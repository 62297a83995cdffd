"""Ports that a router forwards on request: the requested port, the lease, and the release."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from swarm.net.port_mapping import LEASE_S, PortMapping

PORT, OWN, OTHER = 4000, "192.168.1.2", "192.168.1.3"


class Refused(Exception):
    pass


class Router:
    """A router that forwards ports, and keeps a list of what it forwards: host, port and lease of each."""

    lanaddr = OWN

    def __init__(self, *, lends_for_ever: bool = False, refuses: bool = False) -> None:
        self.ports: dict[int, tuple[str, int, int]] = {}
        self._lends_for_ever, self.refuses = lends_for_ever, refuses

    def addportmapping(
        self, outer: int, protocol: str, host: str, inner: int, name: str, remote: str, lease_s: int
    ) -> bool:
        assert (protocol, remote) == ("TCP", "")
        if self.refuses or (self._lends_for_ever and lease_s):
            raise Refused("OnlyPermanentLeasesSupported")
        self.ports[outer] = (host, inner, lease_s)
        return True

    def getspecificportmapping(self, outer: int, protocol: str) -> tuple[Any, ...] | None:
        if outer not in self.ports:
            raise Refused("NoSuchEntryInArray")
        host, inner, lease_s = self.ports[outer]
        return host, inner, "somebody", True, lease_s

    def deleteportmapping(self, outer: int, protocol: str) -> bool:
        del self.ports[outer]
        return True


def run(steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(steps(), 30.0))


def test_the_port_of_the_node_is_lent_renewed_and_given_back() -> None:
    router = Router()
    mapping = PortMapping(PORT, lambda: router)

    async def steps() -> None:
        assert await mapping.open() == PORT
        assert router.ports == {PORT: (OWN, PORT, LEASE_S)}
        router.ports.clear()  # it has started again
        assert await mapping.open() == PORT
        assert (router.ports, mapping.is_open) == ({PORT: (OWN, PORT, LEASE_S)}, True)
        await mapping.close()
        assert (router.ports, mapping.is_open) == ({}, False)

    run(steps)


@pytest.mark.parametrize("owner", [(OTHER, PORT), (OWN, 4001)])
def test_a_port_that_is_forwarded_elsewhere_is_left_alone(owner: tuple[str, int]) -> None:
    router = Router()
    router.ports = {PORT: (*owner, 0), PORT + 1: (*owner, 0)}
    mapping = PortMapping(PORT, lambda: router)

    async def steps() -> None:
        assert await mapping.open() == PORT + 2
        assert router.ports[PORT + 2] == (OWN, PORT, LEASE_S)
        await mapping.close()
        assert router.ports == {PORT: (*owner, 0), PORT + 1: (*owner, 0)}

    run(steps)


def test_a_router_that_lends_forever_only_is_asked_for_that() -> None:
    router = Router(lends_for_ever=True)
    mapping = PortMapping(PORT, lambda: router)

    async def steps() -> None:
        assert await mapping.open() == PORT
        assert router.ports == {PORT: (OWN, PORT, 0)}

    run(steps)


def test_a_router_that_refuses_is_not_searched_again_at_once() -> None:
    router, searches = Router(refuses=True), []

    def find() -> Router:
        searches.append(1)
        return router

    mapping = PortMapping(PORT, find)

    async def steps() -> None:
        for _ in range(3):
            assert await mapping.open() == PORT
        assert (mapping.is_open, len(searches)) == (False, 1)

    run(steps)


def test_where_no_router_forwards_ports_the_own_one_is_tried() -> None:
    def find() -> Router:
        raise Refused("no router answers")

    mapping = PortMapping(PORT, find)

    async def steps() -> None:
        assert await mapping.open() == PORT
        assert not mapping.is_open
        await mapping.close()

    run(steps)


def test_a_router_that_is_found_late_is_told_and_forwards_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.net.port_mapping._FOUND_S", 0.01)
    router, answers = Router(), threading.Event()

    def find() -> Router:
        answers.wait(30.0)
        return router

    async def steps() -> None:
        found = asyncio.Event()
        mapping = PortMapping(PORT, find, found.set)
        assert await mapping.open() == PORT
        assert (mapping.is_open, router.ports, found.is_set()) == (False, {}, False)
        answers.set()
        await found.wait()
        assert mapping.has_found_late
        assert mapping.is_searching
        assert await mapping.open() == PORT
        assert router.ports == {PORT: (OWN, PORT, LEASE_S)}
        assert (mapping.is_open, mapping.is_searching, mapping.has_found_late) == (True, False, False)

    run(steps)


def test_a_search_that_has_begun_before_is_waited_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.net.port_mapping._FOUND_S", 0.0)
    router, searches, begun = Router(), [], threading.Event()

    def find() -> Router:
        searches.append(1)
        begun.set()
        return router

    async def steps() -> None:
        mapping = PortMapping(PORT, find)
        mapping.begin()
        mapping.begin()
        await asyncio.to_thread(begun.wait, 30.0)
        while not mapping.has_found_late:  # noqa: ASYNC110  another thread's result
            await asyncio.sleep(0)
        assert await mapping.open() == PORT
        assert (mapping.is_open, searches, router.ports) == (True, [1], {PORT: (OWN, PORT, LEASE_S)})
        mapping.begin()  # the router is known
        assert await mapping.open() == PORT
        assert searches == [1]

    run(steps)


def test_a_router_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.net.port_mapping._FOUND_S", 0.05)
    answered = threading.Event()

    def find() -> None:
        answered.wait(30.0)

    mapping = PortMapping(PORT, find)

    async def steps() -> None:
        try:
            assert await mapping.open() == PORT
            assert await mapping.open() == PORT
            await mapping.close()
        finally:
            answered.set()

    run(steps)


def test_a_router_that_stalls_is_asked_once_and_not_for_every_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.net.port_mapping._CALL_S", 0.05)
    answered, calls = threading.Event(), []

    class Stalling(Router):
        def getspecificportmapping(self, outer: int, protocol: str) -> None:
            calls.append(outer)
            answered.wait(30.0)

    mapping = PortMapping(PORT, Stalling)

    async def steps() -> None:
        try:
            assert await mapping.open() == PORT
            assert (calls, mapping.is_open) == ([PORT], False)
        finally:
            answered.set()

    run(steps)


def test_a_router_that_refuses_to_renew_what_it_forwards_keeps_its_port() -> None:
    router = Router()
    mapping = PortMapping(PORT, lambda: router)

    async def steps() -> None:
        assert await mapping.open() == PORT
        router.refuses = True
        assert (await mapping.open(), mapping.is_open) == (PORT, True)
        assert set(router.ports) == {PORT}

    run(steps)


def test_a_port_that_is_being_renewed_is_given_back_too() -> None:
    router, is_asked, answers = Router(), threading.Event(), threading.Event()
    ask = router.addportmapping
    mapping = PortMapping(PORT, lambda: router)

    def late(*arguments: Any) -> bool:
        is_asked.set()
        answers.wait(30.0)
        return ask(*arguments)

    async def steps() -> None:
        await mapping.open()
        router.addportmapping = late  # type: ignore[method-assign]
        renewing = asyncio.create_task(mapping.open())
        await asyncio.to_thread(is_asked.wait, 30.0)
        closing = asyncio.create_task(mapping.close())
        await asyncio.sleep(0)
        answers.set()
        await closing
        await renewing
        assert router.ports == {}

    run(steps)


def test_the_router_is_searched_again_after_the_machine_has_moved() -> None:
    routers = [Router(), Router()]
    routers[1].lanaddr = OTHER
    mapping = PortMapping(PORT, lambda: routers.pop(0))

    async def steps() -> None:
        first, second = routers
        await mapping.open()
        mapping.on_moved()
        await mapping.open()
        assert (first.ports, second.ports) == ({PORT: (OWN, PORT, LEASE_S)}, {PORT: (OTHER, PORT, LEASE_S)})

    run(steps)
