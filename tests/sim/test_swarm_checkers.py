"""Tests of the checkers: each promise is broken on purpose, and the checker must report it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from averaging.optim.modes.settings import Gradients
from swarm.core.ids import Key
from swarm.dht.logic.records import VERIFIED_MAX, Entry, Record, encode_value, signed
from swarm.testing.checkers import (
    Authorship,
    CheckLimits,
    ConnectedSwarm,
    Deadlines,
    Expiry,
    Ledger,
    RecordedWrite,
    Survival,
    Violations,
    sizes_of,
)
from swarm.testing.dht_swarm import DhtSwarm, SwarmMember
from swarm.testing.network import SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingSwarm
from swarm.testing.virtual_loop import EPOCH_UNIX_S, run_virtual

KEY = Key("public", "thing")


def entry_of(write: RecordedWrite, value: object, expiration: float) -> Entry:
    return Entry(
        value=value,
        subkey=write.subkey,
        writer=write.writer,
        issued_at=expiration - 60,
        expiration=expiration,
    )


async def swarm_of(count: int) -> DhtSwarm:
    swarm = DhtSwarm(SimulatedNetwork(seed=1))
    await swarm.grow(count)
    return swarm


async def written(ledger: Ledger, member: SwarmMember, ttl_s: float = 600.0) -> RecordedWrite:
    now_s = asyncio.get_running_loop().time()
    write = ledger.begin(KEY, None, member.peer.peer_id, now_s, now_s + ttl_s)
    assert (await member.service.store(KEY, write.number, ttl_s=ttl_s)).ok
    write.acknowledged_s = asyncio.get_running_loop().time()
    return write


def test_a_value_that_was_never_written_is_detected() -> None:
    async def scenario() -> None:
        swarm = await swarm_of(2)
        ledger, violations = Ledger(), Violations()
        authorship = Authorship(ledger, violations)
        one, two = (member.peer.peer_id for member in swarm.members)
        write = await written(ledger, swarm.members[0])
        assert authorship.entry("read", KEY, one, None, write.number, 1.0) is write
        assert not violations.lines
        for writer, subkey, value in (
            (two, None, write.number),
            (one, "a", write.number),
            (one, None, 99),
            (one, None, "x"),
        ):
            assert authorship.entry("read", KEY, writer, subkey, value, 1.0) is None
        assert violations.count == 4
        await swarm.network.close()

    run_virtual(scenario())


def test_a_record_that_outlives_its_expiration_is_detected() -> None:
    async def scenario() -> None:
        swarm = await swarm_of(1)
        ledger, violations = Ledger(), Violations()
        reader = swarm.members[0]
        write = await written(ledger, reader)
        expiry, now = Expiry(violations), reader.peer.clock.swarm_s()
        begun_s = now - EPOCH_UNIX_S
        expiry.read(reader, entry_of(write, 0, now + 1), write, begun_s, now)
        assert not violations.count
        expiry.read(reader, entry_of(write, 0, now - 0.1), write, begun_s, now)
        assert violations.count == 1, "expired by its own clock, within what clocks may err"
        expiry.read(reader, entry_of(write, 0, now - 30), write, begun_s, now - 60)
        assert violations.count == 2, "its own clock said so, but nothing excuses that clock"
        await swarm.network.close()

    run_virtual(scenario())


@pytest.mark.parametrize(("repair_s", "broken"), [(300.0, False), (50.0, True)])
def test_a_record_lost_before_its_expiration_is_detected(repair_s: float, broken: bool) -> None:
    async def scenario() -> None:
        swarm = await swarm_of(8)
        ledger, violations, loop = Ledger(), Violations(), asyncio.get_running_loop()
        survival = Survival(ledger, Authorship(ledger, violations), violations, repair_s)
        write = await written(ledger, swarm.members[0])
        survival.check(swarm.live, loop.time())
        holders = [
            member
            for member in swarm.members
            if member.service.storage.records(KEY, member.service.overlay.now_us)
        ]
        assert len(holders) == 5
        assert write.last_plenty_s == loop.time()
        for holder in holders:  # at once: no protocol survives that
            await swarm.network.crash(holder.peer)
        await asyncio.sleep(100.0)
        for _ in range(2):
            survival.check(swarm.live, loop.time())
        assert (violations.count, survival.lost_with_holders) == ((1, 0) if broken else (0, 1)), "told once"
        await swarm.network.close()

    run_virtual(scenario())


def test_a_replica_that_holds_a_forgery_is_detected() -> None:
    async def scenario() -> None:
        swarm = await swarm_of(3)
        ledger, violations, loop = Ledger(), Violations(), asyncio.get_running_loop()
        survival = Survival(ledger, Authorship(ledger, violations), violations, 300.0)
        await written(ledger, swarm.members[0])
        member = swarm.members[1]
        now_us = member.service.overlay.now_us
        record = Record(
            key=KEY,
            subkey=None,
            value=encode_value(77),
            issued_at_us=now_us,
            expiration_us=now_us + 10**8,
            writer=member.peer.peer_id,
        )
        member.service.storage.store(signed(record, member.peer.identity), now_us)
        survival.check(swarm.live, loop.time())
        assert violations.count == 1
        await swarm.network.close()

    run_virtual(scenario())


def test_late_and_unfinished_operations_are_detected() -> None:
    violations = Violations()
    deadlines = Deadlines(violations)
    in_time, late, _ = (deadlines.begin(what, 10.0) for what in ("one", "two", "three"))
    deadlines.end(in_time, 10.0)
    deadlines.check(10.0)
    assert not violations.lines
    deadlines.end(late, 11.0)
    deadlines.check(12.0)
    deadlines.check(13.0)
    assert [line.partition(" s: ")[2] for line in violations.lines] == [
        "two ended 1.00 s after its deadline",
        "three has not ended 2.00 s after its deadline",
    ]


def test_unbounded_growth_is_detected() -> None:
    async def scenario() -> None:
        swarm = await swarm_of(3)
        violations = Violations()
        limits = CheckLimits(violations, {"tasks": 50}, default_max=100)
        limits.check(swarm.members, 0.0)
        assert not violations.lines
        assert any(name.endswith("table._by_peer") for name in limits.largest)
        assert any("storage" in name for name, _ in sizes_of(swarm.members[0].service))
        service = swarm.members[1].service
        service.__dict__["_forgotten"] = list(range(101))
        limits.check(swarm.members, 1.0)
        assert violations.lines == ["1.0 s: peer 1: _forgotten has 101 entries, more than 100"]
        for size in (VERIFIED_MAX, VERIFIED_MAX + 1):  # a cache is as large as it may be, and no larger
            limits.check_size(1, "validator._verified", size, 2.0)
        assert [line.partition(" s: ")[2] for line in violations.lines[1:]] == [
            f"peer 1: validator._verified has {VERIFIED_MAX + 1} entries, more than {VERIFIED_MAX}"
        ]
        await swarm.network.close()

    run_virtual(scenario())


def test_growth_within_an_optimizer_is_detected(caplog: pytest.LogCaptureFixture) -> None:
    """Regression test: only collections of the objects of one package, those of the DHT, were looked at."""
    caplog.set_level(logging.CRITICAL)

    async def scenario() -> None:
        violations = Violations()
        checks = TrainingChecks(violations, step_s_max=600.0)
        async with asyncio.TaskGroup() as group:
            config = TrainingConfig(target_batch_size=8, mode=Gradients())
            swarm = TrainingSwarm(SimulatedNetwork(seed=1), config, checks.on_step, group)
            one = await swarm.add(batch=4, compute_s=0.5)
            await asyncio.sleep(10.0)
            checks.watch([one], 10.0)
            names = {name for name in checks.limits.largest if not name.startswith("_reporter.dht.")}
            for part in ("_lineage._certificates", ".all_reduce.", ".machine.", "_ledger.", "_meter."):
                assert any(part in name for name in names), f"{part} is in none of {sorted(names)}"
            assert not violations.lines
            vars(vars(one.optimizer)["_history"])["forgotten"] = list(range(5_001))
            await asyncio.sleep(10.0)
            checks.watch([one], 20.0)
            assert not violations.lines, "sizes are checked every half minute"
            await asyncio.sleep(20.0)
            checks.watch([one], 40.0)
            assert [line.partition(": ")[2] for line in violations.lines] == [
                "peer 0: _history.forgotten has 5001 entries, more than 5000"
            ]
            await swarm.close()

    run_virtual(scenario())


def test_islands_are_counted() -> None:
    async def scenario() -> None:
        swarm = await swarm_of(6)
        violations = Violations()
        one = ConnectedSwarm(violations)
        assert one.parts(swarm.members) == 1
        left = swarm.members[:3]
        for member in left:
            for other in swarm.members[3:]:
                while other.peer.peer_id in member.service.overlay.table:
                    member.service.overlay.table.on_failure(other.peer.peer_id, at_once=True)
        assert one.parts(swarm.members) == 2, "three peers know none of the others, which know them"
        one.check(swarm.members, 0.0)
        assert violations.count == 1
        await swarm.network.close()

    run_virtual(scenario())


def test_the_ledger_knows_which_records_must_be_found() -> None:
    async def scenario() -> None:
        swarm = await swarm_of(1)
        ledger = Ledger()
        first = await written(ledger, swarm.members[0], ttl_s=100.0)
        assert ledger.living(50.0) == [first]
        second = ledger.begin(KEY, None, first.writer, 60.0, 160.0)
        assert ledger.living(61.0) == [], "the first is being replaced, the second not acknowledged"
        second.acknowledged_s = 62.0
        assert ledger.living(63.0) == [second]
        assert ledger.owned(first.writer) == [second]
        ledger.replace(second.owner, 70.0)
        assert ledger.living(71.0) == []
        await swarm.network.close()

    run_virtual(scenario())
