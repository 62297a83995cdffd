"""A link between two network namespaces that delays every packet.

Use: `delayed_link.py DELAY_S ONE TWO`. It creates the TUN devices ONE and TWO in its own namespace, prints
that it is ready, and carries packets between them until it is killed. Meanwhile, devices can be renamed and
moved to other namespaces. It is for kernels without netem. Packets keep their order, and are lost only when a
device's queue is full.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES_MAX = 65_535


def tun(name: str) -> int:
    """Make a TUN device, and return the file descriptor of its packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def carry(one: int, two: int, delay_s: float) -> None:
    """Carry packets both ways forever."""
    selector = selectors.SelectSelector()  # epoll and poll would round times up to whole milliseconds
    other = {one: two, two: one}
    # packets in transit, by the device at which they arrive
    under_way: dict[int, deque[tuple[float, bytes]]] = {one: deque(), two: deque()}
    for descriptor in other:
        selector.register(descriptor, selectors.EVENT_READ)
    while True:
        due_s = [packets[0][0] for packets in under_way.values() if packets]
        wait_s = max(min(due_s) - time.monotonic(), 0.0) if due_s else None
        for key, _ in selector.select(wait_s):
            while (packet := _read(key.fd)) is not None:
                under_way[other[key.fd]].append((time.monotonic() + delay_s, packet))
        now_s = time.monotonic()
        for descriptor, packets in under_way.items():
            while packets and packets[0][0] <= now_s:
                _write(descriptor, packets.popleft()[1])


def _read(descriptor: int) -> bytes | None:
    try:
        return os.read(descriptor, _PACKET_BYTES_MAX)
    except BlockingIOError:
        return None
    except OSError:  # the device is down
        return None


def _write(descriptor: int, packet: bytes) -> None:
    try:
        os.write(descriptor, packet)
    except OSError:  # the device is down or its queue is full: packets are lost, as on any link
        return


if __name__ == "__main__":
    ends = [tun(name) for name in sys.argv[2:]]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(ends[0], ends[1], float(sys.argv[1]))
