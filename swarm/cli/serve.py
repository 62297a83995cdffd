"""`swarm serve`: host experts that other peers call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.control import Control
from swarm.cli.invite import starting_invite
from swarm.cli.paths import control_folder, specifications_folder
from swarm.cli.render import Output, make_output
from swarm.cli.render.serve import ExpertLoad, Served, ServePresentation, ServerLoadShown
from swarm.cli.serve_choices import ServeChoices
from swarm.cli.shutdown import Shutdown
from swarm.core.device import check_device_present
from swarm.core.errors import SwarmError, UsageError
from swarm.core.home import user_path
from swarm.core.identity import Identity
from swarm.core.working import working
from swarm.membership.invite import is_invite
from swarm.run.entering import enter, find_run
from swarm.run.events import Event, Listening, Notice, RunChanged
from swarm.runtime.collector import keep_present_objects

if TYPE_CHECKING:
    import torch

    from moe.protocol.names import ExpertUid
    from moe.server.expert import Expert
    from moe.server.expert_server import ExpertServer
    from moe.server.logic.placement import Move
    from swarm.node import Node
    from swarm.run.grid import GridSpecification
    from swarm.run.signed import SignedSpecification

_READ_TIMEOUT_S = 10.0
_ABANDON_S = 60.0  # time to write many checkpoints to a slow disk; a second Ctrl-C ends the command at once
_CREATE_S_MAX = 60.0  # for reading and publishing a specification, including retries


@click.command(context_settings=options.CONTEXT)
@click.argument("addresses", metavar="[GRID.toml] [ADDRESS|INVITE|GRID]...", nargs=-1)
@click.option(
    "--grid",
    metavar="NAME",
    default=None,
    help="Which grid, if the swarm has several: NAME, NAME@ID or ID.",
)
@click.option(
    "--experts",
    metavar="PATTERN",
    multiple=True,
    help="Names of the experts, as a pattern: 'ffn.[0:4].[0:4]', or one name. [default: all of the grid]",
)
@click.option(
    "--num-experts",
    type=options.BoundedInteger(1, 4096),
    default=None,
    help="Host only this many experts, or stages of a pipeline: those that the grid needs most.",
)
@click.option(
    "--memory",
    type=options.SIZE,
    default=None,
    help="Host as many as fit into this much memory with parameters, gradients and optimizer: 4G.",
)
@click.option(
    "--expert-class",
    default="ffn",
    show_default=True,
    help="ffn, transformer, causal_transformer, nop, or one of your own.",
)
@click.option(
    "--module",
    metavar="FILE.py",
    type=click.Path(path_type=Path),
    default=None,
    help="Your own file; --expert-class is a function in it: def make(settings) returns a module and the "
    "tuple of its sample inputs; settings has hidden_dim and sequence_length. A module with the attribute "
    "sequence_dimension = 1 takes shorter sequences than its samples.",
)
@click.option(
    "--hidden-dim",
    type=options.BoundedInteger(1),
    default=1024,
    show_default=True,
    help="Width of the experts.",
)
@click.option(
    "--sequence-length",
    type=options.BoundedInteger(1),
    default=128,
    show_default=True,
    help="Largest length of the sequences, for experts that take sequences.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adam", "adamw", "sgd", "none"]),
    default="adam",
    show_default=True,
    help="Optimizer of the experts; none: their parameters are frozen.",
)
@click.option("--lr", type=options.BoundedNumber(0), default=1e-3, show_default=True, help="Learning rate.")
@click.option(
    "--clip-norm",
    type=options.BoundedNumber(0, min_open=True),
    default=None,
    help="Scale gradients with a larger norm down to this norm.",
)
@click.option(
    "--warmup-steps",
    type=options.BoundedInteger(0),
    default=0,
    help="Steps over which the learning rate rises to its full value.",
)
@click.option(
    "--training-steps",
    type=options.BoundedInteger(1),
    default=None,
    help="Step at which the learning rate has fallen to zero.",
)
@options.device
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the experts' parameters.",
)
@click.option(
    "--open-training",
    is_flag=True,
    help="Let peers without an invite also train the experts, in bounded steps, not only call them.",
)
@click.option(
    "--open", "is_open", is_flag=True, help="Everybody may call, train and host: for a network of your own."
)
@click.option(
    "--max-batch-size",
    type=options.BoundedInteger(1),
    default=4096,
    show_default=True,
    help="Samples in one batch, and in one request.",
)
@click.option(
    "--checkpoint",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="Resume from this folder and save to it.",
)
@click.option(
    "--keep-activations-mb",
    type=options.BoundedInteger(0),
    default=0,
    help="Keep up to this many MB of activations for backward passes, instead of computing them again.",
)
@click.option(
    "--compile",
    "is_compiled",
    is_flag=True,
    help="Compile the experts with torch.compile before they are served.",
)
@click.option(
    "--autocast",
    type=click.Choice(["bfloat16", "float16"]),
    help="Compute the experts under torch.autocast; their parameters keep their type.",
)
@click.option(
    "--average-s",
    type=options.BoundedNumber(0),
    default=60.0,
    show_default=True,
    help="Seconds between averages with replicas on other servers; 0: never.",
)
@options.server_identity
@options.listen_behind_relays
@options.announce
@options.relay_mbit(0.0)
@options.preset
@options.as_json
@options.exit_with_parent
@click.pass_context
def serve(context: click.Context, /, **given: Any) -> int:
    """Host experts: layers that other peers call forward and backward, and that learn from these calls.

    GRID.toml, or --experts with the options for its experts, creates a grid: its signed specification says
    what every server of it hosts. In a swarm that has a grid, ADDRESS is enough, and the name of a GRID that
    this machine has hosted; an option that contradicts the grid is refused. Without them a new swarm begins.
    Peers train and host experts with an invite, which this command prints; without one they may only call
    them. Experts that several servers host are replicas: a server that joins takes over their state, callers
    use any of them, and their parameters are averaged. Ctrl-C finishes the requests that are being computed
    and withdraws the experts.

    \b
    Examples:
      swarm serve --expert-class ffn --hidden-dim 1024 --experts 'ffn.[0:4].[0:4]'
      swarm serve ADDRESS
      swarm serve ADDRESS --memory 4G --checkpoint ~/experts
      swarm serve examples/grid.toml --listen 0.0.0.0:4000
      swarm serve swarm1... --experts 'block.[0:6]' --device cuda
      swarm serve ADDRESS --experts 'mine.[0:8]' --module mine.py --expert-class make_mine --lr 3e-4
    """
    return _serve(ServeChoices.of(context))


def _serve(choices: ServeChoices) -> int:
    offered = choices.offered()
    with (
        Shutdown(exit_with_parent=choices.exit_with_parent, abandon_s=_ABANDON_S) as shutdown,
        make_output(ServePresentation(), as_json=choices.as_json) as output,
    ):
        check_device_present(choices.device)  # check this before anything is opened or declared
        own = choices.open_identity()
        try:
            # imports torch, which takes seconds; the node listens already, and tells callers that experts are
            # not ready yet
            from moe.server.hosting import HostingService
            from swarm.node import Node, NodeConfig

            config = NodeConfig(
                preset=choices.preset, announce=choices.announce, relay_mbit=choices.relay_mbit
            )
            entries = [*_own_invite(choices, own, offered), *choices.addresses]
            listen = choices.listen_at(own.peer_id)
            with Node(bootstrap=entries, listen=listen, identity=own, config=config) as node:
                node.service(HostingService).expect()
                invite = node.entry if node.membership is not None else ""
                output.emit(
                    Listening(
                        peer_id=str(node.peer_id), addresses=node.addresses, invite=invite, reach=node.reach
                    )
                )
                node.tell_reach(
                    lambda sentence: output.emit(Notice(text=_with_experts(sentence, node.reach)))
                )
                if offered is not None:
                    choices.factory(offered)  # check the factory before the grid is published
                if choices.addresses:
                    enter(node, choices.addresses)
                signed, created = _enter_grid(choices, node, own, offered)
                _follow_grid(node, signed, shutdown, output)
                keep_present_objects()
                if node.dht.clock_problem:
                    output.emit(Notice(text=node.dht.clock_problem))
                with Control(control_folder()).announced(
                    signed.name, signed.run_id, str(node.peer_id), node.addresses, trains=False
                ):
                    _Hosting(choices, signed, node, shutdown, output).run(created)
        finally:
            own.close()
    return 0


def _own_invite(choices: ServeChoices, own: Identity, offered: GridSpecification | None) -> list[str]:
    """Return the invite with which this server enters an invited grid that it creates or owns; None for
    another grid.
    """
    if offered is None or offered.members != "invited":
        return []
    if any(map(is_invite, choices.addresses)):
        return []  # the grid is that of the invite, with which a file must agree
    if choices.file is None and choices.addresses and _is_of_another_owner(choices, own, offered):
        return []
    return [starting_invite(own, offered).text()]


def _is_of_another_owner(choices: ServeChoices, own: Identity, offered: GridSpecification) -> bool:
    """Return whether the swarm has a grid of the offered name with another owner."""
    from swarm.node import Node
    from swarm.run.directory import RunDirectory
    from swarm.run.signed import run_id_of

    with Node(bootstrap=choices.addresses, listen=None) as node:
        enter(node, choices.addresses)
        directory = RunDirectory(node.dht.service, clock=node.clock)
        listed = node.network.run(directory.listings(), _CREATE_S_MAX)
    mine = run_id_of(own.peer_id, offered.name, offered.recovery_peer)
    return any(one.name == offered.name for one in listed) and all(one.run_id != mine for one in listed)


def _enter_grid(
    choices: ServeChoices, node: Node, own: Identity, offered: GridSpecification | None
) -> tuple[SignedSpecification, bool]:
    """Return the grid to host, and whether this command has created it. Raise UsageError when the swarm has
    none, or one that this command's options contradict.
    """
    from swarm.run.creation import create_run
    from swarm.run.directory import RunDirectory
    from swarm.run.grid_entry import check_agrees, check_module, create_or_enter
    from swarm.run.membership import check_invited, save_capability
    from swarm.run.specification_store import SpecificationStore

    store = SpecificationStore(specifications_folder())
    directory = RunDirectory(node.dht.service, clock=node.clock, store=store)
    created = False
    if offered is not None and choices.grid is None:
        given = choices.given_keys(offered)
        entering = (
            create_or_enter(directory, offered, given, own, node.clock, membership=node.membership)
            if choices.addresses
            else create_run(directory, offered, own, node.clock)
        )
        signed, created = node.network.run(entering, _CREATE_S_MAX)
    else:
        signed = find_run(node, directory, choices.grid, grid=True)
        described = offered or choices.described(choices.experts or signed.grid.experts)
        check_agrees(signed, described, choices.given_keys(described))
    check_module(signed, choices.module)
    if signed.specification.ended:
        raise UsageError(f"{signed.full_name} is over: its owner has ended it")
    if signed.specification.members == "invited":
        check_invited(signed, node.membership)
    _let_guests_in(node, signed)
    if node.membership is not None and own.path is not None:
        save_capability(specifications_folder(), node.membership)
    node.network.run(directory.save(signed), _READ_TIMEOUT_S)
    node.book.keep_at(store.peers_file(signed.run_id))
    return signed, created


def _let_guests_in(node: Node, signed: SignedSpecification) -> None:
    """Allow peers without an invite what the grid's specification permits."""
    if node.membership is not None and node.membership.run_id == signed.run_id:
        node.membership.guests = signed.grid.guests


