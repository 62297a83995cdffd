"""The connections of strangers are bounded by address prefix and in all; members keep theirs."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections import Counter

import pytest

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net import connections
from swarm.net.connections import (
    ALL_ARRIVALS_MAX,
    ALL_ARRIVALS_PER_S,
    ARRIVALS_MAX,
    ARRIVALS_PER_S,
    AWAY_S,
    CONNECTIONS_MAX,
    FEW_MAX,
    RESERVED,
    UNKNOWN_AT_ONCE_MAX,
    UNKNOWN_GRACE_S,
    UNKNOWN_MAX,
    UNKNOWN_PER_PREFIX_MAX,
    Arrivals,
    Connections,
    Held,
    surplus,
)
from swarm.runtime.listener_filter import NETWORKS_MAX
from swarm.testing.identities import SeededIdentity

MEMBER, STRANGER = (SeededIdentity(name).peer_id for name in ("member", "stranger"))
NOW_S = 100.0


def standing(*members: PeerId) -> PeerStanding:
    known = PeerStanding()
    known.add_members("run", members)
    return known


def held(count: int, prefix: int, peer_id: PeerId | None, since_s: float = 0.0) -> list[Held]:
    return [
        Held(
            (f"198.51.{prefix}.{number % 250}", 1024 + number),
            since_s + number / 1e6,
            peer_id,
            f"198.51.{prefix}.0/24",
        )
        for number in range(count)
    ]


def test_callers_that_make_no_call_are_bounded_and_the_oldest_go_first() -> None:
    idle = held(500, 1, None)
    closed = surplus(idle, standing(), NOW_S)
    assert closed == list(reversed(idle[: 500 - UNKNOWN_PER_PREFIX_MAX]))
    many = [one for prefix in range(20) for one in held(50, prefix, None)]
    left = Counter(one.prefix for one in many) - Counter(
        one.prefix for one in surplus(many, standing(), NOW_S)
    )
    assert left.total() <= UNKNOWN_MAX
    assert min(left.values()) == UNKNOWN_MAX // 20


def test_a_caller_has_time_to_make_its_first_call() -> None:
    fresh = held(500, 1, None, since_s=NOW_S - UNKNOWN_GRACE_S / 2)
    assert surplus(fresh, standing(), NOW_S) == []


@pytest.mark.parametrize("prefixes", [1, 20])
def test_a_thousand_callers_that_came_a_moment_ago_keep_512_connections(prefixes: int) -> None:
    """After TLS one of them takes 86 KiB: a thousand were more than 64 MiB for 5 s."""
    fresh = [one for prefix in range(prefixes) for one in held(1000 // prefixes, prefix, None, since_s=NOW_S)]
    honest = held(1, 99, None, since_s=NOW_S)
    closed = surplus([*fresh, *honest], standing(), NOW_S)
    assert UNKNOWN_AT_ONCE_MAX - prefixes <= 1001 - len(closed) <= UNKNOWN_AT_ONCE_MAX
    assert not set(honest) & set(closed)
    newest = max(fresh, key=lambda one: one.since_s)
    assert newest not in closed, "the oldest go first"


def test_strangers_of_one_address_prefix_have_a_quarter_where_members_are_known() -> None:
    many = held(CONNECTIONS_MAX, 1, STRANGER)
    closed = surplus([*many, *held(10, 2, STRANGER)], standing(MEMBER), NOW_S)
    assert closed == many[CONNECTIONS_MAX // 4 :]
    assert surplus(many, standing(), NOW_S) == many[CONNECTIONS_MAX // 2 :]


def test_members_keep_their_connections_beside_strangers_of_the_same_address() -> None:
    members = held(CONNECTIONS_MAX, 1, MEMBER)
    strangers = held(300, 1, STRANGER, since_s=1.0)
    closed = surplus([*members, *strangers], standing(MEMBER), NOW_S)
    assert closed == strangers[CONNECTIONS_MAX // 4 :]


@pytest.mark.parametrize("seed", range(20))
def test_only_connections_beyond_the_limits_are_closed(seed: int) -> None:
    rng, known = random.Random(seed), standing(MEMBER)
    found: list[Held] = []
    for prefix in range(rng.randint(1, 30)):
        found += held(rng.randint(0, 400), prefix, rng.choice([None, STRANGER, MEMBER]))
    closed = set(surplus(found, known, NOW_S))
    for peer_id, per_prefix_max, total_max in (
        (None, UNKNOWN_PER_PREFIX_MAX, UNKNOWN_MAX),
        (STRANGER, CONNECTIONS_MAX // 4, CONNECTIONS_MAX // 2),
    ):
        all_of = Counter(one.prefix for one in found if one.peer_id == peer_id)
        left = Counter(one.prefix for one in found if one.peer_id == peer_id and one not in closed)
        assert left.total() <= total_max
        assert max(left.values(), default=0) <= per_prefix_max
        if all_of.total() <= total_max and max(all_of.values(), default=0) <= per_prefix_max:
            assert left == all_of
    assert not any(one.peer_id == MEMBER for one in closed)


def test_a_caller_that_comes_while_connections_are_listed_stays_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections are listed in several turns, so that a flood of them does not hold up the event loop."""
    monkeypatch.setattr(connections, "_PER_TURN", 1)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            kept = Connections(standing(), lambda: port)
            near = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
            far = [server.accept()[0] for _ in near]
            gone, *others = [one.getsockname() for one in near]
            for endpoint in (gone, others[0]):
                kept.on_called(STRANGER, endpoint, NOW_S)
            near.pop(0).close()
            far.pop(0).close()
            listing = asyncio.get_running_loop().create_task(kept.close_surplus(NOW_S))
            await asyncio.sleep(0)
            assert not listing.done(), "other tasks have their turn"
            late = socket.create_connection(("127.0.0.1", port))
            kept.on_called(STRANGER, late.getsockname(), NOW_S)
            assert await listing == 0
            assert set(kept._callers) == {others[0], late.getsockname()}
            for one in (*near, *far, late):
                one.close()

    asyncio.run(scenario())


