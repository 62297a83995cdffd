"""Costs of membership to honest peers: runs for invited peers compared with open runs, measured in turn.

Bytes are those of the loopback device, so nothing else may use it meanwhile. The comparison does not resolve
1 %. Therefore one more invited run is profiled for the share of processor time in membership functions and
the bytes of messages with a capability.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed, Worker
from benchmarks.results import Aim, Failures, Row, Series
from benchmarks.small_runs import configuration
from swarm.core.identity import Identity
from swarm.membership.invite import Invite, RunIdentity, Terms, make_invite
from swarm.net.membership import RunMembership

COST_MAX = 1.01  # of an open run
JOINING_SHARE_MIN = 0.95  # of the time that joining by an address takes
_MODULE = "benchmarks.workers.small_run_peer"
_READY_S, _ANSWER_S = 180.0, 60.0

_SHARES = {
    "own-processor": "processor time of the functions of membership, of that of all peers",
    "own-history": "processor time of the functions of histories and certificates, of that of all peers",
    "own-bytes": "bytes of the messages that show a capability, of those that all peers send",
}
_FRAMES_BYTES = 200  # of gRPC, TLS and TCP around such a message

Say = Callable[[str], None]
Members = Literal["open", "invited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Extent of the measurement."""

    peers: int = 4
    newcomers: int = 4  # one after the other
    window_s: float = 20.0
    turns: int = 3


SHORT = Plan(peers=2, newcomers=1, window_s=3.0, turns=1)


@dataclass(slots=True)
class Costs(Failures):
    """Figures of one kind of run, a sample per launch or newcomer."""

    processor_s: list[float] = field(default_factory=list)  # of all peers per epoch
    sent_bytes: list[float] = field(default_factory=list)  # of all peers per epoch
    joining_s: list[float] = field(default_factory=list)  # from the end of the imports to a contribution
    # of all processor time, and of all bytes, in a run that is profiled: in %
    shares: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _SHARES})


def rows(say: Say, plan: Plan | None = None) -> Iterator[list[Row]]:
    """Measure the section and yield its rows."""
    plan = plan or Plan()
    found: dict[Members, Costs] = {"open": Costs(), "invited": Costs()}
    for _ in range(plan.turns):
        for members, costs in found.items():
            try:
                _measure(members, plan, costs)
            except LaunchFailed as failure:
                costs.launches_failed += 1
                costs.fail(str(failure).partition("; its log ends")[0])
                continue
            say(
                f"{members}: {1e3 * costs.processor_s[-1]:.0f} ms and {costs.sent_bytes[-1] / 1e6:.2f} MB an "
                f"epoch; a newcomer contributes after {costs.joining_s[-1]:.1f} s"
            )
    try:
        _measure("invited", plan, found["invited"], is_profiled=True)
    except LaunchFailed as failure:
        found["invited"].launches_failed += 1
        found["invited"].fail(str(failure).partition("; its log ends")[0])
    say("; ".join(f"{name}: {values}" for name, values in found["invited"].shares.items()))
    yield _rows(plan, found["invited"], found["open"])


def _measure(members: Members, plan: Plan, costs: Costs, *, is_profiled: bool = False) -> None:
    first, *others = _configurations(members, plan, is_profiled=is_profiled)
    with Launch("membership", python=OWN_PYTHON, module=_MODULE, configurations=[first]) as launch:
        for other in others[: plan.peers - 1]:
            launch.add(other)
        launch.receive("contributed", _READY_S)
        before = _count(launch.workers)
        time.sleep(plan.window_s)
        after = _count(launch.workers)
        pairs = list(zip(before, after, strict=True))
        if is_profiled:
            used_s = sum(now["processor_s"] - earlier["processor_s"] for earlier, now in pairs)
            sent_bytes = after[0]["begun"]["sent_bytes"] - before[0]["begun"]["sent_bytes"]
            _add_shares(costs, after, used_s, sent_bytes, first["invites"][0])
            return
        costs.processor_s.append(sum(_per_epoch(*pair, "processor_s") for pair in pairs))
        costs.sent_bytes.append(_per_epoch(*pairs[0], "sent_bytes"))
        for other in others[plan.peers - 1 :]:
            newcomer = launch.add(other)
            contributed = newcomer.receive("contributed", time.monotonic() + _READY_S)
            costs.joining_s.append(contributed["seconds"])


