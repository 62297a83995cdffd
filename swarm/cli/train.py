"""`swarm start` and `swarm join`: from the command line to a training volunteer."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.cli.control import Control
from swarm.cli.identity import open_identity
from swarm.cli.paths import control_folder, default_identity, kept_runs, saved_states
from swarm.cli.render import make_output
from swarm.cli.render.output import Output
from swarm.cli.shutdown import Shutdown
from swarm.core.device import check_device_present
from swarm.core.errors import DeadlineExceeded, NetworkError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Contact
from swarm.metrics.record import NAME_CHARACTERS_MAX
from swarm.run.checkpoints import CheckpointConfig
from swarm.run.events import Event, Finished, Listening, Notice
from swarm.run.hours import Hours
from swarm.run.limits import VolunteerLimits, parse_duration_s, parse_size
from swarm.run.machine import choose_device
from swarm.run.specification import RunSpecification

if TYPE_CHECKING:
    from swarm.net.throttle import Bandwidth

_BYTES_PER_MBIT = 125_000.0
_LOOK_S = 0.5
_REFUSED_S = 1.5  # for the first peer to answer, when every address said at once that nobody is there
_ANSWER_S = 6.0  # when nothing was heard at all
_LOOPBACK = ("127.", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainChoices:
    """The options that both commands have."""

    bootstrap: tuple[str, ...]
    identity: str | None
    listen: str | None
    device: str
    data: Path | None
    as_json: bool
    exit_with_parent: bool
    checkpoint_every: str
    resume: bool
    upload: float | None  # Mbit/s
    download: float | None
    hours: tuple[str, ...]
    memory: str | None
    yes: bool = True
    name: str = ""

    @classmethod
    def of(cls, **options: Any) -> TrainChoices:
        """From click's values; checks at once what can be checked before anything is started."""
        choices = cls(**options)
        choices.contacts()
        choices.limits()
        parse_duration_s(choices.checkpoint_every)
        if len(choices.name) > NAME_CHARACTERS_MAX:
            raise UsageError(f"--name has at most {NAME_CHARACTERS_MAX} characters")
        if choices.data is not None and not choices.data.expanduser().is_dir():
            raise UsageError(f"--data {choices.data}: there is no such folder")
        return choices

    def bandwidth(self) -> Bandwidth:
        """What the node may use of its link, each way."""
        from swarm.net.throttle import Bandwidth

        up, down = (None if mbit is None else mbit * _BYTES_PER_MBIT for mbit in (self.upload, self.download))
        return Bandwidth(up_bytes_per_s=up, down_bytes_per_s=down)

    def limits(self) -> VolunteerLimits:
        """What the volunteer allows its machine to be used for; bandwidth is the node's business."""
        memory_bytes_max = parse_size(self.memory) if self.memory is not None else None
        return VolunteerLimits(hours=Hours.parse(self.hours), memory_bytes_max=memory_bytes_max)

    def saving(self, run_id: str) -> CheckpointConfig | None:
        """Whether and where checkpoints are kept."""
        every_s = parse_duration_s(self.checkpoint_every)
        return (
            CheckpointConfig(folder=saved_states() / run_id, every_s=every_s, resume=self.resume)
            if every_s or self.resume
            else None
        )

    def contacts(self) -> list[Contact]:
        return [Contact.parse(address) for address in self.bootstrap]

    def listen_at(self) -> str:
        """All interfaces, so that others can call; but beside a bootstrap on loopback only loopback can be
        meant.
        """
        if self.listen is not None:
            return self.listen
        hosts = [address.host for contact in self.contacts() for address in contact.addresses]
        return "127.0.0.1:0" if hosts and all(host.startswith(_LOOPBACK) for host in hosts) else "0.0.0.0:0"


def found_and_train(file: Path, choices: TrainChoices) -> int:
    """`swarm start`."""
    from swarm.run.task import make_task

    specification = RunSpecification.from_file(file)
    # so that its mistakes are told before anything starts
    make_task(specification.task.name, specification.task.settings)
    if specification.requirements.device == "cuda":
        # nothing is published that this machine cannot train itself
        choose_device(choices.device, specification)
    with _session(choices, default_identity()) as session:
        from swarm.run.creation import create_run

        if choices.bootstrap and not _answered(session.node):
            session.emit(
                Notice(
                    text=f"no bootstrap peer answers yet; going on alone and trying again: {_why(session.node)}"
                )
            )
        signed, founded = session.node.network.run(
            create_run(session.directory, specification, session.own, session.node.clock), 30.0
        )
        session.volunteer(signed, created=founded)
    return 0


