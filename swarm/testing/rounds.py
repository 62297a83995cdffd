"""All-reduce between simulated peers."""

from __future__ import annotations

import random

from averaging.allreduce.allreduce import AllReduce
from averaging.reduction.audit import Notary
from swarm.testing.network import SimulatedPeer


def all_reduce_of(peer: SimulatedPeer) -> AllReduce:
    """Return the all-reduce service of a simulated peer. Its tensor work runs on the virtual loop."""
    return AllReduce(
        handlers=peer.handlers,
        channels=peer.caller,
        pool=None,  # type: ignore[arg-type]
        clock=peer.clock,
        notary=Notary(peer.identity, random.Random(f"audits of {peer.peer_id}")),
    )
