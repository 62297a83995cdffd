"""A node and a run under attack by strangers, on real sockets: how late the node's event loop is, how much
memory it takes, and how many epochs the run still completes.

The node, or each member of the run, is a process that trains; the attacker is another one, of one address:
all of loopback is one network, as a /24 is. Floods last seconds and are bounded in what they send. Lateness
that the node's own work does not explain is the machine's and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed, Worker
from benchmarks.results import Aim, Row, Series

FLOODS = {
    "nothing": "nothing",
    "records": "requests that store as much as they may, each of a new identity",
    "shared_finds": "256 shared questions in one message for a key of a megabyte, no answer read",
    "long_finds": "questions for a key of 4,096 entries and 63 others",
    "many_queries": "256 questions in one call",
    "half_sent": "requests of a megabyte that never arrive, 256 on each of 13 connections",
    "leases": "places for downloads that nobody uses",
    "forged_records": "records with expensive values and no signature",
    "garbage": "connections that send random bytes",
    "silent_tcp": "500 TCP connections that send nothing",
    "idle_tls": "500 TLS connections that call nothing",
    "empty_streams": "256 empty streams on each of 13 connections",
}
MEMBERS = (2, 4)
CROWDS = (1, 10, 1000)  # identities of one attacker
LATE_S_MAX = 0.05
MEMORY_BYTES_MAX = 64 << 20
PACE_MIN = 0.9  # of the epochs without an attack
_MODULE = "benchmarks.workers.attacked_node"
_START_S, _ANSWER_S = 120.0, 60.0
_PAUSE_S = 1.5  # after a flood, for connections to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long, and how often, each attack is measured."""

    flood_s: float = 8.0
    window_s: float = 15.0
    passes: int = 1  # of each flood
    turns: int = 2  # of each crowd
    floods: tuple[str, ...] = tuple(FLOODS)
    members: tuple[int, ...] = MEMBERS


QUICK = Plan(flood_s=2.0, floods=("nothing", "shared_finds", "half_sent", "forged_records"), members=())


def rows(say: Callable[[str], None], plan: Plan | None = None) -> list[Row]:
    """Measure every flood, then runs of members with strangers, and return the rows."""
    plan = plan or Plan()
    found = [row for name in plan.floods for row in _flooded(say, plan, name)]
    for members in plan.members:
        found += _beside(say, plan, members)
    return found


class Attack(Launch):
    """Members of a run, and a process that attacks the first of them."""

    def __init__(self, members: int) -> None:
        configurations = [{"target": 16 * members} for _ in range(members)]
        super().__init__("attacked", python=OWN_PYTHON, module=_MODULE, configurations=configurations)

    def __enter__(self) -> Attack:
        """Start the members, wait until they train, and start the attacker."""
        super().__enter__()
        try:
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _begin(self) -> None:
        answers = self.receive("ready", _START_S)
        self.members: Sequence[Worker] = list(self.workers)
        self.attacker = self.add({"address": answers[0]["address"]}, "benchmarks.workers.attacker")
        self.attacker.receive("ready", time.monotonic() + _START_S)
        time.sleep(_PAUSE_S)

    def measured(self) -> dict[str, Any]:
        """Return the first member's figures since the last call."""
        self.members[0].send({"do": "measure"})
        return self.members[0].receive("measured", time.monotonic() + _ANSWER_S)

    def flood(self, do: str, seconds: float, identities: int = 0) -> int:
        """Attack for a time; return how many requests or connections that were."""
        self.attacker.send({"do": do, "seconds": seconds, "identities": identities})
        answer = self.attacker.receive("flooded", time.monotonic() + seconds + _ANSWER_S)
        return int(answer["count"])


def _flooded(say: Callable[[str], None], plan: Plan, name: str) -> list[Row]:
    late_s: list[float] = []
    memory_bytes: list[float] = []
    notes: list[str] = []
    reasons: list[str] = []
    for _ in range(plan.passes):  # each on a new node, because freed memory is not returned to the system
        try:
            with Attack(1) as attack:
                rest = attack.measured()
                count = attack.flood(name, plan.flood_s)
                figures = attack.measured()
        except LaunchFailed as failure:
            reasons.append(str(failure).partition("; its log ends")[0])
            continue
        late_s.append(figures["late_s"])
        memory_bytes.append(max(figures["memory_bytes"] - rest["memory_after_bytes"], 0))
        notes.append(
            f"{count} requests answered, or connections held, in {plan.flood_s:g} s; 99 % of turns at most "
            f"{1e3 * figures['late_99_s']:.1f} ms late, the longest {1e3 * figures['wall_late_s']:.0f} ms by "
            f"the wall clock; {figures['epoch'] - rest['epoch']} epochs"
        )
        say(f"{name}: {1e3 * late_s[-1]:.0f} ms late, {memory_bytes[-1] / 2**20:.0f} MiB; {notes[-1]}")

    def row(kind: str, quantity: str, unit: str, samples: list[float], aim: float) -> Row:
        return Row(
            identifier=f"attacks-{name.replace('_', '-')}-{kind}",
            workload=f"a node under {FLOODS[name]}",
            quantity=quantity,
            ours=Series(
                name=f"swarm: {name}, {kind}",
                unit=unit,
                samples=tuple(samples),
                launches_failed=len(reasons),
                reasons=tuple(dict.fromkeys(reasons)),
            ),
            peer=None,
            aim=Aim(of="ours", sense="at most", value=aim),
            notes=tuple(notes) if kind == "lag" else (),
        )

    return [
        row("lag", "the longest that its event loop was late by its own work", "s", late_s, LATE_S_MAX),
        row("memory", "memory above that at rest, at most", "bytes", memory_bytes, MEMORY_BYTES_MAX),
    ]


def _beside(say: Callable[[str], None], plan: Plan, members: int) -> list[Row]:
    """Measure the pace of a run without strangers and with each crowd, in turn."""
    paces: dict[int, list[float]] = {identities: [] for identities in (0, *CROWDS)}
    reasons: list[str] = []
    try:
        with Attack(members) as attack:
            for _ in range(plan.turns):
                for identities in paces:
                    before, began_s = attack.measured(), time.monotonic()
                    attack.flood("crowd" if identities else "nothing", plan.window_s, identities)
                    epochs, took_s = attack.measured()["epoch"] - before["epoch"], time.monotonic() - began_s
                    paces[identities].append(60.0 * epochs / took_s)
                    say(f"{members} members, {identities} strangers: {paces[identities][-1]:.0f} epochs/min")
                    time.sleep(_PAUSE_S)
    except LaunchFailed as failure:
        reasons.append(str(failure).partition("; its log ends")[0])
    alone = Series(name="swarm without strangers: pace", unit="epochs/min", samples=tuple(paces[0]))
    return [
        Row(
            identifier=f"attacks-{members}-{identities}-pace",
            workload=f"a run of {members} members beside {identities} identities of one stranger",
            quantity="epochs per minute",
            ours=Series(
                name=f"swarm: {identities} strangers",
                unit="epochs/min",
                samples=tuple(paces[identities]),
                launches_failed=len(reasons),
                reasons=tuple(reasons),
            ),
            peer=alone,
            aim=Aim(of="ours / peer", sense="at least", value=PACE_MIN),
            shown="ours / peer",
        )
        for identities in CROWDS
    ]
