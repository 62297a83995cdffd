"""Emulated links between processes of one machine: rates up and down per peer, delay, loss, and counters of
the traffic.

    with Links([Link.of(mbit_per_s=100, round_trip_s=0.05)] * 4) as links:
        subprocess.Popen(links.command(0, ["python", ...]))   # runs where links.host(0) is its only address

Needs root, `ip` and `nsenter`, and TUN devices: `why_not()` names a missing requirement. Every peer is in its
own network namespace, and one process carries all packets (`swarm.testing.linkrelay`), because not every
kernel can delay them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from swarm.core.errors import SwarmError, UsageError
from swarm.testing import linkrelay

PEERS_MAX = 250
_START_S_MAX = 30.0
_ANSWER_S_MAX = 10.0
_END_S_MAX = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Connection of one peer to all others."""

    up_bytes_per_s: float  # of IP packets
    down_bytes_per_s: float
    delay_s: float = 0.0  # one way, to the middle of the network: between two peers both delays add up
    loss: float = 0.0  # share of its sent packets that are lost
    queue_s: float = 0.2  # packets that would queue longer than this are dropped; 64 KiB always fit

    def __post_init__(self) -> None:
        if not (
            self.up_bytes_per_s > 0
            and self.down_bytes_per_s > 0
            and self.delay_s >= 0
            and self.queue_s > 0
            and 0 <= self.loss < 1
        ):
            raise UsageError(
                "rates and queue_s are positive, delay_s is not negative, loss is at least 0 and below 1"
            )

    @classmethod
    def of(
        cls,
        *,
        mbit_per_s: float,
        round_trip_s: float = 0.0,
        up_mbit_per_s: float | None = None,
        loss: float = 0.0,
    ) -> Link:
        """Create a link from the usual units. `round_trip_s` is between two such peers; the rate up equals
        the rate down unless it is given.
        """
        up = mbit_per_s if up_mbit_per_s is None else up_mbit_per_s
        return cls(
            up_bytes_per_s=up * 125e3,
            down_bytes_per_s=mbit_per_s * 125e3,
            delay_s=round_trip_s / 4,
            loss=loss,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """Traffic that one peer has sent since the start."""

    sent_packets: int
    sent_bytes: int  # of IP packets, headers included
    sent_payload_bytes: int  # payload of TCP, retransmissions included
    dropped_packets: int


class LinksFailed(SwarmError):
    """The emulation cannot run here, or broke. The text says why."""


def why_not() -> str | None:
    """Return why links cannot be emulated here, or None when they can."""
    if not sys.platform.startswith("linux"):
        return "links are emulated on Linux only"
    if os.geteuid() != 0:
        return "emulated links need root, for network namespaces and TUN devices"
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            return f"emulated links need the program {program!r} (packages iproute2 and util-linux)"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"emulated links need TUN devices: /dev/net/tun cannot be opened ({error.strerror})"
    return None


class Links:
    """Emulated links of `links`, one per peer, as a context manager. Leaving it ends the emulation; processes
    that are still inside keep their namespace without a connection.
    Raises LinksFailed when the emulation cannot start.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        if not 2 <= len(links) <= PEERS_MAX:
            raise UsageError(f"links are between 2 to {PEERS_MAX} peers, not {len(links)}")
        self.links = tuple(links)
        self._settings = {
            "hosts": [self.host(place) for place in range(len(links))],
            **{name: [getattr(link, name) for link in links] for name in Link.__slots__},
        }
        self._namespaces: list[int] = []

    def host(self, place: int) -> str:
        """Return the address of a peer."""
        return f"10.77.0.{place + 1}"

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` as this peer."""
        return ["nsenter", f"--net=/proc/{self._process.pid}/fd/{self._namespaces[place]}", "--", *command]

    def traffic(self) -> list[LinkTraffic]:
        """Return the traffic that every peer has sent so far."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("?\n")
            self._process.stdin.flush()
        except OSError:
            raise LinksFailed(f"the emulated links broke{self._error_of_relay()}") from None
        return [LinkTraffic(**counted) for counted in self._read_reply(_ANSWER_S_MAX)]

    def __enter__(self) -> Self:
        problem = why_not()
        if problem is not None:
            raise LinksFailed(problem)
        command = [sys.executable, "-I", str(Path(linkrelay.__file__)), json.dumps(self._settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            reply = self._read_reply(_START_S_MAX)
            if "problem" in reply:
                raise LinksFailed(f"links cannot be emulated here: {reply['problem']}")
            self._namespaces = reply["namespaces"]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _read_reply(self, timeout_s: float) -> Any:
        """Read the next reply of the relay."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
            watchdog.join()
        if not line:
            raise LinksFailed(f"the emulated links broke{self._error_of_relay()}")
        return json.loads(line)

    def _error_of_relay(self) -> str:
        assert self._process.stderr is not None
        self._process.kill()
        lines = self._process.stderr.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _end(self) -> None:
        process = self._process
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                try:
                    pipe.close()  # the relay ends with its standard input
                except OSError:
                    continue
        try:
            process.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
