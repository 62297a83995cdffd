"""The DHT, a process a peer on loopback: stores and gets from all peers at once, and one operation alone, ours beside hivemind."""

from __future__ import annotations

import itertools
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.allreduce import HIVEMIND, Setting
from benchmarks.contenders import READY_TIMEOUT_S, Contender, Round
from benchmarks.dht_load import keys_of_others, own_keys
from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed
from benchmarks.results import Aim, Row
from benchmarks.turns import Plan, Tally, take_turns

SIZES = (8, 16)
TIMES_FASTER = {8: 3.0, 16: 5.0}
HALF = 0.5
OPERATIONS = {8: 150, 16: 60}  # stores, and as many gets, of each peer in a round
CONCURRENCY = 16
ALONE = 50
START_AHEAD_S = 0.1
ORDER_TIMEOUT_S = 90.0
JOIN_TIMEOUT_S = 30.0
JOIN_POLL_S = 0.2
LIMIT = "processor time: all peers share the cores"
ALONE_LIMIT = "one round trip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every peer does in a round."""

    peers: int
    operations: int  # stores, and as many gets
    concurrency: int = CONCURRENCY  # operations that a peer has in flight
    alone: int = ALONE  # operations of one peer while the others rest
    bulk: bool = False  # all keys in one call of the contender's bulk operation; without bulk: `concurrency` calls of one key each


class Peers:
    """A contender: processes that know `store` and `get`."""

    def __init__(self, name: str, *, python: Path, module: str, load: Load) -> None:
        self._name, self._load = name, load
        self._launch = Launch(name, python=python, module=f"benchmarks.workers.{module}", configurations=[{"peers": load.peers}] * load.peers)
        self._batches = (f"{uuid.uuid4().hex[:8]}.{number}" for number in itertools.count())

    @property
    def name(self) -> str:
        return self._name

    def __enter__(self) -> Peers:
        self._launch.__enter__()
        try:
            self._launch.hear("ready", READY_TIMEOUT_S)
            self._wait_joined()
        except BaseException:
            self._launch.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._launch.__exit__(kind, error, trace)

    def round(self) -> Round:
        """Stores from all, a pause in which everybody has finished, gets from all; then one peer alone."""
        load, batch = self._load, next(self._batches)
        before_s = self._launch.processor_s()
        stores_s, wrong = self._together("store", [own_keys(batch, rank, load.operations) for rank in range(load.peers)])
        gets_s, more = self._together("get", [keys_of_others(batch, rank, load.operations, load.peers) for rank in range(load.peers)])
        processor_s = self._launch.processor_s() - before_s
        wrong += more
        phases = {"stores": stores_s, "gets": gets_s}
        if load.alone:
            batch = next(self._batches)
            phases["one store"], more = self._alone("store", own_keys(batch, 0, load.alone), rank=0)
            wrong += more
            phases["one get"], more = self._alone("get", own_keys(batch, 0, load.alone), rank=load.peers - 1)
            wrong += more
        return Round(
            ok=not wrong,
            reason="; ".join(dict.fromkeys(wrong)),
            wrong=False,
            whole_s=stores_s + gets_s,
            reduce_s=0.0,
            processor_s=processor_s,
            delivered=1.0 if not wrong else 0.0,
            phases=phases,
        )

    def _wait_joined(self) -> None:
        """Until every peer knows every other: a swarm of this size is known whole by all."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            self._launch.tell("known")
            known = [answer["peers"] for answer in self._launch.hear("known", READY_TIMEOUT_S)]
            if min(known) >= self._load.peers - 1:
                return
            if time.monotonic() > deadline_s:
                raise LaunchFailed(f"{self._name}: after {JOIN_TIMEOUT_S:g} s peers know {known} others, not {self._load.peers - 1}")
            time.sleep(JOIN_POLL_S)

    def _together(self, what: str, keys: list[list[str]]) -> tuple[float, list[str]]:
        """(seconds from the aligned start to the slowest peer's end, what went wrong)."""
        at_s = time.monotonic() + START_AHEAD_S
        how = "bulk" if self._load.bulk else "together"
        for worker, own in zip(self._launch.workers, keys, strict=True):
            worker.tell({"do": what, "how": how, "at_s": at_s, "keys": own, "concurrency": self._load.concurrency})
        done = self._launch.hear("done", ORDER_TIMEOUT_S)
        return max(report["end_s"] for report in done) - at_s, _faults(done)

    def _alone(self, what: str, keys: list[str], *, rank: int) -> tuple[float, list[str]]:
        worker = self._launch.workers[rank]
        worker.tell({"do": what, "how": "alone", "keys": keys})
        done = worker.hear("done", time.monotonic() + ORDER_TIMEOUT_S)
        return statistics.median(done["seconds"]), _faults([done])


def _faults(done: list[dict[str, Any]]) -> list[str]:
    return [f"{report['wrong']} operations: {reason}" for report in done for reason in report["reasons"]]
