"""Peers of one process behind one router that average together, for network namespaces."""

from __future__ import annotations

# The address to enter by, how many peers there are and how many rounds they hold are its arguments. Each peer
# brings its number. All call each other before the first round: one process makes the 380 connections, for
# longer than peers of a round wait for one another.
CROWD_AVERAGING = """
import json, sys, threading, time, torch, swarm
from contextlib import ExitStack
from swarm.net.hello import HELLO
from swarm.wire.peer_pb2 import Hello
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")  # one write: two threads do
address, peers, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def is_met(node, other):
    request = Hello(contact={"peer_id": node.peer_id.to_bytes()})
    try:
        node.network.run(node.channels.call(other.contact, HELLO, request, timeout_s=30.0))
    except swarm.NetworkError as error:
        show(event="unanswered", why=str(error)[:200])
        return False
    return True
def average(number, node):
    for other in nodes[number + 1:] + nodes[:number]:
        while not is_met(node, other):
            pass
    tensor = torch.zeros(20_000)
    with swarm.Averager(node, [tensor], target_group_size=peers, min_group_size=peers,
                        codec="float32") as averager:
        for key in range(rounds):
            together.wait()
            tensor.fill_(float(number))
            result = averager.step(timeout_s=60.0, round_key=key)
            show(event="round", key=key, failed=result.failed, why=result.detail[:200],
                 members=len(result.peers), values=sorted(set(tensor.tolist()))[:9],
                 accused=len(result.accused))
        together.wait()
with ExitStack() as stack:
    nodes = [stack.enter_context(swarm.Node([address], "0.0.0.0:%d" % (4100 + 2 * number)))
             for number in range(peers)]
    while not all(node.contact.relays for node in nodes):
        time.sleep(0.1)
    show(event="reached", direct=sum(bool(node.contact.addresses) for node in nodes))
    together = threading.Barrier(peers)
    threads = [threading.Thread(target=average, args=one, daemon=True) for one in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    show(event="averaged")
    sys.stdin.readline()
"""
