"""Nodes on loopback that know one another, all in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from swarm.node import Node


@contextmanager
def nodes_of(count: int) -> Iterator[list[Node]]:
    """The first is the others' bootstrap."""
    with ExitStack() as stack:
        first = stack.enter_context(Node(listen="127.0.0.1:0"))
        others = [
            stack.enter_context(Node(bootstrap=first.addresses, listen="127.0.0.1:0"))
            for _ in range(count - 1)
        ]
        yield [first, *others]