def _follow_grid(node: Node, signed: SignedSpecification, shutdown: Shutdown, output: Output) -> None:
    """Follow the grid, and the run to which the node was invited, in the background."""
    from swarm.run.changes import differences, restart_needed
    from swarm.run.membership import follow_run

    latest = [signed]

    def follow(newer: SignedSpecification) -> None:
        if newer.run_id != signed.run_id or newer.version <= latest[0].version:
            return
        old, latest[0] = latest[0], newer
        _let_guests_in(node, newer)
        restart = restart_needed(old.specification, newer.specification)
        output.emit(RunChanged(version=newer.version, changes=differences(old, newer), restart=restart))
        if newer.specification.ended:
            shutdown.request("the owner has ended the grid")

    follow_run(node, signed, follow)


def _with_experts(sentence: str, reach: str) -> str:
    """Extend a sentence about how others reach this machine with the consequence for its experts."""
    if reach in ("hidden", "none"):
        sentence += ". Its experts are not declared, because nobody could call them"
    return sentence


class _Hosting:
    """Hosts experts of a grid until the command should end."""

    def __init__(
        self,
        choices: ServeChoices,
        signed: SignedSpecification,
        node: Node,
        shutdown: Shutdown,
        output: Output,
    ) -> None:
        self._choices, self._signed, self._node = choices, signed, node
        self._shutdown, self._output = shutdown, output

    def run(self, created: bool) -> None:
        """Host the experts, and move to others if the grid needs them. `created`: this command created the
        grid.
        """
        factory = self._choices.factory(self._signed.grid)
        placing = self._choices.placing(self._signed.grid, self._node, factory)
        with working("making the experts"):
            experts = factory.make_all(placing.first())
        move: Move | None = None
        while True:
            with working("opening the experts"):
                opened = self._open_server(experts)
            with opened as server:
                if move is None:
                    self._emit(_served_event(self._signed, created, self._node, server, factory.device))
                move = watch(
                    server, self._shutdown, self._output, self._choices.load_interval_s, placing.next_move
                )
                if move is None:
                    self._say(f"leaving: {self._shutdown.reason}; finishing what is being computed")
                    self._shutdown.begin_cleanup()
            if move is None:
                break
            self._say(f"moving: {move.target} needs a server more than {move.source} does")
            del experts[move.source]
            experts[move.target] = factory.make(move.target)
        folder = self._choices.checkpoint
        self._say("the experts were withdrawn" + (f" and saved in {folder}" if folder else ""))

    def _open_server(self, experts: Mapping[ExpertUid, Expert]) -> ExpertServer:
        from moe.server.expert_server import ExpertServer, ExpertServerConfig

        folder = self._choices.checkpoint
        config = ExpertServerConfig(
            checkpoints=user_path(folder) if folder is not None else None,
            average_s=self._signed.grid.average_s,
        )
        named = {str(uid): expert for uid, expert in experts.items()}
        return ExpertServer(self._node, named, self._choices.max_batch_size, config=config)

    def _emit(self, event: Event) -> None:
        self._output.emit(event)

    def _say(self, text: str) -> None:
        self._output.emit(Notice(text=text))


