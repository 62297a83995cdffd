"""Write the pages of figures: an overview of at most 100 lines, and a page with a chart for each section."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.charts import Bar, Curve, bars, curves
from benchmarks.limiting_factors import LIMITED_BY
from benchmarks.report import NOTHING, ORDER, bound, figure, ratio, replace_file

Record = Mapping[str, Any]
Book = Mapping[str, Any]

LINE_CHARACTERS_MAX = 120
_BARS_MAX = 24
_REASON_CHARACTERS_MAX = 160

# section -> title, and what is compared
TITLES = {
    "allreduce": (
        "All-reduce",
        "Rounds of four peers on one machine, compared with hivemind, gloo and a bare gRPC transport.",
    ),
    "links": ("Links", "Rounds over emulated links, compared with hivemind, gloo and bare TCP."),
    "group": ("Matchmaking", "How long peers take to form a group, compared with hivemind."),
    "killed": ("Killed peers", "One of four killed in a round, and two of four trainers at once."),
    "frozen": ("A frozen peer", "A round of four peers in which one is stopped (SIGSTOP)."),
    "trainer": ("Trainers", "Whole training processes compared with hivemind's."),
    "start": ("Start of a trainer", "From the start of the process to its first joint round."),
    "state": ("State transfer", "Downloading the training state from donors."),
    "cuts": ("Network cuts", "One history again after a swarm was cut in two."),
    "joining": ("Joining", "Many newcomers that join a run at the same moment."),
    "reach": (
        "Peers behind routers",
        "How soon they are reached, what calls through relays cost, and what a lost relay does; namespaces.",
    ),
    "dht": ("DHT", "Stores and reads of real nodes."),
    "experts": ("Experts", "Calls, mixtures and callers side by side, compared with hivemind."),
    "slowdown": (
        "Training while averaging",
        "How much longer a training step takes while rounds run behind it.",
    ),
    "speeds": ("Different speeds", "Peers of different speeds in one swarm."),
    "convergence": ("Convergence", "Loss reached and bytes sent, for every mode and codec."),
    "untrained": (
        "Untrained models",
        "Loss and bytes from an untrained start, AdamW and Muon; four peers of one process, three seeds.",
    ),
    "churn": ("Churn", "Training while peers are killed and started."),
    "codec": ("Codecs", "Encoding and decoding speed."),
    "cuda": ("CUDA", "A peer with a GPU."),
    "simulated": ("Simulated swarms", "Properties of the protocol in virtual time; not of the machine."),
    "grid": (
        "Many peers",
        "Training through the grid in simulated swarms larger than a group; virtual time.",
    ),
    "electors": ("Electors", "Free identities in an open run: how many become electors; virtual time."),
    "monitor": ("Monitor", "What watching a run costs."),
    "membership": (
        "Membership",
        "Runs for invited peers compared with open ones: costs, and joining by an invite.",
    ),
    "attacks": ("Attacks", "A node flooded by strangers, and a run among crowds of them; real sockets."),
    "small": (
        "Small honest runs",
        "Rounds without faults, and runs of two to ten peers, compared with the code before membership.",
    ),
    "hostile": ("Hostile peers", "Loss under attack, and the cost of robust aggregation."),
}

# sections whose chart has curves: what their axes show
_CURVES = {
    "untrained": (
        "bytes that one peer sends per parameter (logarithmic scale); it receives as many",
        "held-out loss in nats per byte over the traffic, mean of the seeds",
    )
}

_METHOD = """
Figures are medians. A ratio compares the medians of one run on one machine: the systems take turns after a
warm-up, each launch in processes of its own, with `OMP_NUM_THREADS=1`, over loopback. Every averaged vector
is compared with the known mean: a round in which an element on any peer is wrong, or a peer is missing,
counts as failed and is in no median. Rows of simulated swarms are of the production services in virtual
time.
"""


def write(book: Book, folder: Path) -> None:
    """Write `index.md`, a page for each section that has rows, and their charts, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sections(book)
    for name, records in found.items():
        chart = chart_of(name, records)
        if chart:
            replace_file(folder / f"{name}.svg", chart)
        replace_file(folder / f"{name}.md", section_page(name, records, book["runs"], charted=bool(chart)))
    replace_file(folder / "index.md", index_page(found))


def sections(book: Book) -> dict[str, dict[str, Record]]:
    """Return the rows of each section, in the order of the pages."""
    found: dict[str, dict[str, Record]] = {}
    for identifier, record in book["rows"].items():
        found.setdefault(identifier.partition("-")[0], {})[identifier] = record
    return {name: found[name] for name in sorted(found, key=ORDER.index)}


def index_page(found: Mapping[str, Mapping[str, Record]]) -> str:
    """Return the overview: what is compared, how, and which aims are met or missed."""
    lines = ["# Benchmarks", "", *_METHOD.strip().splitlines(), ""]
    lines += ["`make bench` measures, and writes these pages and charts from `benchmarks/figures/`.", ""]
    lines += [
        "![Ratios of swarm to hivemind in ten rows, as bars on a logarithmic scale](../images/scorecard.svg)",
        "",
    ]
    lines += _table(
        ["section", "what is compared", "aims met", "aims missed"], [_summary(*one) for one in found.items()]
    )
    missed = [record for records in found.values() for record in records.values() if record["met"] is False]
    if missed:
        lines += ["", "## Missed aims", "", "The page of the section says what limits each.", ""]
        rows = [
            [record["workload"], record["quantity"], _ours(record), ratio(record), bound(record)]
            for record in missed
        ]
        lines += _table(["workload", "measured", "ours", "ratio", "aim"], rows)
    lines += ["", "```{toctree}", ":hidden:", ":glob:", "", "*", "```", ""]
    return "\n".join(lines)


