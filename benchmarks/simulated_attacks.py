"""A hostile member in a small run: epochs per minute of the honest members, in virtual time.

The figures are the same on every machine. The first three epochs of each attack do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.results import Aim, Row, Series
from swarm.testing.sabotage import SABOTAGE_KINDS
from swarm.testing.training_attacks import Attack, AttackFigures, run_attack

SHARE_MIN = 0.9  # of the epochs without an attack
MEMBERS = (4, 8)
MINUTES = 5.0
_CALM_S = 20.0

Say = Callable[[str], None]


def rows(say: Say, members: int, minutes: float = MINUTES) -> list[Row]:
    """Return the rows of a run of some members, one for each attack."""
    with _quiet():
        alone = run_attack(Attack(members=members, minutes=minutes, calm_s=_CALM_S, rounds_free=1))
        found = {}
        for sabotage in SABOTAGE_KINDS:
            if sabotage == "none":
                continue
            attack = Attack(members=members, sabotage=sabotage, minutes=minutes, calm_s=_CALM_S)
            found[sabotage] = run_attack(attack)
            pace = found[sabotage].epochs_per_minute
            say(f"simulated, {members} members, one of them {sabotage}: {pace:.2f} epochs/min")
    return [_row(members, sabotage, figures, alone) for sabotage, figures in found.items()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings, because each fault makes many peers warn."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _row(members: int, sabotage: str, figures: AttackFigures, alone: AttackFigures) -> Row:
    def series(name: str, one: AttackFigures) -> Series:
        return Series(name=f"swarm {name}", unit="epochs/min", samples=(one.epochs_per_minute,))

    return Row(
        identifier=f"attacks-bad-{members}-{sabotage.replace(' ', '-')}",
        workload=f"simulated run of {members} members, one of which {sabotage}",
        quantity="epochs per minute after three epochs",
        ours=series(f"beside one that {sabotage}", figures),
        peer=series("without an attack", alone),
        aim=Aim(of="ours / peer", sense="at least", value=SHARE_MIN),
        notes=(f"rounds that failed: {figures.rounds_failed}; without the bad member: {figures.excluded}",),
    )
