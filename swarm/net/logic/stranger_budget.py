"""A budget of strangers for something that costs this node time: a token bucket for each address prefix, and
one for all strangers together. Pure; times are seconds.

Identities cost nothing, but addresses do. Strangers of one prefix therefore share a bucket, and the last
tokens of all are reserved for prefixes that had few: a newcomer from elsewhere is served during an attack.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_PREFIXES_MAX: Final = 4096  # remembered; beyond this the one that was seen longest ago has its budget again


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimits:
    """Limits of a budget: how much may be used at once, and how much a second after that."""

    per_prefix_max: float
    per_prefix_per_s: float
    all_max: float
    all_per_s: float
    # the last tokens of all are for prefixes that used at most this at once, and this a second after that
    reserved: float
    few_max: float
    few_per_s: float


@dataclass(slots=True)
class _Bucket:
    """A token bucket: its contents grow by `per_s` in a second, up to `most`."""

    most: float
    per_s: float
    left: float
    at_s: float

    def fill(self, now_s: float) -> float:
        """Return the tokens that are left at this time."""
        self.left = min(self.left + max(now_s - self.at_s, 0.0) * self.per_s, self.most)
        self.at_s = now_s
        return self.left


def _full(most: float, per_s: float, now_s: float) -> _Bucket:
    return _Bucket(most, per_s, most, now_s)


class StrangerBudget:
    """The tokens that are left to strangers."""

    def __init__(self, limits: BudgetLimits) -> None:
        self._limits = limits
        # prefix -> (its tokens, its tokens for prefixes with few); the least recently used prefix comes first
        self._left: OrderedDict[str, tuple[_Bucket, _Bucket]] = OrderedDict()
        self._of_all: _Bucket | None = None

    def enter(self, prefix: str, now_s: float) -> bool:
        """Take a token for a stranger of this prefix. Return False when there is none."""
        limits = self._limits
        of_all = self._of_all = self._of_all or _full(limits.all_max, limits.all_per_s, now_s)
        if prefix not in self._left:
            self._left[prefix] = (
                _full(limits.per_prefix_max, limits.per_prefix_per_s, now_s),
                _full(limits.few_max, limits.few_per_s, now_s),
            )
        left, few = self._left[prefix]
        self._left.move_to_end(prefix)
        needed = 1.0 if few.fill(now_s) >= 1.0 else 1.0 + limits.reserved
        has_token = left.fill(now_s) >= 1.0 and of_all.fill(now_s) >= needed
        if has_token:
            for bucket in (left, few, of_all):
                bucket.left = max(bucket.left - 1.0, 0.0)
        if len(self._left) > _PREFIXES_MAX:
            self._left.popitem(last=False)
        return has_token

    def __len__(self) -> int:
        return len(self._left)
