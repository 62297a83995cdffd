"""A thousand free identities in an open run: how many become electors in an hour, and when they could decide.
In virtual time, so the figures are equal on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from averaging.history.electors import HOUR_S
from benchmarks.results import Row, Series
from swarm.testing.elector_growth import GrowthConfig, GrowthFigures, GrowthRun

Say = Callable[[str], None]

RUNS = (
    GrowthConfig(seed=1, crowd="many"),
    GrowthConfig(seed=1, crowd="patient"),
    GrowthConfig(seed=1, crowd="patient", miss=0.05),
    GrowthConfig(seed=1, crowd="patient", miss=0.2),
    GrowthConfig(seed=1, crowd="nobody", miss=0.2, is_reachable=False),
    GrowthConfig(seed=1, crowd="nobody", miss=0.2, is_reachable=False, away_rounds=3),
    GrowthConfig(seed=1, crowd="nobody", miss=0.2, is_reachable=False, away_rounds=30),
    GrowthConfig(seed=1, crowd="none", identities=0),
)
_NAMES = {
    "many": "1,000 newcomers, others in each round",
    "patient": "60 newcomers in every round",
    "none": "no attack",
    "nobody": "no newcomers",
}


def rows(say: Say, runs: Sequence[GrowthConfig] = RUNS) -> Iterator[list[Row]]:
    """Yield the figures of each run as soon as it is over."""
    for one in runs:
        say(f"simulated electors, {_NAMES[one.crowd]}: {one.hours:g} hours")
        yield _rows(one, GrowthRun(one).run())


def _rows(config: GrowthConfig, figures: GrowthFigures) -> list[Row]:
    misses = f" that miss {100 * config.miss:g} % of the rounds" if config.miss else ""
    if not config.is_reachable:
        misses += f", out of reach for {config.away_rounds * config.round_s:g} s each time"
    title = f"{config.honest} electors{misses}, {_NAMES[config.crowd]}, {config.hours:g} h"
    identifier = f"electors-{config.crowd}-{100 * config.miss:g}"
    if not config.is_reachable:
        identifier += f"-{config.away_rounds}"

    def row(name: str, quantity: str, unit: str, value: float, *notes: str) -> Row:
        return Row(
            identifier=f"{identifier}-{name}",
            workload=title,
            quantity=quantity,
            ours=Series(name=f"swarm: {name}", unit=unit, samples=(value,)),
            peer=None,
            aim=None,
            notes=notes,
        )

    if config.crowd == "nobody":
        share = 100 * figures.lost_s / (config.hours * HOUR_S)
        breaks = f"breaks: {figures.breaks}"
        return [row("lost", "part of the time without a quorum", "%", share, breaks)]
    waits = figures.newcomer_s
    newcomer = f"became an elector after {waits / 60:.1f} min" if waits is not None else "became none"
    note = f"an honest newcomer among them {newcomer}; refused rounds: {figures.refused} of {figures.rounds}"
    if config.crowd == "none":
        assert waits is not None
        return [row("wait", "until an honest newcomer is an elector", "s", waits)]
    alone_s = figures.quorum_s if figures.quorum_s is not None else config.hours * HOUR_S
    early = sum(admitted_s < alone_s for admitted_s in figures.admitted_s)
    largest = ", ".join(f"{100 * share:.0f} %" for share in figures.shares)
    shares = f"their largest part of the electors in each hour: {largest}"
    found = [
        row(
            "admitted",
            "newcomers that become electors in an hour",
            "electors",
            early * HOUR_S / alone_s,
            note,
            shares,
        )
    ]
    if figures.quorum_s is not None:
        quantity = "until the newcomers could decide alone"
        found.append(row("alone", quantity, "h", figures.quorum_s / HOUR_S))
    return found
