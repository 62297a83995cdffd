"""Measuring how fast bytes go to a peer, over real sockets: what is measured, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarm.core.errors import PeerError
from swarm.net.throttle import Bandwidth
from swarm.net.throughput import THROUGHPUT
from swarm.node import Node, NodeConfig

HERE = "127.0.0.1:0"
TIMEOUT_S = 30.0


@pytest.fixture
def asked() -> Iterator[Node]:
    with Node(listen=HERE) as node:
        yield node


def test_both_directions_are_measured_once_in_ten_seconds(asked: Node) -> None:
    with Node(listen=None) as asker:
        rates = asker.throughput(asked.contact)
        assert min(rates.up_bytes_per_s, rates.down_bytes_per_s) > 100_000
        with pytest.raises(PeerError, match="you were measured less than 10 s ago"):
            asker.throughput(asked.contact)


def test_the_direction_that_is_slow_is_found(asked: Node) -> None:
    slow = NodeConfig(bandwidth=Bandwidth(up_bytes_per_s=2_000_000.0))
    with Node(listen=None, config=slow) as asker:
        rates = asker.throughput(asked.contact)
    assert rates.up_bytes_per_s < 2_200_000.0  # 0.05 s pass at once
    assert rates.down_bytes_per_s > rates.up_bytes_per_s


def test_a_peer_that_sends_without_end_is_refused(asked: Node) -> None:
    with Node(listen=None) as asker:

        async def flood() -> None:
            async with asker.channels.open_stream(asked.contact, THROUGHPUT, timeout_s=TIMEOUT_S) as stream:
                while True:
                    await stream.send(bytes(THROUGHPUT.message_bytes_max))

        with pytest.raises(PeerError, match="takes at most 1048576 bytes"):
            asker.network.run(flood(), TIMEOUT_S)
