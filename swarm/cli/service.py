"""`swarm service`: let the system start a volunteer, as a systemd user unit on Linux or a launchd agent on
macOS.
"""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from swarm.cli import options
from swarm.cli.render import print_result
from swarm.core.errors import SwarmError, UsageError
from swarm.core.files import write_private
from swarm.core.home import home

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_LABEL = "net.swarm-train"  # label of the launchd agent
_COMMAND_S_MAX = 30.0
# what systemctl says outside a session; systemd 257 and later name the bus
_NO_BUS = re.compile(r"Failed to connect to (user scope )?bus")
_LOG_IN = (
    ". Services belong to a session of their user: log in, on the machine or by ssh, instead of using su "
    "or sudo"
)
_NAME_OPTION = click.option(
    "--as", "name", metavar="NAME", default=None, help="Which service. [default: the only one]"
)


@click.group(context_settings=options.CONTEXT)
def service() -> None:
    """Let the system start a volunteer when you log in, and start it again when it fails.

    \b
    Examples:
      swarm service install swarm1...
      swarm service install bytelm
      swarm service status
      swarm service logs
      swarm service remove
    """


@service.command(context_settings={**options.CONTEXT, "ignore_unknown_options": True})
@click.option(
    "--as", "name", metavar="NAME", default=None, help="A name for the service. [default: that of the run]"
)
@click.option("--no-start", is_flag=True, help="Only write the file, and do not start the service.")
@options.as_json
@click.argument(
    "arguments",
    metavar="RUN|INVITE|ADDRESS [JOIN OPTION]...",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
)
def install(name: str | None, no_start: bool, as_json: bool, arguments: tuple[str, ...]) -> int:
    """Install a service that runs `swarm join` with these arguments. Limits of the volunteer are set with
    `swarm config` at any time, or with options of `swarm join` here.

    \b
    Examples:
      swarm service install swarm1...
      swarm service install bytelm --when-idle --daily 5G
      swarm service install ADDRESS --run bytelm --as bytelm-2 --device cuda:1
    """
    from swarm.cli.train import join

    parsed = join.make_context("swarm join", list(arguments))  # reports wrong arguments
    entries: tuple[str, ...] = parsed.params["addresses"]
    if not entries:
        raise UsageError("the service has no run to join: pass an invite, an address, or the name of a run")
    one = Service(name or parsed.params["run"] or _name_of(entries[0]))
    _check_known(entries, parsed.params)
    command = [_program(), "join", *arguments, *([] if parsed.params["yes"] else ["--yes"])]
    replaced = one.file.exists()
    one.write(command)
    if not no_start:
        try:
            one.start()
        except SwarmError as error:
            raise SwarmError(f"{one.file} is written, but the service was not started: {error}") from error
    fields = {"name": one.name, "file": str(one.file), "started": not no_start, "replaced": replaced}
    after = f"; it starts with: {one.start_line}" if no_start else "; it runs now, and whenever you log in"
    hint = one.hint() if not no_start else ""
    print_result(
        "service",
        fields,
        f"{'replaced' if replaced else 'installed'} {one.file}{after}{hint}",
        as_json=as_json,
    )
    return 0


@service.command(context_settings=options.CONTEXT)
@_NAME_OPTION
@options.as_json
def status(name: str | None, as_json: bool) -> int:
    """Show the system's status of the services."""
    chosen = [_chosen(name)] if name is not None else _all()
    if not chosen:
        text = "no volunteer is installed as a service: swarm service install INVITE"
        print_result("notice", {"text": text}, text, as_json=as_json)
    for one in chosen:
        said = one.status()
        print_result("service", {"name": one.name, "status": said}, said, as_json=as_json)
    return 0


@service.command(context_settings=options.CONTEXT)
@_NAME_OPTION
@click.option("--follow", "-f", is_flag=True, help="Continue to show new lines.")
def logs(name: str | None, follow: bool) -> int:
    """Show the output of a service."""
    return _chosen(name).logs(follow=follow)


