"""Parse and evaluate the hours of the day in which a volunteer may train, such as 22-7 or 12:30-13:15.

Times are local and without a date. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.core.errors import UsageError

DAY_S = 86_400
_RANGE = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*-\s*(\d{1,2})(?::(\d{2}))?")


@dataclass(frozen=True, slots=True)
class Hours:
    """Time ranges of the day, each (first second, second after the last); no range means always.

    A range whose end is before its start spans midnight.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Hours:
        """Parse texts such as `22-7` or `9:30-12,14-18`. Raise UsageError that names the text that is not
        valid.
        """
        return cls(tuple(_parse_range(part) for text in texts for part in text.split(",")))

    def open_at(self, second: float) -> bool:
        """Return whether training is allowed at this second of the day."""
        return not self.ranges or any(
            (second - begin) % DAY_S < (end - begin) % DAY_S or begin == end for begin, end in self.ranges
        )

    def opens_in_s(self, second: float) -> float:
        """Return the seconds until training is allowed; 0 if it is allowed now."""
        return 0.0 if self.open_at(second) else min((begin - second) % DAY_S for begin, _ in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"{_clock(begin)}-{_clock(end)}" for begin, end in self.ranges) or "always"


ALWAYS = Hours()


def _parse_range(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"hours are written like 22-7 or 9:30-12, not {text!r}")
    hour, minute, end_hour, end_minute = (int(part or 0) for part in match.groups())
    if (
        max(hour, end_hour) > 24
        or max(minute, end_minute) > 59
        or (24 in (hour, end_hour) and minute + end_minute > 0)
    ):
        raise UsageError(f"hours are from 0:00 to 24:00, like 22-7 or 9:30-12, not {text!r}")
    if (hour, minute) == (end_hour, end_minute):
        raise UsageError(f"{text!r} ends when it begins: hours are like 22-7, and without any it is always")
    return (hour % 24) * 3600 + minute * 60, (end_hour % 24) * 3600 + end_minute * 60


def _clock(second: int) -> str:
    return f"{second // 3600:02d}:{second % 3600 // 60:02d}"
