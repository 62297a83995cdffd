"""The counts that a relay reports about its work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelayCounts:
    """The work of a relay: the reservations that peers hold there and the circuits that are open now; the
    bytes that it has carried, in both directions, and the requests that it has refused, since it began.
    """

    reservations: int
    circuits: int
    carried_bytes: int
    refused: int
