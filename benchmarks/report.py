"""Keeps figures in docs/benchmarks.json and writes docs/benchmarks.md and the terminal's table from them.

A partial run replaces its own rows and leaves the others alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.notes import LIMITED_BY
from benchmarks.results import Row, Series

FORMAT = 1
NOTHING = "–"
HEADINGS = ("workload", "measured", "peer", "peer's figure", "ours", "ratio", "aim", "met", "physical limit")


def figure(value: float | None, unit: str) -> str:
    """Three significant digits, in the unit that reads best."""
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
    """A row as JSON: all samples stay, everything shown is worked out once, here."""
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
        "notes": list(row.notes),
        "series": [_series_record(series) for series in (row.ours, row.peer) if series is not None],
    }


def _series_record(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "unit": series.unit,
        "samples": [float(f"{sample:.4g}") for sample in series.samples],
        "rounds_failed": series.failed,
        "rounds_wrong": series.wrong,
        "launches_failed": series.launches_failed,
        "reasons": list(series.reasons),
    }


def load(path: Path) -> dict[str, Any]:
    """The figures so far; an absent file or one of another format holds none."""
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return content
    return {"format": FORMAT, "runs": {}, "rows": {}}


def merge(
    book: Mapping[str, Any], rows: Iterable[Row], *, run: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    """`book` with these rows replaced; runs that no row refers to any more are dropped."""
    records = {**book["rows"], **{row.identifier: as_record(row, run) for row in rows}}
    runs = {**book["runs"], run: dict(about)}
    used = {record["run"] for record in records.values()}
    return {
        "format": FORMAT,
        "runs": {name: runs[name] for name in sorted(used)},
        "rows": dict(sorted(records.items(), key=_order)),
    }


# how the page's rows are ordered: by the first word of their identifiers
_ORDER = (
    *("allreduce", "links", "group", "losses", "trainer", "start", "state", "dht", "experts"),
    *("slowdown", "speeds", "convergence", "churn", "codec", "cuda", "simulated", "monitor", "hostile"),
)


def _order(item: tuple[str, Any]) -> tuple[int, int, str]:
    identifier = item[0]
    section, _, rest = identifier.partition("-")
    size = rest.partition("-")[0]
    return (
        _ORDER.index(section) if section in _ORDER else len(_ORDER),
        int(size) if size.isdecimal() else 0,
        identifier,
    )


def save(book: Mapping[str, Any], path: Path) -> None:
    """Replaces the file at once, never a half of it."""
    _replace(path, json.dumps(book, indent=1, ensure_ascii=False) + "\n")


def write_page(book: Mapping[str, Any], path: Path) -> None:
    _replace(path, page(book))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    """One record under HEADINGS."""
    aim = record["aim"]
    bound = NOTHING
    if aim is not None:
        sign = "≥" if aim["sense"] == "at least" else "≤"
        bound = (
            f"{sign} {figure(aim['value'], record['unit'])}"
            if aim["of"] == "ours"
            else f"{sign} {aim['value']:g}×"
        )
    ratio = NOTHING if record["ratio"] is None else f"{record['ratio']:.2f}× ({record['ratio_kind']})"
    verdict = {True: "yes", False: "**no**", None: NOTHING if aim is None else "not measured"}[record["met"]]
    return (
        record["workload"],
        record["quantity"],
        record["peer"],
        figure(record["peer_value"], record["unit"]),
        figure(record["ours_value"], record["unit"]),
        ratio,
        bound,
        verdict,
        record["limit"] or NOTHING,
    )


def terminal_table(records: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(title="medians", show_lines=False)
    for heading in HEADINGS[:-1]:
        table.add_column(heading, overflow="fold")
    for record in records:
        shown = cells(record)[:-1]
        table.add_row(
            *(text.replace("**", "") for text in shown), style="red" if record["met"] is False else None
        )
    return table


def page(book: Mapping[str, Any]) -> str:
    """docs/benchmarks.md, whole."""
    records, runs = book["rows"], list(book["runs"])
    lines = [
        "# Measured",
        "",
        "Written by `make bench` from `benchmarks.json`; not by hand. Figures are medians; a ratio compares medians of one run on one",
        "machine, the contenders taken in turn after a warm-up, each launch in processes of its own. Every averaged vector is compared",
        "with the known mean: a round in which an element on any peer is wrong, or a peer is missing, counts as failed and is in no",
        "median. `OMP_NUM_THREADS=1` everywhere. Loopback. Rows of simulated swarms are of the production services in virtual time:",
        "properties of the protocol and of a seed, not of the machine.",
        "",
    ]
    for number, name in enumerate(runs, 1):
        lines += [f"Run {number}: {name}, `{book['runs'][name]['command']}`", ""]
        lines += [f"- {key}: {value}" for key, value in book["runs"][name]["machine"].items()] + [""]
    lines += _table(
        [*HEADINGS, "run"],
        [[*cells(record), str(runs.index(record["run"]) + 1)] for record in records.values()],
    )
    misses = {identifier: record for identifier, record in records.items() if record["met"] is False}
    if misses:
        lines += ["", "## What limits what misses its aim", ""]
        lines += [
            f"- {record['workload']} ({record['peer']}): {LIMITED_BY.get(identifier, 'not profiled yet.')}"
            for identifier, record in misses.items()
        ]
    noted = [f"- {record['workload']}: {note}" for record in records.values() for note in record["notes"]]
    if noted:
        lines += [
            "",
            "## Where the time goes",
            "",
            "Phases overlap; each is the slowest peer's.",
            "",
            *dict.fromkeys(noted),
        ]
    lines += [
        "",
        "## All samples",
        "",
        "Failed rounds and launches of the contender in that comparison; unnoticed: it reported success, and its result was wrong.",
        "",
        *_samples(records),
    ]
    return "\n".join(lines) + "\n"


def _samples(records: Mapping[str, Any]) -> list[str]:
    found = []
    for record in records.values():
        for series in record["series"]:
            values = series["samples"]
            spread = (
                NOTHING
                if not values
                else f"{figure(min(values), series['unit'])} … {figure(max(values), series['unit'])}"
            )
            reasons = "; ".join(_short(reason) for reason in series["reasons"]) or NOTHING
            failed = f"{series['rounds_failed']} ({series['rounds_wrong']}) / {series['launches_failed']}"
            found.append([record["workload"], series["name"], str(len(values)), spread, failed, reasons])
    return _table(
        ["workload", "contender", "samples", "least … most", "failed rounds (unnoticed) / launches", "why"],
        found,
    )


def _short(reason: str, characters_max: int = 160) -> str:
    plain = " ".join(reason.split())
    return plain if len(plain) <= characters_max else plain[: characters_max - 1] + "…"


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    def line(values: Iterable[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"

    return [line(headings), line(["---"] * len(headings)), *map(line, rows)]
