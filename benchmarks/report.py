"""Store figures in benchmarks/figures/measured.json, and make the terminal's table of them.

A partial run replaces its own rows and leaves the others alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.results import Row, Series

FORMAT = 1
NOTHING = "–"
HEADINGS = ("workload", "measured", "peer", "peer's figure", "ours", "ratio", "aim", "met")


def figure(value: float | None, unit: str) -> str:
    """Return three significant digits, in the unit that reads best."""
    if value is None:
        return NOTHING
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 0.0995 else f"{value:.3g} s"
    if unit == "bytes":
        return f"{value / 1e6:.0f} MB"
    if unit == "bytes sent":
        return f"{value / 1e6:.3g} MB"
    if unit == "":
        return f"{value:g}"
    if unit == "%":
        return f"{value:.4g} %"
    if unit in ("hops", "messages/h", "kB/h"):
        return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{value:.3g} {unit}"


def as_record(row: Row, run: str) -> dict[str, Any]:
    """Return a row as JSON: all samples, and every shown figure, which is computed here once."""
    aim = row.aim
    return {
        "run": run,
        "workload": row.workload,
        "quantity": row.quantity,
        "peer": NOTHING if row.peer is None else row.peer.name.partition(":")[0],
        "peer_value": None if row.peer is None else row.peer.median,
        "ours_value": row.ours.median,
        "unit": row.ours.unit,
        "ratio": row.ratio,
        "ratio_kind": row.ratio_kind,
        "aim": None if aim is None else {"of": aim.of, "sense": aim.sense, "value": aim.value},
        "met": row.met,
        "limit": row.limit,
        "notes": [without_paths(note) for note in row.notes],
        "series": [_series_record(series) for series in (row.ours, row.peer) if series is not None],
        **({"curve": [[float(f"{x:.4g}"), float(f"{y:.4g}")] for x, y in row.curve]} if row.curve else {}),
    }


_PATH = re.compile(r"(?<![\w.])(?:/[\w.+-]+){2,}(?=/)")


def without_paths(text: str) -> str:
    """Replace absolute paths by the file's name: `…/queue.py`."""
    return _PATH.sub("…", text)


def _series_record(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "unit": series.unit,
        "samples": [float(f"{sample:.4g}") for sample in series.samples],
        "rounds_failed": series.failed,
        "rounds_wrong": series.wrong,
        "launches_failed": series.launches_failed,
        "reasons": [without_paths(reason) for reason in series.reasons],
    }


def load(path: Path) -> dict[str, Any]:
    """Return the stored figures; an absent file, or one of another format, has none."""
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return content
    return {"format": FORMAT, "runs": {}, "rows": {}}


def merge(
    book: Mapping[str, Any], rows: Iterable[Row], *, run: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `book` with these rows replaced, without runs that no row refers to any more."""
    records = {**book["rows"], **{row.identifier: as_record(row, run) for row in rows}}
    runs = {**book["runs"], run: dict(about)}
    used = {record["run"] for record in records.values()}
    return {
        "format": FORMAT,
        "runs": {name: runs[name] for name in sorted(used)},
        "rows": dict(sorted(records.items(), key=_order)),
    }


# the order of the pages: the first word of a row's identifier
ORDER = (
    *(
        "allreduce",
        "links",
        "group",
        "killed",
        "frozen",
        "trainer",
        "start",
        "state",
        "joining",
        "cuts",
        "reach",
        "dht",
    ),
    *(
        "experts",
        "slowdown",
        "speeds",
        "convergence",
        "untrained",
        "churn",
        "codec",
        "cuda",
        "simulated",
        "grid",
        "electors",
        "monitor",
        "attacks",
        "membership",
        "small",
        "hostile",
    ),
)


def _order(item: tuple[str, Any]) -> tuple[int, int, str]:
    identifier = item[0]
    section, _, rest = identifier.partition("-")
    size = rest.partition("-")[0]
    return (
        ORDER.index(section) if section in ORDER else len(ORDER),
        int(size) if size.isdecimal() else 0,
        identifier,
    )


def save(book: Mapping[str, Any], path: Path) -> None:
    """Write the figures, replacing the file atomically."""
    replace_file(path, json.dumps(book, indent=1, ensure_ascii=False) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically, so that it is never incomplete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def bound(record: Mapping[str, Any]) -> str:
    """Return a row's aim in words."""
    aim = record["aim"]
    if aim is None:
        return NOTHING
    sign = "≥" if aim["sense"] == "at least" else "≤"
    value = figure(aim["value"], record["unit"]) if aim["of"] == "ours" else f"{aim['value']:g}×"
    return f"{sign} {value}"


def ratio(record: Mapping[str, Any]) -> str:
    """Return a row's ratio, and which figure it divides by which."""
    return NOTHING if record["ratio"] is None else f"{record['ratio']:.2f}× ({record['ratio_kind']})"


def cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one record under HEADINGS."""
    unknown = NOTHING if record["aim"] is None else "not measured"
    return (
        record["workload"],
        record["quantity"],
        record["peer"],
        figure(record["peer_value"], record["unit"]),
        figure(record["ours_value"], record["unit"]),
        ratio(record),
        bound(record),
        {True: "yes", False: "**no**", None: unknown}[record["met"]],
    )


def terminal_table(records: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(title="medians", show_lines=False)
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for record in records:
        shown = cells(record)
        table.add_row(
            *(text.replace("**", "") for text in shown), style="red" if record["met"] is False else None
        )
    return table