def test_strangers_of_one_prefix_that_connect_again_and_again_are_not_answered_and_members_are() -> None:
    known, ports = Connections(standing(MEMBER), lambda: None), itertools.count()

    def answered(host: str, peer_id: PeerId, now_s: float, count: int = 400) -> int:
        return sum(known.on_called(peer_id, (host, next(ports)), now_s) for _ in range(count))

    assert answered("198.51.1.7", STRANGER, NOW_S) == ARRIVALS_MAX
    assert answered("198.51.1.8", STRANGER, NOW_S + 10.0) == 10 * ARRIVALS_PER_S
    assert answered("198.51.1.7", MEMBER, NOW_S + 11.0) == 400
    # of what all strangers have, the first network has used most; after a while there is more again
    assert answered("198.51.2.7", STRANGER, NOW_S + 12.0, 50) >= FEW_MAX, "another network has its own"
    assert answered("198.51.2.7", STRANGER, NOW_S + 30.0, 50) == 50
    assert known.on_called(STRANGER, ("198.51.1.7", 0), NOW_S + 12.0), "it was answered before"
    assert not known.on_called(STRANGER, ("198.51.1.7", 399), NOW_S + 500.0), "it is closed soon"
    nobody_known = Connections(standing(), lambda: None)
    assert all(nobody_known.on_called(STRANGER, ("198.51.1.7", port), NOW_S) for port in range(400))