@service.command(context_settings=options.CONTEXT)
@_NAME_OPTION
@options.as_json
def remove(name: str | None, as_json: bool) -> int:
    """Stop a service and remove it. The identity, checkpoints and contributions of the volunteer stay."""
    one = _chosen(name)
    one.remove()
    print_result("removed", {"name": one.name, "file": str(one.file)}, f"removed {one.file}", as_json=as_json)
    return 0


@dataclass(frozen=True, slots=True)
class Service:
    """One service of this user. Its system file is readable by this user only: an invite is a secret."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"a service's name consists of letters, digits, dots, - and _, not {self.name!r:.60}: use "
                "--as"
            )

    @property
    def file(self) -> Path:
        return _folder() / (f"{_LABEL}.{self.name}.plist" if _is_launchd() else f"swarm-{self.name}.service")

    @property
    def _unit(self) -> str:
        return self.file.name

    def write(self, command: Sequence[str]) -> None:
        """Write the system's file. Raises SwarmError when it cannot be written."""
        raw = agent(f"{_LABEL}.{self.name}", command) if _is_launchd() else unit(self.name, command).encode()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_private(self.file, raw)
        except OSError as error:
            raise SwarmError(f"{self.file} cannot be written: {error.strerror or error}") from error

    def start(self) -> None:
        """Let the system start the service now and at each login. Raises SwarmError if the system refuses."""
        if _is_launchd():
            _run(["launchctl", "bootout", f"gui/{os.getuid()}/{_LABEL}.{self.name}"], check=False)
            _run(["launchctl", "bootstrap", f"gui/{os.getuid()}", str(self.file)])
            return
        _run(["systemctl", "--user", "daemon-reload"])
        _run(["systemctl", "--user", "enable", self._unit])
        _run(["systemctl", "--user", "restart", self._unit])

    @property
    def start_line(self) -> str:
        """Return the command with which a user starts the service."""
        if _is_launchd():
            return f"launchctl bootstrap gui/{os.getuid()} {self.file}"
        return f"systemctl --user enable --now {self._unit}"

    def hint(self) -> str:
        """Return a hint for the user, as the end of a sentence."""
        lingers = Path("/var/lib/systemd/linger", os.environ.get("USER", "")).is_file()
        if _is_launchd() or lingers:
            return ""
        return ". To let it run while nobody is logged in: loginctl enable-linger"

    def status(self) -> str:
        """Return the system's status of the service."""
        if _is_launchd():
            return _run(["launchctl", "print", f"gui/{os.getuid()}/{_LABEL}.{self.name}"], check=False)
        said = _run(["systemctl", "--user", "--no-pager", "status", self._unit], check=False)
        if _NO_BUS.search(said):
            raise SwarmError(f"{self.file} is installed, but its status is not known: {said}{_LOG_IN}")
        return said

    def logs(self, *, follow: bool) -> int:
        """Show the service's output on this terminal. Return the exit status of the program that shows it."""
        if _is_launchd():
            command = ["tail", *(["-f"] if follow else ["-n", "200"]), str(_log(self.name))]
        else:
            command = [
                "journalctl",
                "--user",
                "-u",
                self._unit,
                *(["-f"] if follow else ["--no-pager", "-n", "200"]),
            ]
        try:
            return subprocess.run(command, check=False).returncode
        except FileNotFoundError:
            raise SwarmError(f"this system has no {command[0]}") from None

    def remove(self) -> None:
        """Stop the service and delete its file."""
        if _is_launchd():
            _run(["launchctl", "bootout", f"gui/{os.getuid()}/{_LABEL}.{self.name}"], check=False)
        else:
            _run(["systemctl", "--user", "disable", "--now", self._unit], check=False)
        self.file.unlink(missing_ok=True)
        if not _is_launchd():
            _run(["systemctl", "--user", "daemon-reload"], check=False)


def unit(name: str, command: Sequence[str]) -> str:
    """Return a systemd user unit that runs a command."""
    words = " ".join(_quoted(word) for word in command)
    environment = f"Environment={_quoted(f'SWARM_HOME={home()}')}\n" if "SWARM_HOME" in os.environ else ""
    return f"""[Unit]
Description=Volunteer of swarm: {name}
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={words}
{environment}Restart=on-failure
RestartSec=60
KillSignal=SIGINT
TimeoutStopSec=15
Nice=10
IOSchedulingClass=idle

[Install]
WantedBy=default.target
"""


