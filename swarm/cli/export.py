"""`swarm export`: write the model of a run, or the experts of a grid, to a file."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.admin import RunAddress, temporary_node
from swarm.cli.invite import stored_run
from swarm.cli.paths import checkpoints_folder
from swarm.cli.render import Presentation, make_output, print_result
from swarm.core.errors import UsageError
from swarm.core.home import user_path
from swarm.core.wording import size
from swarm.core.working import Update, working
from swarm.run.entering import find_run
from swarm.run.events import Notice

if TYPE_CHECKING:
    from averaging.optim.state.checkpoint import Checkpoint
    from moe.client.downloading import Progress
    from swarm.node import Node
    from swarm.run.directory import RunDirectory
    from swarm.run.signed import SignedSpecification


@click.command(context_settings=options.CONTEXT)
@click.argument("run", metavar="RUN|GRID")
@options.peers_of_run
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=None,
    help="The safetensors file to write, or the folder of the task causal-lm.",
)
@click.option(
    "--optimizer", is_flag=True, help="Add the optimizer's statistics as `optimizer.NAME.STATISTIC`."
)
@click.option(
    "--checkpoint",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="For a grid: write the whole state, for `swarm serve --checkpoint DIR`.",
)
@click.option(
    "--module",
    metavar="FILE.py",
    type=click.Path(path_type=Path),
    default=None,
    help="The owner's file of expert classes, if the grid needs one.",
)
@options.as_json
def export(**given: Any) -> int:
    """Write a run's model to a safetensors file for torch's load_state_dict.

    The model comes from the newest valid checkpoint on this machine or, with --from, from the run's peers.
    The task causal-lm writes a folder: a PEFT adapter, or a model for from_pretrained.

    For a grid of experts, grid.NAME, the parameters of all experts are downloaded from their servers, as
    EXPERT.TENSOR; --from is not needed where this machine has hosted it. If an expert has three or more
    replicas, three of them are compared. With --checkpoint the command writes the whole state, from which
    other servers can continue.

    \b
    Examples:
      swarm export bytelm -o bytelm.safetensors
      swarm export bytelm -o bytelm.safetensors --from /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm export grid.ffn -o ffn.safetensors
      swarm export grid.ffn --checkpoint ~/ffn --from ADDRESS
    """
    return _export(_Choices(**given))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """The options of `swarm export`."""

    run: str
    addresses: tuple[str, ...]
    output: Path | None
    optimizer: bool
    checkpoint: Path | None
    module: Path | None
    as_json: bool

    @property
    def output_of_run(self) -> Path:
        """Return the file for a run's model. Raise UsageError if an option is for grids only."""
        if self.output is None or self.checkpoint is not None or self.module is not None:
            raise UsageError(
                "a run's model is written with --output FILE only: --checkpoint and --module are for grids"
            )
        return user_path(self.output)


def _export(choices: _Choices) -> int:
    if choices.output is None and choices.checkpoint is None:
        raise UsageError(
            "no place to write to was given: pass --output FILE or, for a grid, --checkpoint DIR"
        )
    where = RunAddress(run=choices.run, addresses=choices.addresses)
    if not choices.addresses:
        signed = stored_run(choices.run)
        if not signed.is_grid:
            path = choices.output_of_run
            _export_run(signed, _newest_on_disk(signed), path, choices)
            return 0
        where = _remembered(signed)
    with temporary_node(where) as (node, directory):
        signed = find_run(node, directory, where.run)
        if signed.is_grid:
            _export_grid(node, signed, choices)
            return 0
        path = choices.output_of_run
        with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
            _export_run(signed, _download(node, directory, signed, Path(folder)), path, choices)
    return 0


def _export_run(signed: SignedSpecification, checkpoint: Checkpoint, path: Path, choices: _Choices) -> None:
    from swarm.run.exporting import export as write

    write(signed, checkpoint, path, optimizer=choices.optimizer)
    files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
    written = sum(one.stat().st_size for one in files)
    print_result(
        "exported",
        {"run": signed.full_name, "epoch": checkpoint.epoch, "path": str(path), "bytes": written},
        f"{signed.full_name}, epoch {checkpoint.epoch}: {size(written)} in {path}",
        as_json=choices.as_json,
    )


def _export_grid(node: Node, signed: SignedSpecification, choices: _Choices) -> None:
    from swarm.run.grid_entry import check_module
    from swarm.run.grid_experts import ExpertFactory
    from swarm.run.grid_export import checkpoint_grid, export_grid

    if choices.optimizer:
        raise UsageError(
            "--checkpoint DIR of a grid contains the optimizer's statistics already: leave --optimizer out"
        )
    check_module(signed, choices.module)
    factory = ExpertFactory(signed.grid, device="cpu", module=choices.module, keep_activations_bytes=0)
    with make_output(Presentation(), as_json=choices.as_json) as shown:
        for write, given in ((export_grid, choices.output), (checkpoint_grid, choices.checkpoint)):
            if given is None:
                continue
            path = user_path(given)
            with working("downloading experts") as update:
                found = write(node, signed, factory, path, _counted(update))
            for text in found.warnings:
                shown.emit(Notice(text=text))
            print_result(
                "exported",
                {
                    "run": signed.full_name,
                    "path": str(path),
                    "experts": found.experts,
                    "missing": found.missing,
                    "doubtful": found.doubtful,
                    "digest": found.digest,
                },
                f"{signed.full_name}: {len(found.experts)} experts in {path}",
                as_json=choices.as_json,
            )


def _counted(update: Update) -> Progress:
    """Return a callback that counts downloaded experts."""
    return lambda done, total, name: update(done, total)


def _remembered(signed: SignedSpecification) -> RunAddress:
    """Return how to reach a grid that this machine has hosted or called: its experts are at its servers.
    Raise UsageError if that needs an address or an invite.
    """
    from swarm.cli.finding import remembered_entry

    try:
        entry = remembered_entry(signed.full_name, None, None, role="observe")
    except UsageError as error:
        raise UsageError(f"{error}. Here it is passed with --from") from error
    return RunAddress(run=signed.run_id, addresses=entry.bootstrap, identity=entry.identity)


def _newest_on_disk(signed: SignedSpecification) -> Checkpoint:
    """Return the newest checkpoint of a run on this machine."""
    from swarm.run.exporting import newest_checkpoint

    return newest_checkpoint(checkpoints_folder() / signed.run_id, signed.full_name)


def _download(node: Node, directory: RunDirectory, signed: SignedSpecification, folder: Path) -> Checkpoint:
    """Download the current state of a run from its peers."""
    from swarm.run.exporting import read_checkpoint
    from swarm.run.volunteer import Volunteer
    from swarm.run.volunteer_config import VolunteerConfig

    volunteer = Volunteer(
        node, signed, directory, VolunteerConfig(device="cpu"), lambda event: None, threading.Event()
    )
    return read_checkpoint(volunteer.fetch_state(folder / "state.safetensors"))
