"""`swarm start` and `swarm join`: train a run as a volunteer."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.control import Control
from swarm.cli.identity import open_entry_identity, open_identity
from swarm.cli.invite import contacts_of, starting_invite
from swarm.cli.paths import (
    checkpoints_folder,
    contributions_file,
    control_folder,
    default_identity,
    preferences_file,
    specifications_folder,
)
from swarm.cli.preferences import given_preferences, preference_options
from swarm.cli.render import Output, make_output
from swarm.cli.render.volunteer import VolunteerPresentation
from swarm.cli.shutdown import Shutdown
from swarm.core.device import check_device_present
from swarm.core.errors import UsageError
from swarm.core.home import user_path
from swarm.core.identity import Identity
from swarm.core.ids import Contact, PeerId
from swarm.core.presets import Preset
from swarm.core.working import working
from swarm.run.contributions import ContributionLog
from swarm.run.entering import find_run, refusal, unanswered, wait_for_answer
from swarm.run.events import Event, Finished, Listening, Notice
from swarm.run.limits import VolunteerLimits, parse_duration_s
from swarm.run.preferences import LivePreferences, Preferences, PreferencesFile
from swarm.run.rank_volunteers import LeadingRanks, follow, following_place, leading
from swarm.runtime.collector import keep_present_objects

if TYPE_CHECKING:
    from swarm.cli.finding import RunEntry
    from swarm.node import Node
    from swarm.run.checkpoints import CheckpointConfig
    from swarm.run.signed import SignedSpecification
    from swarm.run.specification import RunSpecification

_CREATE_S_MAX = 60.0  # for reading and publishing a specification, including retries

_from_scratch = click.option(
    "--from-scratch",
    is_flag=True,
    help="If no peer has a state, begin from the initial parameters, not from this machine's checkpoint.",
)
_no_lan = click.option(
    "--no-lan",
    is_flag=True,
    help="Do not tell others on the local network (mDNS) which run this machine trains.",
)


def _training_options(
    checkpoint_every: str,
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Add the options of both commands. `checkpoint_every` is the default of --checkpoint-every."""
    checkpoints = click.option(
        "--checkpoint-every",
        type=options.TIME,
        default=checkpoint_every,
        show_default=True,
        help="How often to save the state: 90s, 10m, 2h; 0 for never.",
    )
    shared = (
        checkpoints,
        _from_scratch,
        preference_options,
        options.listen,
        options.announce,
        options.relay_mbit(0.0),
        options.preset,
        options.device,
        options.data,
        _no_lan,
        options.libp2p_bootstrap,
        options.as_json,
        options.exit_with_parent,
    )

    def add(command: Callable[..., object]) -> Callable[..., object]:
        for option in reversed(shared):
            command = option(command)
        return command

    return add


@click.command(context_settings=options.CONTEXT)
@click.argument("file", metavar="RUN.toml", type=click.Path(path_type=Path))
@click.option(
    "--bootstrap",
    metavar="ADDRESS",
    multiple=True,
    help="A peer of an existing swarm. Repeatable.",
)
@click.option(
    "--identity",
    metavar="FILE",
    default=None,
    help="The owner's identity; `new`: a new one that is not kept. [default: this user's]",
)
@click.option(
    "--recovery-key",
    metavar="PEERID",
    default=None,
    help="An identity kept offline that can give the run a new owner: its PeerID, or its file.",
)
@_training_options(checkpoint_every="10m")
def start(file: Path, recovery_key: str | None, **given: Any) -> int:
    """Create a run and train as its first volunteer.

    The command publishes the run's signed specification and prints the line with which others join. Started
    again with the same file and identity while others still train, it joins them; with a changed file, it
    publishes the change. If everybody has left, it continues from this machine's newest checkpoint.

    \b
    Examples:
      swarm start examples/bytelm.toml
      swarm start examples/bytelm.toml --listen 0.0.0.0:4000
      swarm start examples/bytelm.toml --from-scratch
      swarm start examples/bytelm.toml --recovery-key 12D3KooW...
      swarm start RUN.toml --bootstrap /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
    """
    if (place := following_place()) is not None:
        return follow(place)
    from swarm.run.machine import choose_device
    from swarm.run.recovery import recovery_key_of
    from swarm.run.specification import RunSpecification

    choices = TrainChoices.of(**given)
    specification = RunSpecification.from_file(file)
    if recovery_key is not None:
        specification = specification.model_copy(update={"recovery_key": recovery_key_of(recovery_key)})
    try:
        specification = _with_package(specification)
    except UsageError as error:
        raise UsageError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from error
    if specification.requirements.device == "cuda":
        # Do not publish a run that this machine cannot train.
        choose_device(choices.device, specification)
    invited_to = specification if specification.members == "invited" else None
    with _session(choices, default_identity(), invited_to) as session:
        from swarm.run.creation import create_run

        if choices.bootstrap and not wait_for_answer(session.node):
            why = unanswered(session.node)
            session.emit(
                Notice(text=f"no bootstrap peer answers yet; training alone and trying again: {why}")
            )
        with working("publishing the run"):
            signed, created = session.node.network.run(
                create_run(session.directory, specification, session.own, session.node.clock), _CREATE_S_MAX
            )
        session.train(signed, created=created)
    return 0


