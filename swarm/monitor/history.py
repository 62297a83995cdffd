"""History of the charts in a SQLite file: three resolutions, each bounded, so that a year of a run takes some
megabytes.

Every sample is added to one bucket of each tier, which holds the mean, minimum and maximum of its samples.
Times without samples have no buckets, so that a gap in a chart is a gap in what the monitor saw.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.core.errors import UsageError
from swarm.monitor.logic.view import MonitorEvent, MonitorView

_FORMAT = 1
_MAGIC = b"SQLite format 3\0"
_NAMES_MAX = 48
_EVENTS_MAX = 5000
_PRUNE_EVERY = 500
_POINTS_MAX = 4000


@dataclass(frozen=True, slots=True)
class Tier:
    """One resolution: buckets of `seconds`, kept for `keep_s`."""

    seconds: float
    keep_s: float


TIERS = (Tier(2.0, 6 * 3600.0), Tier(30.0, 7 * 86400.0), Tier(600.0, 5 * 365 * 86400.0))

_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS point (
    tier INTEGER NOT NULL, name TEXT NOT NULL, at INTEGER NOT NULL, samples INTEGER NOT NULL,
    total REAL NOT NULL, least REAL NOT NULL, most REAL NOT NULL,
    PRIMARY KEY (tier, name, at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS event (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, level TEXT NOT NULL,
    text TEXT NOT NULL, peer TEXT NOT NULL);
"""
# These statements fail if a file has different tables with the same names.
_COLUMNS = (
    "SELECT tier, name, at, samples, total, least, most FROM point LIMIT 1",
    "SELECT number, at, kind, level, text, peer FROM event LIMIT 1",
)
_ADD = """
INSERT INTO point (tier, name, at, samples, total, least, most) VALUES (?, ?, ?, 1, ?, ?, ?)
ON CONFLICT (tier, name, at) DO UPDATE SET
    samples = samples + 1, total = total + excluded.total,
    least = min(least, excluded.least), most = max(most, excluded.most)
"""