def agent(label: str, command: Sequence[str]) -> bytes:
    """Return a launchd agent that runs a command."""
    log = str(_log(label.removeprefix(f"{_LABEL}.")))
    table = {
        "Label": label,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 60,
        "ProcessType": "Background",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    if "SWARM_HOME" in os.environ:
        table["EnvironmentVariables"] = {"SWARM_HOME": str(home())}
    return plistlib.dumps(table)


def _quoted(word: str) -> str:
    """Return a word in systemd's syntax: quoted, with specifiers and variables escaped."""
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$"), ("\n", "\\n")):
        word = word.replace(special, escaped)
    return f'"{word}"'


def _name_of(entry: str) -> str:
    """Return a name for a service: that of the run in an invite, or the given name."""
    from swarm.cli.finding import is_run_name
    from swarm.membership.invite import Invite, is_invite

    if is_invite(entry):
        return Invite.parse(entry).name
    if is_run_name(entry):
        return entry.partition("@")[0]
    raise UsageError("an address does not name a run: give --run NAME, or a name for the service with --as")


def _check_known(entries: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Raise UsageError if the entry is the name of a run that `swarm join` would not find."""
    from swarm.cli.finding import is_run_name, remembered_entry

    if len(entries) == 1 and is_run_name(entries[0]) and not options["libp2p_bootstrap"]:
        remembered_entry(entries[0], options["run"], options["identity"], role="train")


def _chosen(name: str | None) -> Service:
    """Return a service by its name, or the only one. Raises UsageError if it is ambiguous."""
    there = _all()
    found = [one for one in there if name in (None, one.name)]
    if len(found) == 1:
        return found[0]
    if name is not None or not there:
        raise UsageError(f"there is no service {name!r}" if name is not None else "no service is installed")
    raise UsageError(f"which one? --as {' or --as '.join(one.name for one in there)}")


def _all() -> list[Service]:
    pattern = re.compile(rf"{re.escape(_LABEL)}\.(.+)\.plist" if _is_launchd() else r"swarm-(.+)\.service")
    names = sorted(path.name for path in _folder().glob("*")) if _folder().is_dir() else []
    return [
        Service(match[1]) for match in map(pattern.fullmatch, names) if match and _NAME.fullmatch(match[1])
    ]


def _folder() -> Path:
    """Return where the system reads the services of a user. Raises SwarmError on other systems."""
    if _is_launchd():
        return Path.home() / "Library" / "LaunchAgents"
    if sys.platform.startswith("linux"):
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    raise SwarmError(
        "services need systemd or launchd; on this system, let the task scheduler run: swarm join ... --yes"
    )


def _is_launchd() -> bool:
    return sys.platform == "darwin"


def _log(name: str) -> Path:
    return Path.home() / "Library" / "Logs" / f"swarm-{name}.log"


def _program() -> str:
    """Return the path of this command."""
    own = Path(sys.argv[0])
    found = str(own.absolute()) if own.name == "swarm" and own.exists() else shutil.which("swarm")
    if found is None:
        raise SwarmError("the command swarm is not on the PATH, so that a service could not start it")
    return found


def _run(command: list[str], *, check: bool = True) -> str:
    """Run a program of the system, and return its output. With `check`, raises SwarmError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S_MAX, check=False)
    except FileNotFoundError:
        raise SwarmError(f"this system has no {command[0]}: start the volunteer in another way") from None
    except subprocess.TimeoutExpired:
        raise SwarmError(f"{' '.join(command)} did not end within {_COMMAND_S_MAX:g} s") from None
    text = (done.stdout + done.stderr).strip()
    if check and done.returncode != 0:
        advice = _LOG_IN if _NO_BUS.search(text) else ""
        raise SwarmError(f"{' '.join(command)} failed: {text or f'exit status {done.returncode}'}{advice}")
    return text
