"""Names of experts and patterns of names. `ffn.3.17` is the expert at (3, 17) of the grid `ffn`; the pattern
`ffn.[0:4].[0:32]` stands for many experts.

Experts of one grid may lie at any depth from 1 to `DEPTH_MAX`. Experts are looked up by prefix (`ffn`,
`ffn.3`), level after level. Everything that a peer can send here is bounded: a name by its length, a pattern
by the number of names it may stand for.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from swarm.core.errors import UsageError

DEPTH_MAX = 8
COORDINATE_MAX = 4095  # so that one server's experts below a prefix fit into one record
NAMES_MAX = 65536  # names to which a pattern may expand

_BLOCK = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")
_COORDINATE = re.compile(r"0|[1-9][0-9]{0,3}")
_RANGE = re.compile(r"\[(0|[1-9][0-9]{0,3}):(0|[1-9][0-9]{0,4})\]")


class ExpertUid(NamedTuple):
    """The name of an expert (at least one coordinate) or of a prefix (any number of coordinates). `str()`
    gives the text.
    """

    block: str
    coordinates: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> ExpertUid:
        """Parse an expert's name. Raises UsageError, which says what is wrong with it."""
        uid = cls.parse_prefix(text)
        if not uid.coordinates:
            raise UsageError(
                f"{text!r} names a grid, not an expert: "
                f"an expert's name ends in its coordinates, like {text}.0"
            )
        return uid

    @classmethod
    def parse_prefix(cls, text: str) -> ExpertUid:
        """Parse a prefix: a grid's name, or the beginning of an expert's name. Raises UsageError."""
        block, *parts = _split(text)
        if not all(_COORDINATE.fullmatch(part) and int(part) <= COORDINATE_MAX for part in parts):
            raise UsageError(
                f"{text[:100]!r} is no expert's name: "
                f"after the first dot come whole numbers from 0 to {COORDINATE_MAX}"
            )
        return cls(block, tuple(int(part) for part in parts))

    @property
    def prefix(self) -> ExpertUid:
        """Return the name without its last coordinate."""
        return ExpertUid(self.block, self.coordinates[:-1])

    @property
    def prefixes(self) -> tuple[ExpertUid, ...]:
        """Return every prefix of this name, the grid's name first: for ffn.3.17 these are ffn and ffn.3."""
        return tuple(
            ExpertUid(self.block, self.coordinates[:depth]) for depth in range(len(self.coordinates))
        )

    def child(self, coordinate: int) -> ExpertUid:
        """Return the name one level deeper. Raises UsageError when that is too deep, or `coordinate` is out
        of range.
        """
        if len(self.coordinates) >= DEPTH_MAX or not 0 <= coordinate <= COORDINATE_MAX:
            raise UsageError(
                f"below {self} there is no {coordinate}: "
                f"at most {DEPTH_MAX} coordinates, each from 0 to {COORDINATE_MAX}"
            )
        return ExpertUid(self.block, (*self.coordinates, coordinate))

    def __str__(self) -> str:
        return _text_of(self)


@functools.lru_cache(maxsize=16384)  # a pass writes the names of hundreds of experts, each several times
def _text_of(uid: ExpertUid) -> str:
    return ".".join((uid.block, *map(str, uid.coordinates)))


@dataclass(frozen=True, slots=True)
class ExpertGrid:
    """A pattern of names: a grid's name, and for each dimension a range of coordinates."""

    block: str
    dimensions: tuple[range, ...]

    @classmethod
    def parse(cls, text: str) -> ExpertGrid:
        """Parse a pattern such as `ffn.[0:4].[0:32]`. A plain number matches only itself, so an expert's name
        is a pattern for one expert. Raises UsageError.
        """
        block, *parts = _split(text)
        if not parts:
            raise UsageError(f"{text!r} has no dimensions: a grid reads like {text}.[0:4].[0:4]")
        return cls(block, tuple(_dimension(part, text) for part in parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of coordinates in each dimension."""
        return tuple(len(dimension) for dimension in self.dimensions)

    @property
    def count(self) -> int:
        """Return the number of names that the pattern stands for; it may be far too large to list them."""
        return math.prod(self.shape)

    def __contains__(self, uid: ExpertUid) -> bool:
        return (
            uid.block == self.block
            and len(uid.coordinates) == len(self.dimensions)
            and all(
                coordinate in dimension
                for coordinate, dimension in zip(uid.coordinates, self.dimensions, strict=True)
            )
        )

    def covers(self, other: ExpertGrid) -> bool:
        """Return whether all names of another pattern are names of this one."""
        return (
            other.block == self.block
            and len(other.dimensions) == len(self.dimensions)
            and all(
                mine.start <= theirs.start and theirs.stop <= mine.stop
                for mine, theirs in zip(self.dimensions, other.dimensions, strict=True)
            )
        )

    def names(self) -> Iterator[ExpertUid]:
        """Return every name, in order. Raises UsageError when there are more than NAMES_MAX."""
        if self.count > NAMES_MAX:
            raise UsageError(f"{self} stands for {self.count:,} experts; at most {NAMES_MAX:,} can be listed")
        return (ExpertUid(self.block, coordinates) for coordinates in itertools.product(*self.dimensions))

    def __str__(self) -> str:
        return ".".join((self.block, *(_dimension_text(dimension) for dimension in self.dimensions)))


def _split(text: str) -> list[str]:
    if not isinstance(text, str):
        raise UsageError(f"an expert's name is text like ffn.3.17, not {text!r}")
    parts = text[:300].split(".")
    if not _BLOCK.fullmatch(parts[0]):
        raise UsageError(
            f"{text[:100]!r}: a grid's name is a letter and up to 47 letters, digits, dashes or underscores"
        )
    if len(parts) - 1 > DEPTH_MAX:
        raise UsageError(f"{text[:100]!r} has more than {DEPTH_MAX} dimensions")
    return parts


def _dimension(part: str, text: str) -> range:
    if _COORDINATE.fullmatch(part):
        first, end = int(part), int(part) + 1
    else:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise UsageError(f"{text[:100]!r}: {part[:20]!r} is neither a number nor a range like [0:4]")
        first, end = int(match[1]), int(match[2])
    if not first < end <= COORDINATE_MAX + 1:
        raise UsageError(f"{text[:100]!r}: {part[:20]!r} is empty, or goes beyond {COORDINATE_MAX}")
    return range(first, end)


def _dimension_text(dimension: range) -> str:
    return str(dimension.start) if len(dimension) == 1 else f"[{dimension.start}:{dimension.stop}]"
