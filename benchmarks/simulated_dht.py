"""The DHT in simulated swarms of 100 to 10,000 peers: hops, idle traffic, reads under churn, healing of a
split, attacks.

The production services run on virtual time (`swarm.testing`); the figures are properties of the protocol, the
same on every machine. A swarm starts in the state of one that has run for hours: every table is full of live
peers drawn from the seed.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from benchmarks.results import Aim, Row, Series
from swarm.core.errors import SwarmError
from swarm.core.ids import Key
from swarm.dht.logic.records import Entry
from swarm.testing.chance import Chance
from swarm.testing.checkers import ConnectedSwarm, Violations
from swarm.testing.dht_swarm import DhtSwarm, LazySwarm, SwarmMember
from swarm.testing.hostile import Contacts, HostilePeer, invented_contacts, nearest_identities, only_colluders
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.virtual_loop import collector_off, run_virtual

Say = Callable[[str], None]
T = TypeVar("T")
CHURN_SHARE_PER_S = 0.2 / 600.0  # fraction of the peers replaced per second of churn
_TTL_S = 3600.0
_LINK = LinkConfig(delay_s=0.04, jitter=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a swarm, and for how long it is observed.

    A virtual second of 10,000 peers costs a quarter of a processor second, so that size is observed for less
    time.
    """

    peers: int
    rest_warm_up_s: float = 300.0
    rest_s: float = 600.0
    churn_s: float = 600.0
    split_s: float = 600.0


