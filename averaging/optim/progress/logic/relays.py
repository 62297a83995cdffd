"""The peers that a peer reports to directly, so that news reaches all peers of a run at a cost of O(log N)
messages per peer. Pure.

Peers stand on a ring by their ids. News goes to the peers 1, 2, 4, … places further on, and each passes it
on in the same way: every peer is reached within log2 N hops, over many paths, so that a few failed peers
stop nothing. (These are the fingers of Chord: Stoica et al., SIGCOMM 2001.)
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.core.ids import PeerId

# In a run with at most this many other peers each reports to all, which costs no more and takes one hop.
ALL_MAX = 8
# In a run with at most this many other peers, a peer whose round has failed pings all others. Too small:
# failed peers are waited for until their records expire; too large: N peers whose rounds fail send N²
# messages
PROBED_MAX = 64


def relays(own: PeerId, peers: Iterable[PeerId]) -> list[PeerId]:
    """Return those of `peers` that `own` reports to: all of them when they are few, otherwise log2 of their
    number.
    """
    others = sorted((peer for peer in peers if peer != own), key=lambda peer: peer.dht_id)
    if len(others) <= ALL_MAX:
        return others
    first = next((place for place, peer in enumerate(others) if peer.dht_id > own.dht_id), 0)
    steps = range(len(others).bit_length())
    return [others[(first + (1 << step) - 1) % len(others)] for step in steps if 1 << step <= len(others)]
