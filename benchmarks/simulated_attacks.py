"""A member that turns bad in a small run: epochs a minute of the honest ones, in virtual time.

The figures are the same on every machine. The first three epochs of each attack do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.results import Aim, Row, Series
from swarm.testing.misdeeds import MISDEEDS
from swarm.testing.training_attacks import Attack, AttackFigures, run_attack

SHARE_MIN = 0.9  # of the epochs without an attack
MEMBERS = (4, 8)
MINUTES = 5.0
_CALM_S = 20.0

Say = Callable[[str], None]


def rows(say: Say, members: Sequence[int] = MEMBERS, minutes: float = MINUTES) -> Iterator[list[Row]]:
    """Yield the rows of each size of a run."""
    for count in members:
        with _quiet():
            alone = run_attack(Attack(members=count, minutes=minutes, calm_s=_CALM_S, rounds_free=1))
            found = {}
            for misdeed in MISDEEDS:
                if misdeed == "none":
                    continue
                say(f"simulated, {count} members, one of them {misdeed}")
                attack = Attack(members=count, misdeed=misdeed, minutes=minutes, calm_s=_CALM_S)
                found[misdeed] = run_attack(attack)
        yield [_row(count, misdeed, figures, alone) for misdeed, figures in found.items()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings back: each fault is one of many peers."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _row(members: int, misdeed: str, figures: AttackFigures, alone: AttackFigures) -> Row:
    def series(name: str, one: AttackFigures) -> Series:
        return Series(name=f"swarm {name}", unit="epochs/min", samples=(one.epochs_per_minute,))

    return Row(
        identifier=f"attacks-bad-{members}-{misdeed.replace(' ', '-')}",
        workload=f"simulated run of {members} members, one of which {misdeed}",
        quantity="epochs per minute after three epochs",
        ours=series(f"beside one that {misdeed}", figures),
        peer=series("without an attack", alone),
        aim=Aim(of="ours / peer", sense="at least", value=SHARE_MIN),
        notes=(f"rounds that failed: {figures.rounds_failed}; without the bad member: {figures.excluded}",),
    )
