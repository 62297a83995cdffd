"""The scorecard of the README: ten figures of benchmarks/figures/measured.json compared with hivemind's, as
table and chart.

`python -m benchmarks.scorecard` writes README.md and docs/images/scorecard.svg. With `--check` it writes
nothing, and its exit status is 1 when they do not follow from benchmarks/figures/measured.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.charts import Bar, bars

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "figures" / "measured.json"
PAGE = ROOT / "README.md"
CHART = ROOT / "docs" / "images" / "scorecard.svg"
BEGIN, END = "<!-- scorecard: python -m benchmarks.scorecard -->", "<!-- end of scorecard -->"

# row of benchmarks/figures/measured.json -> what was measured, in a few words
CHOSEN = {
    "group-short": "Three peers of a target group of 8 find one another",
    "experts-mixture": "Mixture of 16 experts on 4 servers, forward and backward",
    "frozen-stall": "Delay of a round in which one of 4 peers freezes",
    "dht-8-all": "DHT, 8 peers: stores and reads",
    "trainer-memory": "Memory of a trainer, beyond torch and the model",
    "start-after-import": "A third trainer joins: until its first joint round",
    "allreduce-256-float16-hivemind-whole": "All-reduce, 4 peers × 256 MiB, float16",
    "state-1-donor": "State download, 256 MB from one donor",
    "killed-averaged": "Elements averaged although one of 4 peers is killed",
    "links-100mbit-50ms-float16-hivemind": "Use of links of 100 Mbit/s and 50 ms, 16 MiB, float16",
}


@dataclass(frozen=True)
class Figure:
    """One row: both values as text, and how many times better ours is."""

    what: str
    theirs: str
    ours: str
    better: float


def figures(document: dict[str, Any]) -> list[Figure]:
    """Return the chosen rows, the largest ratio first. Raises KeyError when a row is gone."""
    found = []
    for key, what in CHOSEN.items():
        row = document["rows"][key]
        theirs, ours, unit = float(row["peer_value"]), float(row["ours_value"]), str(row["unit"])
        better = theirs / ours if unit in ("s", "bytes") else ours / theirs
        found.append(Figure(what, shown(theirs, unit), shown(ours, unit), better))
    return sorted(found, key=lambda figure: -figure.better)


def shown(value: float, unit: str) -> str:
    """Return a value with its unit, in at most three digits."""
    if unit == "bytes":
        return f"{value / 1e6:.0f} MB"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    if unit == "operations/s":
        return f"{value:,.0f} per s"
    return f"{value:.3g} {unit}"


def ratio(better: float) -> str:
    """Return how many times better a value is, in at most three digits."""
    return f"{better:,.0f}×" if better >= 100 else f"{better:.3g}×" if better >= 10 else f"{better:.2f}×"


def table(found: list[Figure]) -> str:
    """Return the table in Markdown, between its markers."""
    rows = [f"| {one.what} | {one.theirs} | {one.ours} | {ratio(one.better)} |" for one in found]
    return "\n".join([BEGIN, "| | hivemind 1.1.12 | swarm | |", "|---|--:|--:|--:|", *rows, END])


def chart(found: list[Figure]) -> str:
    """Draw the ratios as bars on a logarithmic scale; at 1 both are equal."""
    axis = "times better than hivemind 1.1.12 (logarithmic scale)"
    return bars(
        "How many times better than hivemind 1.1.12",
        axis,
        [Bar(one.what, one.better, ratio(one.better)) for one in found],
    )


def with_table(page: str, text: str) -> str:
    """Return the page with the table between its markers replaced. Raises ValueError when it has none."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN!r} … {END!r}")
    return before + text + after


def main() -> int:
    """Write both files, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when something is out of date"
    )
    check = parser.parse_args().check
    found = figures(json.loads(FIGURES.read_text(encoding="utf-8")))
    wanted = {PAGE: with_table(PAGE.read_text(encoding="utf-8"), table(found)), CHART: chart(found)}
    stale = [
        path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if check:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} is out of date: run python -m benchmarks.scorecard",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
