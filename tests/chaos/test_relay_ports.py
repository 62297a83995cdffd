"""A relay announces its second port once others have reached it there, in network namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.chaos.namespaces import Internet, missing

pytestmark = [pytest.mark.network_namespaces, pytest.mark.skipif(bool(missing()), reason=missing())]

# A node that relays if it can. It says its addresses, and on which port the PeerIDs on its input relay.
RELAY = """
import json, logging, sys, swarm
from swarm.core.ids import Contact, PeerId
from swarm.net.hello import HELLO
from swarm.wire.peer_pb2 import Hello
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")  # one write: two threads do
class Shown(logging.Handler):
    def emit(self, record): show(event="log", text=record.getMessage())
logging.getLogger("swarm.reach.reaching").addHandler(Shown())
logging.getLogger("swarm.reach.reaching").setLevel(logging.INFO)
config = swarm.NodeConfig(relay_mbit=20.0)
with swarm.Node(bootstrap=sys.argv[1:], listen="0.0.0.0:4000", config=config) as node:
    def tell(text=""):
        contact = [str(node.peer_id), *node.contact.published]
        show(event="reach", contact=contact, addresses=node.addresses)
    tell()
    node.tell_reach(tell)
    for line in sys.stdin:
        peer_id, *published = json.loads(line)
        contact = Contact.of_published(PeerId.parse(peer_id), published)
        request = Hello(contact={"peer_id": node.peer_id.to_bytes()})
        reply = node.network.run(node.channels.call(contact, HELLO, request, timeout_s=30.0))
        show(event="port", peer=peer_id, port=reply.relay_port)
"""


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def test_a_relay_names_its_port_only_where_others_reach_it(internet: Internet) -> None:
    for name in ("r", "open"):
        internet.public(name)
    internet.behind_router("half")
    internet.forward("half", 4000)
    first = internet.start("r", "-c", RELAY)
    (address,) = first.wait("start", lambda event: event["event"] == "reach")["addresses"]
    relays = {name: internet.start(name, "-c", RELAY, address) for name in ("open", "half")}
    outcomes = {
        "open": "relaying for others on TCP port 4001",
        "half": "others do not reach its TCP port 4001",
    }
    for name, said in outcomes.items():
        relays[name].wait(
            f"result for {name}",
            lambda event, what=said: event["event"] == "log" and what in event["text"],
        )
    for name, port in (("open", 4001), ("half", 0)):
        reached = relays[name].wait(
            "contact", lambda event: event["event"] == "reach" and len(event["contact"]) > 1
        )["contact"]
        first.tell(json.dumps(reached))
        answer = first.wait(
            "port", lambda event, of=reached[0]: event["event"] == "port" and event["peer"] == of
        )
        assert answer["port"] == port
    internet.forward("half", 4001)  # it asks again soon: that they failed once may be a lost packet
    said = outcomes["open"]
    relays["half"].wait(
        "relay", lambda event: event["event"] == "log" and said in event["text"], timeout_s=60.0
    )