def _with_package(specification: RunSpecification) -> RunSpecification:
    """Return the specification with the package that provides its task, so that a volunteer without it is
    told what to install. Raise UsageError if the task is not installed or refuses its settings.
    """
    from swarm.run.task import installed_package, make_task

    chosen = specification.task
    make_task(chosen.name, chosen.settings, chosen.package)
    package = chosen.package or installed_package(chosen.name)
    return specification.model_copy(update={"task": chosen.model_copy(update={"package": package})})


@click.command(context_settings=options.CONTEXT)
@click.argument("addresses", metavar="[ADDRESS|INVITE|RUN]...", nargs=-1)
@options.run_name
@options.optional_identity
@click.option("--yes", "-y", is_flag=True, help="Do not ask before training begins.")
@_training_options(checkpoint_every="0")
def join(addresses: tuple[str, ...], run: str | None, **given: Any) -> int:
    """Volunteer for the run at ADDRESS: the address of a live peer or, for a run of invited peers, an INVITE.
    Several are tried at once.

    The name RUN is enough if this machine has taken part in the run, because it remembers peers of it. With
    --libp2p-bootstrap, any run is found by its name in libp2p's DHT. Without arguments, the command lists the
    runs on the local network and joins the only one, or asks which one to join.

    The command shows what will be trained, the memory and the expected traffic, and asks for consent. Then it
    downloads the current state and trains until Ctrl-C. A volunteer that entered by an invite keeps its
    identity for the next time.

    \b
    Examples:
      swarm join /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm join swarm1... --yes
      swarm join bytelm
      swarm join
      swarm join bytelm --libp2p-bootstrap /ip4/203.0.113.9/tcp/4001/p2p/12D3KooW...
      swarm join ADDRESS --run bytelm --yes
      swarm join ADDRESS --device cuda:1 --data ~/texts
      swarm join ADDRESS --upload 20 --download 50 --hours 22-7 --memory 4G
      swarm join ADDRESS --when-idle --daily 5G
    """
    if (place := following_place()) is not None:
        return follow(place)
    from swarm.cli.finding import given_entry, nearby_entry, nearby_runs

    choices = TrainChoices.of(bootstrap=(), **given)
    entry = given_entry(addresses, run, choices.identity, choices.rendezvous(), role="train")
    may_ask = sys.stdin.isatty() and sys.stdout.isatty() and not choices.as_json
    if entry is None:
        with make_output(VolunteerPresentation(), as_json=choices.as_json) as output:
            if choices.as_json and not choices.yes:
                nearby_runs(output, run)
                return 0
            _check_asked(choices, may_ask=may_ask)
            entry = nearby_entry(output, run, choices.identity)
    choices = replace(choices, bootstrap=entry.bootstrap, identity=entry.identity)
    choices.contacts()  # reports a wrong address
    _check_asked(choices, may_ask=may_ask)
    with _session(choices, None) as session:
        signed = _find_run(session, entry)
        if session.train(signed, created=False) and not signed.training.ended:
            session.emit(Notice(text=f"join it again with: swarm join {signed.name}"))
    return 0


def _check_asked(choices: TrainChoices, *, may_ask: bool) -> None:
    if not choices.yes and not may_ask:
        raise UsageError("there is no terminal to ask on: pass --yes to train without being asked")


