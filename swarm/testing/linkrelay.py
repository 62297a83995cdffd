"""The process behind `swarm.testing.links`: it holds the network namespaces of the peers, and forwards their
packets with the properties of slow links.

It is run by file name and uses the standard library only. Every peer has a TUN device in its own namespace.
The namespaces have no names and live as long as this process (and processes that entered them), so that
nothing is left behind however it ends; it ends with its standard input. TCP segments come in bundles of up to
64 KiB, as for network cards, and are counted and delayed as the packets that they represent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TCP4 = 1, 2
DEVICE = "swarm0"
# struct virtio_net_hdr: flags, kind of bundle, ..., bytes of payload per packet of a bundle
_HEADER_BYTES = 10
_PACKET_BYTES_MAX = 1 << 17
_READS_MAX = 32  # packets of one device before the next device is read
_QUEUE_BYTES_MIN = 64 << 10  # one bundle fits
_TCP = 6
_BUNDLE_S = 0.001
_MTU = 1500  # bytes of an IP packet
_CONGESTION = "cubic"  # TCP's congestion control: the usual default
_SEED = 1  # of random losses


@dataclass(slots=True)
class Counted:
    """Traffic counters of one peer, since the start."""

    sent_packets: int = 0  # packets sent and not dropped in the uplink queue
    sent_bytes: int = 0  # of IP packets, headers included
    sent_payload_bytes: int = 0  # payload of TCP: TLS records, gRPC frames, tensors
    dropped_packets: int = 0  # queue full or random loss, in either direction


@dataclass(slots=True)
class LinkModel:
    """Times at which packets leave and arrive: per peer a queue and a rate each way, and a delay. It has no
    I/O; times are seconds of any clock.
    """

    up_bytes_per_s: Sequence[float]
    down_bytes_per_s: Sequence[float]
    delay_s: Sequence[float]  # between the peer and the middle of the network, one way
    queue_s: Sequence[float]
    _up_free_s: list[float] = field(default_factory=list)
    _down_free_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._up_free_s = [0.0] * len(self.delay_s)
        self._down_free_s = [0.0] * len(self.delay_s)

    def send(self, now_s: float, source: int, target: int, size_bytes: int) -> float | None:
        """Return when the packet reaches the queue of the target, or None when the queue of the sender's way
        up is full.
        """
        left_s = self._through(self._up_free_s, source, self.up_bytes_per_s[source], now_s, size_bytes)
        return None if left_s is None else left_s + self.delay_s[source] + self.delay_s[target]

    def arrive(self, now_s: float, target: int, size_bytes: int) -> float | None:
        """Return when the packet is delivered, or None when the queue of the target's way down is full."""
        return self._through(self._down_free_s, target, self.down_bytes_per_s[target], now_s, size_bytes)

    def _through(
        self, free_s: list[float], peer: int, bytes_per_s: float, now_s: float, size_bytes: int
    ) -> float | None:
        start_s = max(free_s[peer], now_s)
        if start_s - now_s > max(self.queue_s[peer], _QUEUE_BYTES_MIN / bytes_per_s):
            return None
        free_s[peer] = start_s + size_bytes / bytes_per_s
        return free_s[peer]


