"""The `swarm` command and the table of its subcommands.

Each subcommand, with its options, its help and its work, is a click command in a module of its own. A module
is imported when its command is used, so that `swarm --help` answers at once and imports none of them.
"""

from __future__ import annotations

import importlib

import click

from swarm import __version__
from swarm.cli.options import CONTEXT

# command -> (module of `swarm.cli`, line in `swarm --help`)
COMMANDS = {
    "bootstrap": ("bootstrap", "Run a long-lived entry point that trains nothing."),
    "change": ("admin", "Change a run that you own while others train it."),
    "config": ("preferences", "Show or change what volunteers may do on this machine."),
    "contributors": ("contributors", "List how much each peer has given to a run."),
    "dashboard": ("dashboard", "Manage a run that you own."),
    "demo": ("demo", "Watch several peers train a model on this machine."),
    "doctor": ("doctor", "Find out whether this machine can volunteer."),
    "experts": ("experts", "List the experts of a swarm."),
    "export": ("export", "Write a run's model, or a grid of experts, to a file."),
    "identity": ("identity", "Show, make, export or import an identity."),
    "invite": ("invite", "Make an invite to a run."),
    "join": ("train", "Volunteer for a run."),
    "monitor": ("monitor", "Watch a run; train nothing."),
    "new-task": ("new_task", "Write a package with a task of your own, to start from."),
    "pause": ("admin", "Pause volunteers on this machine."),
    "recover": ("recover", "Give a run whose owner's key was stolen a new owner."),
    "resume": ("admin", "Let paused volunteers train again."),
    "runs": ("runs", "List the runs of a swarm, or those that this machine knows."),
    "serve": ("serve", "Host experts for others to call."),
    "service": ("service", "Let the system start a volunteer."),
    "start": ("train", "Create a run and train as its first volunteer."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"swarm.cli.{module}"), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(COMMANDS.items())])


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.version_option(__version__, "--version", message="swarm %(version)s")
def swarm() -> None:
    """Strangers train one neural network together, with no master.

    \b
      swarm demo                            watch four peers train a model on this machine
      swarm start examples/bytelm.toml      create a run; prints the command with which others join
      swarm join INVITE                     volunteer for it
      swarm serve --experts 'ffn.[0:4]'     host experts that others call
      swarm monitor INVITE                  watch it
    """
