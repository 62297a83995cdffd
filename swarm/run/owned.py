"""The settings that specifications of runs and of expert grids have in common: name, membership, bans, and
recovery key. Specifications are written as TOML.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from swarm.core.errors import UsageError
from swarm.core.ids import RUN_NAME, PeerId

# Only names of grids begin with this. The id is a hash of the name, so another run cannot claim it.
GRID_PREFIX = "grid."
TOML_BYTES_MAX = 256 << 10
_TOML_DEPTH_MAX = 16  # nested tables and lists; a signed specification allows fewer
BANNED_MAX = 500  # each takes 54 bytes of the specification
REVOKED_MAX = 300  # likewise
CONFIRMED_MAX = 100  # likewise


class SpecificationTable(BaseModel):
    """A table of a specification. An unknown key is an error, because it is usually a misspelt one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OwnedSpecification(SpecificationTable):
    """The settings that the specifications of runs and of grids have in common."""

    # settings of `swarm change`, which the file lacks; they stay when the file is published again
    OWNERS_KEYS: ClassVar[tuple[str, ...]] = ("ended", "banned", "revoked")
    # a key that only files of the other kind have, what such a file describes, and the command for it
    OTHER_KIND: ClassVar[tuple[str, str, str]]

    name: str
    description: str = Field(default="", max_length=500)
    # "invited": peers of the run answer only peers that show a capability of its owner; "open": they answer
    # anybody
    members: Literal["invited", "open"] = "invited"
    # PeerID of the identity, kept offline, that can give the run a new owner. The run's id depends on it.
    recovery_key: str | None = None
    # The owner sets these with `swarm change` during the run.
    ended: bool = False  # the run is over
    banned: tuple[str, ...] = Field(default=(), max_length=BANNED_MAX)  # PeerIDs that every member avoids
    # holders, issuers and invites (as the PeerID of their key) whose capabilities are not valid any more
    revoked: tuple[str, ...] = Field(default=(), max_length=REVOKED_MAX)
    # set by `swarm recover`: peers and invites of the founder whose capabilities stay valid
    confirmed: tuple[str, ...] = Field(default=(), max_length=CONFIRMED_MAX)

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value):
            raise ValueError("1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit")
        return value

    @field_validator("banned", "revoked", "confirmed")
    @classmethod
    def _are_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                PeerId.parse(text)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return tuple(sorted(set(value)))

    @field_validator("recovery_key")
    @classmethod
    def _recovery_key_is_a_peer(cls, value: str | None) -> str | None:
        try:
            return str(PeerId.parse(value)) if value is not None else None
        except UsageError as error:
            raise ValueError(str(error)) from error

    @property
    def recovery_peer(self) -> PeerId | None:
        """Return the identity that can give the run a new owner, or None."""
        return PeerId.parse(self.recovery_key) if self.recovery_key is not None else None

    @property
    def banned_peers(self) -> frozenset[PeerId]:
        """Return the peers that the owner has banned."""
        return frozenset(PeerId.parse(text) for text in self.banned)

    @property
    def revoked_peers(self) -> frozenset[PeerId]:
        """Return the holders, issuers and keys of invites that the owner has revoked."""
        return frozenset(PeerId.parse(text) for text in self.revoked)

    @property
    def confirmed_peers(self) -> frozenset[PeerId]:
        """Return the peers and invites of the founder whose capabilities the present owner has confirmed."""
        return frozenset(PeerId.parse(text) for text in self.confirmed)

    @classmethod
    def from_toml(cls, text: str, where: str) -> Self:
        """Parse and check a TOML text. `where` names the source in error messages (a path).

        Raises UsageError with one line per problem, each with its key.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{where} is not valid TOML: {error}") from error
        except (ValueError, RecursionError) as error:  # a number or brackets with thousands of characters
            raise UsageError(f"{where} is not valid TOML: a value is too long or nests too deep") from error
        _check_bounds(table, where)
        key, described, command = cls.OTHER_KIND
        if key in table:
            raise UsageError(f"{where} describes {described}: it is a file for `{command}`")
        return cls.from_table(table, where)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read and check a TOML file. Raise UsageError if it cannot be read or is not valid."""
        try:
            with path.open("rb") as stream:
                raw = stream.read(TOML_BYTES_MAX + 1)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
        if len(raw) > TOML_BYTES_MAX:
            raise UsageError(
                f"{path} is larger than {TOML_BYTES_MAX >> 10} KiB, the limit of a specification"
            )
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})"
            ) from error
        return cls.from_toml(text, str(path))

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> Self:
        """Check a parsed table. Raise UsageError with one line per problem, each with its key."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise UsageError("\n".join(f"{where}: {line}" for line in explain(error))) from error

    def flat_table(self) -> dict[str, Any]:
        """Return the settings with dotted keys: "optimizer.name"."""
        return _flat(self.table())

    def table(self) -> dict[str, Any]:
        """Return the settings as plain values for signing: scalars, lists, and tables with text keys."""
        return self.model_dump(mode="json")


def _flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[above + key] = value
    return flat


def _check_bounds(table: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if a value nests too deep, or is an integer that does not fit 64 bits."""
    values: list[object] = [table]
    for _ in range(_TOML_DEPTH_MAX + 1):
        tables = [one.values() for one in values if isinstance(one, Mapping)]
        lists = [one for one in values if isinstance(one, list)]
        values = [inner for one in (*tables, *lists) for inner in one]
        if any(isinstance(one, int) and not -(1 << 63) <= one < 1 << 63 for one in values):
            raise UsageError(f"{where} is not valid TOML: an integer has more than 64 bits")
    if values:
        raise UsageError(f"{where} is not valid TOML: its values nest deeper than {_TOML_DEPTH_MAX} levels")


# pydantic's types of problems, in words of the file; placeholders are in the problem's context
_RULES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("dict_type", "model_type"), "must be a table"),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    "string_type": "must be a text",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} or fewer characters",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have {max_length} or fewer items",
}


def explain(error: ValidationError, table: str = "") -> list[str]:
    """Return one line per problem, without pydantic's types and links.

    `table` is the key of the table that was checked; empty for the whole file.
    """
    lines = []
    for problem in error.errors(include_url=False, include_context=True):
        key = ".".join(filter(None, (table, *(str(part) for part in problem["loc"])))) or "the file"
        context = problem.get("ctx", {})
        text = {
            "missing": "is missing",
            "extra_forbidden": "is not a known key (misspelt?)",
            "literal_error": f"must be one of {context.get('expected', '')}, not {problem['input']!r}",
            "value_error": f"{context.get('error', problem['msg'])}, not {problem['input']!r}"
            if isinstance(problem["input"], (str, int, float))
            else str(context.get("error")),
        }.get(problem["type"])
        if text is None:
            rule = problem["msg"].removeprefix("Input ").replace("should be", "must be")
            rule = f"{rule[:1].lower()}{rule[1:]}"
            if problem["type"] in _RULES:
                rule = _RULES[problem["type"]].format_map(context)
            text = f"{rule}, not {problem['input']!r:.60}"
        lines.append(f"{key} {text}" if text.startswith(("is ", "must ")) else f"{key}: {text}")
    return lines
