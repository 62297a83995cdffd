"""`swarm serve`: host experts that other peers call."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.identity import open_entry_identity
from swarm.cli.invite import contacts_of
from swarm.cli.render import Output, make_output
from swarm.cli.render.serve import ExpertLoad, Served, ServePresentation, ServerLoadShown
from swarm.cli.shutdown import Shutdown
from swarm.core.device import check_device_present, resolve_device
from swarm.core.errors import SwarmError, UsageError
from swarm.core.ids import Contact
from swarm.core.presets import Preset
from swarm.run.entering import enter
from swarm.run.events import Listening, Notice
from swarm.runtime.collector import keep_present_objects

if TYPE_CHECKING:
    import torch

    from moe.protocol.names import ExpertGrid, ExpertUid
    from moe.server.expert import Expert
    from moe.server.expert_server import ExpertServer
    from swarm.node import Node

_READ_TIMEOUT_S = 10.0
_LOAD_S = 0.5  # between two load events
_ABANDON_S = 60.0  # time to write many checkpoints to a slow disk; a second Ctrl-C ends the command at once
_LOAD_JSON_S = 2.0  # the same with --json
_EXPERTS_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeChoices:
    """The options of `swarm serve`."""

    addresses: tuple[str, ...]
    experts: tuple[str, ...]
    num_experts: int | None
    expert_class: str
    module: Path | None
    hidden_dim: int
    sequence_length: int
    optimizer: str
    lr: float
    clip_norm: float | None
    warmup_steps: int
    training_steps: int | None
    device: str
    dtype: str
    max_batch_size: int
    checkpoint: Path | None
    keep_activations_mb: int
    average_s: float
    identity: str | None
    listen: str | None
    announce: tuple[str, ...]
    relay_mbit: float
    preset: Preset
    as_json: bool
    exit_with_parent: bool

    @classmethod
    def of(cls, **options: Any) -> ServeChoices:
        """Return the options as click parsed them. Raise UsageError for all that can be checked at once."""
        choices = cls(**options)
        if choices.training_steps is not None and choices.training_steps <= choices.warmup_steps:
            raise UsageError(
                "--training-steps are counted from the start, so there are more of them than --warmup-steps"
            )
        if choices.num_experts is not None and len(choices.experts) > 1:
            raise UsageError("--num-experts picks places in one grid: give --experts once")
        if choices.listen_at() is None:
            raise UsageError("others call experts: --listen none leaves nobody who can")
        return choices

    def contacts(self) -> list[Contact]:
        return contacts_of(self.addresses)

    def listen_at(self) -> str | None:
        """Return where to listen; None: nowhere."""
        return options.listen_at(self.listen, self.announce, self.contacts())


@click.command(context_settings=options.CONTEXT)
@options.entries(required=False)
@click.option(
    "--experts",
    metavar="PATTERN",
    multiple=True,
    required=True,
    help="Names of the experts, as a pattern: 'ffn.[0:4].[0:4]', or one name.",
)
@click.option(
    "--num-experts",
    type=click.IntRange(1, 4096),
    default=None,
    help="Host this many only, in free places of the grid.",
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
    "tuple of its sample inputs; settings has hidden_dim and sequence_length.",
)
@click.option(
    "--hidden-dim", type=click.IntRange(1), default=1024, show_default=True, help="Width of the experts."
)
@click.option(
    "--sequence-length",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Length of the sequences, for experts that take sequences.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adam", "adamw", "sgd", "none"]),
    default="adam",
    show_default=True,
    help="none: frozen.",
)
@click.option("--lr", type=click.FloatRange(0), default=1e-3, show_default=True, help="Learning rate.")
@click.option(
    "--clip-norm",
    type=click.FloatRange(0, min_open=True),
    default=None,
    help="Scale gradients down to this norm.",
)
@click.option(
    "--warmup-steps",
    type=click.IntRange(0),
    default=0,
    help="Steps over which the learning rate rises to its full value.",
)
@click.option(
    "--training-steps",
    type=click.IntRange(1),
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
    "--max-batch-size",
    type=click.IntRange(1),
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
    type=click.IntRange(0),
    default=0,
    help="Keep activations for backward instead of recomputing them.",
)
@click.option(
    "--average-s",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds between averages with replicas on other servers; 0: never.",
)
@options.optional_identity
@options.listen
@options.announce
@options.relay_mbit(0.0)
@options.preset
@options.as_json
@options.exit_with_parent
def serve(**given: Any) -> int:
    """Host experts: layers that others call forward and backward, and that learn from it.

    Declares them in the swarm at ADDRESS, or creates a swarm of its own and prints its address. Experts that
    another server hosts, too, are replicas: their state is taken over at the start, callers use either, and
    their parameters are averaged. Ctrl-C finishes the requests that are being computed and withdraws the
    experts.

    \b
    Examples:
      swarm serve --expert-class ffn --hidden-dim 1024 --experts 'ffn.[0:4].[0:4]'
      swarm serve ADDRESS --experts 'ffn.[0:32].[0:32]' --num-experts 16 --checkpoint ~/experts
      swarm serve ADDRESS --experts 'block.[0:12]' --expert-class causal_transformer --device cuda
      swarm serve ADDRESS --experts 'mine.[0:8]' --module mine.py --expert-class make_mine --lr 3e-4
    """
    choices = ServeChoices.of(**given)
    return _serve(choices)


def _serve(choices: ServeChoices) -> int:
    from moe.protocol.names import ExpertGrid

    grids = [ExpertGrid.parse(text) for text in choices.experts]
    with (
        Shutdown(exit_with_parent=choices.exit_with_parent, abandon_s=_ABANDON_S) as shutdown,
        make_output(ServePresentation(), as_json=choices.as_json) as output,
    ):
        check_device_present(choices.device)  # before anything is opened or declared
        own = open_entry_identity(choices.identity, choices.addresses, "serve")
        try:
            from swarm.node import Node, NodeConfig
            from swarm.run.membership import follow_run

            config = NodeConfig(
                preset=choices.preset, announce=choices.announce, relay_mbit=choices.relay_mbit
            )
            with Node(
                bootstrap=choices.addresses, listen=choices.listen_at(), identity=own, config=config
            ) as node:
                output.emit(Listening(peer_id=str(node.peer_id), addresses=node.addresses, reach=node.reach))
                node.tell_reach(
                    lambda sentence: output.emit(Notice(text=_with_experts(sentence, node.reach)))
                )
                factory = _ExpertFactory(choices)  # imports torch; the node joins meanwhile
                keep_present_objects()
                if choices.addresses:
                    enter(node, choices.addresses)
                follow_run(node)
                names = _names(choices, grids, node)
                with _open_server(choices, node, names, factory) as server:
                    output.emit(_served_event(choices, node, server, factory))
                    if node.dht.clock_problem:
                        output.emit(Notice(text=node.dht.clock_problem))
                    _watch(server, shutdown, output, _LOAD_JSON_S if choices.as_json else _LOAD_S)
                    output.emit(Notice(text=f"leaving: {shutdown.reason}; finishing what is being computed"))
                    shutdown.begin_cleanup()
                output.emit(
                    Notice(
                        text="the experts were withdrawn"
                        + (f" and saved in {choices.checkpoint}" if choices.checkpoint else "")
                    )
                )
        finally:
            own.close()
    return 0


def _with_experts(sentence: str, reach: str) -> str:
    """Add to a sentence about how others reach this machine what follows for its experts."""
    if reach == "hidden":
        sentence += ". Its experts are not declared, because nobody could call them"
    return sentence


class _ExpertFactory:
    """Creates experts according to the options."""

    def __init__(self, choices: ServeChoices) -> None:
        import torch

        from moe.server.classes import ExpertSettings, expert_class

        self._choices = choices
        self._class = expert_class(choices.expert_class, choices.module)
        self._settings = ExpertSettings(
            hidden_dim=choices.hidden_dim, sequence_length=choices.sequence_length
        )
        self.device = resolve_device(choices.device)
        self.dtype: torch.dtype = getattr(torch, choices.dtype)

    def make(self, uid: ExpertUid) -> Expert:
        """Return a new expert of this name."""
        from moe.server.classes import make
        from moe.server.expert import Expert

        module, sample = make(self._choices.expert_class, self._class, self._settings, uid)
        return Expert(
            module.to(self.dtype),
            tuple(_cast(one, self.dtype) for one in sample),
            self._optimizer if self._choices.optimizer != "none" else None,
            schedule=self._schedule if self._choices.warmup_steps or self._choices.training_steps else None,
            clip_norm=self._choices.clip_norm,
            device=self.device,
            keep_activations_bytes=self._choices.keep_activations_mb << 20,
        )

    def _optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[
            self._choices.optimizer
        ]
        optimizer: torch.optim.Optimizer = kind(parameters, lr=self._choices.lr)
        return optimizer

    def _schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a schedule that rises over the warm-up and falls to zero at the last training step."""
        import torch

        warmup, last = self._choices.warmup_steps, self._choices.training_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 1.0 if last is None else max(0.0, (last - step) / (last - warmup))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _names(choices: ServeChoices, grids: list[ExpertGrid], node: Node) -> list[ExpertUid]:
    """Return the experts to host: all names of the patterns or, with --num-experts, free places of the grid.

    Free places with a checkpoint come first.
    """
    from moe.protocol.declarations import Directory
    from moe.server.free_places import choose_places, taken_places

    if choices.num_experts is None:
        names = sorted({uid for grid in grids for uid in grid.names()})
        if len(names) > _EXPERTS_MAX:
            raise UsageError(
                f"{len(names)} experts are too many for one server (at most {_EXPERTS_MAX}): "
                "choose some with --num-experts"
            )
        return names
    grid = grids[0]

    async def taken() -> set[ExpertUid]:
        return await taken_places(Directory(node.dht.service), grid, timeout_s=_READ_TIMEOUT_S)

    occupied = node.network.run(taken(), 2 * _READ_TIMEOUT_S)
    own = [uid for uid in _checkpointed(choices.checkpoint, grid) if uid not in occupied][
        : choices.num_experts
    ]
    rest = choose_places(grid, {*occupied, *own}, choices.num_experts - len(own), random.SystemRandom())
    return sorted([*own, *rest])


