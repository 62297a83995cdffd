"""Training in simulated swarms larger than a group: the distances between the models, and a peer's costs of
averaging through the grid.

The production matchmaking, the seats of the electors and the requests for certificates run on virtual time
(`swarm.testing.grid_training`), so figures are the same on every machine. A model is four numbers: bytes are
those of the protocol, without the averaged values, which cost as much as `rounds` all-reduces of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.results import Row, Series
from swarm.testing.grid_training import TrainingFigures, train

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """One swarm that is measured."""

    peers: int
    group_size: int
    epochs: int
    state_every: int = 2  # epochs between two state rounds


SWARMS = (
    Swarm(peers=100, group_size=16, epochs=4),
    Swarm(peers=256, group_size=16, epochs=2),
    Swarm(peers=1000, group_size=16, epochs=2),
)


def rows(say: Say, swarms: Sequence[Swarm] = SWARMS) -> Iterator[list[Row]]:
    """Yield the figures of each swarm as soon as it is measured."""
    for one in swarms:
        say(f"simulated, {one.peers} peers: {one.epochs} epochs in groups of {one.group_size}")
        yield _rows(train(one.peers, one.group_size, epochs=one.epochs, state_every=one.state_every))


def _rows(figures: TrainingFigures) -> list[Row]:
    title = f"simulated training of {figures.peers:,} peers, groups of {figures.group_size}"
    before = ", ".join(f"{100 * share:.2g} %" for share in figures.before)
    notes = (
        f"{figures.rounds} rounds an epoch, then one of {figures.electors} electors; the distance before the "
        f"state rounds: {before}",
        f"the busiest peer sends {max(figures.messages_most)} messages in an epoch; rounds that continued "
        f"without a peer of their cell: {figures.rounds_missed}; downloads of peers that missed the first "
        f"round of an epoch: {figures.downloads}",
    )

    def row(identifier: str, quantity: str, series: Series, notes: tuple[str, ...] = ()) -> Row:
        return Row(
            identifier=f"grid-{figures.peers}-{identifier}",
            workload=title,
            quantity=quantity,
            ours=series,
            peer=None,
            aim=None,
            notes=notes,
        )

    return [
        row(
            "deviation",
            "largest distance of a model from that of the electors after a state round, of the way to the "
            "optimum",
            Series(
                name="swarm: deviation", unit="%", samples=tuple(100.0 * share for share in figures.after)
            ),
            notes,
        ),
        row(
            "messages",
            "messages that a peer sends in an epoch, on average",
            Series(name="swarm: messages", unit="messages", samples=figures.messages),
        ),
        row(
            "bytes",
            "bytes of these messages, without the averaged values",
            Series(name="swarm: bytes", unit="kB", samples=tuple(one / 1e3 for one in figures.bytes_sent)),
        ),
        row(
            "time",
            "from a full epoch until the last peer has its certificate; a round takes 0.2 s",
            Series(name="swarm: averaging", unit="s", samples=figures.epoch_s),
        ),
    ]
