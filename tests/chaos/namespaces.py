"""An emulated internet in network namespaces: public hosts, and hosts behind NAT routers.

It needs root and the programs `ip` and `nft`; `missing` names missing requirements.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

_ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count()
_UNREACHABLE = """
table ip cut {
  chain forward {
    type filter hook forward priority 0
    reject with icmp type net-unreachable
  }
}
"""
# Strangers get no answer, as from most routers: a refusal would end the dial that is to punch a hole.
_MASQUERADE = """
table ip nat {
  chain postrouting {
    type nat hook postrouting priority 100;
    oifname "out" masquerade
  }
}
table ip strangers {
  chain input { type filter hook input priority 0; iifname "out" ct state new drop; }
}
"""
_FIREWALL = """
table ip6 strangers {
  chain input {
    type filter hook input priority 0;
    iifname "out" meta l4proto tcp ct state new drop
  }
}
"""
_SYMMETRIC = _MASQUERADE.replace("masquerade", "masquerade fully-random")
_CONE = _MASQUERADE.replace(
    "  chain postrouting",
    """  set used { type inet_service; flags dynamic, timeout; timeout 120s; }
  chain prerouting {
    type nat hook prerouting priority -100;
    iifname "out" tcp dport @used dnat to 192.168.1.2
  }
  chain postrouting""",
    1,
).replace("masquerade", "update @used { tcp sport } masquerade")
_RELAY_ONLY = (
    _MASQUERADE
    + """
table ip few {
  chain forward { type filter hook forward priority 0; iifname "in" tcp dport != { 4000, 4001 } drop; }
}
"""
)
# What a router does: "preserving" keeps the port of each connection and lets in answers alone, "cone" lets
# anybody in at a port that its host has dialed from, "symmetric" gives each connection another port,
# "relay-only" preserves ports, and lets out connections to ports 4000 and 4001 alone.
RouterKind = Literal["preserving", "cone", "symmetric", "relay-only"]
_ROUTERS: dict[RouterKind, str] = {
    "preserving": _MASQUERADE,
    "cone": _CONE,
    "symmetric": _SYMMETRIC,
    "relay-only": _RELAY_ONLY,
}
# The chains that miniupnpd writes the forwarded ports to.
_UPNP_CHAINS = """
table inet filter {
  chain miniupnpd {}
  chain prerouting_miniupnpd {}
  chain postrouting_miniupnpd {}
  chain forward { type filter hook forward priority 0; jump miniupnpd; }
  chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
  chain postrouting { type nat hook postrouting priority 101; jump postrouting_miniupnpd; }
}
"""
_UPNP_DAEMON = """
ext_ifname=out
listening_ip=in
http_port=0
enable_upnp=yes
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000001
allow 1024-65535 0.0.0.0/0 1024-65535
"""


def missing() -> str:
    """Return the reason why namespaces cannot be used here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    programs = [program for program in ("ip", "nft") if shutil.which(program) is None]
    if programs:
        return f"{' and '.join(programs)} not installed"
    probe = f"swarm{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    try:
        rules = subprocess.run(
            ["ip", "netns", "exec", probe, "nft", "-f", "-"],
            input=_MASQUERADE.encode(),
            capture_output=True,
            check=False,
        )
        return "" if made.returncode == rules.returncode == 0 else "this kernel has no namespaces or no NAT"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)


