"""All-reduce of four peers over emulated slow, distant and unequal links: time, use of the link's capacity,
and bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from averaging.reduction.balance import ReducerLoad, shares
from benchmarks.allreduce import HIVEMIND, MIB, PEERS, TENSORS, Setting, reduction
from benchmarks.environments import OWN_PYTHON
from benchmarks.interleaving import Plan, Tally, interleave
from benchmarks.launch import LaunchFailed
from benchmarks.measured_systems import MeasuredSystem, Round, Workers, Workload
from benchmarks.results import Aim, Row
from swarm.compression import find
from swarm.testing.links import Link, Links, why_not

CODECS = ("float32", "float16", "int8", "int4")
AIMED = ("float32", "float16")
TOTAL_S = 480.0  # after this time only swarm is measured, so that the section takes about ten minutes
OF_BARE_TCP = 0.95  # the aim: this part of what bare TCP fills in the same run
# the first rounds dial, and measure distances and link speeds
PLAN = Plan(passes=1, rounds=3, warm_up=2)
# the second one sends averages only when their values have come
TCP, BUTTERFLY, GLOO = "bare TCP", "bare TCP butterfly", "gloo"
_MODULES = {TCP: "bare_tcp", BUTTERFLY: "bare_tcp_butterfly", GLOO: "gloo", HIVEMIND: "hivemind_averager"}
_PEERS_ORDER = {
    "tcp": "; the peer moves the bytes of equal shards, and no byte waits for others",
    "butterfly": "; the peer moves the bytes of equal shards, averages when their values have come",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkScenario:
    """How the peers are connected, and what they average."""

    identifier: str
    words: str
    links: tuple[Link, ...]
    vector_mib: float
    beside: dict[str, tuple[str, ...]]  # systems measured in turn with swarm, by codec
    aim_per_cent: float | None = None  # for rows that do not compare with bare TCP
    plan: Plan = PLAN
    codecs: tuple[str, ...] = CODECS


def _alike(mbit_per_s: float, round_trip_s: float) -> tuple[Link, ...]:
    return (Link.of(mbit_per_s=mbit_per_s, round_trip_s=round_trip_s),) * PEERS


def _small(identifier: str, words: str, links: tuple[Link, ...]) -> LinkScenario:
    """Return the scenario of a vector of 1 MiB: round trips and the start of connections decide."""
    return LinkScenario(
        identifier=identifier,
        words=words,
        links=links,
        vector_mib=1,
        beside={"float32": (TCP, BUTTERFLY), "float16": (TCP,)},
        codecs=AIMED,
    )


# the last ones are compared with nobody where time is short
SCENARIOS = (
    _small("100mbit-50ms-1mib", "100 Mbit/s, 50 ms", _alike(100, 0.05)),
    _small("1gbit-20ms-1mib", "1 Gbit/s, 20 ms", _alike(1000, 0.02)),
    _small("20mbit-100ms-1mib", "20 Mbit/s, 100 ms", _alike(20, 0.1)),
    LinkScenario(
        identifier="100mbit-50ms",
        words="100 Mbit/s, 50 ms",
        links=_alike(100, 0.05),
        vector_mib=16,
        beside={"float32": (TCP, GLOO, HIVEMIND), "float16": (TCP, HIVEMIND)},
        aim_per_cent=85.0,
    ),
    LinkScenario(
        identifier="1gbit-20ms",
        words="1 Gbit/s, 20 ms",
        links=_alike(1000, 0.02),
        vector_mib=16,
        beside={"float32": (TCP, GLOO), "float16": (TCP, HIVEMIND)},
    ),
    LinkScenario(
        identifier="1gbit-20ms-256mib",
        words="1 Gbit/s, 20 ms",
        links=_alike(1000, 0.02),
        vector_mib=256,
        beside={"float16": (TCP,)},
        plan=Plan(passes=1, rounds=2, warm_up=1),
        codecs=("float16",),
    ),
    LinkScenario(
        identifier="20mbit-100ms-16mib",
        words="20 Mbit/s, 100 ms",
        links=_alike(20, 0.1),
        vector_mib=16,
        beside={"float16": (TCP,)},
        plan=Plan(passes=1, rounds=1, warm_up=1),
        codecs=("float16",),
    ),
    LinkScenario(
        identifier="one-slow",
        words="100 Mbit/s, 50 ms, one of them 1 Mbit/s up",
        links=(*_alike(100, 0.05)[1:], Link.of(mbit_per_s=100, up_mbit_per_s=1, round_trip_s=0.05)),
        vector_mib=1,
        beside={"float32": (TCP, GLOO), "float16": (TCP,)},
        plan=Plan(passes=1, rounds=1, warm_up=1),
    ),
    LinkScenario(
        identifier="20mbit-100ms",
        words="20 Mbit/s, 100 ms",
        links=_alike(20, 0.1),
        vector_mib=4,
        beside={"float32": (TCP, GLOO), "float16": (TCP,)},
    ),
)


def rows(setting: Setting, figures: Collection[str] = ()) -> Iterator[list[Row]]:
    """Measure these scenarios (all, if none is named), codec by codec. Where links cannot be emulated, print
    why and yield nothing.
    """
    problem = why_not()
    if problem is not None:
        setting.say(f"links: left out: {problem}")
        return
    until_s = time.monotonic() + TOTAL_S
    gone = set() if setting.hivemind is not None else {HIVEMIND}  # systems that completed no round
    for scenario in SCENARIOS:
        if figures and scenario.identifier not in figures:
            continue
        for codec in scenario.codecs:
            others = [name for name in scenario.beside.get(codec, ()) if name not in gone]
            if others and time.monotonic() > until_s:
                setting.say(
                    f"links, {scenario.words}, {codec}: no comparison, for lack of time: {', '.join(others)}"
                )
                others = []
            found, failed = _rows(setting, scenario, codec, others)
            gone |= failed
            yield found


def _rows(
    setting: Setting, scenario: LinkScenario, codec: str, others: list[str]
) -> tuple[list[Row], set[str]]:
    """Return the rows of swarm compared with each other system, and the names of systems that completed no
    round.
    """
    names = [f"swarm {codec}", *(f"{name} {codec}" for name in others)]
    setting.say(f"links, {PEERS} × {scenario.vector_mib:g} MiB, {scenario.words}: {', '.join(names)}")
    makers = [_maker(name, setting, scenario, codec) for name in ("swarm", *others)]
    own, *tallies = interleave(makers, names, scenario.plan, setting.say)
    if not tallies:
        return [_row(scenario, codec, own, None, "alone")], set()
    found = [
        _row(scenario, codec, own, tally, name.split()[-1].lower())
        for name, tally in zip(_short(others), tallies, strict=True)
    ]
    return found, {name for name, tally in zip(others, tallies, strict=True) if not tally.rounds}


def _short(others: list[str]) -> list[str]:
    return ["hivemind" if name == HIVEMIND else name for name in others]


def _maker(name: str, setting: Setting, scenario: LinkScenario, codec: str) -> Callable[[], MeasuredSystem]:
    elements = int(scenario.vector_mib * MIB) // 4
    workload = Workload(elements=elements, tensors=TENSORS, peers=PEERS, target_group_size=PEERS, codec=codec)
    module = _MODULES.get(name, "swarm_averager")
    python = setting.hivemind if name == HIVEMIND and setting.hivemind is not None else OWN_PYTHON
    launched = False

    def make() -> MeasuredSystem:
        nonlocal launched
        if launched and name != "swarm":
            raise LaunchFailed("not launched a second time, for lack of time")
        launched = True
        return Workers(
            f"{name} {codec}", python=python, module=module, workload=workload, links=Links(scenario.links)
        )

    return make


def least_s(links: tuple[Link, ...], vector_bytes: float) -> float:
    """Return the least time of a butterfly of this size over these links: best shares, payload only, no
    delays.
    """
    loads = [
        ReducerLoad(
            up=link.up_bytes_per_s, down=link.down_bytes_per_s, contributes=True, receives=True, reduces=True
        )
        for link in links
    ]
    others = len(links) - 1
    moved = [(1.0 - share + share * others) * vector_bytes for share in shares(loads)]
    return max(
        each / min(link.up_bytes_per_s, link.down_bytes_per_s)
        for each, link in zip(moved, links, strict=True)
    )


def _row(scenario: LinkScenario, codec: str, own: Tally, peer: Tally | None, against: str) -> Row:
    elements = int(scenario.vector_mib * MIB) // 4
    payload = find(codec).encoded_bytes(elements)
    ideal_s = least_s(scenario.links, payload)
    least_bytes = 2 * (PEERS - 1) * payload  # of all peers together, for any shares

    def filled(outcome: Round) -> float | None:
        return 100.0 * ideal_s / reduction(outcome)

    return Row(
        identifier=f"links-{scenario.identifier}-{codec}-{against}",
        workload=f"all-reduce, {PEERS} peers × {scenario.vector_mib:g} MiB, {codec}: {scenario.words}",
        quantity="per cent of the links' capacity, all-reduce alone" + _PEERS_ORDER.get(against, ""),
        ours=own.series("", filled, unit="%"),
        peer=None if peer is None else peer.series("", filled, unit="%"),
        aim=_aim(scenario, codec, against),
        shown="ours / peer",
        limit=(
            f"{ideal_s:.3g} s for the payload at line rate; {100 * 1448 / 1500:.1f} % are left beside "
            "TCP's and IP's headers"
        ),
        notes=tuple(_spent(tally, elements, least_bytes) for tally in (own, peer) if tally is not None),
    )


def _aim(scenario: LinkScenario, codec: str, against: str) -> Aim | None:
    if against == "tcp":
        return Aim(of="ours / peer", sense="at least", value=OF_BARE_TCP)
    if scenario.aim_per_cent is None or codec not in AIMED:
        return None
    return Aim(of="ours", sense="at least", value=scenario.aim_per_cent)


def _spent(tally: Tally, elements: int, least_bytes: int) -> str:
    """Return the medians of seconds, bytes per parameter and framing in words."""
    if not tally.rounds:
        return f"{tally.name}: no round"
    median = partial(_median, tally)
    return (
        f"{tally.name}: all-reduce {median('reduce_s'):.2f} s, "
        f"{median('wire_bytes') / PEERS / elements:.3f} bytes a parameter and peer "
        "on the wire, framing (beneath it only TCP and IP) "
        f"{100 * (median('carried_bytes') / least_bytes - 1):.2f} % of the payload"
    )


def _median(tally: Tally, name: str) -> float:
    return float(statistics.median(getattr(outcome, name) for outcome in tally.rounds))
