"""The options of `swarm serve`, and the grid of experts that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moe.protocol.names import ExpertGrid
from swarm.cli import options
from swarm.cli.finding import is_run_name, remembered_entry
from swarm.cli.identity import open_entry_identity, open_identity
from swarm.cli.invite import contacts_of
from swarm.cli.paths import default_identity
from swarm.core.errors import UsageError
from swarm.core.home import user_path
from swarm.core.identity import Identity
from swarm.core.ids import Contact, PeerId
from swarm.core.presets import Preset
from swarm.core.wording import size
from swarm.membership.invite import is_invite
from swarm.run.grid import GridSpecification
from swarm.run.grid_entry import module_hash
from swarm.run.limits import parse_size

if TYPE_CHECKING:
    from swarm.node import Node
    from swarm.run.grid_experts import ExpertFactory
    from swarm.run.placing import Placing

# Options that are settings of the grid -> key of the specification.
_GRID_OPTIONS = {
    "experts": "experts",
    "expert_class": "expert_class",
    "module": "module",
    "hidden_dim": "hidden_dim",
    "sequence_length": "sequence_length",
    "dtype": "dtype",
    "average_s": "average_s",
    "optimizer": "optimizer.name",
    "lr": "optimizer.learning_rate",
    "clip_norm": "optimizer.clip_norm",
    "warmup_steps": "optimizer.warmup_steps",
    "training_steps": "optimizer.training_steps",
    "open_training": "guests",
    "is_open": "members",
}
_LOAD_S = 0.5  # between two load events
_LOAD_JSON_S = 2.0  # the same with --json
_WITH_A_FILE = {"experts", "module"}  # those of these options that may be combined with a grid's file


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeChoices:
    """The options of `swarm serve`."""

    given: frozenset[str]  # the options in `_GRID_OPTIONS` that the user has set
    file: Path | None  # the grid file
    addresses: tuple[str, ...]
    grid: str | None
    experts: tuple[str, ...]
    num_experts: int | None
    memory: str | None
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
    open_training: bool
    is_open: bool
    max_batch_size: int
    checkpoint: Path | None
    keep_activations_mb: int
    is_compiled: bool
    autocast: str | None
    average_s: float
    identity: str | None
    listen: str | None
    announce: tuple[str, ...]
    relay_mbit: float
    preset: Preset
    as_json: bool
    exit_with_parent: bool

    @classmethod
    def of(cls, context: click.Context) -> ServeChoices:
        """Return the options as click parsed them. Raise UsageError for all that can be checked at once."""
        options = dict(context.params)
        entries = options.pop("addresses")
        files = [one for one in entries if one.endswith(".toml")]
        entries = tuple(one for one in entries if one not in files)
        if len(entries) == 1 and is_run_name(entries[0]):
            entry = remembered_entry(entries[0], options["grid"], options["identity"], role="serve")
            entries = entry.bootstrap
            options |= {"grid": entry.run, "identity": entry.identity}
        written = click.core.ParameterSource.COMMANDLINE
        choices = cls(
            given=frozenset(name for name in _GRID_OPTIONS if context.get_parameter_source(name) is written),
            file=user_path(files[0]) if files else None,
            addresses=entries,
            **options,
        )
        choices._check(len(files))
        return choices

    def _check(self, files: int) -> None:
        if files > 1:
            raise UsageError("a server hosts the experts of one grid: give one file")
        if not files and not self.experts and not self.addresses:
            raise UsageError(
                "say what to host: --experts PATTERN, a GRID.toml, or the address of a swarm that has a grid"
            )
        if files and (replaced := self.given - _WITH_A_FILE):
            names = ", ".join(sorted(f"--{name.removeprefix('is_').replace('_', '-')}" for name in replaced))
            raise UsageError(f"{self.file} defines the experts already: leave {names} out")
        if self.open_training and self.is_open:
            raise UsageError("--open lets anybody train already: choose it or --open-training")
        if self.training_steps is not None and self.training_steps <= self.warmup_steps:
            raise UsageError(
                "--training-steps are counted from the start, so they must exceed --warmup-steps"
            )
        if self.listens_nowhere() and not self.addresses:
            raise UsageError(
                "with --listen none, others can call experts only through relays of a swarm: give an "
                "ADDRESS of one"
            )

    def contacts(self) -> list[Contact]:
        return contacts_of(self.addresses)

    def listen_at(self, own: PeerId) -> str:
        """Return where to listen, by default at the port of this identity. With --listen none it is loopback,
        to which relayed calls are forwarded.
        """
        return options.listen_at(self.listen, self.announce, self.contacts(), own) or "127.0.0.1:0"

    def listens_nowhere(self) -> bool:
        """Return whether this server opens no port and must be called through relays."""
        return options.listen_at(self.listen, self.announce, self.contacts()) is None

    def open_identity(self) -> Identity:
        """Open this user's identity for a grid of a file or of a new swarm, so that its owner can change it
        later; else the identity with which the command enters a swarm.
        """
        creates = self.file is not None or not self.addresses
        if creates and not any(map(is_invite, self.addresses)):
            return open_identity(self.identity, default_identity())
        return open_entry_identity(self.identity, self.addresses, "serve")

    def offered(self) -> GridSpecification | None:
        """Return the grid in the file, or the one that the options with --experts describe; None without
        either.
        """
        if self.file is None:
            return self.described(self.experts) if self.experts else None
        grid = GridSpecification.from_file(self.file)
        missing = [one for one in self.patterns(grid) if not grid.has(one)]
        if missing:
            raise UsageError(f"{self.file} has no experts {missing[0]}: it names {', '.join(grid.experts)}")
        return grid.model_copy(update={"module": self._module_hash()}) if self.module is not None else grid

    def described(self, experts: Sequence[str]) -> GridSpecification:
        """Return the specification of a grid of these experts from the options."""
        table = {
            "experts": list(experts),
            "members": "open" if self.is_open else "invited",
            "guests": "train" if self.open_training else "call",
            "expert_class": self.expert_class,
            "module": self._module_hash(),
            "hidden_dim": self.hidden_dim,
            "sequence_length": self.sequence_length,
            "dtype": self.dtype,
            "average_s": self.average_s,
            "optimizer": {
                "name": self.optimizer,
                "learning_rate": self.lr,
                "clip_norm": self.clip_norm,
                "warmup_steps": self.warmup_steps,
                "training_steps": self.training_steps,
            },
        }
        return GridSpecification.from_table(table, "the options")

    def given_keys(self, grid: GridSpecification) -> set[str]:
        """Return the keys of the grid that the user has set: by options, or all of them by a file."""
        if self.file is not None:
            return set(grid.flat_table()) - {
                "description",
                "members",
                "recovery_key",
                "confirmed",
                *grid.OWNERS_KEYS,
            }
        return {_GRID_OPTIONS[name] for name in self.given}

    def factory(self, grid: GridSpecification) -> ExpertFactory:
        """Return the factory of the grid's experts. Raise UsageError if this machine cannot make them."""
        import torch

        from swarm.run.grid_experts import ExpertFactory

        return ExpertFactory(
            grid,
            device=self.device,
            module=self.module,
            keep_activations_bytes=self.keep_activations_mb << 20,
            is_compiled=self.is_compiled,
            autocast=getattr(torch, self.autocast) if self.autocast else None,
        )

    def placing(self, grid: GridSpecification, node: Node, factory: ExpertFactory) -> Placing:
        """Return the choice of experts that this machine hosts. Raise UsageError if the options are wrong."""
        from moe.server.expert_server import EXPERTS_MAX
        from swarm.run.placing import Placing

        count = self.num_experts
        if self.memory is not None:
            needed = factory.memory()
            room = needed.room(parse_size(self.memory))
            if not room:
                takes = size(needed.each + needed.shared)
                raise UsageError(f"--memory {self.memory} is less than one expert takes: {takes}")
            count = min(room, count or sum(pattern.count for pattern in self.patterns(grid)), EXPERTS_MAX)
        folder = user_path(self.checkpoint) if self.checkpoint is not None else None
        return Placing(node, self.patterns(grid), count, folder)

    @property
    def load_interval_s(self) -> float:
        """Return the time between two load events."""
        return _LOAD_JSON_S if self.as_json else _LOAD_S

    def _module_hash(self) -> str | None:
        return module_hash(self.module) if self.module is not None else None

    def patterns(self, grid: GridSpecification) -> list[ExpertGrid]:
        """Return the patterns of the experts to host."""
        return [ExpertGrid.parse(one) for one in self.experts] or grid.patterns