class ChartHistory:
    """History of one run. Every method may be called from any thread; each call is short."""

    def __init__(self, path: Path | None, run_id: str, tiers: Sequence[Tier] = TIERS) -> None:
        """Open the history at `path`, or in memory when it is None. A damaged one is moved away first.

        Raises UsageError if the file is not a history of this run or another monitor uses it.
        """
        self.path, self._tiers = path, tuple(tiers)
        self._lock = threading.Lock()
        self._added = 0
        self._connection: sqlite3.Connection | None = None
        # new path of a damaged file; None: the file was not damaged
        self.damaged: Path | None = None
        try:
            if path is not None:
                self.damaged = _set_aside_if_damaged(path)
                path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = connection = sqlite3.connect(
                path or ":memory:", timeout=0.5, check_same_thread=False, isolation_level=None
            )
            # a damaged file may contain arbitrary bytes as text
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            for pragma in (
                "locking_mode=EXCLUSIVE",
                "journal_mode=WAL",
                "synchronous=NORMAL",
                "journal_size_limit=4194304",
            ):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            connection.executescript(_SCHEMA)
            self._check(connection, run_id)
        except (sqlite3.Error, OSError) as error:
            self.close()
            if "locked" in str(error):
                raise UsageError(
                    f"another monitor keeps its history in {path}: choose another file with --history"
                ) from None
            raise UsageError(
                f"{path} cannot hold a monitor's history ({error}):"
                " move it away, or choose another with --history"
            ) from None
        except UsageError:
            self.close()
            raise

    def _check(self, connection: sqlite3.Connection, run_id: str) -> None:
        for columns in _COLUMNS:
            connection.execute(columns).fetchall()
        about = dict(connection.execute("SELECT name, value FROM about"))
        if about.get("run", run_id) != run_id:
            raise UsageError(
                f"{self.path} is the history of another run ({about['run']}):"
                " choose another file with --history"
            )
        if about.get("format", str(_FORMAT)) != str(_FORMAT):
            raise UsageError(
                f"{self.path} was written by another version of swarm: choose another file with --history"
            )
        connection.execute(
            "INSERT OR REPLACE INTO about VALUES ('run', ?), ('format', ?)", (run_id, str(_FORMAT))
        )

    def add(self, view: MonitorView, events: Iterable[MonitorEvent] = ()) -> None:
        """Add the samples of a view, if it is live, and the events."""
        values = samples_of(view) if view.live else {}
        with self._lock:
            if self._connection is None:
                return
            with self._connection as connection:  # commits, or rolls back on an exception
                connection.execute("BEGIN IMMEDIATE")  # autocommit mode begins no transaction by itself
                known = (
                    {name for (name,) in connection.execute("SELECT DISTINCT name FROM point WHERE tier = 2")}
                    if values
                    else set()
                )
                for name, value in values.items():
                    if name not in known and len(known) >= _NAMES_MAX:
                        continue
                    known.add(name)
                    for number, tier in enumerate(self._tiers):
                        connection.execute(
                            _ADD, (number, name, int(view.at_s // tier.seconds), value, value, value)
                        )
                rows = [(one.number, one.at_s, one.kind, one.level, one.text, one.peer_id) for one in events]
                connection.executemany("INSERT OR REPLACE INTO event VALUES (?, ?, ?, ?, ?, ?)", rows)
                self._added += 1
                if self._added % _PRUNE_EVERY == 1:
                    self._prune(connection, view.at_s)

    def series(self, since_s: float, until_s: float, points_max: int = 600) -> dict[str, Any]:
        """Return means between two times in at most `points_max` buckets, as `{"seconds": bucket length,
        "at": [start times], "series": {name: [mean or None]}}`.
        """
        points_max = max(2, min(points_max, _POINTS_MAX))
        span_s = max(until_s - since_s, 1.0)
        number, tier = self._tier(since_s, until_s, points_max)
        # buckets of the tier that are merged into one of the result
        factor = max(1, -(-int(span_s) // int(points_max * tier.seconds)))
        with self._lock:
            if self._connection is None:
                return {"seconds": tier.seconds, "at": [], "series": {}}
            rows = self._connection.execute(
                "SELECT name, at / ? AS bucket, sum(total) / sum(samples), min(least), max(most) FROM point "
                "WHERE tier = ? AND at BETWEEN ? AND ? GROUP BY name, bucket ORDER BY bucket",
                (factor, number, int(since_s // tier.seconds), int(until_s // tier.seconds)),
            ).fetchall()
        seconds = factor * tier.seconds
        buckets = sorted({row[1] for row in rows})
        place = {bucket: index for index, bucket in enumerate(buckets)}
        series: dict[str, list[float | None]] = {}
        for name, bucket, mean, _, _ in rows:
            series.setdefault(name, [None] * len(buckets))[place[bucket]] = mean
        return {"seconds": seconds, "at": [bucket * seconds for bucket in buckets], "series": series}

    def began_s(self) -> float | None:
        """Return the earliest time in the history, or None when it is empty."""
        with self._lock:
            if self._connection is None:
                return None
            found = self._connection.execute("SELECT tier, min(at) FROM point GROUP BY tier").fetchall()
        return min((at * self._tiers[tier].seconds for tier, at in found), default=None)

    def events(self, count: int = 300) -> list[MonitorEvent]:
        """Return the latest `count` events, the newest last."""
        with self._lock:
            if self._connection is None:
                return []
            rows = self._connection.execute(
                "SELECT number, at, kind, level, text, peer FROM event ORDER BY number DESC LIMIT ?", (count,)
            ).fetchall()
        return [
            MonitorEvent(number=number, at_s=at_s, kind=kind, level=level, text=text, peer_id=peer)
            for number, at_s, kind, level, text, peer in reversed(rows)
        ]

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _tier(self, since_s: float, until_s: float, points_max: int) -> tuple[int, Tier]:
        """Return the finest tier that covers the whole interval without reading hundreds of thousands of
        rows.
        """
        for number, tier in enumerate(self._tiers):
            if until_s - since_s <= tier.keep_s and (until_s - since_s) / tier.seconds <= 20 * points_max:
                return number, tier
        return len(self._tiers) - 1, self._tiers[-1]

    def _prune(self, connection: sqlite3.Connection, now_s: float) -> None:
        for number, tier in enumerate(self._tiers):
            connection.execute(
                "DELETE FROM point WHERE tier = ? AND at < ?",
                (number, int((now_s - tier.keep_s) // tier.seconds)),
            )
        connection.execute(
            "DELETE FROM event WHERE number <= (SELECT max(number) FROM event) - ?", (_EVENTS_MAX,)
        )


def _set_aside_if_damaged(path: Path) -> Path | None:
    """Move a damaged history away and return its new name. A file that is not a history, or that another
    process uses, stays in place.
    """
    try:
        with path.open("rb") as stream:
            if stream.read(len(_MAGIC)) != _MAGIC:
                return None
        with contextlib.closing(sqlite3.connect(path, timeout=0.5)) as connection:
            connection.text_factory = bytes
            if connection.execute("PRAGMA quick_check(1)").fetchone() == (b"ok",):
                return None
    except (OSError, sqlite3.OperationalError):
        return None
    except (sqlite3.DatabaseError, UnicodeDecodeError):  # the check itself may raise UnicodeDecodeError
        pass  # the file is too damaged for the check
    damaged = path.with_name(f"{path.name}.damaged")
    path.replace(damaged)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return damaged


def samples_of(view: MonitorView) -> dict[str, float]:
    """Return the values of a view for the charts, by the name of the series."""
    last_round = next((one for one in view.rounds if not one.failed), None)
    values: dict[str, float | None] = {
        "loss": view.loss,
        "validation_loss": view.validation_loss,
        "samples_per_s": view.samples_per_s,
        "peers": float(view.peers_live),
        "epoch": float(view.epoch),
        "drift": view.drift,
        "bytes_per_s": view.bytes_per_s,
        "round_s": last_round.seconds if last_round is not None else None,
    }
    values |= {f"own.{name}": own.median for name, own in view.own.items()}
    return {name: value for name, value in values.items() if value is not None}
