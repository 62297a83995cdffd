"""Peers that cannot be called directly, in network namespaces: time until they can be reached, cost of calls,
and effect of losing a relay.

The emulated internet is that of the tests (`tests/chaos/namespaces.py`): routers with NAT, made of namespaces
and nftables, which needs root. Its links have no delay but where a row says so, and all ends share this
machine's cores: times leave out round trips, and rates are bounded by processor time.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import relayed_training
from benchmarks.environments import NoEnvironment
from benchmarks.reach_figures import CROWD_BYTES, CROWD_MBIT, CROWD_PEERS, ROUND_TRIPS_MS, Samples
from benchmarks.results import Aim, Failures, Row
from tests.chaos.namespaces import Internet, RouterKind, missing
from tests.chaos.reach_peers import CROWD, entry_point

Say = Callable[[str], None]

_RELAY_MBIT = 100_000.0  # so high that the processor is the limit
_CALLS = 30  # on one connection
_IDLE_S = 15.0
_TRAINED_S, _FETCHED_BYTES_PER_S = 8.0, 5e6
_WAIT_S = 90.0
_CROWD_S = 180.0
_KINDS: tuple[RouterKind | None, ...] = (None, "cone", "preserving", "symmetric", "relay-only")
_MEMBER_PASSES, _MEMBER_ROUNDS, _MEMBER_SETTLING = 3, 10, 3  # settling: first rounds, which connect
_MEMBER_RATIO_MAX = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    relayed: int = 3  # peers behind routers that give each connection another port
    punched: int = 3  # and behind routers that keep ports
    mebibytes: int = 64
    passes: int = 3
    lost: bool = True
    trainer: bool = True
    figures: Collection[str] = frozenset()  # of `FIGURES`; empty: all


QUICK = Plan(
    relayed=2, punched=0, mebibytes=8, passes=1, lost=False, trainer=False, figures=frozenset({"near"})
)


@dataclass(slots=True)
class Rounds(Failures):
    """Seconds of rounds."""

    samples: list[float] = field(default_factory=list)


class SceneFailed(Exception):
    """A peer ended, or an expected event did not occur in time."""


def check() -> None:
    """Raise NoEnvironment where there can be no namespaces."""
    problem = missing()
    if problem:
        raise NoEnvironment(f"reach: {problem}")


def rows(say: Say, plan: Plan | None = None) -> Iterator[list[Row]]:
    """Measure the section, and yield rows as they come."""
    plan = plan or Plan()
    samples = Samples()
    for name, measure in _MEASURES.items():
        if plan.figures and name not in plan.figures:
            continue
        try:
            measure(say, plan, samples)
        except (AssertionError, SceneFailed) as failure:  # raised by the tests' helpers after a timeout
            samples.launches_failed += 1
            samples.fail(str(failure).partition("; last events")[0])
            say(f"reach: {failure}")
    yield samples.rows(plan.mebibytes)
    if not plan.figures or MEMBER in plan.figures:
        yield _member_rows(say)
    if not plan.figures or TRAINING in plan.figures:
        yield relayed_training.rows(say)


def short(say: Say) -> list[Row]:
    """Measure the short form, or say why it is left out."""
    try:
        check()
    except NoEnvironment as problem:
        say(f"left out: {problem}")
        return []
    say("reach: two peers that call each other through a relay")
    return [row for found in rows(say, QUICK) for row in found]


class Peer:
    """A node of `benchmarks.workers.reach_peer`."""

    def __init__(
        self,
        internet: Internet,
        name: str,
        kind: RouterKind | None,
        bootstrap: Sequence[str],
        *,
        relay_mbit: float = 0.0,
    ) -> None:
        """Start it behind a router of this kind; None: behind none."""
        if kind is None:
            internet.public(name)
        else:
            internet.behind_router(name, kind)
        settings = {"listen": "0.0.0.0:4000", "bootstrap": list(bootstrap), "relay_mbit": relay_mbit}
        self.name = name
        self.process = internet.start(name, "-m", "benchmarks.workers.reach_peer", json.dumps(settings))

    def reached(self, how: str, ways: int = 1) -> dict[str, Any]:
        """Wait until it is reached like this, and return the event that said so."""
        return self.process.wait(
            f"{how} {self.name}",
            lambda event: (
                event["event"] == "reach" and event["reach"] == how and len(event["contact"]) > ways
            ),
            _WAIT_S,
        )

    def contact(self, how: str, ways: int = 1) -> list[str]:
        """Wait until it can be called in this many ways, and return how."""
        found: list[str] = self.reached(how, ways)["contact"]
        return found

    def order(self, answer: str, **order: Any) -> dict[str, Any]:
        """Send it an order, and return the result. Raises SceneFailed if the order failed."""
        self.tell(**order)
        return self.answer(answer)

    def tell(self, **order: Any) -> None:
        """Send it an order."""
        self.process.tell(json.dumps(order))

    def answer(self, answer: str) -> dict[str, Any]:
        """Return the result of an order. Raises SceneFailed if the order failed."""
        event = self.process.wait(
            answer, lambda event: event["event"] == answer and not event.get("seen"), 2 * _WAIT_S
        )
        event["seen"] = True
        if event.get("why"):
            raise SceneFailed(f"{self.name}: {answer}: {event['why']}")
        return event

    def call(self, contact: Sequence[str], count: int = 1) -> list[float]:
        """Let it call a peer, and return the seconds of each call."""
        seconds: list[float] = self.order("called", do="call", contact=contact, count=count)["seconds"]
        return seconds

    def processor_s(self) -> float:
        """Return the processor time that it has taken so far."""
        return float(self.order("usage", do="usage")["processor_s"])

    def memory_bytes(self) -> float:
        """Return the memory that it takes."""
        return float(self.order("usage", do="usage")["memory_bytes"])


def _calls(say: Say, plan: Plan, samples: Samples) -> None:
    """Measure peers behind routers: their start, calls, bulk, and the loss of relays."""
    with Internet() as internet:
        relays = {"r": Peer(internet, "r", None, (), relay_mbit=_RELAY_MBIT)}
        entry = [_line(relays["r"].contact("direct"))]
        if plan.lost:
            relays["s"] = Peer(internet, "s", None, entry, relay_mbit=_RELAY_MBIT)
        _relaying(relays.values())
        relayed = _start(internet, samples, entry, "symmetric", plan.relayed, ways=len(relays))
        punched = _start(internet, samples, entry, "preserving", plan.punched, ways=len(relays))
        say(f"reach: {len(relayed) + len(punched)} peers are reached through relays")
        if plan.lost:  # until others have called its second port, it takes a quarter of a minute
            relays["t"] = Peer(internet, "t", None, entry, relay_mbit=_RELAY_MBIT)
        opened = Peer(internet, "o", None, entry)
        opened.contact("direct")
        opened.call(relays["r"].contact("direct"))
        samples.add(
            "memory",
            *(max(one.memory_bytes() - opened.memory_bytes(), 0.0) for one in relayed),
        )
        if plan.lost:
            samples.add("idle", *_idle_percent(relayed, opened))
        _first_calls(samples, relayed, punched)
        pairs = {"relayed": (relayed[0], _now(relayed[1]))}
        if punched:
            pairs["punched"] = (punched[0], _now(punched[1]))
        pairs["direct"] = (relayed[0], opened.contact("direct"))
        for way, (caller, contact) in pairs.items():
            samples.add(f"call-{way}", *caller.call(contact, _CALLS))
        ends = {"relayed": relayed[1], "direct": opened} | ({"punched": punched[1]} if punched else {})
        for number in range(plan.passes):
            for way, (caller, contact) in pairs.items():
                rate = _bulk(samples, way, caller, ends[way], contact, plan.mebibytes, list(relays.values()))
                say(f"reach: pass {number + 1}: {way} {rate:.1f} MB/s")
        if plan.trainer:
            samples.add("trainer", *(_slowdown_percent(*relayed[:2]) for _ in range(plan.passes)))
        if plan.lost:
            _lose(say, internet, samples, relays, relayed)


def _start(
    internet: Internet, samples: Samples, entry: Sequence[str], kind: RouterKind, count: int, *, ways: int
) -> list[Peer]:
    """Start peers one after another, and wait until each is announced with this many relays."""
    found = []
    for number in range(count):
        peer = Peer(internet, f"{kind[0]}{number}", kind, entry)
        peer.reached("relayed", ways)
        reach = [event for event in peer.process.events if event["event"] == "reach"]
        verdict = next(event for event in reach if event["reach"] in ("hidden", "relayed"))
        announced = next(
            event for event in reach if event["reach"] == "relayed" and len(event["contact"]) > 1
        )
        samples.add("verdict", verdict["seconds"])
        samples.add("reservation", announced["seconds"] - verdict["seconds"])
        found.append(peer)
    return found


def _idle_percent(relayed: Sequence[Peer], opened: Peer) -> list[float]:
    """Return the share of a core that each idle peer uses, beyond that of `opened`."""
    before = [peer.processor_s() for peer in (opened, *relayed)]
    time.sleep(_IDLE_S)
    spent_s = [peer.processor_s() - old for peer, old in zip((opened, *relayed), before, strict=True)]
    return [100.0 * max(one - spent_s[0], 0.0) / _IDLE_S for one in spent_s[1:]]


def _ring(peers: Sequence[Peer]) -> list[tuple[Peer, Peer]]:
    return list(zip(peers, [*peers[1:], *peers[:1]], strict=True))


def _far_calls(say: Say, plan: Plan, samples: Samples) -> None:
    """Measure the first calls of peers that are far from each other and from their relay."""
    for milliseconds in ROUND_TRIPS_MS:
        with Internet(round_trip_s=1e-3 * milliseconds) as internet:
            relay = Peer(internet, "r", None, (), relay_mbit=_RELAY_MBIT)
            entry = [_line(relay.contact("direct"))]
            kinds: dict[str, RouterKind] = {"s": "symmetric", "p": "preserving"}
            relayed, punched = (
                [Peer(internet, f"{name}{number}", kind, entry) for number in range(3)]
                for name, kind in kinds.items()
            )
            for peer in (*relayed, *punched):
                peer.reached("relayed")
            say(f"reach: round trips of {milliseconds} ms")
            _first_calls(samples, relayed, punched, f"-{milliseconds}")


def _first_calls(
    samples: Samples, relayed: Sequence[Peer], punched: Sequence[Peer], suffix: str = ""
) -> None:
    """Let every peer call the next one for the first time, and wait until holes are punched. `suffix`: of the
    figures' names.
    """
    for caller, callee in _ring(relayed)[: max(len(relayed) - 1, 1)]:
        samples.add(f"first-relayed{suffix}", *caller.call(_now(callee)))
    for caller, callee in _ring(punched)[: max(len(punched) - 1, 1)] if punched else ():
        contact = _now(callee)
        called = caller.order("called", do="call", contact=contact, count=1)
        begin_s = called["at_s"] - sum(called["seconds"])
        if suffix:
            begin_s = _connected(caller, contact[0], "circuit")["at_s"]
        samples.add(f"punched{suffix}", _connected(caller, contact[0], "punched")["at_s"] - begin_s)


def _connected(caller: Peer, peer_id: str, how: str) -> dict[str, Any]:
    """Wait until a peer has a connection to another one like this, and return the event that said so."""
    return caller.process.wait(
        how, lambda event: event["event"] == how and peer_id.endswith(event["peer"]), _WAIT_S
    )


def _bulk(
    samples: Samples,
    way: str,
    caller: Peer,
    callee: Peer,
    contact: Sequence[str],
    mebibytes: int,
    relays: Sequence[Peer],
) -> float:
    """Let one peer fetch bytes of another, and return the megabytes per second."""
    before = [peer.processor_s() for peer in (caller, callee, *relays)]
    fetched = caller.order("fetched", do="fetch", contact=contact, mebibytes=mebibytes)
    after = [peer.processor_s() for peer in (caller, callee, *relays)]
    spent_ms = [1e3 * (end - begin) / fetched["megabytes"] for begin, end in zip(before, after, strict=True)]
    rate = float(fetched["megabytes"] / fetched["seconds"])
    samples.add(f"rate-{way}", rate)
    if way != "direct":
        samples.add(f"processor-ends-{way}", *spent_ms[:2])
    if way == "relayed":
        samples.add("processor-relay", sum(spent_ms[2:]))
    return rate


def _slowdown_percent(trainer: Peer, other: Peer) -> float:
    """Let a peer train, without and with another one that fetches of it, and return how much slower it is."""

    def pace() -> float:
        return float(trainer.order("trained", do="train", seconds=_TRAINED_S)["steps_per_s"])

    contact = _now(trainer)
    alone = pace()
    mebibytes = int(_FETCHED_BYTES_PER_S * (_TRAINED_S + 2.0)) >> 20
    other.tell(do="fetch", contact=contact, mebibytes=mebibytes, bytes_per_s=_FETCHED_BYTES_PER_S)
    time.sleep(1.0)
    beside = pace()
    other.answer("fetched")
    return 100.0 * (1.0 - beside / alone)


def _lose(
    say: Say, internet: Internet, samples: Samples, relays: Mapping[str, Peer], peers: Sequence[Peer]
) -> None:
    """Kill a relay, put another in its place, and cut the cable of the older one."""
    _relaying(relays.values())
    _talk(peers)
    relays["r"].process.kill()
    samples.add("killed", _recovered_s(say, "killed", peers))
    for peer in peers:
        _until_two_relays(peer)
    _talk(peers)
    internet.unplug("s")
    samples.add("unplugged", _recovered_s(say, "unplugged", peers))


def _line(contact: Sequence[str]) -> str:
    """Return the address to enter by of a peer that is called directly."""
    return contact[1] if "/p2p/" in contact[1] else f"{contact[1]}/p2p/{contact[0]}"


def _relaying(relays: Iterable[Peer]) -> None:
    """Wait until these peers relay."""
    for relay in relays:
        relay.process.wait(f"relay {relay.name}", lambda event: event["event"] == "relaying", _WAIT_S)


def _talk(peers: Sequence[Peer]) -> None:
    for caller, callee in _ring(peers):
        caller.call(_now(callee))


def _recovered_s(say: Say, what: str, peers: Sequence[Peer]) -> float:
    """Let all call each other until they are answered, and return how long that took the slowest."""
    for caller, callee in _ring(peers):
        caller.tell(do="recover", contact=_now(callee))
    answers = [peer.answer("recovered") for peer in peers]
    say(
        f"reach: a relay is {what}: the next calls after "
        + ", ".join(f"{answer['seconds']:.2f} s ({answer['failures']} failed)" for answer in answers)
    )
    return max(float(answer["seconds"]) for answer in answers)


def _now(peer: Peer) -> list[str]:
    """Return the reach that a peer reported last."""
    last = [event for event in peer.process.events if event["event"] == "reach"][-1]
    return list(last["contact"])


def _until_two_relays(peer: Peer) -> None:
    """Wait until a peer that has lost a relay has another one."""
    peer.process.wait(
        f"one relay of {peer.name}",
        lambda event: event["event"] == "reach" and len(event["contact"]) == 2 and event["seconds"] > 0,
        _WAIT_S,
    )
    peer.process.wait(f"another relay of {peer.name}", lambda _: len(_now(peer)) == 3, _WAIT_S)


def _pairs(say: Say, plan: Plan, samples: Samples) -> None:
    """Let a peer behind each kind of router call a peer behind each."""
    with Internet() as internet:
        relay = Peer(internet, "r", None, (), relay_mbit=_RELAY_MBIT)
        entry = [_line(relay.contact("direct"))]
        callers, callees = (
            [Peer(internet, f"{name}{number}", kind, entry) for number, kind in enumerate(_KINDS)]
            for name in "ab"
        )
        contacts = [
            one.contact("direct" if kind is None else "relayed")
            for one, kind in zip(callees, _KINDS, strict=True)
        ]
        called, pairs = 0, len(callers) * len(contacts)
        for caller, contact in itertools.product(callers, contacts):
            try:
                called += len(caller.call(contact))
            except SceneFailed as failure:
                say(f"reach: {failure}")
        samples.add("pairs", 100.0 * called / pairs)
        say(f"reach: {called} of {pairs} pairs")


def _member_rows(say: Say) -> list[Row]:
    """Measure rounds of three of which one is hidden, in turns with rounds of three with open ports."""
    hidden, opened = Rounds(), Rounds()
    with Internet() as internet:
        relay = Peer(internet, "r", None, (), relay_mbit=_RELAY_MBIT)
        entry = [_line(relay.contact("direct"))]
        two = [Peer(internet, f"o{number}", None, entry) for number in range(2)]
        thirds = (
            (hidden, Peer(internet, "h", "symmetric", entry), "relayed"),
            (opened, Peer(internet, "third", None, entry), "direct"),
        )
        for _, third, how in thirds:
            third.contact(how)
        for one in two:
            one.contact("direct")
        try:
            for _ in range(_MEMBER_PASSES):
                for rounds, third, _ in thirds:
                    members = [*two, third]
                    for one in members:
                        one.tell(do="average", rounds=_MEMBER_ROUNDS)
                    seconds = [one.answer("averaged")["seconds"] for one in members]
                    rounds.samples += [max(each) for each in zip(*seconds, strict=True)][_MEMBER_SETTLING:]
        except (AssertionError, SceneFailed) as failure:
            hidden.fail(str(failure).partition("; last events")[0])
            say(f"reach: {failure}")
    return [
        Row(
            identifier="reach-hidden-member",
            workload="three peers average 4 MB; one has a router that gives each connection another port",
            quantity="seconds of a round, beside the same peers with open ports",
            ours=hidden.series_of("swarm, one hidden", hidden.samples, "s"),
            peer=opened.series_of("swarm, open ports", opened.samples, "s"),
            aim=Aim(of="ours / peer", sense="at most", value=_MEMBER_RATIO_MAX),
        )
    ]


def _crowd(say: Say, plan: Plan, samples: Samples) -> None:
    """Let peers behind one router call each other through a relay whose link is narrow."""
    with Internet() as internet:
        _, address = entry_point(internet)
        internet.limit("r", CROWD_MBIT)
        internet.behind_router("crowd", "symmetric")
        host, peer_id = address.split("/")[2], address.rpartition("/")[2]
        crowd = internet.start("crowd", "-c", CROWD, peer_id, host, str(CROWD_PEERS), str(CROWD_BYTES))
        done = crowd.wait("exchange", lambda event: event["event"] == "exchanged", _CROWD_S)
    least_s = 2 * CROWD_PEERS * CROWD_BYTES / (CROWD_MBIT * 125_000)
    samples.add("crowd", 100.0 * least_s / done["seconds"])
    samples.add("crowd-evenness", 100.0 * min(done["each"]) / max(done["each"]))
    say(f"reach: {CROWD_PEERS} peers at one relay: {done['seconds']:.1f} s, at line rate {least_s:.1f} s")
    if done["held"] < CROWD_PEERS:
        raise SceneFailed(f"{CROWD_PEERS - done['held']} of {CROWD_PEERS} peers lost their reservations")


_MEASURES: dict[str, Callable[[Say, Plan, Samples], None]] = {
    "near": _calls,
    "far": _far_calls,
    "crowd": _crowd,
    "pairs": _pairs,
}
MEMBER, TRAINING = "hidden-member", "training"
FIGURES = (*_MEASURES, MEMBER, TRAINING)  # parts that may be measured without the others
