"""The DHT on loopback, one process per peer: concurrent stores and gets, and single operations, compared with
hivemind.
"""

from __future__ import annotations

import itertools
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.allreduce import HIVEMIND, Setting
from benchmarks.environments import OWN_PYTHON
from benchmarks.interleaving import Tally, interleave
from benchmarks.launched_system import LaunchedSystem
from benchmarks.measured_systems import READY_TIMEOUT_S, MeasuredSystem, Round
from benchmarks.results import Aim, Row, Series

SIZES = (8, 16)
TIMES_FASTER = {8: 3.0, 16: 5.0}
GET_SHARE_MAX = {8: 0.6, 16: 0.4}
STORE_SHARE_MAX = 0.5
OPERATIONS = {8: 100, 16: 30}  # stores, and equally many gets, of each peer in a round
CONCURRENCY = 16
ALONE = 25
KEYS_FOR_ALONE = 128  # keys of all writers together; enough that the reader does not hold ALONE of them
WARM_UP = 2
START_AHEAD_S = 0.1
ORDER_TIMEOUT_S = 90.0
JOIN_S_MAX = 5.0
JOIN_POLL_S = 0.2
LIMIT = "processor time: all peers share the cores"
ALONE_LIMIT = "one round trip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The operations of every peer in a round."""

    peers: int
    operations: int  # stores, and equally many gets
    concurrency: int = CONCURRENCY  # operations in flight per peer
    alone: int = ALONE  # operations of one peer while the others idle
    # gets of keys that the reader does not hold; fewer, because a hivemind peer keeps all keys that it has
    # read
    far_operations: int


