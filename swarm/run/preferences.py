"""Preferences: what a user allows volunteers on this machine. One file holds them for all runs, with a table
for each run that differs.

    hours = "22-7"
    daily = "5G"

    [run.bytelm]
    daily = "1G"

An option of `swarm join` or `swarm start` takes precedence over the file. A volunteer reads the file again
when it changes.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from swarm.core.errors import UsageError
from swarm.core.files import write_private
from swarm.core.wording import one_line
from swarm.metrics.record import NAME_CHARACTERS_MAX
from swarm.net.throttle import Bandwidth
from swarm.run.hours import Hours
from swarm.run.limits import IDLE_S, VolunteerLimits, parse_duration_s, parse_size
from swarm.run.owned import explain

_BYTES_PER_MBIT = 125_000.0
_BYTES_MAX = 64 << 10
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def _checked(parse: Callable[[str], object]) -> BeforeValidator:
    """Return a validator of texts that `parse` accepts."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            try:
                parse(value)
            except UsageError as error:
                raise ValueError(str(error).rpartition(", not ")[0] or str(error)) from None
        return value

    return BeforeValidator(check)


def _idle_s(text: str) -> float:
    return {"on": IDLE_S, "off": 0.0}[text] if text in ("on", "off") else parse_duration_s(text)


_Size = Annotated[str, _checked(parse_size)]
_Hours = Annotated[str, _checked(lambda text: Hours.parse([text]))]
_Idle = Annotated[str, _checked(_idle_s)]
_Mbit = Annotated[float, Field(ge=0.1, le=1e6, allow_inf_nan=False)]


