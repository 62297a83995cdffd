"""The histories of a run, as its peers report them: how many peers are in each, breaks and reunions.

Peers of one history report different heads for a moment after each round. Histories are distinguished by
their line, which is the head after the last break. A peer that is cut off and waits is still in the history
of the others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from swarm.metrics.record import Metrics
from swarm.monitor.logic.view import HistoryView

_LINES_MAX = 1024  # limit of known lines, because a liar may invent any number
_SHOWN_MAX = 16

_BACK_EPOCHS_MIN = 3  # fewer: peers that were ahead have left
_JUMP_EPOCHS_MIN, _JUMP_RATIO = 100, 20


class KnownLines:
    """The lines seen so far."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, None] = OrderedDict()

    def is_new(self, line: str) -> bool:
        """Return whether this line belongs to a new break, and remember it."""
        if not line or line in self._lines:
            return False
        self._lines[line] = None
        if len(self._lines) > _LINES_MAX:
            self._lines.popitem(last=False)
        return True


def histories_of(published: Iterable[Metrics]) -> tuple[HistoryView, ...]:
    """Return the histories of these peers, the one with the most peers first."""
    lines: dict[str, Counter[tuple[int, str]]] = {}
    for one in published:
        if one.head:
            lines.setdefault(one.line, Counter())[one.epoch, one.head] += 1
    found = []
    for line, heads in lines.items():
        epoch, head = max(heads, key=lambda place: (heads[place], place))
        found.append(HistoryView(head=head, line=line, epoch=epoch, peers=heads.total()))
    return tuple(sorted(found, key=lambda one: (-one.peers, one.line))[:_SHOWN_MAX])


class EpochJumps:
    """Tells steps of the run's epoch from jumps: another history took over, or the run began again."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._step = 1  # the largest usual step between two polls

    def text(self, epoch: int) -> str:
        """Return a sentence about the jump to this epoch; "" where it is a step."""
        last, self._last = self._last, epoch
        if not last:
            return ""
        step = epoch - last
        if step <= -_BACK_EPOCHS_MIN:
            return f"the run went from epoch {last:,} back to {epoch:,}"
        if step > max(_JUMP_EPOCHS_MIN, _JUMP_RATIO * self._step):
            return f"the run jumped from epoch {last:,} to {epoch:,}"
        self._step = max(self._step, step)
        return ""
