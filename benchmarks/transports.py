"""The processor time of moving bytes between two peers: the bulk path, and gRPC with TLS, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed
from benchmarks.results import Aim, Failures, Row

MESSAGE_BYTES = 1 << 20
SIZE_MIB = 1024
TURNS = 5
_TIMEOUT_S = 90.0


@dataclass(slots=True, kw_only=True)
class Spent(Failures):
    """The processor time of one transport."""

    is_bulk: bool
    per_gb_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "swarm: bulk path" if self.is_bulk else "swarm: gRPC with TLS"

    def launch(self) -> Launch:
        configuration = {"message_bytes": MESSAGE_BYTES, "bulk": self.is_bulk}
        return Launch(
            self.name,
            python=OWN_PYTHON,
            module="benchmarks.workers.swarm_stream",
            configurations=[configuration] * 2,
        )

    def measure(self, launch: Launch, size_mib: int) -> None:
        """Move that many MiB once."""
        before_s = launch.processor_s()
        sender = launch.workers[1]
        sender.send({"do": "send", "messages": size_mib})
        sent = sender.receive("sent", time.monotonic() + _TIMEOUT_S)
        if sent["is_bulk"] is not self.is_bulk:
            raise LaunchFailed("the stream used the other transport")
        self.per_gb_s.append((launch.processor_s() - before_s) / (size_mib * MESSAGE_BYTES / 1e9))


def rows(say: Callable[[str], None], *, size_mib: int = SIZE_MIB, turns: int = TURNS) -> list[Row]:
    """Measure both transports in turn, and return their row."""
    say(f"{size_mib} MiB from one peer to another: bulk path, gRPC")
    bulk, grpc = Spent(is_bulk=True), Spent(is_bulk=False)
    with ExitStack() as stack:
        try:
            open_ones = [(spent, _ready(stack, spent)) for spent in (bulk, grpc)]
            for spent, launch in open_ones:  # connections are made
                spent.measure(launch, 1)
                spent.per_gb_s.clear()
            for spent, launch in _in_turn(open_ones, turns):
                spent.measure(launch, size_mib)
        except LaunchFailed as failure:
            for spent in (bulk, grpc):
                spent.launches_failed += 1
                spent.fail(str(failure))
    say(
        "  "
        + ", ".join(f"{spent.name} {min(spent.per_gb_s, default=0.0):.2f} s/GB" for spent in (bulk, grpc))
    )
    return [
        Row(
            identifier="allreduce-transport-processor",
            workload=f"{size_mib} MiB one way between two peers, messages of 1 MiB on one stream",
            quantity="processor seconds per GB, both ends together",
            ours=bulk.series_of(bulk.name, bulk.per_gb_s, "s/GB"),
            peer=grpc.series_of(grpc.name, grpc.per_gb_s, "s/GB"),
            aim=Aim(of="ours", sense="at most", value=1.0),
            shown="ours / peer",
        )
    ]


def _ready(stack: ExitStack, spent: Spent) -> Launch:
    launch = stack.enter_context(spent.launch())
    launch.receive("ready", _TIMEOUT_S)
    return launch


def _in_turn(pairs: list[tuple[Spent, Launch]], turns: int) -> Iterable[tuple[Spent, Launch]]:
    for turn in range(turns):
        yield from pairs if turn % 2 else reversed(pairs)