def _summary(name: str, records: Mapping[str, Record]) -> list[str]:
    title, what = TITLES[name]
    met = [record["met"] for record in records.values()]
    return [f"[{title}]({name}.md)", what, str(met.count(True)), str(met.count(False))]


def section_page(name: str, records: Mapping[str, Record], runs: Mapping[str, Any], *, charted: bool) -> str:
    """Return the page of one section: table, limits of missed aims, phases, samples, and the machine."""
    title, what = TITLES[name]
    lines = [f"# {title}", "", what, ""]
    if charted:
        drawn = _CURVES.get(name, ("", "how many times better than the peer"))[1]
        lines += [f"![{title}: {drawn}]({name}.svg)", ""]
    rows = [
        [
            record["workload"],
            record["quantity"],
            _ours(record),
            record["peer"],
            _theirs(record),
            ratio(record),
            bound(record),
            _met(record),
        ]
        for record in records.values()
    ]
    lines += _table(["workload", "measured", "ours", "peer", "peer's figure", "ratio", "aim", "met"], rows)
    limits = [f"{record['workload']}: {record['limit']}" for record in records.values() if record["limit"]]
    missed = [
        f"{record['workload']} ({record['peer']}): {LIMITED_BY.get(identifier, 'not profiled yet.')}"
        for identifier, record in records.items()
        if record["met"] is False
    ]
    notes = [f"{record['workload']}: {note}" for record in records.values() for note in record["notes"]]
    lines += _items("What limits what misses its aim", missed)
    lines += _items("Physical limits", limits)
    lines += _items("Where the time goes", notes, "Phases overlap; each is the slowest peer's.")
    lines += [
        "",
        "## Samples",
        "",
        "Failed rounds include unnoticed ones: success was reported, and the result was wrong.",
        "",
    ]
    lines += _samples(records)
    lines += _items(
        "Measured on",
        [_machine(run, runs[run]) for run in dict.fromkeys(one["run"] for one in records.values())],
    )
    return "\n".join(lines) + "\n"


def chart_of(name: str, records: Mapping[str, Record]) -> str:
    """Return a chart of the rows that have a ratio, in which longer is better for swarm; "" when there is
    none.
    """
    if name in _CURVES:
        drawn = [
            Curve(
                record["series"][0]["name"],
                record["curve"],
                dashed=record["series"][0]["name"].startswith("Muon"),
            )
            for record in records.values()
            if record.get("curve")
        ]
        return curves(TITLES[name][0], _CURVES[name], drawn) if drawn else ""
    found = []
    for record in records.values():
        if record["ratio"]:
            better = record["ratio"]
            if record["ratio_kind"] != "peer / ours" and _lower_is_better(record):
                better = 1 / better
            what = textwrap.shorten(f"{record['workload']}, {record['quantity']}", 50, placeholder=" …")
            label = f"{what} | {textwrap.shorten(record['peer'], 24, placeholder=' …')}"
            found.append(Bar(label, better, f"{better:.3g}×", record["met"] is False))
    if not found:
        return ""
    return bars(
        TITLES[name][0],
        "times better than the peer named behind each row (logarithmic scale; red: below the aim)",
        found[:_BARS_MAX],
    )


def _lower_is_better(record: Record) -> bool:
    aim = record["aim"]
    if aim is not None:
        return bool(aim["sense"] == "at most")
    return record["unit"] in ("s", "bytes", "bytes sent")


def _ours(record: Record) -> str:
    return figure(record["ours_value"], record["unit"])


def _theirs(record: Record) -> str:
    return figure(record["peer_value"], record["unit"])


def _met(record: Record) -> str:
    unknown = NOTHING if record["aim"] is None else "not measured"
    return {True: "yes", False: "**no**", None: unknown}[record["met"]]


def _machine(name: str, run: Mapping[str, Any]) -> str:
    about = "; ".join(f"{key} {value}" for key, value in run["machine"].items())
    return f"{name}, `{run['command']}`: {about}"


def _samples(records: Mapping[str, Record]) -> list[str]:
    rows = []
    for record in records.values():
        for series in record["series"]:
            values, unit = series["samples"], series["unit"]
            spread = NOTHING if not values else f"{figure(min(values), unit)} … {figure(max(values), unit)}"
            reasons = "; ".join(_short(reason) for reason in dict.fromkeys(series["reasons"])) or NOTHING
            failed = f"{series['rounds_failed']} ({series['rounds_wrong']}) / {series['launches_failed']}"
            rows.append([record["workload"], series["name"], str(len(values)), spread, failed, reasons])
    headings = [
        "workload",
        "system",
        "samples",
        "least … most",
        "failed rounds (unnoticed) / launches",
        "why",
    ]
    return _table(headings, rows)


def _short(reason: str) -> str:
    return textwrap.shorten(reason, _REASON_CHARACTERS_MAX, placeholder=" …")


def _items(heading: str, texts: Iterable[str], introduction: str = "") -> list[str]:
    unique = list(dict.fromkeys(texts))
    if not unique:
        return []
    lines = ["", f"## {heading}", ""] + ([introduction, ""] if introduction else [])
    for text in unique:
        lines += textwrap.wrap(
            f"- {text}",
            LINE_CHARACTERS_MAX,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    def line(values: Iterable[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"

    return [line(headings), line(["---"] * len(headings)), *map(line, rows)]
