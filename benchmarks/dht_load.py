"""The load on a DHT: which peer stores and reads which keys, and how operations are timed. Standard library
only.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

VALUE_BYTES = 96
TTL_S = 600.0  # no record expires in a run
REASONS_MAX = 3

# one operation on one key; returns "" when the result is right, else what is wrong
Work = Callable[[str], Awaitable[str]]
BulkWork = Callable[
    [Sequence[str]], Awaitable[list[str]]
]  # one operation on many keys, with a result for each


def key_of(batch: str, writer: int, index: int) -> str:
    """Return the key of a writer's record. `batch` is never used twice, so every key is new."""
    return f"benchmark.{batch}.{writer}.{index}"


def value_of(key: str) -> bytes:
    """Return the value stored under a key. Readers compute it themselves to check what they read."""
    return b"".join(hashlib.sha256(f"{key} {part}".encode()).digest() for part in range(VALUE_BYTES // 32))


def own_keys(batch: str, rank: int, count: int) -> list[str]:
    return [key_of(batch, rank, index) for index in range(count)]


def keys_of_others(batch: str, rank: int, count: int, peers: int) -> list[str]:
    """Return `count` keys stored by other peers, equally many of each; over all ranks each key once."""
    return [key_of(batch, (rank + 1 + index % (peers - 1)) % peers, index) for index in range(count)]


def keys_elsewhere(
    batch: str, rank: int, count: int, peers: int, stored: int, held: Callable[[str], bool]
) -> list[str]:
    """Return up to `count` of the `stored` keys of each other peer that this peer does not hold: reading them
    takes the network.
    """
    others = (
        key_of(batch, (rank + 1 + turn) % peers, (index + rank) % stored)
        for index in range(stored)
        for turn in range(peers - 1)
    )
    return [one for one in others if not held(one)][:count]


def wanted(order: dict[str, Any], held: Callable[[str], bool]) -> list[str]:
    """Return the keys of an order. `which` is "own" for a writer; for a reader "any", or "elsewhere" for keys
    that it does not hold.
    """
    batch, rank, count = order["batch"], order["rank"], order["count"]
    if order["which"] == "own":
        return own_keys(batch, rank, count)
    if order["which"] == "any":
        return keys_of_others(batch, rank, count, order["peers"])
    return keys_elsewhere(batch, rank, count, order["peers"], order["stored"], held)


async def run_concurrently(
    keys: Sequence[str], work: Work, *, at_s: float, concurrency: int
) -> dict[str, Any]:
    """Run `concurrency` operations at a time from `at_s` (monotonic) on. Return the end, the number of
    failures and why.
    """
    await _sleep_until(at_s)
    left = iter(keys)
    wrong: list[str] = []

    async def worker() -> None:
        for one in left:
            fault = await work(one)
            if fault:
                wrong.append(fault)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return _report(len(keys), wrong)


async def run_in_bulk(keys: Sequence[str], work: BulkWork, *, at_s: float) -> dict[str, Any]:
    """Handle all keys in one call of the system's own bulk operation."""
    await _sleep_until(at_s)
    return _report(len(keys), [fault for fault in await work(keys) if fault])


async def run_one_by_one(keys: Sequence[str], work: Work) -> dict[str, Any]:
    """Run one operation after the other. The report has "seconds" of each."""
    seconds: list[float] = []
    wrong: list[str] = []
    for one in keys:
        started_s = time.perf_counter()
        fault = await work(one)
        seconds.append(time.perf_counter() - started_s)
        if fault:
            wrong.append(fault)
    return {**_report(len(keys), wrong), "seconds": seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The operations of a system's peer, each with the results of `Work`. `held(key)` returns whether the
    peer holds a key.
    """

    store: Work
    get: Work
    store_many: BulkWork
    get_many: BulkWork
    held: Callable[[str], bool]

    async def perform(self, order: dict[str, Any]) -> dict[str, Any]:
        """Perform one order and return the report on it."""
        keys = wanted(order, self.held)
        one, many = (self.store, self.store_many) if order["do"] == "store" else (self.get, self.get_many)
        if order["how"] == "one by one":
            return await run_one_by_one(keys, one)
        if order["how"] == "bulk":
            return await run_in_bulk(keys, many, at_s=order["at_s"])
        return await run_concurrently(keys, one, at_s=order["at_s"], concurrency=order["concurrency"])


def _report(performed: int, wrong: Sequence[str]) -> dict[str, Any]:
    return {
        "end_s": time.monotonic(),
        "performed": performed,
        "wrong": len(wrong),
        "reasons": list(dict.fromkeys(wrong))[:REASONS_MAX],
    }


async def _sleep_until(monotonic_s: float) -> None:
    """Sleep without blocking the loop, since the peer serves others meanwhile. The delay of at most a
    millisecond is included in the measured time.
    """
    await asyncio.sleep(max(0.0, monotonic_s - time.monotonic()))
