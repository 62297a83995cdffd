"""The command `python -m benchmarks`: run workloads, print the table, save the figures, write
docs/benchmarks.
"""

from __future__ import annotations

import datetime
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from benchmarks import attacks, churn, quick, report, simulated_dht
from benchmarks.allreduce import Setting
from benchmarks.environments import NoEnvironment, hivemind_python, machine
from benchmarks.interleaving import Plan
from benchmarks.launch import ROOT
from benchmarks.pages import write as write_pages
from benchmarks.results import Row
from benchmarks.sections import SECTIONS, Request, measure

_WITH_FIGURES = [name for name, section in SECTIONS.items() if section.figures]


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # makes every launch end its processes


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(tuple(SECTIONS)),
    help="Measure these sections; the page keeps the other rows. Repeatable.",
)
@click.option(
    "--sizes", default="64,256", show_default=True, help="All-reduce: MiB per peer, comma-separated."
)
@click.option("--passes", default=2, show_default=True, help="All-reduce: new launches of every system.")
@click.option(
    "--rounds", default=3, show_default=True, help="All-reduce: measured rounds per system and pass."
)
@click.option("--no-hivemind", is_flag=True, help="Leave hivemind out (nothing is kept: the page compares).")
@click.option(
    "--quick",
    "is_quick",
    is_flag=True,
    help="Small sizes, ours and the bare transport only, results checked, nothing kept: under a minute. "
    "With --only simulated: all but the swarm of 10,000 peers. With --only churn: three peers, twenty "
    "seconds. With --only attacks: four floods.",
)
@click.option(
    "--figure",
    "figures",
    multiple=True,
    type=click.Choice(sorted({figure for name in _WITH_FIGURES for figure in SECTIONS[name].figures})),
    help=f"With --only and one of {', '.join(_WITH_FIGURES)}: this one of its figures. Repeatable.",
)
@click.option(
    "--figures",
    "folder",
    default=ROOT / "benchmarks" / "figures",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the figures are kept.",
)
@click.option(
    "--pages",
    default=ROOT / "docs" / "benchmarks",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the pages are written.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output; progress goes to standard error."
)
def main(
    only: tuple[str, ...],
    sizes: str,
    passes: int,
    rounds: int,
    no_hivemind: bool,
    is_quick: bool,
    figures: tuple[str, ...],
    folder: Path,
    pages: Path,
    as_json: bool,
) -> None:
    """Measure swarm against hivemind, gloo and a bare transport on this machine, and the DHT and the grid in
    simulated swarms.
    """
    signal.signal(signal.SIGTERM, _stop)
    console = Console(stderr=True, highlight=False)
    started_s, under = time.monotonic(), machine()
    if figures and not (len(only) == 1 and set(figures) <= set(SECTIONS[only[0]].figures)):
        raise click.UsageError("--figure chooses among the figures of the section that --only names")

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - started_s:4.0f} s] {text}", markup=False, soft_wrap=True)

    if not is_quick:
        only = _measurable(only, say)
    run = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    compares = any(SECTIONS[name].compared for name in only)
    keep = not is_quick and not (no_hivemind and compares)
    if is_quick:
        sections: Iterable[list[Row]] = _quickly(only, say)
    else:
        try:
            hivemind = hivemind_python(say) if compares and not no_hivemind else None
        except NoEnvironment as problem:
            raise click.ClickException(str(problem)) from problem
        setting = Setting(
            plan=Plan(passes=passes, rounds=rounds), hivemind=hivemind, copy_bytes_per_s=1.0, say=say
        )
        sizes_mib = tuple(int(size) for size in sizes.split(","))
        sections = measure(
            only,
            Request(
                setting=setting,
                sizes_mib=sizes_mib,
                figures=frozenset(figures),
                folder=folder if keep else None,
            ),
        )
    book = report.load(folder / "measured.json") if keep else report.load(Path("nothing kept"))
    rows: list[Row] = []
    for section in sections:  # stored one by one, so that an interrupted run keeps its results
        rows += section
        about = {
            "machine": under,
            "command": _command(sys.argv[1:]),
            "seconds": round(time.monotonic() - started_s),
        }
        book = report.merge(book, section, run=run, about=about)
        if keep:
            folder.mkdir(parents=True, exist_ok=True)
            report.save(book, folder / "measured.json")
            write_pages(book, pages)
    measured = {row.identifier: book["rows"][row.identifier] for row in rows}
    if as_json:
        click.echo(
            json.dumps({"run": run, **book["runs"][run], "rows": measured}, indent=1, ensure_ascii=False)
        )
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(report.terminal_table(measured.values()))
    for row in rows:
        if row.ours.failed or row.ours.launches_failed:
            say(
                f"{row.workload}: ours failed {row.ours.failed} rounds, {row.ours.launches_failed} "
                f"launches: {'; '.join(row.ours.reasons)}"
            )
    # a loss that is never reached is a result, not an error
    reaching = [row for row in rows if not row.identifier.startswith("convergence-bytes")]
    if any(row.ours.median is None or row.ours.wrong for row in reaching):
        raise SystemExit(1)


def _quickly(only: tuple[str, ...], say: Callable[[str], None]) -> Iterable[list[Row]]:
    # without the swarm of 10,000 peers, which takes gigabytes and most of the time
    if only == ("simulated",):
        return simulated_dht.rows(say, simulated_dht.Plan(sizes=simulated_dht.SMALL))
    if only == ("attacks",):
        return [attacks.rows(say, attacks.QUICK)]
    return [churn.rows(say, churn.QUICK) if only == ("churn",) else quick.rows(say)]


def _measurable(only: tuple[str, ...], say: Callable[[str], None]) -> tuple[str, ...]:
    """Return the sections asked for; without any, all sections that this machine can measure."""
    found = []
    for name in only or SECTIONS:
        try:
            SECTIONS[name].check()
            found.append(name)
        except NoEnvironment as problem:
            if only:
                raise click.ClickException(str(problem)) from problem
            say(f"left out: {problem}")
    return tuple(found)


def _command(arguments: list[str]) -> str:
    """Return the command line as typed, without the options that name output folders."""
    kept = [
        argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
        if not {"--figures", "--pages"} & {before, argument}
    ]
    return " ".join(["python -m benchmarks", *kept])


if __name__ == "__main__":
    main()
