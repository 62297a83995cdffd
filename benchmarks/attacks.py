"""A node and a run under attack by strangers, on real sockets: the delay of the node's event loop, its
memory, and the epochs that the run still completes.

The node, or each member of the run, is a process that trains. The attacker is another process with one
address prefix, because all of 127.0.0 is one /24 network. Floods last seconds, and the data that they send is
bounded. Delays that the node's own work does not explain are due to the machine and are left out. The
attacker shares the processor with its victims here, at the lowest priority. The victims' costs are also given
in processor time, which does not depend on that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from averaging.history.electors import FOUNDING_MAX
from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed, Worker
from benchmarks.results import Aim, Failures, Row, Series

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
    "scattered_tls": "500 TLS connections from 20 networks that call nothing",
    "empty_streams": "256 empty streams on each of 13 connections",
    "unnamed_tls": "TLS handshakes that show no certificate",
    "reconnects": "connections of one call each, made again and again",
    "experts": "forward and backward calls of an expert, a megabyte each, by 4 identities at once",
}
LATE_S_MAX = 0.05
MEMORY_BYTES_MAX = 64 << 20
_MODULE = "benchmarks.workers.attacked_node"
_START_S, _START_S_PER_MEMBER, _ANSWER_S = 120.0, 15.0, 60.0
_PAUSE_S = 1.5  # after a flood, for connections to end


@dataclass(frozen=True, slots=True)
class Crowd:
    """The identities of one attacker, and the /24 networks from which they call."""

    identities: int
    networks: int = 1

    @property
    def pace_min(self) -> float:
        """Return the aim as a fraction of the epochs without an attack."""
        return 0.95 if self.networks == 1 else 0.9


NOBODY = Crowd(0)
CROWDS = (Crowd(1), Crowd(10), Crowd(1000), Crowd(1000, 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackedRun:
    """A run among crowds, each measured in every turn. A step takes `step_s` besides its processor time, and
    an epoch `steps` of them: members that share the cores must leave some of them to the strangers.
    """

    members: int
    crowds: tuple[Crowd, ...] = CROWDS
    turns: int = 2
    step_s: float = 0.05
    steps: int = 16
    window_s: float = 10.0


LARGE_RUN = AttackedRun(members=33, turns=1, step_s=0.5, steps=8, window_s=80.0)
ATTACKED_RUNS = (AttackedRun(members=2), AttackedRun(members=4), LARGE_RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Duration and number of measurements of each attack."""

    flood_s: float = 8.0
    passes: int = 1  # of each flood
    floods: tuple[str, ...] = tuple(FLOODS)
    attacked_runs: tuple[AttackedRun, ...] = ATTACKED_RUNS
    figures: frozenset[str] = frozenset()  # such as "silent_tcp" or "crowd-2"; empty: all


# Windows of two epochs: the short form only shows that crowds can be measured.
QUICK = Plan(
    flood_s=2.0,
    floods=("nothing", "shared_finds", "half_sent", "forged_records"),
    attacked_runs=tuple(AttackedRun(members=members, turns=1, window_s=2.0) for members in (2, 4)),
)
QUICK_CROWDS = Plan(floods=(), attacked_runs=QUICK.attacked_runs[:1])


def rows(say: Callable[[str], None], plan: Plan | None = None) -> list[Row]:
    """Measure every flood, then runs of members with strangers, and return the rows."""
    plan = plan or Plan()
    wanted = plan.figures or frozenset(figures(plan))
    found = [row for name in plan.floods if name in wanted for row in _flooded(say, plan, name)]
    for attacked in plan.attacked_runs:
        if _crowd(attacked) in wanted:
            found += _beside(say, attacked)
    return found


def figures(plan: Plan) -> list[str]:
    """Return the names of the figures that `rows` measures, for `Plan.figures`."""
    return [*plan.floods, *(_crowd(attacked) for attacked in plan.attacked_runs)]


def _crowd(attacked: AttackedRun) -> str:
    return f"crowd-{attacked.members}"


class Attack(Launch):
    """Members of a run, and a process that attacks the first of them."""

    def __init__(self, attacked: AttackedRun) -> None:
        # a run without an owner knows no strangers before its founding is over (docs/decisions/0033)
        founded = FOUNDING_MAX + 1 if attacked.members > 1 else 2
        target = attacked.steps * attacked.members
        one = {"target": target, "epochs": founded, "step_s": attacked.step_s}
        configurations = [one] * attacked.members
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
        answers = self.receive("ready", _START_S + _START_S_PER_MEMBER * len(self.workers))
        self.members: Sequence[Worker] = list(self.workers)
        self.attacker = self.add({"address": answers[0]["address"]}, "benchmarks.workers.attacker")
        self.attacker.receive("ready", time.monotonic() + _START_S)
        time.sleep(_PAUSE_S)

    def measured(self) -> dict[str, Any]:
        """Return the first member's figures since the last call, with the processor time of all members."""
        for member in self.members:
            member.send({"do": "measure"})
        deadline_s = time.monotonic() + _ANSWER_S
        found = [member.receive("measured", deadline_s) for member in self.members]
        return {**found[0], "processor_s": sum(one["processor_s"] for one in found)}

    def flood(self, do: str, seconds: float, crowd: Crowd = NOBODY) -> int:
        """Attack for a time. Return the number of requests or connections."""
        identities, networks = crowd.identities, crowd.networks
        self.attacker.send({"do": do, "seconds": seconds, "identities": identities, "networks": networks})
        answer = self.attacker.receive("flooded", time.monotonic() + seconds + _ANSWER_S)
        return int(answer["count"])