def _checkpointed(folder: Path | None, grid: ExpertGrid) -> list[ExpertUid]:
    from moe.server.checkpoints import saved_names

    return [uid for uid in saved_names(folder) if uid in grid] if folder is not None else []


def _open_server(
    choices: ServeChoices, node: Node, names: list[ExpertUid], factory: _ExpertFactory
) -> ExpertServer:
    from moe.server.expert_server import ExpertServer, ExpertServerConfig

    folder = choices.checkpoint.expanduser() if choices.checkpoint is not None else None
    config = ExpertServerConfig(checkpoints=folder, average_s=choices.average_s)
    return ExpertServer(
        node, {str(uid): factory.make(uid) for uid in names}, choices.max_batch_size, config=config
    )


def _served_event(choices: ServeChoices, node: Node, server: ExpertServer, factory: _ExpertFactory) -> Served:
    first, expert = next(iter(server.experts.items()))
    parameters = sum(parameter.numel() for parameter in expert.module.parameters())
    address = next(iter((*choices.addresses, *node.addresses)), "")
    inputs = ", ".join(
        f"torch.zeros({(4, *leaf.shape)}, dtype={leaf.dtype})".replace("((", "(").replace("),", ",")
        for leaf in expert.schema.input_leaves
    )
    return Served(
        experts=[str(uid) for uid in server.experts],
        resumed=server.resumed,
        expert_class=choices.expert_class,
        parameters=parameters,
        schema=str(expert.schema),
        device=str(factory.device),
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


def _watch(server: ExpertServer, shutdown: Shutdown, output: Output, every_s: float) -> None:
    """Emit the load until the command should end. Raise SwarmError if a device of the server failed."""
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


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _cast(value: Any, dtype: torch.dtype) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype.is_floating_point else value
    if isinstance(value, dict):
        return {key: _cast(one, dtype) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(one, dtype) for one in value)
    return value
