"""The measurements of `benchmarks.simulated_dht` at a small scale: they run, count correctly, and meet
bounds.
"""

from __future__ import annotations

import math

import pytest

from benchmarks import report, simulated_dht, simulated_rounds
from swarm.core.ids import Key
from swarm.testing.chance import Chance
from swarm.testing.dht_swarm import DhtSwarm, LazySwarm, Overview
from swarm.testing.hostile import nearest_identities
from swarm.testing.network import SimulatedNetwork
from swarm.testing.virtual_loop import run_virtual


@pytest.mark.parametrize("peers", [100, 400])
def test_hops_grow_with_the_logarithm(peers: int) -> None:
    assert max(simulated_dht.hops(peers, lookups=20)) <= math.log2(peers) / 2 + 2


def test_a_constructed_table_equals_a_grown_one() -> None:
    """The constructed tables obey the table's own rule: adding all peers changes no bucket's range."""

    async def scenario() -> None:
        swarm = DhtSwarm(SimulatedNetwork(seed=2))
        settled = swarm.settle(300)
        for member in swarm.members[:20]:
            table = member.service.overlay.table
            known, buckets = len(table), table.bucket_count
            for other in swarm.members:
                table.on_answer(other.peer.contact, 1.0)
            assert (len(table), table.bucket_count) == (known, buckets)
        place = swarm.members[0].peer.peer_id.dht_id
        assert settled.nearest(place, 1) == [swarm.members[0].peer.contact]
        await swarm.network.close()

    run_virtual(scenario())


def test_a_lazy_swarm_creates_peers_when_they_are_asked() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=3)
        swarm = LazySwarm(network, 300)
        await swarm.service(swarm.peers[7]).get(Key("public", "x"))
        assert 5 < swarm.services_made < 150
        assert not network.errors
        await network.close()

    run_virtual(scenario())


def test_identities_near_a_key_are_nearest() -> None:
    sought = nearest_identities(12345, 3, 200, "x")
    assert len(sought) == 3
    others = Overview([])
    assert others.nearest(0, 5) == []
    distances = [identity.peer_id.dht_id ^ 12345 for identity in sought]
    assert distances == sorted(distances)
    assert distances[-1] < 2**256 // 20


@pytest.mark.simulation
def test_every_figure_becomes_a_row() -> None:
    plan = simulated_dht.Plan(
        sizes=(simulated_dht.Size(peers=30, rest_warm_up_s=10.0, rest_s=60.0, churn_s=300.0, split_s=120.0),),
        lookups=5,
        churn_keys=10,
        heal_s_max=120.0,
        hostile_peers=40,
        identities_tried=300,
    )
    rows = [row for section in simulated_dht.rows(lambda text: None, plan) for row in section]
    values = {row.identifier: row.ours.median for row in rows}
    assert 1.0 <= values["simulated-30-hops"] <= 2.0
    assert values["simulated-30-churn"] is not None
    assert (values["simulated-30-heal-tables"] or 0.0) < 120.0
    assert "simulated-30-heal-reads" in values
    assert (values["simulated-30-rest-messages"] or 0) > 10
    assert (values["simulated-40-eclipse"] or 0) > 50
    cells = report.cells(
        report.as_record(next(row for row in rows if row.identifier.endswith("-hops")), "run")
    )
    assert cells[4] in ("1 hops", "2 hops")
    assert cells[6].startswith("≤ 4.5")


def test_churn_reads_count_lost_records() -> None:
    found, reads, lost = simulated_dht.churn_reads(30, keys=20, churn_s=600.0, seed=Chance(1).below(100))
    assert reads >= 6
    assert found <= reads
    assert lost <= 20


def test_a_round_has_little_overhead_and_survives_a_crash() -> None:
    rows = {
        row.identifier: row.ours.median or 0.0
        for section in simulated_rounds.rows(lambda text: None, (16,))
        for row in section
    }
    assert rows["simulated-round-16-bytes"] < 2.0, "per cent over the butterfly's own bytes"
    assert rows["simulated-round-16-messages"] < 9 * (simulated_rounds.GROUP_SIZE - 1)
    # Open and chunk, average, vote and its answer: four messages in sequence.
    assert rows["simulated-round-16-time"] < 4 * 1.25 * simulated_rounds.LINK.delay_s + 0.15
    assert (
        rows["simulated-round-16-time"]
        < rows["simulated-round-16-lost-time"]
        < rows["simulated-round-16-time"] + 0.5
    )
