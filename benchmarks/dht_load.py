"""What a DHT is asked to do: who stores which keys, who reads them, and how they are timed. Standard library
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
TTL_S = 600.0  # of every record: none expires in a run
REASONS_MAX = 3

# one operation on one key; "" when its result is right, else what was wrong
Work = Callable[[str], Awaitable[str]]
BulkWork = Callable[[Sequence[str]], Awaitable[list[str]]]  # one on many, with a word for each


def key_of(batch: str, writer: int, index: int) -> str:
    """`batch` is never used twice, so that no peer has ever seen the key."""
    return f"benchmark.{batch}.{writer}.{index}"


def value_of(key: str) -> bytes:
    """What is stored under a key: a reader knows it without having been told."""
    return b"".join(hashlib.sha256(f"{key} {part}".encode()).digest() for part in range(VALUE_BYTES // 32))


def own_keys(batch: str, rank: int, count: int) -> list[str]:
    return [key_of(batch, rank, index) for index in range(count)]


def keys_of_others(batch: str, rank: int, count: int, peers: int) -> list[str]:
    """`count` keys that other peers stored, from each other peer as many, and over all ranks every key once."""
    return [key_of(batch, (rank + 1 + index % (peers - 1)) % peers, index) for index in range(count)]


def keys_elsewhere(
    batch: str, rank: int, count: int, peers: int, stored: int, held: Callable[[str], bool]
) -> list[str]:
    """`count` of the `stored` keys of each other peer that this peer does not hold itself: reading them takes
    the network.
    """
    others = (
        key_of(batch, (rank + 1 + turn) % peers, (index + rank) % stored)
        for index in range(stored)
        for turn in range(peers - 1)
    )
    return [one for one in others if not held(one)][:count]


def wanted(order: dict[str, Any], held: Callable[[str], bool]) -> list[str]:
    """The keys of an order. `which`: "own" of a writer; of others, "any" or only those "elsewhere"."""
    batch, rank, count = order["batch"], order["rank"], order["count"]
    if order["which"] == "own":
        return own_keys(batch, rank, count)
    if order["which"] == "any":
        return keys_of_others(batch, rank, count, order["peers"])
    return keys_elsewhere(batch, rank, count, order["peers"], order["stored"], held)


async def run_concurrently(
    keys: Sequence[str], work: Work, *, at_s: float, concurrency: int
) -> dict[str, Any]:
    """`concurrency` operations at a time from `at_s` (monotonic) on; when the last ended, how many went
    wrong, and why.
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
    """All keys in one call of the contender's own bulk operation."""
    await _sleep_until(at_s)
    return _report(len(keys), [fault for fault in await work(keys) if fault])


async def run_one_by_one(keys: Sequence[str], work: Work) -> dict[str, Any]:
    """One operation after the other, each timed; "seconds" of each in the report."""
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
    """What a contender's peer can do, each answering as `Work` does; `held`: whether it has a key itself."""

    store: Work
    get: Work
    store_many: BulkWork
    get_many: BulkWork
    held: Callable[[str], bool]

    async def perform(self, order: dict[str, Any]) -> dict[str, Any]:
        """One order; the report on it."""
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
    """The peer serves others meanwhile, so it may not block. Late by a millisecond at most, which is counted."""
    await asyncio.sleep(max(0.0, monotonic_s - time.monotonic()))
