"""The setups of rounds for tests of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from averaging.allreduce.logic.setup import RoundSetup, proposal_of
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.partition import plan_chunks
from swarm.compression import find
from swarm.core.ids import Address, Contact
from swarm.testing.identities import SeededIdentity

CODEC = find("float32")
CHUNK_BYTES = 4096
NUMEL = 1024  # elements of a chunk


def round_setup(
    identities: Sequence[SeededIdentity],
    *,
    chunks_each: int = 1,
    deadline_s: float = 30.0,
    clients: Sequence[int] = (),
    auxiliaries: Sequence[int] = (),
) -> RoundSetup:
    """Return the setup of the member at place 0, begun at 0 s. Every member contributes and reduces
    `chunks_each` chunks; clients, which cannot be dialed, reduce nothing, and auxiliary members only reduce.
    """
    places = range(len(identities))
    weights = [0.0 if place in auxiliaries else 1.0 for place in places]
    bandwidths = [0.0 if place in clients else 1.0 for place in places]
    group = Group(
        group_id=bytes(32),
        members=tuple(
            Member(
                contact=Contact(
                    identity.peer_id, () if place in clients else (Address("10.0.0.1", 4000 + place),)
                ),
                weight=weights[place],
                bandwidth=bandwidths[place],
                auxiliary=place in auxiliaries,
            )
            for place, identity in enumerate(identities)
        ),
        codec="float32",
        gathered=(b"",) * len(identities),
    )
    reducers = len(identities) - len(clients)
    return RoundSetup(
        group=group,
        own=0,
        plan=plan_chunks(NUMEL * chunks_each * reducers, bandwidths, CODEC, CHUNK_BYTES),
        codec=CODEC,
        weights=tuple(weights),
        proposal=proposal_of(group, None),
        electors=(),
        goodbyes={},
        audited=False,
        min_fraction=1.0,
        begun_s=0.0,
        deadline_s=deadline_s,
    )
