"""`swarm config`, and the options with which a command overrides the preferences file."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import click

from swarm.cli import options
from swarm.cli.paths import preferences_file
from swarm.cli.render import print_result
from swarm.core.errors import UsageError
from swarm.core.ids import RUN_NAME
from swarm.run.preferences import Preferences, PreferencesFile, parse_preference

_FLAGS = {
    "hours": ("FROM-TO", "Train in these hours only (local time): 22-7. Repeatable."),
    "daily": ("SIZE", "Send and receive at most this much a day, for instance 5G."),
    "monthly": ("SIZE", "Send and receive at most this much a month."),
    "memory": ("SIZE", "Use at most this much memory, for instance 4G; leave the run before using more."),
    "cpu": ("PERCENT", "Use at most this share of the processor."),
    "temperature": ("CELSIUS", "Pause while the GPU or processor is hotter than this."),
    "upload": ("MBIT", "Send at most this many Mbit/s."),
    "download": ("MBIT", "Receive at most this many Mbit/s."),
    "name": ("NAME", "A name of this machine for `swarm monitor`; at most 40 characters."),
}
_SWITCHES = {
    "battery": ("--battery/--no-battery", "Train on battery, too, or not."),
    "metered": ("--metered/--no-metered", "Train over a metered connection, too, or not."),
}


class _Preference(click.ParamType[Any]):
    """The value of one preference, checked as `swarm config` checks it."""

    def __init__(self, key: str) -> None:
        self.key, self.name = key, key

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_preference(self.key, value) if isinstance(value, str) else value
        except UsageError as error:
            self.fail(f"{str(error).removeprefix(f'{self.key}: ')}.", param, ctx)


def preference_options(command: options.Command) -> options.Command:
    """Add an option for each preference. `given_preferences` removes them from the command's arguments."""
    added: list[Callable[[options.Command], options.Command]] = [
        click.option(
            f"--{key}",
            metavar=metavar,
            type=_Preference(key),
            multiple=key == "hours",
            default=None,
            help=text,
        )
        for key, (metavar, text) in _FLAGS.items()
    ]
    added.append(
        click.option(
            "--when-idle",
            flag_value="on",
            default=None,
            help="Train while nobody has used the machine for 5 minutes and other programs are quiet.",
        )
    )
    added.append(
        click.option(
            "--gpu",
            type=click.Choice(["yield", "share"]),
            default=None,
            help="Pause while another program computes on the GPU, or train at the same time.",
        )
    )
    added += [click.option(flags, key, default=None, help=text) for key, (flags, text) in _SWITCHES.items()]
    for option in reversed(added):
        command = option(command)
    return command


def given_preferences(arguments: dict[str, Any]) -> Preferences:
    """Remove the preferences from a command's arguments, and return them."""
    found = {key: arguments.pop(key) for key in Preferences.model_fields}
    found["hours"] = ",".join(found["hours"]) or None
    return Preferences(**{key: value for key, value in found.items() if value is not None})


@click.command(context_settings=options.CONTEXT)
@click.argument("changes", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--run", metavar="NAME", default=None, help="Only for the run with this name.")
@click.option("--unset", metavar="KEY", multiple=True, help="Forget a preference. Repeatable.")
@options.as_json
def config(changes: tuple[str, ...], run: str | None, unset: tuple[str, ...], as_json: bool) -> int:
    """Show or change what volunteers may do on this machine: hours, traffic, memory, and when they pause.

    The preferences apply to every `swarm join` and `swarm start` of this user, including running ones. An
    option of a command takes precedence.

    \b
    Examples:
      swarm config
      swarm config hours=22-7 daily=5G when_idle=5m
      swarm config --run bytelm daily=1G
      swarm config hours= daily=
      swarm config --unset hours
    """
    if run is not None and not RUN_NAME.fullmatch(run):
        raise UsageError(
            f"--run takes the name of a run, like bytelm, and no run can have the name {run!r:.80}"
        )
    file = PreferencesFile(preferences_file())
    given = {}
    for one in changes:
        key, separator, value = one.partition("=")
        if not separator:
            raise UsageError(f"a preference is set with KEY=VALUE, like daily=5G, not {one!r:.60}")
        name = key.strip().replace("-", "_")
        if not value.strip():
            unset = (*unset, name)  # KEY= forgets it
        elif name == "name" and run is not None:
            raise UsageError("name is the same for all runs of this machine: set it without --run")
        else:
            given[name] = parse_preference(name, value.strip())
    removed = [key.replace("-", "_") for key in unset]
    for key in removed:
        if key not in Preferences.model_fields:
            raise UsageError(
                f"{key!r:.60} is not a preference; these exist: {', '.join(Preferences.model_fields)}"
            )
    if given or removed:
        file.change(run, given, removed)
    everywhere, runs = file.read()
    lines = [f"{file.path}{'' if file.path.exists() else ' (not written yet)'}"]
    lines += _lines(everywhere, only_given=bool(given or removed))
    for name, own in sorted(runs.items()):
        if own.given:
            lines += [f"for the run {name}:", *_lines(own, only_given=True)]
    fields = {
        "path": str(file.path),
        "preferences": everywhere.given,
        "runs": {name: own.given for name, own in runs.items()},
    }
    print_result("config", fields, "\n".join(lines), as_json=as_json)
    return 0


def _lines(preferences: Preferences, *, only_given: bool = False) -> list[str]:
    lines = []
    for key, field in Preferences.model_fields.items():
        value = getattr(preferences, key)
        if value is not None or not only_given:
            shown = "-" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
            lines.append(f"  {key:<12}{shown:<14}{typing.cast(str, field.description)}")
    return lines
