"""Schemas for values: declared types and sizes, with which every replica and every reader can check an
untrusted value alike.

    addresses = Many(Text(300), 8)
    Table({"epoch": Number(0, 1 << 40, whole=True), "addresses": addresses}, optional={"note": Text(100)})

A table accepts keys that it does not name, within its size, so that newer peers can publish more than older
ones check. The work of every check is bounded by the value's size, which `records` bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from swarm.dht.logic.records import Value

_NOTHING: Mapping[str, RecordSchema] = MappingProxyType({})


class RecordSchema(Protocol):
    """A schema for one kind of value."""

    def refusal(self, value: Value) -> str | None:
        """Return what is wrong with the value, as a phrase that follows the value's name (`epoch is not …`);
        None when it is valid.
        """
        ...


@dataclass(frozen=True, slots=True)
class Flag:
    """A bool."""

    def refusal(self, value: Value) -> str | None:
        return None if isinstance(value, bool) else "is not true or false"


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds, both included."""

    minimum: float
    maximum: float
    whole: bool = False

    def refusal(self, value: Value) -> str | None:
        kinds = (int,) if self.whole else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, kinds)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            return "is not a whole number" if self.whole else "is not a finite number"
        return (
            None
            if self.minimum <= value <= self.maximum
            else f"is not within {self.minimum:g} and {self.maximum:g}"
        )


@dataclass(frozen=True, slots=True)
class Text:
    """A string of limited length."""

    characters_max: int

    def refusal(self, value: Value) -> str | None:
        if not isinstance(value, str):
            return "is not text"
        return (
            None if len(value) <= self.characters_max else f"has more than {self.characters_max} characters"
        )


@dataclass(frozen=True, slots=True)
class Binary:
    """A byte string with a length within bounds."""

    bytes_max: int
    bytes_min: int = 0

    def refusal(self, value: Value) -> str | None:
        if not isinstance(value, bytes):
            return "is not bytes"
        return (
            None
            if self.bytes_min <= len(value) <= self.bytes_max
            else f"has not {self.bytes_min} to {self.bytes_max} bytes"
        )


@dataclass(frozen=True, slots=True)
class Many:
    """A list of limited length whose items have one kind."""

    of: RecordSchema
    count_max: int

    def refusal(self, value: Value) -> str | None:
        if not isinstance(value, list):
            return "is not a list"
        if len(value) > self.count_max:
            return f"has more than {self.count_max} items"
        return next(
            (
                f"[{number}] {reason}"
                for number, item in enumerate(value)
                if (reason := self.of.refusal(item))
            ),
            None,
        )


@dataclass(frozen=True, slots=True)
class Named:
    """A map of limited size with values of one kind, under arbitrary names."""

    of: RecordSchema
    count_max: int
    name_characters_max: int

    def refusal(self, value: Value) -> str | None:
        if not isinstance(value, dict):
            return "is not a map"
        if len(value) > self.count_max:
            return f"has more than {self.count_max} keys"
        for name, item in value.items():
            if not isinstance(name, str) or not 1 <= len(name) <= self.name_characters_max:
                return f"has a key that is not text of 1 to {self.name_characters_max} characters"
            reason = self.of.refusal(item)
            if reason:
                return f"[{name!r}] {reason}"
        return None


@dataclass(frozen=True, slots=True)
class Table:
    """A map with these keys, each with its own schema; `optional` keys may be missing. Other keys are
    accepted.
    """

    required: Mapping[str, RecordSchema]
    optional: Mapping[str, RecordSchema] = field(default_factory=lambda: _NOTHING)
    keys_max: int = 64

    def refusal(self, value: Value) -> str | None:
        if not isinstance(value, dict):
            return "is not a map"
        if len(value) > self.keys_max:
            return f"has more than {self.keys_max} keys"
        for name, kind in (*self.required.items(), *self.optional.items()):
            if name not in value:
                if name in self.required:
                    return f"has no {name!r}"
                continue
            reason = kind.refusal(value[name])
            if reason:
                return f"[{name!r}] {reason}"
        return None