class Internet:
    """Hosts that are connected by one router. Every host has a /24 of public addresses to itself.

    `round_trip_s`: how long a packet and its answer take between two hosts or their routers; 0: no time.
    """

    def __init__(self, round_trip_s: float = 0.0) -> None:
        self._link_delay_s = round_trip_s / 4  # a packet passes two links each way
        self._prefix = f"swarm{os.getpid()}x{next(_numbers)}"
        self._namespaces: list[str] = []
        self._networks = itertools.count(1)
        self._processes: list[Process] = []
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.routers: dict[str, str] = {}  # public address of each host's router
        self._links: dict[str, str] = {}  # the core's devices to hosts with a public address
        self._core = self._namespace("core")

    def __enter__(self) -> Internet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(5.0)
            if daemon.stdout is not None:
                daemon.stdout.close()
        for name in reversed(self._namespaces):
            subprocess.run(["ip", "netns", "del", name], check=False)

    def public(self, name: str) -> str:
        """Add a host with a public address, and return the address."""
        address = self._attach(self._namespace(name))
        self._links[name] = f"to{address.split('.')[1]}"
        return address

    def second_uplink(self, name: str) -> str:
        """Give a host with a public address a second interface with another one, and return that address.
        What the host sends takes the first one, until `lose_uplink`.
        """
        number, namespace = next(self._networks), f"{self._prefix}{name}"
        self._connect(
            self._core, f"to{number}", f"44.{number}.0.1/24", namespace, "second", f"44.{number}.0.2/24"
        )
        _run(*("ip", "-n", namespace, "route", "add", "default", "via", f"44.{number}.0.1", "metric", "100"))
        return f"44.{number}.0.2"

    def lose_uplink(self, name: str) -> None:
        """Take the first interface of a host with `second_uplink` away."""
        _run("ip", "-n", f"{self._prefix}{name}", "link", "del", "out")

    def public_ipv6(self, name: str) -> str:
        """Add a host that has a public IPv6 address and no other one, and return the address."""
        number, namespace = next(self._networks), self._namespace(name)
        self._connect(
            self._core, f"to{number}", f"2600:{number}::1/64", namespace, "out", f"2600:{number}::2/64"
        )
        _run("ip", "-n", namespace, "-6", "route", "add", "default", "via", f"2600:{number}::1")
        return f"2600:{number}::2"

    def behind_firewall(self, name: str) -> str:
        """Add a host that has a public IPv6 address and lets in answers alone, as most routers do with IPv6,
        and return the address.
        """
        address = self.public_ipv6(name)
        command = [*self.inside(name), "nft", "-f", "-"]
        subprocess.run(command, input=_FIREWALL.encode(), check=True)
        return address

    def behind_router(self, name: str, kind: RouterKind = "preserving") -> str:
        """Add a host with a private address behind a router that translates it. Return the router's public
        address. All such hosts have the same private address, as those of many homes do.
        """
        router, host = self._namespace(f"{name}nat"), self._namespace(name)
        public = self.routers[name] = self._attach(router)
        self._connect(router, "in", "192.168.1.1/24", host, "eth0", "192.168.1.2/24")
        _run("ip", "-n", host, "route", "add", "default", "via", "192.168.1.1")
        subprocess.run(
            ["ip", "netns", "exec", router, "nft", "-f", "-"],
            input=_ROUTERS[kind].encode(),
            check=True,
        )
        return public

    def lan(self, *names: str) -> list[str]:
        """Connect hosts by a switch, without a way to anywhere else; hosts that do not exist yet are added.
        Return their private addresses, in this order.
        """
        switch = self._namespace(f"sw{next(self._networks)}")
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        hosts = [f"192.168.7.{number}" for number in range(1, len(names) + 1)]
        for number, (name, host) in enumerate(zip(names, hosts, strict=True)):
            full = f"{self._prefix}{name}"
            namespace = full if full in self._namespaces else self._namespace(name)
            _run(
                "ip",
                "link",
                "add",
                f"p{number}",
                "netns",
                switch,
                "type",
                "veth",
                "peer",
                "name",
                "lan",
                "netns",
                namespace,
            )
            _run("ip", "-n", switch, "link", "set", f"p{number}", "master", "switch", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{host}/24", "dev", "lan")
            _run("ip", "-n", namespace, "link", "set", "lan", "up")
        return hosts

    def forward(self, name: str, port: int) -> None:
        """Let the router of a host pass connections to this port on to it."""
        rules = (
            "table ip forwarded { chain prerouting { type nat hook prerouting priority -100; policy accept;\n"
            f"iifname out tcp dport {port} dnat to 192.168.1.2\n}}\n}}\n"
        )
        router = f"{self._prefix}{name}nat"
        subprocess.run(["ip", "netns", "exec", router, "nft", "-f", "-"], input=rules.encode(), check=True)

    def unforward(self, name: str) -> None:
        """Undo `forward`."""
        router = f"{self._prefix}{name}nat"
        _run("ip", "netns", "exec", router, "nft", "delete", "table", "ip", "forwarded")

    def forward_on_request(self, name: str, folder: Path) -> None:
        """Let the router of a host forward ports for programs that ask by UPnP. `folder` is for its files."""
        router = f"{self._prefix}{name}nat"
        inside = ["ip", "netns", "exec", router]
        subprocess.run([*inside, "nft", "-f", "-"], input=_UPNP_CHAINS.encode(), check=True)
        settings = folder / "miniupnpd.conf"
        settings.write_text(_UPNP_DAEMON)
        daemon = ["miniupnpd", "-d", "-f", str(settings), "-P", str(folder / "miniupnpd.pid")]
        written = folder / "miniupnpd.log"
        with written.open("wb") as log:
            self._daemons.append(subprocess.Popen([*inside, *daemon], stdout=log, stderr=log))
        while b"HTTP listening" not in written.read_bytes():
            assert self._daemons[-1].poll() is None, written.read_text()
            time.sleep(0.01)

    def forwarded_on_request(self, name: str) -> bool:
        """Return whether the router of a host forwards a port for a program that has asked."""
        router = f"{self._prefix}{name}nat"
        command = ["ip", "netns", "exec", router, "nft", "list", "chain", "inet", "filter"]
        listed = subprocess.run([*command, "prerouting_miniupnpd"], capture_output=True, check=True)
        return b"dnat" in listed.stdout

    def readdress(self, name: str, host: str) -> str:
        """Give a host with a public address another one, as some providers do every night. Return it."""
        network, _, number = host.rpartition(".")
        namespace, now = f"{self._prefix}{name}", f"{network}.{int(number) + 1}"
        _run("ip", "-n", namespace, "addr", "del", f"{host}/24", "dev", "out")
        _run("ip", "-n", namespace, "addr", "add", f"{now}/24", "dev", "out")
        _run("ip", "-n", namespace, "route", "add", "default", "via", f"{network}.1")
        return now

    def restart_router(self, name: str) -> None:
        """Let the router of a host forget all connections."""
        router, host = f"{self._prefix}{name}nat", self.routers[name]
        assert self.connections_of_router(name), "there is nothing to forget"
        _run("ip", "-n", router, "link", "set", "out", "down")  # the kernel forgets what it translates there
        deadline_s = time.monotonic() + 2.0
        while left := self.connections_of_router(name):
            assert time.monotonic() < deadline_s, f"the router still knows {left} connections"
            time.sleep(0.05)
        _run("ip", "-n", router, "link", "set", "out", "up")
        _run("ip", "-n", router, "route", "add", "default", "via", f"{host.rpartition('.')[0]}.1")

    def connections_of_router(self, name: str) -> int:
        """Return the number of connections that the router of a host tracks."""
        file = "/proc/sys/net/netfilter/nf_conntrack_count"
        command = ["ip", "netns", "exec", f"{self._prefix}{name}nat", "cat", file]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    def readdress_router(self, name: str) -> None:
        """Give the router of a host another public address."""
        self.routers[name] = self.readdress(f"{name}nat", self.routers[name])

    def limit(self, name: str, mbit: int) -> None:
        """Let a host with a public address send and receive no more than this."""
        for namespace, device in ((f"{self._prefix}{name}", "out"), (self._core, self._links[name])):
            rate = ("rate", f"{mbit}mbit", "burst", "32kbit", "latency", "100ms")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def received_bytes(self, name: str) -> int:
        """Return the number of bytes that a host with a public address has received."""
        file = "/sys/class/net/out/statistics/rx_bytes"
        return int(subprocess.run([*self.inside(name), "cat", file], capture_output=True, check=True).stdout)

    def unplug(self, name: str) -> None:
        """Cut the cable of a host with a public address: packets to it are lost silently."""
        _run("ip", "-n", self._core, "link", "set", self._links[name], "down")
        _run("ip", "-n", self._core, "route", "add", "blackhole", f"44.{self._links[name][2:]}.0.0/24")

    def cut(self) -> None:
        """Disconnect all hosts until `restore`: each gets the error that the network is unreachable."""
        subprocess.run(
            ["ip", "netns", "exec", self._core, "nft", "-f", "-"], input=_UNREACHABLE.encode(), check=True
        )

    def restore(self) -> None:
        """Undo `cut`."""
        _run("ip", "netns", "exec", self._core, "nft", "delete", "table", "ip", "cut")

    def inside(self, name: str) -> list[str]:
        """Return the words before a command that run it on a host."""
        return ["ip", "netns", "exec", f"{self._prefix}{name}"]

    def start(self, name: str, *arguments: str) -> Process:
        """Run Python with these arguments on a host. It is killed at the end."""
        process = Process([*self.inside(name), sys.executable, "-P", *arguments])
        self._processes.append(process)
        return process

    def _namespace(self, name: str) -> str:
        full = f"{self._prefix}{name}"
        _run("ip", "netns", "add", full)
        self._namespaces.append(full)
        _run("ip", "-n", full, "link", "set", "lo", "up")
        for setting in ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"):
            _run("ip", "netns", "exec", full, "sysctl", "-q", "-w", setting)
        return full

    def _attach(self, namespace: str) -> str:
        number = next(self._networks)
        self._connect(
            self._core, f"to{number}", f"44.{number}.0.1/24", namespace, "out", f"44.{number}.0.2/24"
        )
        _run("ip", "-n", namespace, "route", "add", "default", "via", f"44.{number}.0.1")
        return f"44.{number}.0.2"

    def _connect(self, one: str, first: str, at_one: str, two: str, second: str, at_two: str) -> None:
        if one == self._core and self._link_delay_s:
            self._delayed_link(first, two, second)
        else:
            pair = ("type", "veth", "peer", "name", second, "netns", two)
            _run("ip", "link", "add", first, "netns", one, *pair)
        for namespace, device, address in ((one, first, at_one), (two, second, at_two)):
            ready = ("nodad",) if ":" in address else ()  # without the second that an IPv6 address waits
            _run("ip", "-n", namespace, "addr", "add", address, "dev", device, *ready)
            _run("ip", "-n", namespace, "link", "set", device, "up")

    def _delayed_link(self, first: str, two: str, second: str) -> None:
        """Make a link between the core and a namespace on which packets take a part of the round trip."""
        command = [sys.executable, str(_ROOT / "tests/chaos/delayed_link.py"), str(self._link_delay_s)]
        link = subprocess.Popen(
            ["ip", "netns", "exec", self._core, *command, first, f"{first}far"], stdout=subprocess.PIPE
        )
        self._daemons.append(link)
        assert link.stdout is not None
        assert link.stdout.readline() == b"ready\n"
        _run("ip", "-n", self._core, "link", "set", f"{first}far", "netns", two, "name", second)


class Process:
    """A process that prints events as JSON lines, and takes lines."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_ROOT,
        )
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=target, daemon=True) for target in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def seen(self) -> int:
        """Return the number of events so far."""
        while not self._lines.empty():
            if (event := self._lines.get()) is None:  # the process has ended, which `wait` has to see, too
                self._lines.put(None)
                break
            self.events.append(event)
        return len(self.events)

    def wait(
        self, what: str, fits: Callable[[dict[str, Any]], bool], timeout_s: float = 120.0, *, since: int = 0
    ) -> dict[str, Any]:
        """Return the first event that fits, after the first `since`, waiting for it if necessary."""
        deadline_s = time.monotonic() + timeout_s
        for event in self.events[since:]:
            if fits(event):
                return event
        while True:
            try:
                event = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.0))
            except queue.Empty:
                event = None
            assert event is not None, f"no {what}; last events {self.events[-5:]}, errors {self.errors[-5:]}"
            self.events.append(event)
            if fits(event):
                return event

    def tell(self, line: str) -> None:
        """Send a line to the standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end_input(self) -> None:
        """Close the standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process at once, and read the rest of its output."""
        self._process.kill()
        for reader in self._readers:
            reader.join(5.0)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.wait(5.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a library printed something
            if isinstance(event, dict):
                self._lines.put(event)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self.errors += [line.rstrip() for line in self._process.stderr]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
