"""The command: runs the workloads, prints the table, keeps docs/benchmarks.json and writes docs/benchmarks.md."""

from __future__ import annotations

import datetime
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from benchmarks import (
    allreduce,
    codecs,
    dht,
    experts,
    grid,
    groups,
    hostile,
    losses,
    monitoring,
    quick,
    report,
    simulated,
    simulated_progress,
    simulated_rounds,
    trainers,
)
from benchmarks import state as states
from benchmarks.allreduce import Setting
from benchmarks.environments import NoEnvironment, hivemind_python, machine, memory_copy_bytes_per_s
from benchmarks.launch import ROOT
from benchmarks.results import Row
from benchmarks.turns import Plan

SECTIONS = ("allreduce", "groups", "losses", "trainers", "state", "dht", "experts", "simulated", "progress", "monitor", "hostile", "codecs")
# with hivemind, whose environment they need
COMPARED = frozenset({"allreduce", "groups", "losses", "trainers", "state", "dht", "experts", "codecs"})


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that every launch ends what it started


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only", multiple=True, type=click.Choice(SECTIONS), help="Measure these sections; the page keeps the other rows. Repeatable."
)
@click.option("--sizes", default="64,256", show_default=True, help="All-reduce: MiB per peer, comma-separated.")
@click.option("--passes", default=2, show_default=True, help="All-reduce: fresh launches of every contender.")
@click.option("--rounds", default=3, show_default=True, help="All-reduce: measured rounds per contender and pass.")
@click.option("--no-hivemind", is_flag=True, help="Leave hivemind out (nothing is kept: the page compares).")
@click.option(
    "--quick",
    "is_quick",
    is_flag=True,
    help="Small sizes, ours and the bare transport only, results checked, nothing kept: under a minute. "
    "With --only simulated: all but the swarm of 10,000 peers.",
)
@click.option("--docs", default=ROOT / "docs", type=click.Path(path_type=Path, file_okay=False), help="Where the figures and the page are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output; progress goes to standard error.")
def main(only: tuple[str, ...], sizes: str, passes: int, rounds: int, no_hivemind: bool, is_quick: bool, docs: Path, as_json: bool) -> None:
    """Measure swarm beside hivemind, gloo and a bare transport on this machine, and the DHT and the grid in simulated swarms."""
    signal.signal(signal.SIGTERM, _stop)
    console = Console(stderr=True, highlight=False)
    started_s, under = time.monotonic(), machine()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - started_s:4.0f} s] {text}", markup=False, soft_wrap=True)

    run = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    keep = not is_quick and not (no_hivemind and COMPARED & set(only or SECTIONS))
    if is_quick:
        # with --only simulated: all of it but the swarm of 10,000, which takes gigabytes and most of the time
        sections: Iterable[list[Row]] = (
            simulated.rows(say, simulated.Plan(sizes=simulated.SMALL)) if only == ("simulated",) else [quick.rows(say)]
        )
    else:
        try:
            hivemind = None if no_hivemind or not COMPARED & set(only or SECTIONS) else hivemind_python(say)
        except NoEnvironment as problem:
            raise click.ClickException(str(problem)) from problem
        plan = Plan(passes=passes, rounds=rounds)
        sections = _measure(only or SECTIONS, [int(size) for size in sizes.split(",")], plan, hivemind, say)
    book = report.load(docs / "benchmarks.json") if keep else report.load(Path("nothing kept"))
    rows: list[Row] = []
    for section in sections:  # kept as they come: who interrupts a long run has what was measured
        rows += section
        about = {"machine": under, "command": _command(sys.argv[1:]), "seconds": round(time.monotonic() - started_s)}
        book = report.merge(book, section, run=run, about=about)
        if keep:
            docs.mkdir(parents=True, exist_ok=True)
            report.save(book, docs / "benchmarks.json")
            report.write_page(book, docs / "benchmarks.md")
    measured = {row.identifier: book["rows"][row.identifier] for row in rows}
    if as_json:
        click.echo(json.dumps({"run": run, **book["runs"][run], "rows": measured}, indent=1, ensure_ascii=False))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(report.terminal_table(measured.values()))
    for row in rows:
        if row.ours.failed or row.ours.launches_failed:
            say(f"{row.workload}: ours failed {row.ours.failed} rounds, {row.ours.launches_failed} launches: {'; '.join(row.ours.reasons)}")
    if any(row.ours.median is None or row.ours.wrong for row in rows):
        raise SystemExit(1)


def _measure(
    sections: tuple[str, ...], sizes: list[int], plan: Plan, hivemind: Path | None, say: Callable[[str], None]
) -> Iterator[list[Row]]:
    copy_bytes_per_s = memory_copy_bytes_per_s() if COMPARED & set(sections) else 1.0
    setting = Setting(plan=plan, hivemind=hivemind, copy_bytes_per_s=copy_bytes_per_s, say=say)
    if "allreduce" in sections:
        for size in sizes:
            yield allreduce.rows(setting, vector_mib=size)
    if "groups" in sections:
        yield groups.rows(setting, rounds=5)
    if "losses" in sections:
        yield losses.rows(setting)
    if "trainers" in sections:
        yield trainers.rows(setting)
    if "state" in sections:
        yield states.rows(setting)
    if "dht" in sections:
        for peers in dht.SIZES:
            yield dht.rows(setting, peers=peers)
    if "experts" in sections:
        yield experts.rows(setting)
    if "simulated" in sections:
        yield from simulated_rounds.rows(say)
        yield from grid.rows(say)
        yield from simulated.rows(say)
    if "simulated" in sections or "progress" in sections:  # of the former, a part that can be had by itself
        yield from simulated_progress.rows(say)
    if "simulated" in sections or "monitor" in sections:
        yield from monitoring.rows(say)
    if "hostile" in sections:
        yield hostile.rows(say)
    if "codecs" in sections:
        yield codecs.rows(say, hivemind)


def _command(arguments: list[str]) -> str:
    """As typed, less where the page went."""
    kept = [argument for before, argument in zip(["", *arguments], arguments, strict=False) if "--docs" not in (before, argument)]
    return " ".join(["python -m benchmarks", *kept])


if __name__ == "__main__":
    main()
