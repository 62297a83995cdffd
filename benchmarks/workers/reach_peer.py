"""A node in a network namespace that reports how it is reached, and calls others on order.

Its only argument is JSON: `listen`, `bootstrap` (addresses), and `relay_mbit`, how much it relays for others.
It prints events as JSON lines, and takes orders as such from its standard input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import threading
import time
from typing import Any

import psutil

import swarm
from swarm.core.errors import NetworkError
from swarm.core.ids import Contact, PeerId
from swarm.net.hello import HELLO
from swarm.net.rpc import Stream, StreamMethod
from swarm.wire.peer_pb2 import Hello

FETCH = StreamMethod(name="/swarm.Benchmark/Fetch")
_MESSAGE = bytes(1 << 20)
_CALL_S_MAX, _FETCH_S_MAX = 30.0, 120.0
_LOOK_S = 0.005
_WIDTH, _BATCH = 512, 64  # of the model that is trained
_AGAIN_S = 0.02
_GROUP, _AVERAGED = 3, 1_000_000  # members, and values
# text of a log line -> name of the event
_SAID = {
    "is connected through the relay": "circuit",
    "is called directly from now on": "punched",
    "relaying for others": "relaying",
}


def show(**event: Any) -> None:
    """Print an event, in one write: two threads do."""
    sys.stdout.write(json.dumps({"at_s": time.monotonic(), **event}) + "\n")
    sys.stdout.flush()


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        for text, event in _SAID.items():
            if text in record.getMessage():
                show(event=event, peer=record.getMessage().partition(" ")[0])


async def _serve(stream: Stream) -> None:
    """Send as many messages as the caller asks for."""
    asked = await stream.receive()
    for _ in range(int(asked or b"0")):
        await stream.send(_MESSAGE)


def _watch(node: swarm.Node, began_s: float) -> None:
    """Print how the node is reached at every change, with the seconds since its start."""
    last: tuple[str, int] | None = None
    while not node.closed:
        now = (node.reach, len(node.contact.published))
        if now != last:
            last = now
            contact = [str(node.peer_id), *node.contact.published]
            show(event="reach", reach=now[0], contact=contact, seconds=time.monotonic() - began_s)
        time.sleep(_LOOK_S)


class _Caller:
    """The caller's part of the orders."""

    def __init__(self, node: swarm.Node) -> None:
        self._node = node

    def call(self, contact: Contact, count: int) -> None:
        """Call a peer this many times, one call after another."""
        seconds, why = [], ""
        for _ in range(count):
            began_s = time.monotonic()
            why = self._failure(contact)
            if why:
                break
            seconds.append(time.monotonic() - began_s)
        show(event="called", seconds=seconds, why=why)

    def recover(self, contact: Contact) -> None:
        """Call a peer until it answers."""
        began_s, tries = time.monotonic(), 0
        while why := self._failure(contact):
            tries += 1
            if time.monotonic() - began_s > _CALL_S_MAX:
                break
            time.sleep(_AGAIN_S)
        show(event="recovered", seconds=time.monotonic() - began_s, failures=tries, why=why)

    def fetch(self, contact: Contact, mebibytes: int, bytes_per_s: float = math.inf) -> None:
        """Let a peer send this much, and take it no faster than this."""
        began_s = time.monotonic()
        try:
            received = self._node.network.run(self._fetch(contact, mebibytes, bytes_per_s), _FETCH_S_MAX)
        except NetworkError as error:
            show(event="fetched", why=str(error))
            return
        show(event="fetched", seconds=time.monotonic() - began_s, megabytes=received / 1e6, why="")

    async def _fetch(self, contact: Contact, mebibytes: int, bytes_per_s: float) -> int:
        received = 0
        began_s = time.monotonic()
        async with self._node.channels.open_stream(contact, FETCH, timeout_s=_FETCH_S_MAX) as stream:
            await stream.send(str(mebibytes).encode())
            await stream.finish()
            while (message := await stream.receive()) is not None:
                received += len(message)
                await asyncio.sleep(max(began_s + received / bytes_per_s - time.monotonic(), 0.0))
        return received

    def _failure(self, contact: Contact) -> str:
        request = Hello(contact={"peer_id": self._node.peer_id.to_bytes()})
        call = self._node.channels.call(contact, HELLO, request, timeout_s=_CALL_S_MAX)
        try:
            self._node.network.run(call)
        except NetworkError as error:
            return str(error)
        return ""


def average(node: swarm.Node, rounds: int) -> None:
    """Average with two other peers, and print the seconds of each round."""
    import torch

    tensor, seconds, why = torch.ones(_AVERAGED), list[float](), ""
    with swarm.Averager(node, [tensor], target_group_size=_GROUP, min_group_size=_GROUP) as averager:
        for number in range(rounds):
            result = averager.step(timeout_s=_CALL_S_MAX, round_key=number)
            seconds.append(result.seconds["total"])
            why = why or (result.detail or "a round failed" if result.failed else "")
    show(event="averaged", seconds=seconds, why=why)


def usage() -> None:
    """Print the memory and the processor time of this process."""
    process = psutil.Process()
    show(event="usage", processor_s=time.process_time(), memory_bytes=process.memory_info().rss)


def train(seconds: float) -> None:
    """Train a small model for this long, and print how many steps it made a second."""
    import torch

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(_BATCH, _WIDTH)
    steps, began_s = 0, time.monotonic()
    while time.monotonic() - began_s < seconds:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        steps += 1
    show(event="trained", steps_per_s=steps / (time.monotonic() - began_s))


def main() -> None:
    settings = json.loads(sys.argv[1])
    for name in ("swarm.libp2p.punching", "swarm.reach.reaching"):
        logging.getLogger(name).addHandler(_Said())
        logging.getLogger(name).setLevel(logging.DEBUG)
    began_s = time.monotonic()
    config = swarm.NodeConfig(relay_mbit=settings["relay_mbit"])
    with swarm.Node(bootstrap=settings["bootstrap"], listen=settings["listen"], config=config) as node:
        node.handlers.stream(FETCH, _serve)
        threading.Thread(target=_watch, args=(node, began_s), daemon=True).start()
        caller = _Caller(node)
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "usage":
                usage()
                continue
            if order["do"] == "train":
                train(order["seconds"])
                continue
            if order["do"] == "average":
                average(node, order["rounds"])
                continue
            peer_id, *published = order["contact"]
            contact = Contact.of_published(PeerId.parse(peer_id), published)
            if order["do"] == "call":
                caller.call(contact, order["count"])
            elif order["do"] == "recover":
                caller.recover(contact)
            else:
                caller.fetch(contact, order["mebibytes"], order.get("bytes_per_s", math.inf))


if __name__ == "__main__":
    main()
