"""A peer for network namespaces that trains, hosts an expert, and interacts with others on order."""

from __future__ import annotations

# Its number, where it listens and the addresses to enter by are its arguments. Its expert multiplies by its
# number. Once it is told to train, it trains until its input ends, and calls the peers on its input, reads
# their state and calls their experts meanwhile.
MATRIX_PEER = """
import hashlib, json, sys, threading, time, torch, swarm
from averaging.optim.state.download import Download
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.net.hello import HELLO
from swarm.wire.peer_pb2 import Hello
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")  # one write: two threads do
number = int(sys.argv[1])
class Times(torch.nn.Module):
    def forward(self, x): return number * x
torch.manual_seed(0)
net = torch.nn.Linear(64, 1)
example = torch.arange(8.0).reshape(1, 8)
def pairwise(contact, other):
    opened = node.network.run(node.channels.call(
        contact, HELLO, Hello(contact={"peer_id": node.peer_id.to_bytes()}), timeout_s=30.0))
    yield "call", bool(opened.agent)
    download = Download(run=opt.run_id, caller=node.channels, bytes_max=10_000_000, epoch_min=0,
                        epoch_known=lambda: opt.epoch + 1)
    state = node.network.run(download.fetch([contact], 60.0))
    yield "state", [[str(one) for one in state.donors], state.epoch, state.canonical, state.digest.hex()]
    yield "expert", swarm.RemoteExpert(node, f"times.{other}")(example).tolist()
def serve_orders():
    for line in sys.stdin:
        if line == "train\\n":
            begun.set()
            continue
        other, (peer_id, *published) = json.loads(line)
        did, why = {}, ""
        try:
            for what, result in pairwise(Contact.of_published(PeerId.parse(peer_id), published), other):
                did[what] = result
        except SwarmError as error:
            why = f"{type(error).__name__}: {error}"
        show(event="did", other=other, why=why, **did)
    ended.set()
    begun.set()
begun, ended = threading.Event(), threading.Event()
with swarm.Node(bootstrap=sys.argv[3:], listen=sys.argv[2]) as node:
    node.at_announced(lambda: show(event="reach", contact=[str(node.peer_id), *node.contact.published]))
    show(event="reach", contact=[str(node.peer_id), *node.contact.published])
    threading.Thread(target=serve_orders, daemon=True).start()
    begun.wait()
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    with (
        swarm.ExpertServer(node, {f"times.{number}": swarm.Expert(Times(), (example,))}),
        swarm.Optimizer(sgd, node=node, run="matrix", batch_size_per_step=4, target_batch_size=100) as opt,
    ):
        while not ended.is_set():
            opt.zero_grad()
            x = torch.randn(4, 64)
            (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
            report = opt.step()
            if report.round is not None and not report.alone:
                digest = hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest()
                show(event="round", epoch=report.epoch, peers=len(report.round.weights),
                     contributed=report.contributed, digest=digest)
            ended.wait(0.1)
"""
