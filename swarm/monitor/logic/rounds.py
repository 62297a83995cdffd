"""Rounds as their members tell of them, merged: a liar can tell of rounds that never were, and cannot push
the others' out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from swarm.core.ids import PeerId
from swarm.metrics.record import RoundReport
from swarm.monitor.logic.robust import median
from swarm.monitor.logic.view import RoundView

_AHEAD_MAX = 2  # epochs that a round may be ahead of the swarm
_ALONE_MAX = 4  # rounds that one peer alone tells of
_BLAME_MAX = 8

RoundKey = tuple[str, int, str]


@dataclass(slots=True)
class _Round:
    told: dict[PeerId, RoundReport] = field(default_factory=dict)
    first_s: float = 0.0  # when the monitor heard of it


class RoundBook:
    """The latest rounds of a run."""

    def __init__(self, rounds_max: int = 50) -> None:
        self._rounds_max = rounds_max
        self._rounds: dict[RoundKey, _Round] = {}

    def tell(self, writer: PeerId, told: RoundReport, epoch: int, now_s: float) -> RoundKey | None:
        """One member's word; returns the round's key when it is the first to tell of it. `epoch`: the
        swarm's.
        """
        if told.epoch > epoch + _AHEAD_MAX or told.at_s > now_s + 60.0 or not told.kind:
            return None
        key = (told.kind, told.epoch, told.group or "-")
        known = self._rounds.get(key)
        if known is not None:
            known.told[writer] = told
            return None
        self._make_room(writer)
        self._rounds[key] = _Round({writer: told}, now_s)
        return key

    def view(self, key: RoundKey) -> RoundView | None:
        found = self._rounds.get(key)
        return _merged(key, found) if found is not None else None

    def latest(self) -> list[RoundView]:
        """The newest first."""
        views = [_merged(key, found) for key, found in self._rounds.items()]
        return sorted(views, key=lambda view: (view.at_s, view.epoch), reverse=True)

    def accusers(self) -> dict[str, set[PeerId]]:
        """Who was caught lying as a reducer, and by whom."""
        found: dict[str, set[PeerId]] = {}
        for one in self._rounds.values():
            for writer, told in one.told.items():
                for peer, _ in told.accused:
                    found.setdefault(peer, set()).add(writer)
        return found

    def _make_room(self, writer: PeerId) -> None:
        alone = [key for key, one in self._rounds.items() if set(one.told) == {writer}]
        for key in alone[: max(0, len(alone) - _ALONE_MAX + 1)]:
            del self._rounds[key]
        while len(self._rounds) >= self._rounds_max:
            del self._rounds[
                min(
                    self._rounds, key=lambda key: (len(self._rounds[key].told) > 1, self._rounds[key].first_s)
                )
            ]


def _merged(key: RoundKey, one: _Round) -> RoundView:
    told = list(one.told.values())
    failed = [one for one in told if one.reason]
    members = round(median(one.members for one in told) or 0)
    digests = Counter(one.digest for one in told if one.digest)
    left, accused = (
        {peer: why for one in told for peer, why in getattr(one, blame)} for blame in ("left", "accused")
    )
    reason = Counter(one.reason for one in failed).most_common(1)
    detail = Counter(one.detail for one in failed if one.detail).most_common(1)
    return RoundView(
        kind=key[0],
        epoch=key[1],
        at_s=statistics.median(one.at_s for one in told),
        members=members,
        told_by=len(told),
        seconds=median(one.seconds for one in told) or 0.0,
        bytes=(median(one.bytes for one in told) or 0.0) * max(1, members),
        failed=2 * len(failed) > len(told),
        failed_for=len(failed),
        reason=reason[0][0] if reason else "",
        detail=detail[0][0] if detail else "",
        left=dict(list(left.items())[:_BLAME_MAX]),
        accused=dict(list(accused.items())[:_BLAME_MAX]),
        digest=digests.most_common(1)[0][0] if digests else "",
        digests=len(digests),
    )
