"""Marks for the model check of rounds, equal for peers that decide alike, no matter how they got there."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from averaging.allreduce.logic.failure_detector import FailureDetector
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.setup import RoundSetup
from averaging.history.certificate import Certificate, Proposal, Vote
from averaging.history.chain import Chain
from averaging.reduction.partition import Plan
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from swarm.testing.round_peers import Situation


def fingerprint(peer: int, local: Situation) -> tuple[Any, ...]:
    """Return a value that is equal for situations in which a peer decides alike."""
    lineage = local.lineage
    return (
        peer,
        lineage.head,
        snapshot(vars(lineage)),
        tuple((one.attempt.number, one.mark) for one in local.rounds),
    )


def mark_of(machine: RoundMachine) -> Any:
    """Return a value that is equal for machines that decide alike. A finished machine only answers."""
    finish = machine.finished
    if finish is None:
        return snapshot(vars(machine))
    held = machine.assembly.held if finish.failure is None else {}
    return snapshot((finish, machine.votes.statement(), held))


def text_of(body: Any) -> str:
    """Return a text that is equal for equal bodies of messages."""
    return "" if body is None else repr(snapshot(body))


def snapshot(value: Any) -> Any:
    """Return a hashable value of everything that determines a peer's decisions."""
    kind = type(value)
    read = _READERS.get(kind)
    if read is None:
        read = _READERS[kind] = _reader_of(kind)
    return read(value)


def _reader_of(kind: type) -> Callable[[Any], Any]:
    """Return how values of this type are made hashable. Setups and heartbeats are left out: the first never
    changes, and who answers is an input here.
    """
    if issubclass(kind, str):
        return bool  # a reason is a text for users; only its presence matters
    if issubclass(kind, (int, float, bytes, type(None), Enum, PeerId)):
        return lambda value: value
    if issubclass(kind, Mapping):
        return lambda value: frozenset((key, snapshot(one)) for key, one in value.items())
    if issubclass(kind, (tuple, list, deque)):
        return lambda value: tuple([snapshot(one) for one in value])
    if issubclass(kind, (set, frozenset)):
        return frozenset
    left_out = (RoundSetup, FailureDetector, Chain, Plan, functools.partial)
    is_callable = any("__call__" in vars(base) for base in kind.__mro__)
    if issubclass(kind, left_out) or is_callable or kind.__module__.startswith("swarm.compression"):
        return lambda value: None
    if (known := {Certificate: "head", Proposal: "group_id"}.get(kind)) is not None:
        return operator.attrgetter(known)
    if kind is Vote:
        return operator.attrgetter("voter", "result")
    names = [name for one in kind.__mro__ for name in getattr(one, "__slots__", ())]
    if names:
        return lambda value: (kind.__name__, *[snapshot(getattr(value, name)) for name in names])
    return lambda value: (kind.__name__, *[snapshot(one) for one in vars(value).values()])


_READERS: dict[type, Callable[[Any], Any]] = {}
