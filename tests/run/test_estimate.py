"""The size of a run before joining it: of a small one from its members' reports, of one whose reports are
spread over shards from its aggregators' totals.
"""

from __future__ import annotations

import asyncio
from typing import Any

from averaging.optim.progress.logic.reports import ProgressReport, ProgressTotal
from averaging.optim.progress.logic.shards import TreeNode
from swarm.core.ids import Address, Key, PeerId
from swarm.dht.logic.records import Entry
from swarm.run.estimate import RunEstimate, estimate_run, read_members
from swarm.testing.identities import SeededIdentity

NOW_S = 1000.0
RUN = "a" * 20
OWN = SeededIdentity(0).peer_id
TOTAL = ProgressTotal(
    epoch=7, samples=0.0, rate=400.0, peers=200, median_rate=2.0, at_s=NOW_S, since_s=NOW_S, bits=2
)


class Clock:
    def monotonic_s(self) -> float:
        return NOW_S

    def swarm_s(self) -> float:
        return NOW_S


def entry(number: int, value: Any) -> Entry:
    writer: PeerId = SeededIdentity(number).peer_id
    return Entry(value=value, subkey=str(writer), writer=writer, issued_at=NOW_S, expiration=NOW_S + 60.0)


def report(number: int, **more: Any) -> Entry:
    progress = ProgressReport(epoch=7, samples=3, rate=2.0, at_s=NOW_S, since_s=NOW_S)
    addresses = [Address("203.0.113.7", 4000 + number).multiaddr]
    return entry(number, {**progress.encode(), "addresses": addresses, **more})


def notice(number: int, total: ProgressTotal = TOTAL) -> Entry:
    """Return what an aggregator of a large run publishes for newcomers."""
    empty = ProgressReport(epoch=7, samples=0, rate=0.0, at_s=NOW_S, since_s=NOW_S)
    return entry(number, {**empty.encode(), "total": total.encode()})


class Table:
    """A DHT with dictionaries of a run."""

    def __init__(self, **entries: list[Entry]) -> None:
        self._entries = {name.replace("_", "."): found for name, found in entries.items()}

    async def get(self, key: Key, **how: Any) -> dict[str, Entry] | None:
        found = self._entries.get(str(key).partition("/")[2])
        return {str(one.subkey): one for one in found} if found else None


def estimate(table: Any) -> RunEstimate:
    return asyncio.run(estimate_run(table, RUN, OWN, Clock()))


def members(table: Any) -> list[PeerId]:
    return [contact.peer_id for contact in asyncio.run(read_members(table, RUN, Clock()))]


def test_a_small_run_is_the_sum_of_its_reports_without_the_own_one() -> None:
    table = Table(progress=[report(0), report(1), report(2), entry(3, "no report")])
    assert estimate(table) == RunEstimate(peers=2, samples_per_s=4.0, epoch=7)
    assert members(table) == [SeededIdentity(number).peer_id for number in (0, 1, 2)]


def test_a_large_run_is_as_large_as_its_aggregators_say() -> None:
    table = Table(progress=[notice(1), notice(2), notice(3)], progress_2_0=[report(4), report(5)])
    assert estimate(table) == RunEstimate(peers=200, samples_per_s=400.0, epoch=7)
    assert TreeNode(2, 0, 0).name == "progress.2.0"
    assert members(table) == [SeededIdentity(number).peer_id for number in (4, 5)]


def test_one_liar_makes_a_small_run_no_larger() -> None:
    honest = [report(number) for number in (1, 2, 3)]
    assert estimate(Table(progress=[*honest, notice(4)])).peers == 4
    assert members(Table(progress=[*honest, notice(4)])) == [
        SeededIdentity(number).peer_id for number in (1, 2, 3)
    ]
