"""Several processes as one peer: the ranks of a torch process group, as `torchrun` starts them.

Rank 0 has the node and talks to other peers; the other ranks have none. They hold the same parameters
(DistributedDataParallel) or shards of them (FSDP2), compute gradients, and follow rank 0, which sends them
orders: make a step, give your shards, take these parameters. Orders go over a gloo group of their own, whose
calls may wait for as long as a round takes, and end at once when a process of the group ends.

Whole parameters: those of rank 0 themselves where every rank holds all of them; else copies on rank 0's host,
in float32 or whatever type the parameters have.
"""

from __future__ import annotations

import datetime
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from averaging.optim.parameters import parameters_of, set_option
from averaging.reduction.sharded import is_sharded
from swarm.core.device import is_out_of_memory
from swarm.core.errors import SwarmError, UsageError

_ORDER_BYTES_MAX = 1 << 24
_HOST = torch.device("cpu")
# timeout of a rank's wait for rank 0, which covers whole rounds, validation and pauses
_WAIT = datetime.timedelta(days=30)
_BUCKET_ELEMENTS_MAX = 1 << 23  # gradients that are summed in one call


class RankChannel:
    """The connection between the ranks of this peer. All ranks make the same calls in the same order.

    Raises SwarmError from any call when another process of the group has ended.
    """

    def __init__(self) -> None:
        """Open the channel over all ranks of the default process group. Raise UsageError if there is none."""
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "there is no process group: start the program with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        with self.explained():
            self._group = dist.new_group(backend="gloo", timeout=_WAIT)

    @property
    def is_leader(self) -> bool:
        """Return whether this is rank 0, which has the node."""
        return self.rank == 0

    def tell(self, name: str, **contents: Any) -> None:
        """Send an order from rank 0 to all others. `contents`: numbers, strings, lists and dicts of them."""
        order = json.dumps([name, contents]).encode()
        payload = torch.tensor(list(order), dtype=torch.uint8, device=_HOST)
        with self.explained():
            dist.broadcast(
                torch.tensor([payload.numel()], dtype=torch.int64, device=_HOST), 0, group=self._group
            )
            dist.broadcast(payload, 0, group=self._group)

    def hear(self) -> tuple[str, dict[str, Any]]:
        """Wait for the next order of rank 0 and return its name and contents."""
        size = torch.zeros(1, dtype=torch.int64, device=_HOST)
        with self.explained():
            dist.broadcast(size, 0, group=self._group)
            payload = torch.empty(min(int(size), _ORDER_BYTES_MAX), dtype=torch.uint8, device=_HOST)
            dist.broadcast(payload, 0, group=self._group)
        name, contents = json.loads(bytes(payload.tolist()))
        return name, contents

    def sum(self, values: Sequence[int]) -> list[int]:
        """Return the sums over all ranks, place by place. All ranks pass equally many values."""
        total = torch.tensor(values, dtype=torch.int64, device=_HOST)
        with self.explained():
            dist.all_reduce(total, group=self._group)
        return list(map(int, total.tolist()))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's values into `tensor` on every other rank."""
        with torch.no_grad(), self.explained(), _on_group(tensor) as values:
            dist.broadcast(values, 0, group=self._group_of(values))

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over all ranks, in place; those of one type go together."""
        with torch.no_grad(), self.explained():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                with _on_group(flat) as values:
                    dist.all_reduce(values, group=self._group_of(values))
                for tensor, one in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                    tensor.copy_(one.view(tensor.shape))

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        """Return the group for a collective on `tensor`: the default one on devices, where it is NCCL's."""
        return self._group if tensor.device.type == "cpu" else None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error of a collective, which another process has caused by its end, into SwarmError."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, (SwarmError, UsageError)) or is_out_of_memory(error):
                raise
            raise SwarmError(
                f"another process of this peer has ended (this one is rank {self.rank} of {self.size}): "
                "the peer leaves the run. Start all of its processes again, with torchrun"
            ) from error


