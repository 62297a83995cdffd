"""Turns: the periods of swarm time in which a server averages an expert with its replicas, where it shares
too many for one period.

Replicas must choose the same periods without asking each other about the rest of their experts. The number of
turns is a power of two, the larger one of any two servers counts, and the period follows from the name of the
expert; so servers that share few experts follow those that share many.
"""

from __future__ import annotations

import hashlib

from moe.protocol.names import ExpertUid

PER_PERIOD = 64  # experts that a server averages in one period, about


def turns_for(shared: int) -> int:
    """Return the number of periods in which a server with this number of shared experts averages each of them
    once.
    """
    turns = 1
    while turns * PER_PERIOD < shared:
        turns *= 2
    return turns


def is_due(uid: ExpertUid, turns: int, period: int) -> bool:
    """Return whether an expert has its turn in this period."""
    place = int.from_bytes(hashlib.blake2b(str(uid).encode(), digest_size=8).digest())
    return place % turns == period % turns
