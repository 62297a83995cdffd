"""The input cache is bounded, and one caller does not evict another's inputs."""

from __future__ import annotations

import random

import pytest

from moe.server.logic.input_cache import InputCache


def test_a_value_is_cached_until_it_is_dropped() -> None:
    kept: InputCache[str] = InputCache()
    assert kept.put("x", 1, "inputs", 100)
    assert kept.get("x", 1) == "inputs"
    assert kept.get("y", 1) is None
    kept.drop("x", 1)
    kept.drop("x", 1)
    assert kept.get("x", 1) is None
    assert kept.size_bytes == 0


def test_a_caller_evicts_only_its_own_entries() -> None:
    kept: InputCache[str] = InputCache(bytes_max=1000, bytes_per_caller_max=300, entry_overhead_bytes=0)
    kept.put("quiet", 0, "kept", 100)
    for number in range(50):
        assert kept.put("loud", number, "", 100)
    assert kept.get("quiet", 0) == "kept"
    assert [number for number in range(50) if kept.get("loud", number) is not None] == [47, 48, 49]
    assert not kept.put("loud", 99, "", 301)


@pytest.mark.parametrize("seed", range(10))
def test_limits_hold_under_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    kept: InputCache[int] = InputCache(bytes_max=2000, bytes_per_caller_max=800, entry_overhead_bytes=10)
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
            == sum(size for _, size in kept._entries.values())
            == sum(kept._caller_bytes.values())
        )
        assert all(size <= 800 for size in kept._caller_bytes.values())
        for (who, what), _ in kept._entries.items():
            assert kept.get(who, what) == mirror[str(who), int(str(what))]
        most = max(most, len(kept._entries))
    assert most > 3
