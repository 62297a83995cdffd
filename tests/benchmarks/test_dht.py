"""The DHT benchmark: the keys of each reader, the count of wrong results, and the figures of a row."""

from __future__ import annotations

import asyncio

from benchmarks.dht import Load, faults_of, rows_of
from benchmarks.dht_load import (
    VALUE_BYTES,
    keys_elsewhere,
    keys_of_others,
    own_keys,
    run_concurrently,
    run_one_by_one,
    value_of,
)
from benchmarks.interleaving import Tally
from benchmarks.measured_systems import Round

PEERS, COUNT = 4, 6


def test_every_key_is_read_once_and_never_by_its_writer() -> None:
    stored = [one for rank in range(PEERS) for one in own_keys("b", rank, COUNT)]
    read = [one for rank in range(PEERS) for one in keys_of_others("b", rank, COUNT, PEERS)]
    assert sorted(read) == sorted(stored)
    for rank in range(PEERS):
        assert not set(keys_of_others("b", rank, COUNT, PEERS)) & set(own_keys("b", rank, COUNT))
    assert len({value_of(one) for one in stored}) == len(stored)
    assert {len(value_of(one)) for one in stored} == {VALUE_BYTES}


def test_keys_elsewhere_are_stored_by_others_and_not_held() -> None:
    held = set(own_keys("b", 1, COUNT))
    found = keys_elsewhere("b", 2, 2 * COUNT, PEERS, COUNT, held.__contains__)
    assert len(found) == len(set(found)) == 2 * COUNT
    assert set(found) == {*own_keys("b", 0, COUNT), *own_keys("b", 3, COUNT)}


def test_every_key_is_handled_once_and_faults_are_counted() -> None:
    seen: list[str] = []

    async def work(key: str) -> str:
        seen.append(key)
        await asyncio.sleep(0)
        return "odd" if key in "13" else ""

    report = asyncio.run(run_concurrently("01234", work, at_s=0.0, concurrency=3))
    assert sorted(seen) == list("01234")
    assert (report["performed"], report["wrong"], report["reasons"]) == (5, 2, ["odd"])
    lone = asyncio.run(run_one_by_one("024", work))
    assert (len(lone["seconds"]), lone["wrong"]) == (3, 0)
    assert faults_of([report, lone], 5) == ["2 operations: odd", "3 operations, not 5"]


def test_rows_count_operations_of_all_peers_and_have_the_aims() -> None:
    def tally(name: str, scale: float) -> Tally:
        phases = {
            "stores": 2.0 * scale,
            "gets": 1.0 * scale,
            "gets elsewhere": 0.5 * scale,
            "bulk stores": 0.5 * scale,
            "bulk gets": 0.5 * scale,
            "one store": 0.002 * scale,
            "one get": 0.001 * scale,
        }
        return Tally(name, rounds=[Round(ok=True, phases=phases)])

    load = Load(peers=8, operations=30, far_operations=15)
    found = {row.identifier: row for row in rows_of(load, tally("ours", 1.0), tally("theirs", 3.5))}
    assert found["dht-8-all"].ours.median == 2 * 8 * 30 / 3.0
    assert found["dht-8-far"].ours.median == 8 * 45 / 2.5
    assert (found["dht-8-all"].ratio, found["dht-8-all"].met) == (3.5, True)
    assert found["dht-8-all-bulk"].ours.median == 2 * 8 * 30 / 1.0
    assert (found["dht-8-one-get"].ours.median, found["dht-8-one-get"].met) == (0.001, True)