@pytest.mark.parametrize("seed", range(10))
def test_in_any_time_a_prefix_has_its_burst_and_its_rate_at_most(seed: int) -> None:
    rng, arrivals = random.Random(seed), Arrivals()
    now_s, answered_s = NOW_S, list[float]()
    for _ in range(2000):
        now_s += rng.choice([0.0, 0.01, 0.3, 5.0])
        if arrivals.enter("198.51.1.0/24", now_s):
            answered_s.append(now_s)
    for first, began_s in enumerate(answered_s):
        for last in range(first, len(answered_s), 37):
            allowed = ARRIVALS_MAX + (answered_s[last] - began_s) * ARRIVALS_PER_S
            assert last - first + 1 <= allowed + 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_in_any_time_all_strangers_have_their_burst_and_their_rate_at_most(seed: int) -> None:
    rng, arrivals = random.Random(seed), Arrivals()
    now_s, answered_s = NOW_S, list[float]()
    for _ in range(4000):
        now_s += rng.choice([0.0, 0.01, 0.1, 0.5])
        if arrivals.enter(f"198.51.{rng.randrange(200)}.0/24", now_s):
            answered_s.append(now_s)
    for first, began_s in enumerate(answered_s):
        for last in range(first, len(answered_s), 37):
            allowed = ALL_ARRIVALS_MAX + (answered_s[last] - began_s) * ALL_ARRIVALS_PER_S
            assert last - first + 1 <= allowed + 1e-6


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("networks", [1, 20, 32])
def test_a_newcomer_gets_in_during_a_flood_from_other_networks(networks: int, seed: int) -> None:
    """A newcomer tries as its system does, and needs a few connections."""
    rng, arrivals = random.Random(seed), Arrivals()
    came_s = NOW_S + rng.uniform(0.0, 120.0)
    tries = [came_s + after_s for after_s in (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0)]
    # in a second each network of the attacker makes up to ten connections
    flood = [NOW_S + rng.uniform(0.0, 200.0) for _ in range(networks * rng.choice([200, 2000]))]
    waited_s = None
    for now_s, is_honest in sorted([*((at_s, False) for at_s in flood), *((at_s, True) for at_s in tries)]):
        if not is_honest:
            arrivals.enter(f"198.51.{rng.randrange(networks)}.0/24", now_s)
        elif waited_s is None and all(arrivals.enter("203.0.113.0/24", now_s) for _ in range(3)):
            waited_s = now_s - came_s
    assert waited_s is not None
    # the attacker's networks have their few first, and all strangers get new ones at their rate
    assert waited_s <= max(networks * FEW_MAX - RESERVED, 0) / ALL_ARRIVALS_PER_S + 15.0
    if came_s > NOW_S + 60.0:
        assert waited_s == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_reconnects_constantly_is_filtered_most_of_the_time_with_pauses(
    seed: int,
) -> None:
    rng, arrivals = random.Random(seed), Arrivals()
    away, now_s, states = False, NOW_S, list[bool]()
    for _ in range(120):
        for _ in range(0 if away else 100):
            arrivals.enter("198.51.1.0/24", now_s + rng.random())
        arrivals.enter("198.51.2.0/24", now_s)
        now_s += 1.0
        found = arrivals.turn(now_s)
        assert set(found) <= {"198.51.1.0/24"}, "the other one makes as many as it may"
        away = bool(found)
        states.append(away)
    runs = [(key, len(list(group))) for key, group in itertools.groupby(states)]
    assert all(length <= AWAY_S + 1.0 for is_away, length in runs if is_away)
    assert all(length == 1 for is_away, length in runs[2:-1] if not is_away)
    assert sum(states) >= 0.6 * len(states)


def test_known_and_refused_networks_are_bounded() -> None:
    arrivals = Arrivals()
    for number in range(20_000):
        arrivals.enter(f"198.{number % 250}.{number // 250}.0/24", NOW_S)
    assert len(arrivals.turn(NOW_S + 1.0)) == NETWORKS_MAX
    assert len(arrivals.budget) == 4096


def test_callers_that_hold_connections_and_make_no_call_are_turned_away_with_their_network() -> None:
    """They are closed after a while, and others of them would come in their place."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            kept = Connections(standing(MEMBER), lambda: port)
            near = [
                socket.create_connection(("127.0.0.1", port), source_address=("127.0.7.1", 0))
                for _ in range(UNKNOWN_PER_PREFIX_MAX + 1)
            ]
            far = [server.accept()[0] for _ in near]
            assert await kept.close_surplus(NOW_S) == 0
            assert await kept.close_surplus(NOW_S + UNKNOWN_GRACE_S) == 1
            assert kept.turned_away == ["127.0.7.0/24"]
            for one in (*near, *far):
                one.close()

    asyncio.run(scenario())
