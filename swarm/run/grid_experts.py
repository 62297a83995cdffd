"""Make the experts of a grid on this machine, as its specification says. Imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe.classes import ExpertSettings, expert_class, make
from moe.classes.low_rank import ActivationSubspace
from moe.protocol.codecs import WireCodecs
from moe.server.expert import ComputationFailed, Expert
from moe.server.norm_statistics import norm_layers, unchanged_statistics
from swarm.core.device import free_bytes, is_out_of_memory, resolve_device
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from moe.protocol.names import ExpertUid
    from moe.protocol.schema import Leaf
    from swarm.run.grid import GridSpecification

_COMPILED_BATCH = 2  # torch.compile makes a case of its own for a batch of one


def seed_of(seed: int, uid: ExpertUid) -> int:
    """Return the seed of an expert's initial parameters: a hash of the grid's seed and its name, of 63
    bits.
    """
    digest = hashlib.sha256(f"swarm expert 1\0{seed}\0{uid}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMemory:
    """The memory of a server's experts, which are all of one class, in bytes."""

    each: int  # of each expert
    shared: int  # once for all experts, which make their steps one after the other

    def room(self, size_bytes: int) -> int:
        """Return the number of experts that fit into this much memory."""
        return max(0, size_bytes - self.shared) // self.each


class ExpertFactory:
    """Makes the experts of a grid on this machine."""

    def __init__(
        self,
        grid: GridSpecification,
        *,
        device: str,
        module: Path | None,
        keep_activations_bytes: int,
        is_compiled: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        """`device`: as `resolve_device` takes it. `module`: the user's own file that has the expert class.
        `keep_activations_bytes`: activations that each expert keeps for the backward pass instead of
        computing them again.

        `is_compiled`: experts are compiled with `torch.compile` when they are made. `autocast`: as in
        `swarm.Expert`.

        Raises UsageError when there is no such class, or no such device.
        """
        self._grid, self._keep_activations_bytes = grid, keep_activations_bytes
        self._is_compiled, self._autocast = is_compiled, autocast
        self._class = expert_class(grid.expert_class, module)
        self._settings = ExpertSettings(hidden_dim=grid.hidden_dim, sequence_length=grid.sequence_length)
        self.device = resolve_device(device)
        self.dtype: torch.dtype = getattr(torch, grid.dtype)

    def make_all(self, uids: Sequence[ExpertUid]) -> dict[ExpertUid, Expert]:
        """Return new experts. Raises UsageError when the memory of the device is too small for them: at once
        where its free memory is known, otherwise when it has run out.
        """
        free = free_bytes(self.device)
        room = len(uids) if free is None else self.memory().room(free)
        if room < len(uids):
            raise self._too_little(len(uids), room)
        made: dict[ExpertUid, Expert] = {}
        for uid in uids:
            try:
                made[uid] = self.make(uid)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise self._too_little(len(uids), len(made)) from None
        return made

    def _too_little(self, wanted: int, room: int) -> UsageError:
        cure = f"host {room} with --num-experts, or say --memory SIZE" if room else "choose another device"
        return UsageError(
            f"{wanted} experts with their gradients and optimizers do not fit into the memory of "
            f"{self.device}, and {room or 'not even one'} would: {cure}"
        )

    def make(self, uid: ExpertUid) -> Expert:
        """Return a new expert. Its initial parameters follow from the grid's seed and its name, so replicas
        that start on two machines are equal.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self._grid.seed, uid))
            module, sample = self._make()
        optimizer = self._grid.optimizer
        clip_norm, update_norm_max = self._grid.step_bounds
        expert = Expert(
            module.to(self.dtype),
            tuple(_cast(one, self.dtype) for one in sample),
            self._optimizer if optimizer.name != "none" else None,
            schedule=self._schedule if optimizer.warmup_steps or optimizer.training_steps else None,
            clip_norm=clip_norm,
            device=self.device,
            keep_activations_bytes=self._keep_activations_bytes,
            autocast=self._autocast,
        )
        expert.codecs = WireCodecs(**self._grid.codecs.model_dump())
        expert.update_norm_max = update_norm_max
        expert.target_batch_size = optimizer.target_batch_size
        is_known = self._grid.module is None and not self._grid.activation_rank
        expert.expert_class = self._grid.expert_class if is_known else ""
        if self._is_compiled:
            _compile(expert)
        return expert

    def _make(self) -> tuple[torch.nn.Module, tuple[Any, ...]]:
        grid = self._grid
        module, sample = make(grid.expert_class, self._class, self._settings)
        if not grid.activation_rank:
            return module, sample
        subspace = ActivationSubspace(grid.hidden_dim, grid.activation_rank, grid.seed)
        return subspace.stage(module), subspace.sample(sample)

    def memory(self) -> ExpertMemory:
        """Return the memory that the experts take on their device: parameters, buffers, gradients, optimizer,
        float32 copies of smaller parameters, and what a step copies. Activations are not included.
        """
        try:
            with torch.device("meta"):  # without memory
                module, _ = self._make()
        except UsageError:  # a class of the user that needs a real device
            module, _ = self._make()
        optimizer, size = self._grid.optimizer, self.dtype.itemsize
        count = sum(parameter.numel() for parameter in module.parameters())
        buffers = sum(
            one.numel() * (size if one.is_floating_point() else one.itemsize) for one in module.buffers()
        )
        if optimizer.name == "none":
            return ExpertMemory(each=max(1, count * size + buffers), shared=0)
        statistics = 8 if optimizer.name in ("adam", "adamw") else 0
        masters = 4 if size < 4 else 0
        gathered = 4 if optimizer.target_batch_size else 0  # gradients of the target batch, in float32
        each = count * (2 * size + statistics + masters + gathered) + buffers
        # copies of one expert's parameters and statistics, from which a step can be undone
        return ExpertMemory(each=max(1, each), shared=count * (4 + statistics))

    def _optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        chosen = self._grid.optimizer
        kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[
            chosen.name
        ]
        optimizer: torch.optim.Optimizer = kind(parameters, lr=chosen.learning_rate)
        return optimizer

    def _schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a schedule that rises over the warm-up and falls to zero at the last training step."""
        warmup, last = self._grid.optimizer.warmup_steps, self._grid.optimizer.training_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 1.0 if last is None else max(0.0, (last - step) / (last - warmup))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _compile(expert: Expert) -> None:
    """Compile an expert for batches of any size, now and not when the first caller waits for it. Raises
    UsageError where that is impossible.
    """
    module, schema = expert.module, expert.schema

    def call(*arguments: Any) -> Any:  # torch does not compile some of its own modules by themselves
        return module(*arguments)

    expert.called = torch.compile(call, dynamic=True)

    def zeros(leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        return [
            torch.zeros((_COMPILED_BATCH, *leaf.shape), dtype=leaf.dtype, device="cpu") for leaf in leaves
        ]

    try:
        with unchanged_statistics(norm_layers(expert.module)):
            expert.forward(zeros(schema.input_leaves))
            if not expert.frozen:
                expert.accumulate([(None, zeros(schema.input_leaves), zeros(schema.gradient_leaves))])
    except ComputationFailed as error:
        raise UsageError(
            f"torch.compile does not work for this expert here, leave --compile out: {error}"
        ) from None
    expert.discard()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype.is_floating_point else value
    if isinstance(value, dict):
        return {key: _cast(one, dtype) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(one, dtype) for one in value)
    return value