def _flooded(say: Callable[[str], None], plan: Plan, name: str) -> list[Row]:
    late_s: list[float] = []
    memory_bytes: list[float] = []
    notes: list[str] = []
    failures = Failures()
    for _ in range(plan.passes):  # each on a new node, because freed memory is not returned to the system
        try:
            with Attack(AttackedRun(members=1)) as attack:
                rest = attack.measured()
                count = attack.flood(name, plan.flood_s)
                figures = attack.measured()
        except LaunchFailed as failure:
            failures.launches_failed += 1
            failures.fail(str(failure).partition("; its log ends")[0])
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
            ours=failures.series_of(f"swarm: {name}, {kind}", samples, unit),
            peer=None,
            aim=Aim(of="ours", sense="at most", value=aim),
            notes=tuple(notes) if kind == "lag" else (),
        )

    return [
        row("lag", "the longest that its event loop was late by its own work", "s", late_s, LATE_S_MAX),
        row("memory", "memory above that at rest, at most", "bytes", memory_bytes, MEMORY_BYTES_MAX),
    ]


@dataclass(slots=True)
class Costs(Failures):
    """Figures of windows of time: epochs a minute, and processor time of all members per epoch."""

    paces: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    def add(self, attack: Attack, window_s: float, crowd: Crowd) -> None:
        """Measure one window among a crowd, from the beginning of an epoch to that of the last one: parts of
        epochs would count for much in it.
        """
        before = attack.measured()
        attack.flood("nothing", window_s, crowd)
        after = attack.measured()
        epochs = after["epoch"] - before["epoch"]
        took_s = after["epoch_began_s"] - before["epoch_began_s"]
        self.paces.append(60.0 * epochs / took_s if epochs else 0.0)
        self.processor_s.append((after["processor_s"] - before["processor_s"]) / max(epochs, 1))
        time.sleep(_PAUSE_S)


def _beside(say: Callable[[str], None], attacked: AttackedRun) -> list[Row]:
    """Measure a run among each crowd, and without one before every second crowd."""
    members = attacked.members
    costs = {crowd: Costs() for crowd in (NOBODY, *attacked.crowds)}
    windows = [
        window
        for number, crowd in enumerate(attacked.crowds)
        for window in ((NOBODY, crowd) if number % 2 == 0 else (crowd,))
    ]
    try:
        with Attack(attacked) as attack:
            for _ in range(attacked.turns):
                for crowd in windows:
                    one = costs[crowd]
                    one.add(attack, attacked.window_s, crowd)
                    say(
                        f"{members} members, {crowd.identities} strangers of {crowd.networks} networks: "
                        f"{one.paces[-1]:.0f} epochs/min, "
                        f"{1e3 * one.processor_s[-1]:.0f} ms of processor time an epoch"
                    )
    except LaunchFailed as failure:
        for one in costs.values():
            one.launches_failed += 1
            one.fail(str(failure).partition("; its log ends")[0])
    return [row for crowd in attacked.crowds for row in _rows_beside(members, crowd, costs)]


def _rows_beside(members: int, crowd: Crowd, costs: dict[Crowd, Costs]) -> list[Row]:
    strangers = f"{crowd.identities} identities of one stranger"
    name = f"attacks-{members}-{crowd.identities}"
    if crowd.networks > 1:
        strangers += f", who calls from {crowd.networks} networks"
        name += f"-{crowd.networks}"

    def row(kind: str, quantity: str, unit: str, aim: Aim | None) -> Row:
        def series(of: Crowd, beside: str) -> Series:
            samples = costs[of].paces if kind == "pace" else costs[of].processor_s
            return costs[of].series_of(f"swarm {beside}: {kind}", samples, unit)

        return Row(
            identifier=f"{name}-{kind}",
            workload=f"a run of {members} members beside {strangers}",
            quantity=quantity,
            ours=series(crowd, f"beside {crowd.identities} strangers"),
            peer=series(NOBODY, "without strangers"),
            aim=aim,
            shown="ours / peer",
        )

    aim = Aim(of="ours / peer", sense="at least", value=crowd.pace_min)
    cost = "processor time of all members in an epoch"
    return [row("pace", "epochs per minute", "epochs/min", aim), row("processor", cost, "s", None)]