def _find_run(session: _Session, entry: RunEntry) -> SignedSpecification:
    """Return the run to join, from the swarm or, if no peer answers, from the copy on this machine."""
    if not wait_for_answer(session.node):
        why = unanswered(session.node)
        known = entry.run is not None and session.node.network.run(session.directory.stored(entry.run), 30.0)
        if session.node.not_invited or not known:
            raise refusal(session.node, entry.bootstrap)
        text = (
            "no peer answers yet; training alone with the specification stored on this machine, and "
            f"trying again: {why}"
        )
        session.emit(Notice(text=text))
    return find_run(session.node, session.directory, entry.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainChoices:
    """The options of `swarm start` and `swarm join`."""

    bootstrap: tuple[str, ...]
    identity: str | None
    listen: str | None
    announce: tuple[str, ...]
    relay_mbit: float
    device: str
    data: Path | None
    as_json: bool
    exit_with_parent: bool
    checkpoint_every: str
    from_scratch: bool
    preferences: Preferences
    yes: bool = True
    no_lan: bool = False
    libp2p_bootstrap: tuple[str, ...] = ()  # multiaddrs
    preset: Preset = "wan"

    @classmethod
    def of(cls, **options: Any) -> TrainChoices:
        """Return the options as click parsed them. Raise UsageError for all that can be checked at once."""
        choices = cls(preferences=given_preferences(options), **options)
        choices.listen_at()
        choices.rendezvous()
        PreferencesFile(preferences_file()).read()
        # Path.is_dir raises OSError for a name that is too long
        if choices.data is not None and not os.path.isdir(user_path(choices.data)):
            raise UsageError(f"--data {choices.data}: there is no such folder")
        return choices

    def checkpoints(self, run_id: str) -> CheckpointConfig:
        """Return where checkpoints are read and written, and how often they are written."""
        from swarm.run.checkpoints import CheckpointConfig

        every_s = parse_duration_s(self.checkpoint_every)
        return CheckpointConfig(
            folder=checkpoints_folder() / run_id, every_s=every_s, from_scratch=self.from_scratch
        )

    def rendezvous(self) -> list[Contact]:
        """Return the addresses of libp2p DHT servers."""
        return [Contact.parse(text) for text in self.libp2p_bootstrap]

    def contacts(self) -> list[Contact]:
        return contacts_of(self.bootstrap)

    def listen_at(self, own: PeerId | None = None) -> str | None:
        """Return where to listen, by default at the port of this identity; None: nowhere."""
        return options.listen_at(self.listen, self.announce, self.contacts(), own)


class _Session:
    """The node, the run directory and the output of a command that trains."""

    def __init__(
        self,
        node: Node,
        own: Identity,
        output: Output,
        shutdown: Shutdown,
        choices: TrainChoices,
        importing: threading.Thread,
    ) -> None:
        from swarm.run.directory import RunDirectory
        from swarm.run.specification_store import SpecificationStore

        self._importing = importing
        self.node, self.own, self.output = node, own, output
        self.shutdown, self.choices = shutdown, choices
        self._store = SpecificationStore(specifications_folder())
        self.directory = RunDirectory(node.dht.service, clock=node.clock, store=self._store)

    def emit(self, event: Event) -> None:
        """Show an event. After the last one the command only cleans up."""
        self.output.emit(event)
        if isinstance(event, Finished):
            self.shutdown.begin_cleanup()

    def train(self, signed: SignedSpecification, *, created: bool) -> bool:
        """Describe the run, ask the user, and train until the end, with the other processes of this peer if
        torchrun has started some. Return False if the user did not agree, or stopped it before.
        """
        with leading(self.choices.data) as ranks:
            return self._train(signed, ranks, created=created)

    def _train(self, signed: SignedSpecification, ranks: LeadingRanks | None, *, created: bool) -> bool:
        from swarm.cli.finding import announce_by_name, announce_nearby
        from swarm.run.machine import asking
        from swarm.run.machine_use import MachineProbes
        from swarm.run.membership import check_invited, save_capability
        from swarm.run.volunteer import Volunteer
        from swarm.run.volunteer_config import VolunteerConfig

        check_invited(signed, self.node.membership)
        control = Control(control_folder())
        preferences = LivePreferences(
            PreferencesFile(preferences_file()), signed.name, self.choices.preferences
        )
        self.node.set_bandwidth(preferences.now.bandwidth())

        def limits() -> VolunteerLimits:
            if changes := preferences.changed():
                self.node.set_bandwidth(preferences.now.bandwidth())
                self.emit(Notice(text=f"preferences changed: {changes}"))
            return preferences.now.limits()

        config = VolunteerConfig(
            device=self.choices.device,
            data=self.choices.data,
            limits=limits,
            asked_to_pause=control.asked_to_pause,
            checkpoints=self.choices.checkpoints(signed.run_id),
            probes=lambda device: MachineProbes(device, control.processes),
            log=ContributionLog(contributions_file()),
            ranks=ranks,
        )
        volunteer = Volunteer(self.node, signed, self.directory, config, self.emit, self.shutdown.requested)
        with working("asking how many train this run"):
            found = volunteer.describe_run(created=created)
        self.emit(found)
        if self.node.dht.clock_problem:
            self.emit(Notice(text=self.node.dht.clock_problem))
        with working("loading torch"):
            self._importing.join()
        device = volunteer.choose_device()
        with asking():
            agreed = self.choices.yes or self.output.ask(f"Train this on {device}?")
        if not agreed or self.shutdown.requested.is_set():
            self.emit(Notice(text="nothing was trained"))
            return False
        if self.node.membership is not None and self.own.path is not None:
            save_capability(specifications_folder(), self.node.membership)
        self.node.book.keep_at(self._store.peers_file(signed.run_id))
        if not self.choices.no_lan and self.choices.preset != "local":
            announce_nearby(self.node, signed)
        if servers := self.choices.rendezvous():
            announce_by_name(self.node, signed, servers, self.emit)
        with control.announced(signed.name, signed.run_id, str(self.node.peer_id), self.node.entries):
            volunteer.train(device, new=created, why=lambda: self.shutdown.reason)
        return True


@contextlib.contextmanager
def _session(
    choices: TrainChoices, identity: Path | None, invited_to: RunSpecification | None = None
) -> Iterator[_Session]:
    """Open the node. `identity`: the default identity file of an owner; None: the command joins a run.
    `invited_to`: an invited run that this identity owns. Raises `click.Abort` if Ctrl-C comes before the node
    is open.
    """
    is_open = False
    with (
        Shutdown(exit_with_parent=choices.exit_with_parent) as shutdown,
        make_output(VolunteerPresentation(), as_json=choices.as_json) as output,
    ):
        check_device_present(choices.device)  # check this before anything is opened or published
        own = (
            open_identity(choices.identity, identity)
            if identity is not None
            else open_entry_identity(choices.identity, choices.bootstrap, "train")
        )
        try:
            from swarm.node import Node, NodeConfig

            file = PreferencesFile(preferences_file())
            preferences = choices.preferences.over(file.read()[0])
            config = NodeConfig(
                preset=choices.preset,
                name=preferences.name or "",
                bandwidth=preferences.bandwidth(),
                announce=choices.announce,
                relay_mbit=choices.relay_mbit,
            )
            entries = [starting_invite(own, invited_to).text()] if invited_to is not None else []
            entries += choices.bootstrap
            listen = choices.listen_at(own.peer_id)
            with Node(bootstrap=entries, listen=listen, identity=own, config=config) as node:
                # The import of torch takes seconds; the node joins meanwhile.
                importing = threading.Thread(target=_import_torch, name="imports torch", daemon=True)
                importing.start()
                output.emit(
                    Listening(
                        peer_id=str(node.peer_id),
                        addresses=node.addresses,
                        invite=node.entry if node.membership is not None else "",
                        reach=node.reach,
                    )
                )
                node.tell_reach(lambda sentence: output.emit(Notice(text=sentence)))
                is_open = True
                yield _Session(node, own, output, shutdown, choices, importing)
        finally:
            own.close()
    if not is_open:  # `Shutdown` has ended the KeyboardInterrupt
        raise click.Abort


def _import_torch() -> None:
    """Import torch, and its compiler, which the first optimizer imports and which takes nearly as long."""
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    keep_present_objects()