class Preferences(BaseModel):
    """Limits that a user sets; None: not set. Sizes are texts such as 5G, durations such as 5m."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hours: Annotated[
        _Hours | None, Field(description="train in these hours only (local time): 22-7, or 9-12,22-7")
    ] = None
    when_idle: Annotated[
        _Idle | None,
        Field(description="train while nobody has typed for this long: 5m, on (5m) or off"),
    ] = None
    gpu: Annotated[
        Literal["yield", "share"] | None,
        Field(description="yield (the default): pause while others use the GPU; or share"),
    ] = None
    battery: Annotated[bool | None, Field(description="true: train on battery, too")] = None
    metered: Annotated[bool | None, Field(description="true: train over a metered connection, too")] = None
    temperature: Annotated[
        Annotated[float, Field(ge=30, le=120)] | None,
        Field(description="pause while GPU or processor is hotter than this, in degrees Celsius"),
    ] = None
    cpu: Annotated[
        Annotated[float, Field(gt=0, le=100)] | None,
        Field(description="use at most this part of the processor, in %"),
    ] = None
    memory: Annotated[_Size | None, Field(description="use at most this much memory: 4G")] = None
    daily: Annotated[_Size | None, Field(description="send and receive at most this much a day: 5G")] = None
    monthly: Annotated[
        _Size | None, Field(description="send and receive at most this much a month: 100G")
    ] = None
    upload: Annotated[_Mbit | None, Field(description="send at most this many Mbit/s")] = None
    download: Annotated[_Mbit | None, Field(description="receive at most this many Mbit/s")] = None
    name: Annotated[
        Annotated[str, Field(max_length=NAME_CHARACTERS_MAX), AfterValidator(partial(one_line, "a name"))]
        | None,
        Field(description="a name of this machine for others to read"),
    ] = None

    def over(self, other: Preferences) -> Preferences:
        """Return these preferences, with values of `other` for those that are not set."""
        return other.model_copy(update=self.given)

    @property
    def given(self) -> dict[str, Any]:
        """Return the preferences that are set."""
        return self.model_dump(exclude_none=True)

    def bandwidth(self) -> Bandwidth:
        """Return the caps of the node in each direction."""
        up, down = (None if mbit is None else mbit * _BYTES_PER_MBIT for mbit in (self.upload, self.download))
        return Bandwidth(up_bytes_per_s=up, down_bytes_per_s=down)

    def limits(self) -> VolunteerLimits:
        """Return the limits of a volunteer."""
        return VolunteerLimits(
            hours=Hours.parse([self.hours] if self.hours else []),
            memory_bytes_max=parse_size(self.memory) if self.memory else None,
            idle_s=_idle_s(self.when_idle) if self.when_idle else 0.0,
            yields_gpu=self.gpu != "share",
            on_battery=bool(self.battery),
            on_metered=bool(self.metered),
            temperature_c_max=self.temperature,
            processor_share=self.cpu / 100 if self.cpu else 1.0,
            daily_bytes_max=parse_size(self.daily) if self.daily else None,
            monthly_bytes_max=parse_size(self.monthly) if self.monthly else None,
        )


def parse_preference(key: str, text: str) -> Any:
    """Return the value of `KEY=VALUE` as typed. Raise UsageError that names key and value if it is not
    valid.
    """
    known = Preferences.model_fields
    if key not in known:
        raise UsageError(f"{key!r:.60} is not a preference; these exist: {', '.join(known)}")
    value: Any = text
    if key in ("battery", "metered") and text.lower() in ("true", "yes", "on", "false", "no", "off"):
        value = text.lower() in ("true", "yes", "on")
    elif key in ("temperature", "cpu", "upload", "download"):
        try:
            value = float(text.removesuffix("%"))
        except ValueError:
            raise UsageError(f"{key} is a number, not {text!r:.60}") from None
    try:
        return getattr(Preferences.model_validate({key: value}), key)
    except ValidationError as error:
        raise UsageError(explain(error)[0]) from None


class PreferencesFile:
    """The file of one user."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[Preferences, dict[str, Preferences]]:
        """Return the preferences for all runs, and the differing ones by the name of a run. Raise UsageError
        if the file is not valid.
        """
        try:
            with self.path.open("rb") as stream:
                tables = tomllib.loads(stream.read(_BYTES_MAX).decode())
        except FileNotFoundError:
            return Preferences(), {}
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"{self.path} cannot be read: {why}") from None
        runs = tables.pop("run", {})
        if not isinstance(runs, dict):
            raise UsageError(f"{self.path}: preferences for one run belong into a table [run.NAME]")
        return self._table(tables, ""), {
            name: self._table(one, f"[run.{name}] ") for name, one in runs.items()
        }

    def for_run(self, name: str) -> Preferences:
        """Return the preferences for a run. Raises UsageError as `read` does."""
        everywhere, runs = self.read()
        return runs.get(name, Preferences()).over(everywhere)

    def change(self, run: str | None, given: Mapping[str, Any], removed: Sequence[str]) -> Preferences:
        """Set and remove preferences of all runs (`run` is None) or of one. Return the resulting preferences.
        Raises UsageError if the file is not valid or cannot be written.
        """
        everywhere, runs = self.read()
        old = everywhere if run is None else runs.get(run, Preferences())
        kept = {key: value for key, value in old.given.items() if key not in removed}
        new = Preferences(**{**kept, **given})
        if run is None:
            everywhere = new
        else:
            runs[run] = new
        lines = _lines(everywhere)
        for name, one in sorted(runs.items()):
            if one.given:
                key = name if _BARE_KEY.fullmatch(name) else _quoted(name)
                lines += ["", f"[run.{key}]", *_lines(one)]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_private(self.path, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror or error}") from error
        return new

    def _table(self, table: Any, where: str) -> Preferences:
        try:
            return Preferences.model_validate(table)
        except ValidationError as error:
            raise UsageError(f"{self.path}: {where}{explain(error)[0]}") from None


class LivePreferences:
    """The preferences of one running volunteer: those of its command, then those of the file."""

    def __init__(self, file: PreferencesFile, run: str, options: Preferences) -> None:
        """Raises UsageError if the file is not valid."""
        self._file, self._run, self._options = file, run, options
        self._stamp = self._read_stamp()
        self.now = options.over(file.for_run(run))

    def changed(self) -> str:
        """Read the file again if it was written since. Return the differences as text for the user; empty if
        there are none. If the file is not valid, raises UsageError once and keeps the preferences.
        """
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return ""
        self._stamp = stamp
        before, self.now = self.now, self._options.over(self._file.for_run(self._run))
        old, new = before.given, self.now.given
        return ", ".join(
            f"{key} {new[key]}" if key in new else f"no {key} any more"
            for key in Preferences.model_fields
            if old.get(key) != new.get(key)
        )

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._file.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _lines(preferences: Preferences) -> list[str]:
    """Return lines of TOML."""
    return [f"{key} = {_toml(value)}" for key, value in preferences.given.items()]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _quoted(value) if isinstance(value, str) else f"{value:g}"


def _quoted(text: str) -> str:
    escaped = "".join(
        f"\\u{ord(one):04x}" if ord(one) < 0x20 or ord(one) == 0x7F else one
        for one in text.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'
