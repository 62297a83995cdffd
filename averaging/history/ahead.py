"""The history of others that a peer should follow."""

from __future__ import annotations

from dataclasses import dataclass

from averaging.history.lineage import Chain
from swarm.core.ids import Contact


@dataclass(frozen=True, slots=True)
class Ahead:
    """A history that this peer should follow: it extends this peer's own, or wins against it."""

    chain: Chain
    contact: Contact  # of a peer that has it
    epochs_given_up: int = 0  # this peer's own since the two parted; 0: it is merely behind