def join_and_train(run: str | None, choices: TrainChoices) -> int:
    """`swarm join`."""
    if not choices.yes and (choices.as_json or not sys.stdin.isatty() or not sys.stdout.isatty()):
        raise UsageError("there is no terminal to ask on: pass --yes to train without being asked")
    with _session(choices, None) as session:
        if not _answered(session.node):
            if run is None or not session.node.network.run(session.directory.stored(run), 30.0):
                where = choices.bootstrap[0]
                raise NetworkError(
                    f"nobody answers at {where}: {_why(session.node)}. Ask for the address of another live peer"
                )
            text = "nobody answers yet; going on alone with the specification that this machine kept, and trying again"
            session.emit(Notice(text=f"{text}: {_why(session.node)}"))
        signed = session.node.network.run(session.directory.find(run), 30.0)
        session.volunteer(signed, created=False)
    return 0


class _Session:
    """A node, its directory and the output, for as long as the command runs."""

    def __init__(
        self,
        node: Any,
        own: Identity,
        output: Output,
        leaving: Shutdown,
        choices: TrainChoices,
        importing: threading.Thread,
    ) -> None:
        from swarm.run.directory import RunDirectory
        from swarm.run.specification_store import SpecificationStore

        self._importing = importing
        self.node, self.own, self.output, self.leaving, self.choices = node, own, output, leaving, choices
        self.directory = RunDirectory(
            node.dht.service, node.peer_id, clock=node.clock, store=SpecificationStore(kept_runs())
        )

    def emit(self, event: Event) -> None:
        """Show an event."""
        self.output.emit(event)
        if isinstance(event, Finished):
            self.leaving.tidy()

    def volunteer(self, signed: Any, *, founded: bool) -> None:
        """Say what it is about, ask, and train until the end."""
        from swarm.run.volunteer import Volunteer, VolunteerConfig

        control = Control(control_folder())
        config = VolunteerConfig(
            device=self.choices.device,
            data=self.choices.data,
            limits=self.choices.limits(),
            asked_to_pause=control.asked_to_pause,
            saving=self.choices.saving(signed.run_id),
        )
        volunteer = Volunteer(self.node, signed, self.directory, config, self.emit, self.leaving.requested)
        self.emit(volunteer.describe_run(created=founded))
        if self.node.dht.clock_problem:
            self.emit(Notice(text=self.node.dht.clock_problem))
        self._importing.join()
        device = volunteer.choose_device()
        if not self.choices.yes and not self.output.question(f"Train this on {device}?"):
            self.emit(Notice(text="nothing was trained"))
            return
        if not self.leaving.requested.is_set():
            with control.announced(signed.name, signed.run_id, str(self.node.peer_id), self.node.addresses):
                volunteer.train(device, new=founded, why=lambda: self.leaving.why)


@contextlib.contextmanager
def _session(choices: TrainChoices, identity: Path | None) -> Iterator[_Session]:
    with (
        Shutdown(exit_with_parent=choices.exit_with_parent) as leaving,
        make_output(as_json=choices.as_json) as output,
    ):
        check_device_present(choices.device)  # before anything is opened or published
        own = open_identity(choices.identity, identity)
        try:
            from swarm.node import Node, NodeConfig

            config = NodeConfig(name=choices.name, bandwidth=choices.bandwidth())
            with Node(
                bootstrap=choices.contacts(), listen=choices.listen_at(), identity=own, config=config
            ) as node:
                # torch takes seconds to import; the network finds its peers meanwhile
                importing = threading.Thread(target=_import_torch, name="imports torch", daemon=True)
                importing.start()
                output.emit(Listening(peer_id=str(node.peer_id), addresses=node.addresses))
                yield _Session(node, own, output, leaving, choices, importing)
        finally:
            own.close()


def _import_torch() -> None:
    """torch, and what torch's optimizers import when the first of them is made (its compiler, nearly as much
    again).
    """
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def _answered(node: Any) -> bool:
    """Whether a peer of the swarm answered; waits for as long as that is likely."""
    started_s = time.monotonic()
    while True:
        # On a busy machine the loading of torch's library can hold everything up for seconds, this wait
        # included.
        with contextlib.suppress(DeadlineExceeded):
            if node.wait_joined(_LOOK_S):
                return True
        waited_s = time.monotonic() - started_s
        if waited_s > (_REFUSED_S if node.join_failures else _ANSWER_S):
            return False


def _why(node: Any) -> str:
    failures: Sequence[str] = node.join_failures
    return "; ".join(failures) or "no answer in time"