@contextmanager
def _on_group(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield contiguous values where a group can reach them, and copy them back: the default group may have no
    backend for the tensor's device.
    """
    device = tensor.device.type
    reaches = device == "cpu" or (device == "cuda" and "cuda:nccl" in _backends())
    values = tensor.detach().contiguous() if reaches else tensor.detach().cpu().contiguous()
    yield values
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)


def _backends() -> str:
    """Return the backends of the default group by device, as in "cpu:gloo,cuda:nccl"."""
    name = dist.get_backend_config()
    return "cuda:nccl" if name == "nccl" else name


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one type and device together, until they have `_BUCKET_ELEMENTS_MAX` elements."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        bucket = kinds[tensor.dtype, tensor.device]
        bucket.append(tensor)
        if sum(one.numel() for one in bucket) >= _BUCKET_ELEMENTS_MAX:
            yield bucket
            kinds[tensor.dtype, tensor.device] = []
    yield from filter(None, kinds.values())


class WholeParameters:
    """The parameters of an optimizer as rank 0 shows them to other peers, and the way there and back.

    `tensors`: one for each parameter of `inner`, in its order. On rank 0 they are whole; on other ranks they
    are the parameters themselves.
    """

    def __init__(self, channel: RankChannel, inner: torch.optim.Optimizer) -> None:
        self._channel = channel
        self.own = parameters_of(inner)
        self.is_sharded = any(is_sharded(p) for p in self.own)
        self.tensors = [
            torch.empty(p.shape, dtype=p.dtype, device=_HOST).requires_grad_(p.requires_grad)
            if is_sharded(p) and channel.is_leader
            else p
            for p in self.own
        ]
        self._synchronised: list[int] | None = None
        self._is_stale = False

    def of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter group with the whole tensors instead of its parameters."""
        whole = {id(own): tensor for own, tensor in zip(self.own, self.tensors, strict=True)}
        return {**group, "params": [whole[id(p)] for p in group["params"]]}

    def gather(self) -> None:
        """Copy the shards of all ranks into rank 0's whole parameters."""
        self._gather(self.own, self.tensors)
        self._is_stale = False

    def gather_gradients(self, present: Sequence[bool]) -> None:
        """Set the gradients of rank 0's whole parameters from the shards of all ranks. `present`: which
        parameters have a gradient on any rank.
        """
        if not self.is_sharded:
            return
        has = [whether and is_sharded(p) for whether, p in zip(present, self.own, strict=True)]
        sources = [
            p.grad if p.grad is not None else torch.zeros_like(p)
            for p, taken in zip(self.own, has, strict=True)
            if taken
        ]
        if self._channel.is_leader:
            for whole, taken in zip(self.tensors, has, strict=True):
                if taken:
                    whole.grad = torch.empty_like(whole)
        targets = [whole.grad for whole, taken in zip(self.tensors, has, strict=True) if taken]
        self._gather(sources, targets)

    def _gather(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor | None]) -> None:
        """Copy whole tensors to `targets` on rank 0, one at a time: each rank holds one of them meanwhile."""
        with torch.no_grad(), self._channel.explained():
            for source, target in zip(sources, targets, strict=True):
                if is_sharded(source):
                    whole = source.full_tensor()  # type: ignore[attr-defined]
                    if self._channel.is_leader and target is not None:
                        target.copy_(whole)

    def push(self) -> None:
        """Copy rank 0's whole parameters to all ranks."""
        for whole, own in zip(self.tensors, self.own, strict=True):
            if is_sharded(own):
                self._scatter(whole, own)
            else:
                self._channel.broadcast(own)
        self.synchronised()

    def _scatter(self, whole: torch.Tensor, own: Any) -> None:
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad(), self._channel.explained():
            values = (
                whole.detach().to(own.device)
                if self._channel.is_leader
                else torch.empty(own.shape, dtype=own.dtype, device=own.device)
            )
            own.copy_(distribute_tensor(values, own.device_mesh, own.placements))

    def synchronised(self) -> None:
        """Record that all ranks hold rank 0's whole parameters."""
        self._synchronised = self._versions()

    @property
    def have_changed(self) -> bool:
        """Return whether rank 0's whole parameters were written since all ranks had them."""
        return self._synchronised != self._versions()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]

    # --- local steps on the shards

    def stepped(self) -> None:
        """Record that all ranks have made a step of their own optimizers."""
        self._is_stale = self.is_sharded
        if not self._is_stale:
            self.synchronised()

    @property
    def are_stale(self) -> bool:
        """Return whether the shards have continued since they were gathered."""
        return self._is_stale


class OrderedSteps(torch.optim.Optimizer):
    """The inner optimizer of a mode with local steps on rank 0: a step of it is a step of the real optimizers
    on all ranks, each on its own gradients. It has no statistics.
    """

    def __init__(
        self,
        whole: WholeParameters,
        inner: torch.optim.Optimizer,
        step: Callable[[list[dict[str, Any]]], None],
        gather: Callable[[], None],
    ) -> None:
        """`step` gets the present groups, whose learning rates a schedule may have changed. `gather` brings
        the whole parameters up to date.
        """
        super().__init__([whole.of(group) for group in inner.param_groups], dict(inner.defaults))
        self._order_step, self._gather, self._whole = step, gather, whole

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step on all ranks."""
        self._order_step(self.param_groups)

    def fetch(self) -> None:
        """Bring the whole parameters up to date, before they are read."""
        if self._whole.are_stale:
            self._gather()


def options_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of parameter groups that are numbers, as an order can carry them."""
    return [
        {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in ((key, _number(value)) for key, value in group.items() if key != "params")
            if isinstance(value, (bool, int, float)) or (isinstance(value, tuple) and _are_numbers(value))
        }
        for group in groups
    ]


def set_options(groups: Sequence[dict[str, Any]], options: Sequence[dict[str, Any]]) -> None:
    """Set the options of parameter groups from `options_of`. Tensors keep their place in memory. What a
    schedule has added to its groups is left out.
    """
    for group, new_options in zip(groups, options, strict=True):
        for key, value in new_options.items():
            if key not in group:
                continue
            set_option(group, key, tuple(value) if isinstance(group[key], tuple) else value)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _are_numbers(values: tuple[Any, ...]) -> bool:
    return all(isinstance(one, (bool, int, float)) for one in values)


def with_whole_parameters(inner: torch.optim.Optimizer, whole: WholeParameters) -> torch.optim.Optimizer:
    """Return an optimizer like `inner` over the whole parameters, with the same options and hooks; `inner`
    itself where no parameter is sharded. Raise UsageError if it has statistics of shards already.
    """
    if not whole.is_sharded:
        return inner
    if any(inner.state.get(p) for p in whole.own):
        raise UsageError(
            "the optimizer has made steps on shards already: pass a new one, and call load_state_dict of "
            "swarm's optimizer to resume"
        )
    second = type(inner).__new__(type(inner))
    # a scheduler replaces `step` on the instance
    second.__dict__ = {key: value for key, value in inner.__dict__.items() if key != "step"}
    second.param_groups = [whole.of(group) for group in inner.param_groups]
    second.state = defaultdict(dict)
    return second
