"""Add up what this user's volunteers have given, by day and run: samples, rounds, time, traffic and energy.

The file is a SQLite database, so that several volunteers add to it at the same time. If the file cannot be
used, the volunteer reports this once and continues to train.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

_WAIT_S = 2.0  # wait for another process to finish writing
_SCHEMA = """
create table if not exists given (
    day text not null, run text not null, samples integer not null, rounds integer not null, seconds real not
    null, sent_bytes integer not null, received_bytes integer not null, joules real not null, primary key
    (day, run)
) without rowid
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Sums of the contributions in a period."""

    samples: int = 0  # those that counted in a round
    rounds: int = 0
    seconds: float = 0.0  # spent training
    sent_bytes: int = 0
    received_bytes: int = 0
    joules: float = 0.0  # energy of the device, if it can be measured

    @property
    def bytes(self) -> int:
        return self.sent_bytes + self.received_bytes

    def __sub__(self, other: Given) -> Given:
        return Given(**{one.name: getattr(self, one.name) - getattr(other, one.name) for one in fields(self)})


_COLUMNS = [one.name for one in fields(Given)]
_SUMS = ", ".join(f"coalesce(sum({name}), 0)" for name in _COLUMNS)


class ContributionLog:
    """The database of one user."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, day: date, run: str, given: Given) -> None:
        """Add the contributions of a day to a run (`name@id`). Raises OSError if the file cannot be used."""
        values = [getattr(given, name) for name in _COLUMNS]
        updates = ", ".join(f"{name} = {name} + excluded.{name}" for name in _COLUMNS)
        marks = ", ".join("?" * (2 + len(values)))
        with self._opened(create=True) as database:
            database.execute(
                f"insert into given (day, run, {', '.join(_COLUMNS)}) values ({marks}) "
                f"on conflict (day, run) do update set {updates}",
                [day.isoformat(), run, *values],
            )

    def total(self, *, run: str | None = None, since: date | None = None) -> Given:
        """Return the sum over all runs or one, of all days or those from `since` on. Raises OSError if the
        file cannot be used.
        """
        if not self.path.exists():
            return Given()
        with self._opened(create=False) as database:
            row = database.execute(
                f"select {_SUMS} from given where day >= ? and (? is null or run = ?)",
                [since.isoformat() if since is not None else "", run, run],
            ).fetchone()
        return Given(**dict(zip(_COLUMNS, row, strict=True)))

    def by_run(self) -> dict[str, Given]:
        """Return the sum of all days by run (`name@id`). Raises OSError if the file cannot be used."""
        if not self.path.exists():
            return {}
        with self._opened(create=False) as database:
            rows = database.execute(
                f"select run, {_SUMS} from given group by run order by max(day) desc"
            ).fetchall()
        return {run: Given(**dict(zip(_COLUMNS, row, strict=True))) for run, *row in rows}

    @contextlib.contextmanager
    def _opened(self, *, create: bool) -> Iterator[sqlite3.Connection]:
        try:
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as database, database:
                database.execute(_SCHEMA)
                yield database
        except sqlite3.Error as error:
            raise OSError(f"{self.path}: {error}") from error
