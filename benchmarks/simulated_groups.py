"""Forming groups in simulated swarms larger than a group: messages and time per round, and the speed of
mixing.

The production matchmaking runs on virtual time (`swarm.testing.grid_swarm`), so figures are the same on every
machine. The first round begins with peers that know no others, and is left out of messages and times; the
deviation counts from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.results import Aim, Row, Series
from benchmarks.simulated_dht import simulated_row
from swarm.testing.grid_swarm import GridFigures, measure

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. The default is for the page; tests take less."""

    # peers, target group size
    swarms: tuple[tuple[int, int], ...] = (
        (16, 16),
        (64, 16),
        (256, 16),
        (16, 4),
        (64, 4),
        (256, 4),
        (60, 16),
    )
    rounds: int = 4


def rows(say: Say, plan: Plan | None = None) -> Iterator[list[Row]]:
    """Yield every figure as soon as it is measured."""
    plan = plan or Plan()
    for peers, target_group_size in plan.swarms:
        say(f"simulated, {peers} peers: {plan.rounds} rounds in groups of {target_group_size}")
        yield _rows(measure(peers, target_group_size, rounds=plan.rounds))


def _rows(figures: GridFigures) -> list[Row]:
    title = f"simulated swarm of {figures.peers} peers, groups of {figures.target_group_size}"
    prefix = f"{figures.peers}-groups-of-{figures.target_group_size}"
    left = ", ".join(f"{share:.1e}" for share in figures.deviations)
    exact = figures.target_group_size**figures.rounds_to_mix == figures.peers
    notes = (
        f"{figures.cells} cells; {figures.rounds_to_mix} rounds to mix; deviation left after each round, "
        f"of what it was: {left}",
        f"messages are requests and replies; the busiest peer sends {max(figures.messages_most[1:])} in a "
        "round",
    )
    mixed = 100.0 * figures.deviations[figures.rounds_to_mix - 1]
    return [
        simulated_row(
            f"{prefix}-messages",
            title,
            "messages that a peer sends in a round to find its group, on average",
            Series(name="swarm: messages", unit="messages", samples=figures.messages[1:]),
            notes=notes,
        ),
        simulated_row(
            f"{prefix}-bytes",
            title,
            "bytes that a peer sends in a round to find its group, on average",
            Series(
                name="swarm: bytes",
                unit="kB",
                samples=tuple(size_bytes / 1e3 for size_bytes in figures.bytes_sent[1:]),
            ),
        ),
        simulated_row(
            f"{prefix}-forming",
            title,
            "from the aligned start until the last peer has its group",
            Series(name="swarm: groups formed", unit="s", samples=figures.forming_s[1:]),
        ),
        simulated_row(
            f"{prefix}-mixing",
            title,
            f"deviation from the global mean left after {figures.rounds_to_mix} "
            f"round{'s' * (figures.rounds_to_mix > 1)}",
            Series(name="swarm: deviation left", unit="%", samples=(mixed,)),
            Aim(of="ours", sense="at most", value=1e-9 if exact else 125.0 / figures.target_group_size),
        ),
    ]
