"""A round among four processes, one of which is killed or stopped in the middle: the others end it fast and say who it was."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.chaos

WORKER = """
import asyncio, json, sys, time
from concurrent.futures import ThreadPoolExecutor

import torch

from averaging.allreduce import AllReduce
from averaging.group import Group, Member
from swarm.clock import SystemClock
from swarm.identity import Identity
from swarm.ids import Address, Contact
from swarm.net.channels import Channels
from swarm.net.rpc import Handlers
from swarm.net.server import Server


async def main() -> None:
    loop = asyncio.get_running_loop()
    identity, handlers, server = Identity.generate(), Handlers(), Server()
    port = await server.start(identity, handlers, "127.0.0.1", 0)
    channels = Channels(identity)
    service = AllReduce(handlers=handlers, channels=channels, own=identity.peer_id, pool=ThreadPoolExecutor(2), clock=SystemClock())
    print(json.dumps(Contact(identity.peer_id, (Address("127.0.0.1", port),)).multiaddrs[0]), flush=True)
    setup = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    members = tuple(Member(contact=Contact.parse(text), weight=1.0, bandwidth=1.0) for text in setup["contacts"])
    vector = torch.full((setup["numel"],), float(setup["rank"]))
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, places = json.loads(line)
        chosen = tuple(members[place] for place in places)
        group = Group(group_id=bytes.fromhex(name), members=chosen, codec="float32", gathered=(b"",) * len(chosen))
        begun = loop.create_task(service.run(group, vector, deadline_s=time.monotonic() + 30))
        await asyncio.sleep(0)
        print(json.dumps("begun"), flush=True)
        outcome = await begun
        mean = torch.tensor(float(sum(places))) / len(places)
        right = outcome.vector is None or bool((outcome.vector == mean).all())
        print(json.dumps([outcome.failed, outcome.reason, outcome.digest, right, time.time()]), flush=True)
    service.close()
    await channels.close()
    await server.stop(0)


asyncio.run(main())
"""


class Worker:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def workers(numel: int) -> Iterator[list[tuple[Worker, str]]]:
    """Four of them, each with the PeerId that others know it by."""
    started = [Worker() for _ in range(4)]
    try:
        contacts = [worker.hear() for worker in started]
        for rank, worker in enumerate(started):
            worker.tell({"contacts": contacts, "numel": numel, "rank": rank})
        yield [(worker, contact.rpartition("/")[2]) for worker, contact in zip(started, contacts, strict=True)]
    finally:
        for worker in started:
            os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.communicate()


def begin(four: list[tuple[Worker, str]], places: Sequence[int]) -> None:
    name = secrets.token_hex(32)
    taking_part = [four[place] for place in places]
    for worker, _ in taking_part:
        worker.tell([name, list(places)])
    for worker, _ in taking_part:
        assert worker.hear() == "begun"


def committed(results: list[Any]) -> None:
    assert [result[:2] for result in results] == [[False, None]] * len(results)
    assert len({result[2] for result in results}) == 1
    assert all(result[3] for result in results)


@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, 8.0)])
def test_one_of_four_is_gone_in_the_middle(how: signal.Signals, within_s: float) -> None:
    """`within_s` is generous: on an idle machine it takes 0.1 s and 1 s. A second round among the survivors is not held up by the first."""
    with workers(16_000_000) as four:
        begin(four, range(4))
        committed([worker.hear() for worker, _ in four])
        begin(four, range(4))
        victim, name = four[2]
        os.kill(victim.process.pid, how)
        gone_s = time.time()
        survivors = [worker.hear() for worker, _ in four if worker is not victim]
        assert all(failed and name in reason for failed, reason, *_ in survivors), survivors
        assert max(result[4] for result in survivors) - gone_s < within_s
        begin(four, [0, 1, 3])
        committed([worker.hear() for worker, _ in four if worker is not victim])
