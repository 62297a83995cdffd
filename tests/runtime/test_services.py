"""Tests of the services of a node: one instance of each kind."""

from __future__ import annotations

import threading

import pytest

from swarm.runtime.services import Services


class Owner:
    def __init__(self) -> None:
        self.services = Services(self)


class Inner:
    def __init__(self, owner: Owner) -> None:
        self.owner = owner


class Outer:
    def __init__(self, owner: Owner) -> None:
        self.inner = owner.services.get(Inner)


def test_a_kind_has_one_instance_per_owner() -> None:
    one, other = Owner(), Owner()
    assert one.services.get(Inner) is one.services.get(Inner)
    assert one.services.get(Inner).owner is one
    assert one.services.get(Inner) is not other.services.get(Inner)


def test_a_constructor_may_request_another_service() -> None:
    owner = Owner()
    assert owner.services.get(Outer).inner is owner.services.get(Inner)


def test_concurrent_threads_get_the_same_instance() -> None:
    owner, together, found = Owner(), threading.Barrier(8), []

    def ask() -> None:
        together.wait(10.0)
        found.append(owner.services.get(Outer))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len(found) == 8
    assert len({id(one) for one in found}) == 1


def test_a_failing_constructor_leaves_no_instance() -> None:
    class Fails:
        made = 0

        def __init__(self, owner: Owner) -> None:
            Fails.made += 1
            if Fails.made == 1:
                raise ValueError("not yet")

    owner = Owner()
    with pytest.raises(ValueError, match="not yet"):
        owner.services.get(Fails)
    assert isinstance(owner.services.get(Fails), Fails)


def test_a_simulation_sets_its_own_instance() -> None:
    owner = Owner()
    mine = Inner(owner)
    owner.services.put(Inner, mine)
    assert owner.services.get(Outer).inner is mine