def _per_epoch(earlier: dict[str, Any], now: dict[str, Any], figure: str) -> float:
    """Return how much a figure of a peer grew in an epoch, from the beginning of one to that of another: a
    part of an epoch at the end of a window of twenty would count for up to a twentieth.
    """
    epochs: int = now["begun"]["epoch"] - earlier["begun"]["epoch"]
    grown: float = now["begun"][figure] - earlier["begun"][figure]
    return grown / max(epochs, 1)


def _add_shares(
    costs: Costs, counts: list[dict[str, Any]], used_s: float, sent_bytes: int, invite: str
) -> None:
    profiles = [one["profile"] for one in counts]
    membership = RunMembership(Invite.parse(invite), Identity.generate().peer_id, (), time.time)
    message_bytes = membership.request().ByteSize() + _FRAMES_BYTES
    used_s -= sum(one["profiler_s"] for one in profiles)
    costs.shares["own-processor"].append(100.0 * sum(one["membership_s"] for one in profiles) / used_s)
    costs.shares["own-history"].append(100.0 * sum(one["history_s"] for one in profiles) / used_s)
    shown = sum(one["shown"] for one in profiles)
    costs.shares["own-bytes"].append(100.0 * shown * message_bytes / max(sent_bytes, 1))


def _configurations(members: Members, plan: Plan, *, is_profiled: bool = False) -> list[dict[str, Any]]:
    found = [
        {**configuration(founds=number == 0, peers=plan.peers), "is_profiled": is_profiled}
        for number in range(plan.peers + plan.newcomers)
    ]
    if members == "invited":
        owner = Identity.generate()
        run = RunIdentity(owner.peer_id, "small")
        terms = Terms(roles=("train",), uses=100, lifetime_s=86400.0)
        invite = make_invite(run, owner, (), terms, now_s=time.time()).text()
        for one in found:
            one |= {"run": run.run_id, "invites": [invite]}
    return found


def _count(workers: list[Worker]) -> list[dict[str, Any]]:
    for one in workers:
        one.send({"do": "count"})
    deadline_s = time.monotonic() + _ANSWER_S
    return [one.receive("counted", deadline_s) for one in workers]


def _rows(plan: Plan, invited: Costs, opened: Costs) -> list[Row]:
    def row(kind: str, quantity: str, unit: str, aim: Aim, samples: Callable[[Costs], list[float]]) -> Row:
        def series(costs: Costs, members: Members) -> Series:
            return costs.series_of(f"swarm, {members} run: {kind}", samples(costs), unit)

        return Row(
            identifier=f"membership-{plan.peers}-{kind}",
            workload=f"{plan.peers} peers of a run for invited peers, beside an open run",
            quantity=quantity,
            ours=series(invited, "invited"),
            peer=series(opened, "open"),
            aim=aim,
        )

    def share(name: str) -> Row:
        return Row(
            identifier=f"membership-{plan.peers}-{name}",
            workload=f"{plan.peers} peers of a run for invited peers, profiled",
            quantity=_SHARES[name],
            ours=invited.series_of(f"swarm, invited run: {name}", invited.shares[name], "%"),
            peer=None,
            aim=Aim(of="ours", sense="at most", value=1.0) if name != "own-history" else None,
        )

    cheap = Aim(of="ours / peer", sense="at most", value=COST_MAX)
    fast = Aim(of="peer / ours", sense="at least", value=JOINING_SHARE_MIN)
    return [
        row("processor", "processor time of all peers in an epoch", "s", cheap, lambda one: one.processor_s),
        row("bytes", "bytes that all peers send in an epoch", "bytes", cheap, lambda one: one.sent_bytes),
        row(
            "invite",
            "until a newcomer contributes, from the end of its imports, by an invite beside by an address",
            "s",
            fast,
            lambda one: one.joining_s,
        ),
        *(share(name) for name in _SHARES),
    ]
