"""The cache of a server is bounded; one caller does not evict another's entries, nor strangers a member's."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from moe.server.logic.caller_cache import CacheLimits, CallerCache


def is_stranger(caller: Hashable) -> bool:
    return caller in ("d", "e")


def limits(bytes_max: int, per_caller: int, strangers: int, overhead: int = 0) -> CacheLimits:
    return CacheLimits(
        bytes_max=bytes_max,
        bytes_per_caller_max=per_caller,
        strangers_bytes_max=strangers,
        entry_overhead_bytes=overhead,
    )


def test_a_value_is_cached_until_it_is_dropped() -> None:
    kept: CallerCache[str] = CallerCache(limits(1 << 20, 1 << 20, 1 << 20), is_stranger)
    assert kept.put("x", 1, "inputs", 100)
    assert kept.get("x", 1) == "inputs"
    assert kept.get("y", 1) is None
    kept.drop("x", 1)
    kept.drop("x", 1)
    assert kept.get("x", 1) is None
    assert kept.size_bytes == 0


def test_a_caller_evicts_only_its_own_entries() -> None:
    kept: CallerCache[str] = CallerCache(limits(1000, 300, 500), is_stranger)
    kept.put("quiet", 0, "kept", 100)
    for number in range(50):
        assert kept.put("loud", number, "", 100)
    assert kept.get("quiet", 0) == "kept"
    assert [number for number in range(50) if kept.get("loud", number) is not None] == [47, 48, 49]
    assert not kept.put("loud", 99, "", 301)


@pytest.mark.parametrize("seed", range(10))
def test_limits_hold_under_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    kept: CallerCache[int] = CallerCache(limits(2000, 800, 900, 10), is_stranger)
    mirror: dict[tuple[str, int], int] = {}
    most = 0
    for step in range(2000):
        caller, name = rng.choice("abcde"), rng.randrange(20)
        if rng.random() < 0.7:
            size = rng.randrange(900)
            if kept.put(caller, name, step, size):
                mirror[caller, name] = step
        else:
            kept.drop(caller, name)
            mirror.pop((caller, name), None)
        assert kept.size_bytes <= 2000
        assert (
            kept.size_bytes
            == sum(entry.size_bytes for entry in kept._entries.values())
            == sum(kept._caller_bytes.values())
        )
        assert kept.strangers_bytes <= 900
        assert kept.strangers_bytes == sum(kept._caller_bytes.get(one, 0) for one in ("d", "e"))
        assert all(size <= 800 for size in kept._caller_bytes.values())
        for who, what in kept._entries:
            assert kept.get(who, what) == mirror[str(who), int(str(what))]
        most = max(most, len(kept))
    assert most > 3


def test_strangers_displace_strangers_only_and_members_displace_them() -> None:
    kept: CallerCache[str] = CallerCache(limits(1000, 1000, 400), is_stranger)
    kept.put("member", 0, "kept", 500)
    assert not kept.put("d", 0, "", 401)
    for number in range(50):
        assert kept.put("de"[number % 2], number, "", 100)
    assert kept.strangers_bytes == 400
    assert kept.get("member", 0) == "kept"
    assert kept.put("other member", 0, "also", 500)
    assert kept.strangers_bytes == 0
    assert (kept.get("member", 0), kept.get("other member", 0)) == ("kept", "also")
