"""Hours of the day in which a volunteer may train, as people write them: 22-7, 12:30-13:15. Local time, no
dates. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.core.errors import UsageError

DAY_S = 86_400
_SPAN = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*-\s*(\d{1,2})(?::(\d{2}))?")


@dataclass(frozen=True, slots=True)
class Hours:
    """Spans of the day, each (first second, second after the last); a span that ends before it begins goes
    over midnight. None: always.
    """

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Hours:
        """From `22-7` or `9:30-12,14-18`, any number of them. UsageError says which is wrong."""
        return cls(tuple(_span(part) for text in texts for part in text.split(",")))

    def open_at(self, second: float) -> bool:
        """Whether training is allowed at this second of the day."""
        return not self.spans or any(
            (second - begin) % DAY_S < (end - begin) % DAY_S or begin == end for begin, end in self.spans
        )

    def opens_in_s(self, second: float) -> float:
        """Seconds until it is allowed; 0 while it is."""
        return 0.0 if self.open_at(second) else min((begin - second) % DAY_S for begin, _ in self.spans)

    def __str__(self) -> str:
        return ", ".join(f"{_clock(begin)}-{_clock(end)}" for begin, end in self.spans) or "always"


ALWAYS = Hours()


def _span(text: str) -> tuple[int, int]:
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"hours are written like 22-7 or 9:30-12, not {text!r}")
    hour, minute, end_hour, end_minute = (int(part or 0) for part in match.groups())
    if (
        max(hour, end_hour) > 24
        or max(minute, end_minute) > 59
        or (24 in (hour, end_hour) and minute + end_minute > 0)
    ):
        raise UsageError(f"there are no such hours of the day: {text!r}")
    return (hour % 24) * 3600 + minute * 60, (end_hour % 24) * 3600 + end_minute * 60


def _clock(second: int) -> str:
    return f"{second // 3600:02d}:{second % 3600 // 60:02d}"
