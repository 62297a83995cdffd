"""Twenty hidden peers at one relay whose link carries 50 Mbit/s, in network namespaces."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.chaos.namespaces import Internet, missing
from tests.chaos.reach_peers import entry_point

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(shutil.which("tc") is None, reason="tc not installed"),
]
PEERS, MBIT = 20, 50
BYTES = 1_000_000  # that each peer sends to the next one, which sends them back

# Libp2p hosts that keep reservations at one relay, and call each other through it.
CROWD = """
import asyncio, json, os, sys, time
from swarm.core.clock import SystemClock
from swarm.core.ids import Address, Contact, PeerId
from swarm.libp2p.circuits import Circuits
from tests.wire.libp2p_hosts import Scene
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")
async def exchange(circuits, target, relay, size):
    started_s = time.monotonic()
    stream = await (await circuits.connect(target, [relay], timeout_s=60.0)).open("/echo")
    data, back = os.urandom(size), bytearray()
    async def read():
        while part := await stream.read():
            back.extend(part)
    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        await stream.write(data)
        stream.finish()
    assert bytes(back) == data
    return time.monotonic() - started_s
async def main(relay_id, host, peers, size):
    scene, relay = Scene(), Contact(PeerId.parse(relay_id), (Address(host, 4001),))
    crowd = [Circuits(await scene.host(listens=False), SystemClock()) for _ in range(peers)]
    for circuits in crowd:
        scene.hosts[crowd.index(circuits)].supervisor.spawn("reservations", circuits.run)
        circuits.offer([relay])
    while not all(circuits.held for circuits in crowd):
        await asyncio.sleep(0.05)
    show(event="reserved")
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(exchange(one, scene.hosts[(number + 1) % peers].peer_id, relay, size))
            for number, one in enumerate(crowd)
        ]
    show(event="exchanged", seconds=time.monotonic() - started_s, each=[one.result() for one in running],
         held=sum(bool(circuits.held) for circuits in crowd))
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def test_twenty_hidden_peers_share_a_relay_evenly_and_lose_no_connection(internet: Internet) -> None:
    _, address = entry_point(internet)
    internet.limit("r", MBIT)
    internet.behind_router("crowd", "symmetric")
    host, peer_id = address.split("/")[2], address.rpartition("/")[2]
    crowd = internet.start("crowd", "-c", CROWD, peer_id, host, str(PEERS), str(BYTES))
    crowd.wait("reservations", lambda event: event["event"] == "reserved")
    done = crowd.wait("exchange", lambda event: event["event"] == "exchanged", 240.0)
    least_s = (
        2 * PEERS * BYTES / (MBIT * 125_000)
    )  # there and back, each once into the relay and once out of it
    assert done["held"] == PEERS
    assert done["seconds"] > 0.9 * least_s
    assert done["seconds"] < 3 * least_s, done
    assert min(done["each"]) > 0.3 * max(done["each"]), done
