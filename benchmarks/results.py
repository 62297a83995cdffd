"""Figures as values: samples, comparisons, and whether an aim is met. Free of I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All samples of one quantity of one system."""

    name: str  # "hivemind 1.1.12 float16, 64 MiB: whole step"
    unit: str
    samples: tuple[float, ...]
    failed: int = 0  # rounds without the right result on every peer; they are in no median
    wrong: int = 0  # failed rounds that the system itself reported as successful
    launches_failed: int = 0  # launches that never completed a round, or died in one
    reasons: tuple[str, ...] = ()  # reasons of failures, each once

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def tried(self) -> int:
        return len(self.samples) + self.failed


@dataclass(slots=True, kw_only=True)
class Failures:
    """The failures while one system is measured. The fields are those of `Series`; subclasses add samples."""

    failed: int = 0
    wrong: int = 0
    launches_failed: int = 0
    reasons: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        """Record the reason of a failure. The caller counts it."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def series_of(self, name: str, samples: Iterable[float], unit: str = "s") -> Series:
        """Return these samples with the failures added."""
        return Series(
            name=name,
            unit=unit,
            samples=tuple(samples),
            failed=self.failed,
            wrong=self.wrong,
            launches_failed=self.launches_failed,
            reasons=tuple(self.reasons),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A bound on our figure ("ours") or on a ratio of it to the peer's ("peer / ours", "ours / peer")."""

    of: Literal["ours", "peer / ours", "ours / peer"]
    sense: Literal["at least", "at most"]
    value: float

    def met(self, ours: float | None, peer: float | None) -> bool | None:
        """Return whether the aim is met; None when a figure is missing."""
        figure = ours if self.of == "ours" else ratio(ours, peer, self.of)
        if figure is None:
            return None
        return figure >= self.value if self.sense == "at least" else figure <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: our figure and a peer's, measured in one run."""

    identifier: str  # stable: a later run replaces the row of the same identifier
    workload: str
    quantity: str  # which quantity of a system this is
    ours: Series
    peer: Series | None
    aim: Aim | None
    shown: Literal["peer / ours", "ours / peer"] | None = None  # which ratio is shown; None: that of the aim
    limit: str = ""  # the physical limit
    notes: tuple[str, ...] = field(default=())
    # points of a chart with curves: (bytes per parameter, loss)
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def ratio_kind(self) -> str | None:
        if self.peer is None:
            return None
        if self.shown is not None:
            return self.shown
        return self.aim.of if self.aim is not None and self.aim.of != "ours" else "peer / ours"

    @property
    def ratio(self) -> float | None:
        kind = self.ratio_kind
        return None if kind is None or self.peer is None else ratio(self.ours.median, self.peer.median, kind)

    @property
    def met(self) -> bool | None:
        return (
            None
            if self.aim is None
            else self.aim.met(self.ours.median, None if self.peer is None else self.peer.median)
        )


def ratio(ours: float | None, peer: float | None, kind: str) -> float | None:
    """Return the ratio that `kind` names; None when a figure is missing or not positive."""
    if ours is None or peer is None or min(ours, peer) <= 0.0:
        return None
    return peer / ours if kind == "peer / ours" else ours / peer
