"""The counts that a relay reports about its work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelayCounts:
    """The work of a relay: its current reservations and open circuits, and the bytes carried in both
    directions and requests refused since its start.
    """

    reservations: int
    circuits: int
    carried_bytes: int
    refused: int
