"""Experts on loopback: calls by four clients compared with hivemind, calls by more clients, and the time to
the first answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.allreduce import HIVEMIND, Setting
from benchmarks.environments import OWN_PYTHON
from benchmarks.interleaving import Tally, interleave
from benchmarks.launch import Launch, LaunchFailed, proportional_bytes
from benchmarks.launched_system import LaunchedSystem
from benchmarks.measured_systems import READY_TIMEOUT_S, MeasuredSystem, Round
from benchmarks.results import Aim, Row, Series

CLIENTS = 4
COUNTS = {"small": 150, "large": 6, "train": 40}  # calls per client in a round
TITLES = {
    "small": "expert call, no-op, batch 1 of 1024 float32",
    "large": "expert call, no-op, 2048 × 1024 float32 both ways",
    "train": "expert forward + backward, ffn 256, batch 32",
}
AIMS = {"small": 6.0, "large": 5.0, "train": 4.0}
LIMITS = {
    "small": "processor time of a call on both ends: the cores are shared by server and clients",
    "large": "TLS and copies of 16 MiB a call on both ends",
    "train": "the module's own arithmetic on the server, and two calls",
}
HANDLERS = 2  # hivemind's connection handlers: one process per core was its fastest
CROWDS = (1, 4, 16, 64)
HELD = 200
CALLER_PROCESSES = 4
CROWD_S = 1.0
CROWD_READINGS = 5
STARTS = 3
START_AHEAD_S = 0.1
ORDER_TIMEOUT_S = 90.0


class Callers(LaunchedSystem):
    """A server process, and client processes that accept the order `calls`."""

    def __init__(self, name: str, *, python: Path, module: str) -> None:
        super().__init__(
            name, python=python, module=module, configurations=[{"handlers": HANDLERS}] * (1 + CLIENTS)
        )

    def round(self) -> Round:
        """Run each workload once, from all clients."""
        phases: dict[str, float] = {}
        wrong: list[str] = []
        before_s = self._launch.processor_s()
        clients = self._launch.workers[1:]
        for what, count in COUNTS.items():
            at_s = time.monotonic() + START_AHEAD_S
            for client in clients:
                client.send({"do": "calls", "what": what, "count": count, "at_s": at_s})
            done = [client.receive("done", time.monotonic() + ORDER_TIMEOUT_S) for client in clients]
            phases[what] = max(report["end_s"] for report in done) - at_s
            wrong += [f"{what}: {reason}" for report in done for reason in report["reasons"]]
            wrong += [
                f"{what}: {report['performed']} calls, not {count}"
                for report in done
                if report["performed"] != count
            ]
        return Round(
            ok=not wrong,
            reason="; ".join(dict.fromkeys(wrong)),
            wrong=any("wrong" in reason for reason in wrong),
            whole_s=sum(phases.values()),
            processor_s=self._launch.processor_s() - before_s,
            phases=phases,
        )


def rows(setting: Setting) -> list[Row]:
    """Measure the section and return its rows."""
    names: list[str] = ["swarm"]
    makers: list[Callable[[], MeasuredSystem]] = [
        lambda: Callers("swarm", python=OWN_PYTHON, module="swarm_experts")
    ]
    hivemind = setting.hivemind
    if hivemind is not None:
        names.append(HIVEMIND)
        makers.append(lambda: Callers(HIVEMIND, python=hivemind, module="hivemind_experts"))
    setting.say(f"experts, {CLIENTS} clients: {', '.join(names)}")
    tallies = interleave(makers, names, replace(setting.plan, warm_up=1), setting.say)
    own, peer = tallies[0], tallies[1] if len(tallies) == 2 else None
    return [*(row_of(what, own, peer) for what in COUNTS), _first_answer(setting), *_crowds(setting)]


def row_of(what: str, own: Tally, peer: Tally | None) -> Row:
    def rate(outcome: Round) -> float:
        return CLIENTS * COUNTS[what] / outcome.phases[what]

    return Row(
        identifier=f"experts-{what}",
        workload=f"{TITLES[what]}, {CLIENTS} client processes",
        quantity="calls a second" if what != "train" else "forward and backward passes a second",
        ours=own.series(what, rate, unit="calls/s"),
        peer=peer.series(what, rate, unit="calls/s") if peer is not None else None,
        aim=Aim(of="ours / peer", sense="at least", value=AIMS[what]) if peer is not None else None,
        shown="ours / peer",
        limit=LIMITS[what],
        notes=tuple(tally.spending() for tally in (own, peer) if tally is not None)
        if what == "small"
        else (),
    )


def _first_answer(setting: Setting) -> Row:
    """Measure the time from the start of both processes; importing torch is most of it."""
    systems = [("swarm", OWN_PYTHON, "swarm_experts")]
    if setting.hivemind is not None:
        systems.append((HIVEMIND, setting.hivemind, "hivemind_experts"))
    samples: dict[str, list[float]] = {name: [] for name, _, _ in systems}
    reasons: dict[str, list[str]] = {name: [] for name, _, _ in systems}
    for _ in range(STARTS):
        for name, python, module in systems:
            try:
                samples[name].append(_start(name, python, module))
            except LaunchFailed as failure:
                reasons[name].append(str(failure))
    setting.say(
        "  first answers: "
        + ", ".join(f"{name} {[round(one, 2) for one in taken]} s" for name, taken in samples.items())
    )
    series = [
        Series(
            name=f"{name}: first answer",
            unit="s",
            samples=tuple(samples[name]),
            launches_failed=len(reasons[name]),
            reasons=tuple(dict.fromkeys(reasons[name])),
        )
        for name, _, _ in systems
    ]
    return Row(
        identifier="experts-first-answer",
        workload="a server of two experts and a caller, both started now",
        quantity="from the start of the processes to the first answer",
        ours=series[0],
        peer=series[1] if len(series) == 2 else None,
        aim=None,
        limit="importing torch, in both processes",
    )


def _start(name: str, python: Path, module: str) -> float:
    with Launch(
        name,
        python=python,
        module=f"benchmarks.workers.{module}",
        configurations=[{"handlers": HANDLERS}] * 2,
    ) as launch:
        caller = launch.workers[1]
        caller.send({"do": "first"})
        answered = caller.receive("answered", time.monotonic() + READY_TIMEOUT_S)
        return float(answered["at_s"]) - launch.workers[0].started_s


def _crowds(setting: Setting) -> list[Row]:
    """Measure swarm alone with more clients, each with one call in flight."""
    return [_crowd(setting, clients) for clients in (*CROWDS, HELD)]


def _crowd(setting: Setting, clients: int) -> Row:
    processes = min(clients, CALLER_PROCESSES)
    rates: list[float] = []
    reasons: list[str] = []
    failed = 0
    with Launch(
        "swarm", python=OWN_PYTHON, module="benchmarks.workers.swarm_experts", configurations=[{}]
    ) as launch:
        server = launch.workers[0]
        server.receive("ready", time.monotonic() + READY_TIMEOUT_S)
        alone_bytes = proportional_bytes(launch.processes(of=server))
        callers = [
            launch.add({"clients": clients // processes}, "benchmarks.workers.swarm_expert_callers")
            for _ in range(processes)
        ]
        for caller in callers:
            caller.receive("ready", time.monotonic() + READY_TIMEOUT_S)
        held_bytes = proportional_bytes(launch.processes(of=server))
        medians: list[float] = []
        slow: list[float] = []
        for _ in range(CROWD_READINGS):
            at_s = time.monotonic() + START_AHEAD_S
            for caller in callers:
                caller.send({"do": "calls", "seconds": CROWD_S, "at_s": at_s})
            done = [caller.receive("done", time.monotonic() + ORDER_TIMEOUT_S) for caller in callers]
            rates.append(sum(report["performed"] / report["seconds"] for report in done))
            failed += sum(report["failed"] for report in done)
            reasons += [reason for report in done for reason in report["reasons"]]
            medians += [report["median_s"] for report in done if report["median_s"] is not None]
            slow += [report["slow_s"] for report in done if report["slow_s"] is not None]
    setting.say(f"  {clients} clients: {sorted(rates)[len(rates) // 2]:.0f} calls/s, {failed} failed")
    latency = (
        f"a call takes {sorted(medians)[len(medians) // 2] * 1e3:.1f} ms in the middle, "
        f"{max(slow) * 1e3:.0f} ms one in a hundred"
    )
    # with few clients, memory pages shared by more processes exceed the difference
    memory = (
        f"; the server took {(held_bytes - alone_bytes) / clients / 1e3:.0f} kB a client"
        if clients == HELD
        else ""
    )
    return Row(
        identifier=f"experts-clients-{clients}",
        workload=(
            f"no-op expert, batch 1, {clients} connected client{'s' if clients > 1 else ''}, one call in "
            "flight each"
        ),
        quantity="calls a second of all",
        ours=Series(
            name=f"swarm: {clients} clients",
            unit="calls/s",
            samples=tuple(rates),
            failed=failed,
            reasons=tuple(dict.fromkeys(reasons)),
        ),
        peer=None,
        aim=None,
        limit=f"processor time: the server is one process, the clients are in {processes}",
        notes=(latency + memory,),
    )