class Peers(LaunchedSystem):
    """Processes that accept the orders `store` and `get`."""

    def __init__(self, name: str, *, python: Path, module: str, load: Load) -> None:
        super().__init__(
            name, python=python, module=module, configurations=[{"peers": load.peers}] * load.peers
        )
        self._load = load
        self._batches = (f"{uuid.uuid4().hex[:8]}.{number}" for number in itertools.count())

    def round(self) -> Round:
        """Run one round: concurrent operations of all peers, then bulk operations, then those of one peer
        alone.

        All peers store, then all get, then all get keys that they do not hold, each with `concurrency` calls
        of one key in flight. Then all peers store and get again, each with all keys in one bulk call. Finally
        one peer performs one operation after the other.
        """
        load, batch = self._load, next(self._batches)
        before_s = self._launch.processor_s()
        stores = self._run_concurrently("store", "own", batch)
        gets = self._run_concurrently("get", "any", batch)
        processor_s = self._launch.processor_s() - before_s
        far_gets = self._run_concurrently("get", "elsewhere", batch, load.far_operations)
        batch = next(self._batches)
        bulk_stores = self._run_concurrently("store", "own", batch, bulk=True)
        bulk_gets = self._run_concurrently("get", "any", batch, bulk=True)
        phases = {"stores": stores.seconds, "gets": gets.seconds, "gets elsewhere": far_gets.seconds}
        phases |= {"bulk stores": bulk_stores.seconds, "bulk gets": bulk_gets.seconds}
        wrong = [*stores.wrong, *gets.wrong, *far_gets.wrong, *bulk_stores.wrong, *bulk_gets.wrong]
        if load.alone:
            one_store = self._run_one_by_one("store", "own", next(self._batches), rank=0)
            batch = next(self._batches)
            self._run_concurrently("store", "own", batch, KEYS_FOR_ALONE // load.peers)
            one_get = self._run_one_by_one(
                "get", "elsewhere", batch, rank=load.peers - 1, stored=KEYS_FOR_ALONE // load.peers
            )
            phases |= {"one store": one_store.seconds, "one get": one_get.seconds}
            wrong += [*one_store.wrong, *one_get.wrong]
        return Round(
            ok=not wrong,
            reason="; ".join(dict.fromkeys(wrong)),
            whole_s=stores.seconds + gets.seconds,
            processor_s=processor_s,
            phases=phases,
        )

    def _prepare(self) -> None:
        """Wait until every peer knows every other, at most JOIN_S_MAX: hivemind's peers meet the last ones in
        the warm-up.
        """
        deadline_s = time.monotonic() + JOIN_S_MAX
        while True:
            self._launch.send("known")
            known = [answer["peers"] for answer in self._launch.receive("known", READY_TIMEOUT_S)]
            if min(known) >= self._load.peers - 1 or time.monotonic() > deadline_s:
                return
            time.sleep(JOIN_POLL_S)

    def _run_concurrently(
        self, what: str, which: str, batch: str, count: int | None = None, *, bulk: bool = False
    ) -> _Phase:
        """Let all peers work at once. The seconds count from the aligned start to the end of the slowest
        peer.
        """
        load, at_s = self._load, time.monotonic() + START_AHEAD_S
        count = load.operations if count is None else count
        order = {"how": "bulk" if bulk else "concurrent", "at_s": at_s, "concurrency": load.concurrency}
        for rank, worker in enumerate(self._launch.workers):
            worker.send(self._order(what, which, batch, rank, count) | order)
        done = self._launch.receive("done", ORDER_TIMEOUT_S)
        return _Phase(max(report["end_s"] for report in done) - at_s, faults_of(done, count))

    def _run_one_by_one(self, what: str, which: str, batch: str, *, rank: int, stored: int = 0) -> _Phase:
        """Let one peer perform one operation after the other while the others only serve. Return the median
        seconds.
        """
        worker = self._launch.workers[rank]
        worker.send(
            self._order(what, which, batch, rank, self._load.alone) | {"how": "one by one", "stored": stored}
        )
        done = worker.receive("done", time.monotonic() + ORDER_TIMEOUT_S)
        return _Phase(statistics.median(done["seconds"]), faults_of([done], self._load.alone))

    def _order(self, what: str, which: str, batch: str, rank: int, count: int) -> dict[str, Any]:
        return {
            "do": what,
            "which": which,
            "batch": batch,
            "rank": rank,
            "count": count,
            "peers": self._load.peers,
            "stored": self._load.operations,
        }


@dataclass(frozen=True, slots=True)
class _Phase:
    seconds: float
    wrong: list[str]


def faults_of(done: Sequence[dict[str, Any]], count: int) -> list[str]:
    found = [f"{report['wrong']} operations: {reason}" for report in done for reason in report["reasons"]]
    return found + [
        f"{report['performed']} operations, not {count}" for report in done if report["performed"] != count
    ]


def rows(setting: Setting, *, peers: int) -> list[Row]:
    """Measure one number of peers and return its rows; all systems are open at the same time."""
    load = Load(peers=peers, operations=OPERATIONS[peers], far_operations=OPERATIONS[peers] // 2)

    def own() -> MeasuredSystem:
        return Peers("swarm", python=OWN_PYTHON, module="swarm_dht", load=load)

    def theirs() -> MeasuredSystem:
        assert setting.hivemind is not None
        return Peers(HIVEMIND, python=setting.hivemind, module="hivemind_dht", load=load)

    names, makers = ["swarm"], [own]
    if setting.hivemind is not None:
        names.append(HIVEMIND)
        makers.append(theirs)
    setting.say(f"DHT, {peers} peers: {', '.join(names)}")
    plan = replace(setting.plan, warm_up=WARM_UP)  # the first rounds open connections
    tallies = interleave(makers, names, plan, setting.say)
    return rows_of(load, tallies[0], tallies[1] if len(tallies) == 2 else None)


def rows_of(load: Load, own: Tally, peer: Tally | None) -> list[Row]:
    faster = Aim(of="ours / peer", sense="at least", value=TIMES_FASTER[load.peers])
    fast_get = Aim(of="ours / peer", sense="at most", value=GET_SHARE_MAX[load.peers])
    fast_store = Aim(of="ours / peer", sense="at most", value=STORE_SHARE_MAX)
    title = f"DHT, {load.peers} peers"
    crowd = f"{title}, {load.operations} keys each, {load.concurrency} operations in flight each"

    def row(identifier: str, quantity: str, phases: tuple[str, ...], aim: Aim | None) -> Row:
        one = phases[0].startswith("one ")
        return Row(
            identifier=f"dht-{load.peers}-{identifier}",
            workload=title + ", the others idle" if one else crowd,
            quantity=quantity,
            ours=_series(own, load, phases),
            peer=None if peer is None else _series(peer, load, phases),
            aim=aim if peer is not None else None,
            shown="ours / peer",
            limit=ALONE_LIMIT if one else LIMIT,
            notes=tuple(tally.spending() for tally in (own, peer) if tally is not None)
            if identifier == "all"
            else (),
        )

    both, far, bulk = ("stores", "gets"), ("stores", "gets elsewhere"), ("bulk stores", "bulk gets")
    return [
        row("all", "stores, then gets of others' keys, from all at once", both, faster),
        row(
            "all-bulk",
            "the same, all keys of a process in one call of store_many and one of get_many",
            bulk,
            faster,
        ),
        row("far", "stores, then gets of others' keys that the reader does not hold", far, faster),
        row("stores", "stores from all at once", ("stores",), None),
        row("gets", "gets of others' keys from all at once; replicas read their own copies", ("gets",), None),
        row(
            "gets-far",
            "gets of keys that the reader does not hold, from all at once",
            ("gets elsewhere",),
            None,
        ),
        row("one-store", "one store", ("one store",), fast_store),
        row("one-get", "one get of a key that the reader does not hold", ("one get",), fast_get),
    ]


def _series(tally: Tally, load: Load, phases: tuple[str, ...]) -> Series:
    """Return operations per second over these phases together; for single operations, their seconds."""
    words = " and ".join(phases)
    if phases[0].startswith("one "):
        return tally.series(words, lambda outcome: outcome.phases.get(phases[0]))
    operations = load.peers * sum(
        load.far_operations if phase == "gets elsewhere" else load.operations for phase in phases
    )
    return tally.series(
        words,
        lambda outcome: operations / sum(outcome.phases[phase] for phase in phases),
        unit="operations/s",
    )
