"""All-reduce in simulated swarms of 16, 64 and 256 peers in groups of sixteen: messages, bytes and virtual
time.

The production services run on virtual time, so the figures are properties of the protocol and of the link,
not of the machine. A message takes the link's delay and its size over the link's bandwidth; messages do not
queue behind one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group, Member
from benchmarks.results import Row, Series
from benchmarks.simulated_dht import simulated_row
from swarm.testing.chance import Chance
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.rounds import all_reduce_of
from swarm.testing.virtual_loop import run_virtual

GROUP_SIZE = 16
ELEMENTS = 1 << 17
DEADLINE_S = 60.0
LINK = LinkConfig(delay_s=0.025, jitter=0.25, bandwidth=12.5e6)
LINK_WORDS = "25 ms one way, 100 Mbit/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """The cost of a round without faults for one peer."""

    messages: float  # sent by a peer: requests, replies, messages of streams
    size_bytes: float  # their protobuf and tensor bytes, without TLS and TCP
    took_s: float  # virtual time until the last peer had committed
    payload_bytes: float  # the butterfly's payload: the rest is framing, heartbeats and votes


def measure(peers: int, *, lost: int = 0, seed: int = 1) -> RoundFigures:
    """Run one round of all groups at once. `lost` peers of the first group crash in the middle of it."""

    async def scenario() -> RoundFigures:
        network, chance = SimulatedNetwork(seed, LINK), Chance(seed, "rounds")
        members = [network.peer() for _ in range(peers)]
        services = {peer.peer_id: all_reduce_of(peer) for peer in members}
        values = {peer.peer_id: torch.full((ELEMENTS,), float(place)) for place, peer in enumerate(members)}
        groups = [
            _group(members[first : first + GROUP_SIZE], chance) for first in range(0, peers, GROUP_SIZE)
        ]

        async def run(peer: SimulatedPeer, group: Group) -> RoundOutcome:
            deadline_s = peer.clock.monotonic_s() + DEADLINE_S
            return await services[peer.peer_id].run(
                group, values[peer.peer_id], deadline_s=deadline_s, config=RoundConfig()
            )

        began_s = asyncio.get_running_loop().time()
        running = {
            peer.peer_id: asyncio.create_task(run(peer, group))
            for group in groups
            for peer in members
            if peer.peer_id in group.peer_ids
        }
        victims = members[1 : 1 + lost]
        if victims:
            await asyncio.sleep(3 * LINK.delay_s)
        for victim in victims:
            running.pop(victim.peer_id).cancel()
            await network.crash(victim)
        outcomes = {peer_id: await task for peer_id, task in running.items()}
        took_s = asyncio.get_running_loop().time() - began_s
        wrong = [outcome.reason for outcome in outcomes.values() if outcome.failed]
        if wrong or network.errors:
            raise AssertionError(f"a round failed: {(wrong or network.errors)[0]}")
        sent = [peer for peer in members if peer not in victims]
        for service in services.values():
            service.close()
        figures = RoundFigures(
            messages=sum(peer.messages_sent for peer in sent) / len(sent),
            size_bytes=sum(peer.bytes_sent for peer in sent) / len(sent),
            took_s=took_s,
            payload_bytes=2 * ELEMENTS * 2 * (GROUP_SIZE - 1) / GROUP_SIZE,
        )
        await network.close()
        return figures

    return run_virtual(scenario())


def _group(peers: list[SimulatedPeer], chance: Chance) -> Group:
    members = tuple(
        sorted(
            (Member(contact=peer.contact, weight=1.0, bandwidth=1.0) for peer in peers),
            key=lambda member: member.peer_id,
        )
    )
    return Group(
        group_id=chance.randbytes(32), members=members, codec="float16", gathered=(b"",) * len(members)
    )


def rows(say: Callable[[str], None], sizes: tuple[int, ...] = (16, 64, 256)) -> Iterator[list[Row]]:
    """Yield every figure of the section as soon as it is measured."""
    for peers in sizes:
        say(f"simulated, {peers} peers: a round of all-reduce in groups of {GROUP_SIZE}")
        yield _rows(peers, "", measure(peers))
    say(f"simulated, {GROUP_SIZE} peers, one of which crashes: a round of all-reduce")
    yield _rows(GROUP_SIZE, ", one of which crashes in the middle", measure(GROUP_SIZE, lost=1))


def _rows(peers: int, what: str, figures: RoundFigures) -> list[Row]:
    title = (
        f"simulated round of {peers} peers in groups of {GROUP_SIZE}{what}, {4 * ELEMENTS // 1024} KiB "
        f"each, float16, {LINK_WORDS}"
    )
    name = f"round-{peers}" + ("-lost" if what else "")
    extra = figures.size_bytes / figures.payload_bytes - 1.0

    def row(kind: str, quantity: str, unit: str, value: float, *notes: str) -> Row:
        series = Series(name=f"swarm: {kind}", unit=unit, samples=(value,))
        return simulated_row(f"{name}-{kind}", title, quantity, series, notes=notes)

    return [
        row(
            "messages",
            "messages that a peer sends, heartbeats and votes included",
            "messages",
            figures.messages,
        ),
        row("time", "virtual time until the last peer has committed", "s", figures.took_s),
        row(
            "bytes",
            "bytes that a peer sends over the butterfly's own",
            "%",
            100.0 * extra,
            f"{figures.size_bytes / 1e3:.0f} kB in all",
        ),
    ]