def _served_event(
    signed: SignedSpecification, created: bool, node: Node, server: ExpertServer, device: torch.device
) -> Served:
    first, expert = next(iter(server.experts.items()))
    parameters = sum(parameter.numel() for parameter in expert.module.parameters())
    address = node.entry or next(iter(node.entries), "")  # without an invite for others, they may only call
    inputs = ", ".join(
        f"torch.zeros({(4, *leaf.shape)}, dtype={leaf.dtype})".replace("((", "(").replace("),", ",")
        for leaf in expert.schema.input_leaves
    )
    return Served(
        experts=[str(uid) for uid in server.experts],
        resumed=server.resumed,
        grid=signed.full_name,
        created=created,
        expert_class=signed.grid.expert_class,
        parameters=parameters,
        schema=str(expert.schema),
        device=str(device),
        address=address,
        snippet="\n".join(
            (
                "import swarm, torch",
                f'node = swarm.Node(bootstrap=["{address}"])',
                f'expert = swarm.RemoteExpert(node, "{first}")',
                f"y = expert({inputs})",
            )
        ),
    )


def watch(
    server: ExpertServer,
    shutdown: Shutdown,
    output: Output,
    every_s: float,
    next_move: Callable[[], Move | None],
) -> Move | None:
    """Emit the load until the command should end or its server should move. Return the move. Raise SwarmError
    if a device of the server failed.
    """
    before, before_s = server.statistics(), time.monotonic()
    while not shutdown.requested.wait(every_s):
        if server.failed is not None:
            raise SwarmError(f"{server.failed}; its experts were withdrawn: start `swarm serve` again")
        now, now_s = server.statistics(), time.monotonic()
        rows = []
        for name, one in now.experts.items():
            old = before.experts[name].counts
            rows.append(
                ExpertLoad(
                    name=name,
                    version=one.version,
                    forward_samples=one.counts.forward_samples,
                    backward_samples=one.counts.backward_samples,
                    samples_per_s=(
                        one.counts.forward_samples
                        + one.counts.backward_samples
                        - old.forward_samples
                        - old.backward_samples
                    )
                    / (now_s - before_s),
                    requests_per_batch=_ratio(
                        one.counts.forward_requests + one.counts.backward_requests,
                        one.counts.forward_batches + one.counts.backward_batches,
                    ),
                    busy=(one.counts.busy_s - old.busy_s) / (now_s - before_s),
                    refused=sum(one.refusals.values()),
                    failed=one.counts.failed_requests,
                )
            )
        output.emit(ServerLoadShown(queued=now.queued, wait_s=now.wait_s, experts=rows))
        before, before_s = now, now_s
        if move := next_move():
            return move
    return None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
