"""Nodes in network namespaces that report how they are reached, and call each other on order."""

from __future__ import annotations

import json
from typing import Any

from tests.chaos.namespaces import Internet, Process, RouterKind

# A node that says how it is reached and which holes it has punched, and calls the PeerIDs on its input.
PEER = """
import json, logging, sys, time, swarm
from swarm.net.hello import HELLO
from swarm.wire.peer_pb2 import Hello
from swarm.core.ids import Contact, PeerId
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")  # one write: two threads do
class Shown(logging.Handler):
    def emit(self, record): show(event="log", text=record.getMessage())
logging.getLogger("swarm.libp2p.punching").addHandler(Shown())
logging.getLogger("swarm.libp2p.punching").setLevel(logging.INFO)
with swarm.Node(bootstrap=sys.argv[2:], listen=sys.argv[1]) as node:
    def tell(text=""):
        contact = [str(node.peer_id), *node.contact.published]
        show(event="reach", verdict=node.reach, text=text, contact=contact)
    node.tell_reach(tell)
    node.at_announced(tell)
    for line in sys.stdin:
        peer_id, *published = json.loads(line)
        contact = Contact.of_published(PeerId.parse(peer_id), published)
        request = Hello(contact={"peer_id": node.peer_id.to_bytes()})
        started_s = time.monotonic()
        try:
            reply = node.network.run(node.channels.call(contact, HELLO, request, timeout_s=30.0))
            seconds = time.monotonic() - started_s
            show(event="called", peer=peer_id, why="", agent=reply.agent, seconds=seconds)
        except swarm.NetworkError as error:
            show(event="called", peer=peer_id, why=str(error), seconds=time.monotonic() - started_s)
"""


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


def entry_point(internet: Internet, name: str = "r", *bootstrap: str) -> tuple[Process, str]:
    """Start a relay, and return it and its address; empty while it waits for somebody to call it there."""
    internet.public(name)
    command = ("-m", "swarm.cli", "bootstrap", "--identity", "new", "--json", "--exit-with-parent")
    entry = internet.start(name, *command, *(part for one in bootstrap for part in ("--bootstrap", one)))
    addresses = entry.wait("start", lambda event: event["event"] == "listening")["addresses"]
    return entry, addresses[0] if addresses else ""


def peer(internet: Internet, name: str, kind: RouterKind | None, address: str) -> Process:
    """Start a node behind a router of this kind; None: behind none."""
    if kind is None:
        internet.public(name)
    else:
        internet.behind_router(name, kind)
    port = 4000 if kind is None else 4100  # this router permits few outgoing ports, so use one of them
    return internet.start(name, "-c", PEER, f"0.0.0.0:{port}", address)


def contact_of(process: Process, ways: int = 1) -> list[str]:
    """Wait until others can call a peer in this many ways, and return how."""
    reached: list[str] = process.wait(
        "contact", lambda event: event["event"] == "reach" and len(event["contact"]) == 1 + ways
    )["contact"]
    return reached


def call(caller: Process, contact: list[str]) -> dict[str, Any]:
    """Make a node call another one, and return the result."""
    before = [id(event) for event in caller.events]
    caller.tell(json.dumps(contact))
    return caller.wait(
        "outcome", lambda event: event["event"] == "called" and id(event) not in before, timeout_s=60.0
    )