def sizes(packet: bytes) -> tuple[int, int, int]:
    """Return (packets, bytes, payload bytes) that an IPv4 packet with a virtio header in front represents."""
    size = len(packet) - _HEADER_BYTES
    if packet[_HEADER_BYTES + 9] != _TCP:
        return 1, size, 0
    ip_bytes = (packet[_HEADER_BYTES] & 15) * 4
    headers = ip_bytes + (packet[_HEADER_BYTES + ip_bytes + 12] >> 4) * 4
    payload = size - headers
    each = int.from_bytes(packet[4:6], sys.byteorder) if packet[1] else 0
    count = -(-payload // each) if each else 1
    return count, payload + count * headers, payload


class Relay:
    """Carrier of packets between the devices. It runs until standard input ends, and answers every line there
    with the counters.
    """

    def __init__(self, devices: Sequence[int], model: LinkModel, loss: Sequence[float], seed: int) -> None:
        self._devices, self._model, self._loss = list(devices), model, list(loss)
        self._rng = random.Random(seed)
        # (time, number, whether only delivery is left, target, size, packet)
        self._due: list[tuple[float, int, bool, int, int, bytes]] = []
        self._number = 0
        self.counted = [Counted() for _ in devices]

    def run(self) -> None:
        """Carry packets until standard input ends."""
        control = sys.stdin.fileno()
        places = {device: place for place, device in enumerate(self._devices)}
        watched = [control, *self._devices]
        while True:
            wait_s = max(self._due[0][0] - time.monotonic(), 0.0) if self._due else None
            ready, _, _ = select.select(watched, [], [], wait_s)
            self._rng.shuffle(
                ready
            )  # rotate the order, because the first device gets more room in every queue
            for descriptor in ready:
                if descriptor == control:
                    if not os.read(control, 4096):
                        return
                    answer([_as_dict(counted) for counted in self.counted])
                else:
                    self._take(places[descriptor], descriptor)
            self._deliver(time.monotonic())

    def _take(self, source: int, device: int) -> None:
        for _ in range(_READS_MAX):
            try:
                packet = os.read(device, _PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            target = (
                packet[_HEADER_BYTES + 19] - 1
                if len(packet) > _HEADER_BYTES + 20 and packet[_HEADER_BYTES] >> 4 == 4
                else -1
            )
            if not 0 <= target < len(self._devices):
                continue  # not addressed to a peer
            count, size, payload = sizes(packet)
            counted = self.counted[source]
            at_s = self._model.send(time.monotonic(), source, target, size)
            if at_s is None or (self._loss[source] and self._rng.random() < self._loss[source]):
                counted.dropped_packets += count
                continue
            counted.sent_packets += count
            counted.sent_bytes += size
            counted.sent_payload_bytes += payload
            self._push(at_s, False, target, size, packet)

    def _push(self, at_s: float, last: bool, target: int, size: int, packet: bytes) -> None:
        self._number += 1
        heapq.heappush(self._due, (at_s, self._number, last, target, size, packet))

    def _deliver(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            at_s, _, last, target, size, packet = heapq.heappop(self._due)
            if last:
                try:
                    os.write(self._devices[target], packet)
                except OSError:
                    self.counted[target].dropped_packets += 1
                continue
            delivered_s = self._model.arrive(at_s, target, size)
            if delivered_s is None:
                self.counted[target].dropped_packets += 1
            else:
                self._push(delivered_s, True, target, size, packet)


def _as_dict(counted: Counted) -> dict[str, int]:
    return {name: getattr(counted, name) for name in Counted.__slots__}


def answer(message: Any) -> None:
    """Write one line of JSON for the process that started this one."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def make_peer(host: str, up_bytes_per_s: float, *, bundles: bool) -> tuple[int, int]:
    """Create a namespace with its device, and return both descriptors. This process is in that namespace
    afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(
            ctypes.get_errno(), f"a network namespace cannot be made: {os.strerror(ctypes.get_errno())}"
        )
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    )
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | (_OFFLOAD_TCP4 if bundles else 0))
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    commands = [
        "link set lo up",
        f"address add {host}/24 dev {DEVICE}",
        f"link set {DEVICE} mtu {_MTU} txqueuelen 4000 up",
    ]
    # a bundle is what the link carries in a millisecond, even if many connections share it, because each
    # packet costs this process 20 µs
    segments = min(max(int(up_bytes_per_s * _BUNDLE_S / _MTU), 2), 32)
    Path("/proc/sys/net/ipv4/tcp_min_tso_segs").write_text(str(segments))
    # per route: the default of a namespace may only be one that the machine allows to all users
    commands.append(
        f"route replace {host.rpartition('.')[0]}.0/24 dev {DEVICE} src {host} congctl {_CONGESTION}"
    )
    for command in commands:
        done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"ip {command}: {done.stderr.strip()}")
    return namespace, device


def main() -> None:
    """Run the relay with the settings in the first argument (JSON). The first reply holds the descriptors of
    the namespaces, or the problem.
    """
    settings = json.loads(sys.argv[1])
    try:  # the relay must not wait for the processes that use it
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-20)
    made = []
    try:
        for host, up_bytes_per_s in zip(settings["hosts"], settings["up_bytes_per_s"], strict=True):
            made.append(make_peer(host, up_bytes_per_s, bundles=not any(settings["loss"])))
    except OSError as error:
        answer({"problem": str(error)})
        return
    answer({"namespaces": [namespace for namespace, _ in made]})
    model = LinkModel(
        *(settings[name] for name in ("up_bytes_per_s", "down_bytes_per_s", "delay_s", "queue_s"))
    )
    Relay([device for _, device in made], model, settings["loss"], _SEED).run()


if __name__ == "__main__":
    main()
