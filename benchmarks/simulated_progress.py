"""The cost of publishing progress in simulated runs of 10, 100 and 1,000 peers, and how well epochs meet
their target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.results import Row, Series
from benchmarks.simulated_dht import simulated_row
from swarm.testing.progress_swarm import OperationCost, ProgressFigures, measure, operations

SIZES = (10, 100, 1000)
LARGE = 1000  # observed for less time: a virtual second of this swarm costs a processor second


def rows(say: Callable[[str], None], sizes: tuple[int, ...] = SIZES) -> Iterator[list[Row]]:
    """Yield every figure of the section as soon as it is measured."""
    for peers in sizes:
        say(f"simulated, {peers:,} peers: progress")
        figures = measure(peers) if peers < LARGE else measure(peers, settle_s=45.0, measured_s=40.0)
        yield _rows(figures, operations(peers, figures.entries_most))


def _rows(figures: ProgressFigures, cost: OperationCost) -> list[Row]:
    shards = f"{figures.shards} shard{'s' if figures.shards > 1 else ''}"
    title = f"simulated run of {figures.peers:,} peers telling progress, epochs of 30 s, {shards}"
    messages = figures.reads * cost.read_messages + figures.writes * cost.write_messages + figures.reports
    size_bytes = figures.reads * cost.read_bytes + figures.writes * cost.write_bytes + figures.report_bytes
    gathered = ", ".join(f"{100 * share:.0f} %" for share in figures.gathered)
    details = (
        f"{figures.reads:.0f} reads and {figures.writes:.0f} writes of the DHT in a minute, and "
        f"{figures.reports:.0f} messages to other "
        f"peers directly; a read is {cost.read_messages:.1f} messages, a write {cost.write_messages:.1f}",
        f"epochs began when {gathered} of their target was there; the last peer began them "
        f"{figures.spread_s:.1f} s after the first",
    )

    def row(kind: str, quantity: str, unit: str, value: float, *notes: str) -> Row:
        series = Series(name=f"swarm: {kind}", unit=unit, samples=(value,))
        return simulated_row(f"progress-{figures.peers}-{kind}", title, quantity, series, notes=notes)

    return [
        row("messages", "messages that a peer causes in a minute", "messages/min", messages, *details),
        row("bytes", "bytes that a peer causes in a minute", "kB/min", size_bytes / 1e3),
        row(
            "busiest",
            "reads and writes of the DHT by the busiest peer in a minute",
            "operations/min",
            figures.operations_most,
        ),
        row(
            "readers",
            "reads of the dictionary that is read most, in a minute",
            "reads/min",
            figures.readers_most,
        ),
        row("entries", "entries in the largest dictionary", "", float(figures.entries_most)),
    ]