SMALL = (Size(peers=100), Size(peers=1_000))
# takes 3 GB and a few minutes
LARGE = Size(peers=10_000, rest_warm_up_s=60.0, rest_s=180.0, churn_s=60.0, split_s=150.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. The default is for the page; tests take less."""

    sizes: tuple[Size, ...] = (*SMALL, LARGE)
    lookups: int = 100
    churn_keys: int = 300
    heal_s_max: float = 900.0
    hostile_peers: int = 500
    figures: frozenset[str] = frozenset()  # such as "10000-heal"; empty: all
    identities_tried: int = 20_000  # by an attacker that wants to be near a key


def hops(peers: int, lookups: int, seed: int = 1) -> list[float]:
    """Return the number of consecutive calls of reads of missing keys, by peers drawn from the seed.

    All messages take the same time here, so the number follows from a read's duration.
    """

    async def scenario(network: SimulatedNetwork) -> list[float]:
        swarm = LazySwarm(network, peers)
        chance, loop = Chance(seed, "hops"), asyncio.get_running_loop()
        found = []
        for number in range(lookups):
            service = swarm.service(chance.choice(swarm.peers))
            begun_s = loop.time()
            await service.get(Key("public", f"hops-{number}"))
            found.append(round((loop.time() - begun_s) / (2 * 0.05), 3))
        return found

    return _simulate(seed, scenario, LinkConfig(delay_s=0.05, jitter=0.0))


def at_rest(peers: int, warm_up_s: float, measured_s: float, seed: int = 1) -> tuple[float, float]:
    """Return the messages and bytes that a peer sends in an hour without requests.

    Counts requests and replies, without TLS and TCP.
    """

    async def scenario(network: SimulatedNetwork) -> tuple[float, float]:
        DhtSwarm(network).settle(peers)
        await asyncio.sleep(warm_up_s)
        before = _sent(network)
        await asyncio.sleep(measured_s)
        messages, size_bytes = (
            after - earlier for after, earlier in zip(_sent(network), before, strict=True)
        )
        return messages / peers / measured_s * 3600.0, size_bytes / peers / measured_s * 3600.0

    return _simulate(seed, scenario)


def churn_reads(peers: int, keys: int, churn_s: float, seed: int = 1) -> tuple[int, int, int]:
    """Measure reads while peers are replaced. Return (successful reads, reads, keys that no live peer held in
    the end).

    A fifth of the peers crash in ten minutes, one after the other, and as many newcomers join through three
    live peers. Meanwhile peers drawn from the seed read keys that were stored before. No record is renewed:
    reads find what the replicas keep among themselves.
    """

    async def scenario(network: SimulatedNetwork) -> tuple[int, int, int]:
        swarm, chance = DhtSwarm(network), Chance(seed, "churn")
        swarm.settle(peers)
        names = await _store(swarm, keys, chance)
        found = reads = 0
        gone = round(peers * CHURN_SHARE_PER_S * churn_s)
        async with asyncio.TaskGroup() as joining:
            for _ in range(gone):
                await asyncio.sleep(churn_s / gone)
                leaver = chance.choice(swarm.members)
                swarm.members.remove(leaver)
                await network.crash(leaver.peer)
                bootstrap = [member.peer.contact for member in chance.sample(swarm.members, 3)]
                joining.create_task(swarm.add().service.join(bootstrap))
                for _ in range(max(1, 2 * keys // gone)):
                    number = chance.below(keys)
                    found += await _reads(chance.choice(swarm.members[: peers - gone]), names[number], number)
                    reads += 1
        live = [member.service for member in swarm.members]
        lost = sum(
            not any(service.storage.records(name, service.overlay.now_us) for service in live)
            for name in names
        )
        return found, reads, lost

    return _simulate(seed, scenario, replace(_LINK, dead_are_silent=True))


@dataclass(frozen=True, slots=True)
class Healing:
    """Seconds after the end of a cut; None when the given time did not suffice."""

    tables_s: float | None  # until routing tables connect every peer with every other
    reads_s: float | None  # until each of 50 values written on one side was read on the other
    missing: int  # values not found


def heal(peers: int, split_s: float, heal_s_max: float, seed: int = 1) -> Healing:
    """Cut the swarm in halves for `split_s`, let both sides write, end the cut, and measure how the swarm
    heals.
    """

    async def scenario(network: SimulatedNetwork) -> Healing:
        swarm, chance, loop = DhtSwarm(network), Chance(seed, "heal"), asyncio.get_running_loop()
        swarm.settle(peers)
        members = list(swarm.members)
        chance.shuffle(members)
        halves = members[: peers // 2], members[peers // 2 :]
        network.partition(*([member.peer for member in half] for half in halves))
        await asyncio.sleep(split_s)
        missing: list[tuple[SwarmMember, Key, int]] = []
        for side, half in enumerate(halves):
            for number in range(25):
                key = Key("public", f"side-{side}-{number}")
                await chance.choice(half).service.store(key, number, ttl_s=_TTL_S)
                missing.append((chance.choice(halves[1 - side]), key, number))
        network.heal()
        healed_s, one = loop.time(), ConnectedSwarm(Violations())
        tables_s = reads_s = None
        while loop.time() < healed_s + heal_s_max and reads_s is None:
            if tables_s is None and one.parts(members) == 1:
                tables_s = loop.time() - healed_s
            missing = [asked for asked in missing if not await _reads(*asked)]
            if not missing and tables_s is not None:
                reads_s = loop.time() - healed_s
            await asyncio.sleep(5.0)
        return Healing(tables_s, reads_s, len(missing))

    return _simulate(seed, scenario)


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack: the share of hostile peers, and the contacts that they name."""

    title: str
    identifier: str
    share: float  # of all peers
    near: bool = False  # identities are searched to be nearest to the keys that are read
    endless: bool = False  # they name new peers that do not exist in every answer


ATTACKS = (
    Attack("20 % of the peers name only one another (eclipse)", "eclipse", 0.2),
    Attack(
        "20 % of the peers name invented contacts, new ones in every answer", "endless", 0.2, endless=True
    ),
    Attack(
        "20 identities sought out of 20,000 so that they are nearest to the key", "near-key", 0.04, near=True
    ),
)


def attacked_reads(
    attack: Attack, peers: int, keys: int = 40, *, tried: int = 20_000, seed: int = 1
) -> tuple[int, int]:
    """Let honest peers store and read while hostile ones in their tables drop records. Return (successful
    reads, reads).
    """

    async def scenario(network: SimulatedNetwork) -> tuple[int, int]:
        swarm, chance = DhtSwarm(network), Chance(seed, "attack")
        names = [Key("public", f"thing-{number}") for number in range(1 if attack.near else keys)]
        count = round(peers * attack.share)
        sought = nearest_identities(names[0].dht_id, count, tried, seed) if attack.near else [None] * count
        strangers = [network.peer(identity=identity) for identity in sought]
        contacts: Contacts = invented_contacts(chance) if attack.endless else only_colluders(strangers)
        hostile = [HostilePeer(stranger, contacts) for stranger in strangers]
        swarm.settle(peers - count, strangers)
        async with asyncio.TaskGroup() as group:
            for attacker in hostile:
                victims = chance.sample(
                    [member.peer.contact for member in swarm.members], min(50, len(swarm.members))
                )
                group.create_task(attacker.enter_tables(victims))
        for number, name in enumerate(names):
            await chance.choice(swarm.members).service.store(name, number, ttl_s=_TTL_S)
        asked = [number % len(names) for number in range(5 * keys)]
        found = [await _reads(chance.choice(swarm.members), names[number], number) for number in asked]
        return sum(found), len(found)

    return _simulate(seed, scenario, replace(_LINK, dead_are_silent=True))


async def _store(swarm: DhtSwarm, keys: int, chance: Chance) -> list[Key]:
    names = [Key("public", f"thing-{number}") for number in range(keys)]
    for number, name in enumerate(names):
        await chance.choice(swarm.members).service.store(name, number, ttl_s=_TTL_S)
    return names


async def _reads(member: SwarmMember, key: Key, value: int) -> bool:
    """Return whether this peer finds the value."""
    try:
        entry = await member.service.get(key)
    except SwarmError:
        return False
    return isinstance(entry, Entry) and entry.value == value


def _sent(network: SimulatedNetwork) -> tuple[int, int]:
    return sum(peer.messages_sent for peer in network.peers.values()), sum(
        peer.bytes_sent for peer in network.peers.values()
    )


def _simulate(
    seed: int, scenario: Callable[[SimulatedNetwork], Coroutine[Any, Any, T]], link: LinkConfig = _LINK
) -> T:
    async def main() -> T:
        network = SimulatedNetwork(seed, link)
        result = await scenario(network)
        if network.errors:
            raise network.errors[0]
        await network.close()
        return result

    # messages leave few reference cycles, and walking a thousand tables repeatedly costs a fifth of the time
    with collector_off():
        result = run_virtual(main())
    gc.collect()
    return result


def rows(say: Say, plan: Plan | None = None) -> Iterator[list[Row]]:
    """Yield every figure of the section as soon as it is measured."""
    plan = plan or Plan()
    # The largest swarm comes last, so that an interrupted run has everything else.
    for attack in ATTACKS:
        if _wanted(plan, plan.hostile_peers, attack.identifier):
            say(f"simulated, {plan.hostile_peers} peers: {attack.title}")
            yield [
                _attack_row(
                    attack,
                    plan.hostile_peers,
                    *attacked_reads(attack, plan.hostile_peers, tried=plan.identities_tried),
                )
            ]
    for size in plan.sizes:
        if _wanted(plan, size.peers, "hops"):
            say(f"simulated, {size.peers} peers: hops of {plan.lookups} reads")
            yield [_hops_row(size.peers, hops(size.peers, plan.lookups))]
        if _wanted(plan, size.peers, "rest"):
            say(f"simulated, {size.peers} peers: traffic at rest")
            yield _rest_rows(size, *at_rest(size.peers, size.rest_warm_up_s, size.rest_s))
        if _wanted(plan, size.peers, "churn"):
            say(f"simulated, {size.peers} peers: reads while {_replaced(size)}")
            yield [_churn_row(size, *churn_reads(size.peers, plan.churn_keys, size.churn_s))]
        if _wanted(plan, size.peers, "heal"):
            say(f"simulated, {size.peers} peers: healing of a split of {size.split_s:.0f} s")
            yield _heal_rows(size, plan, heal(size.peers, size.split_s, plan.heal_s_max))


def figures(plan: Plan) -> list[str]:
    """Return the names of the figures that `rows` measures, for `Plan.figures`."""
    attacks = [f"{plan.hostile_peers}-{attack.identifier}" for attack in ATTACKS]
    return attacks + [
        f"{size.peers}-{figure}" for size in plan.sizes for figure in ("hops", "rest", "churn", "heal")
    ]


def _wanted(plan: Plan, peers: int, figure: str) -> bool:
    return not plan.figures or f"{peers}-{figure}" in plan.figures


def simulated_row(
    identifier: str,
    workload: str,
    quantity: str,
    series: Series,
    aim: Aim | None = None,
    notes: tuple[str, ...] = (),
) -> Row:
    """Return a row of this section, without a peer to compare with, since other libraries cannot be
    simulated.
    """
    return Row(
        identifier=f"simulated-{identifier}",
        workload=workload,
        quantity=quantity,
        ours=series,
        peer=None,
        aim=aim,
        notes=notes,
    )


def _hops_row(peers: int, found: list[float]) -> Row:
    return simulated_row(
        f"{peers}-hops",
        f"simulated swarm of {peers:,} peers, a read",
        "calls that follow one upon the other, the longest of all reads",
        Series(name="swarm: hops, longest", unit="hops", samples=(max(found),)),
        Aim(of="ours", sense="at most", value=round(math.log2(peers) / 2 + 2, 1)),
        (f"hops of {len(found)} reads: mean {sum(found) / len(found):.2f}, most {max(found):g}",),
    )


def _heal_rows(size: Size, plan: Plan, healing: Healing) -> list[Row]:
    def row(identifier: str, quantity: str, found_s: float | None, reason: str) -> Row:
        series = Series(
            name=f"swarm: healing, {identifier}",
            unit="s",
            samples=() if found_s is None else (found_s,),
            failed=int(found_s is None),
            reasons=() if found_s is not None else (f"{reason} after {plan.heal_s_max:.0f} s",),
        )
        title = f"simulated swarm of {size.peers:,} peers, cut in halves for {size.split_s:.0f} s"
        return simulated_row(f"{size.peers}-heal-{identifier}", title, quantity, series)

    missing = f"{healing.missing} of 50 values not found"
    return [
        row(
            "tables",
            "from the cut's end until everybody is reached from everybody",
            healing.tables_s,
            "in parts",
        ),
        row(
            "reads",
            "from the cut's end until all that one side wrote is found from the other",
            healing.reads_s,
            missing,
        ),
    ]


def _replaced(size: Size) -> str:
    time = f"{size.churn_s / 60:.0f} minutes" if size.churn_s >= 120.0 else f"{size.churn_s:.0f} s"
    return f"{100 * CHURN_SHARE_PER_S * size.churn_s:.0f} % replaced in {time}"


def _churn_row(size: Size, found: int, reads: int, lost: int) -> Row:
    return simulated_row(
        f"{size.peers}-churn",
        f"simulated swarm of {size.peers:,} peers, {_replaced(size)}",
        "reads that find what was stored before",
        Series(name="swarm: reads that succeed", unit="%", samples=(100.0 * found / reads,)),
        Aim(of="ours", sense="at least", value=99.5) if size.peers == 1_000 else None,
        (f"{found} of {reads} reads; keys that no live peer holds in the end: {lost}",),
    )


def _attack_row(attack: Attack, peers: int, found: int, reads: int) -> Row:
    return simulated_row(
        f"{peers}-{attack.identifier}",
        f"simulated swarm of {peers:,} peers: {attack.title}",
        "reads that still succeed",
        Series(name="swarm: reads that succeed", unit="%", samples=(100.0 * found / reads,)),
    )


def _rest_rows(size: Size, messages: float, size_bytes: float) -> list[Row]:
    title = f"simulated swarm of {size.peers:,} peers at rest"
    over = f"measured over {size.rest_s:.0f} s after {size.rest_warm_up_s:.0f} s and extrapolated to an hour"
    note = (f"{over}; requests and replies, protobuf bytes without TLS and TCP",)
    return [
        simulated_row(
            f"{size.peers}-rest-messages",
            title,
            "messages that a peer sends in an hour",
            Series(name="swarm: messages", unit="messages/h", samples=(messages,)),
            None,
            note,
        ),
        simulated_row(
            f"{size.peers}-rest-bytes",
            title,
            "bytes that a peer sends in an hour",
            Series(name="swarm: bytes", unit="kB/h", samples=(size_bytes / 1e3,)),
        ),
    ]
