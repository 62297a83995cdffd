"""Volunteering with several processes that `torchrun` has started: one peer, one process per GPU.

Rank 0 is the volunteer. The other ranks build the same model. On order of rank 0 they draw batches of their
own and average their gradients with those of rank 0. They end on order of rank 0, or when it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.core.errors import SwarmError, UsageError
from swarm.core.ids import PeerId
from swarm.run.signed import SignedSpecification, verified
from swarm.run.task import Draw, Task, make_task

if TYPE_CHECKING:
    import torch

    from averaging.optim.ranks import RankChannel

_END = "end"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank of this process among those of its peer, from torchrun's environment variables."""

    rank: int
    size: int
    local_rank: int  # rank on this machine, which is the index of the GPU

    @classmethod
    def of_environment(cls) -> RankPlace | None:
        """Return the rank of this process; None if torchrun did not start it, or started only one. Raise
        UsageError for variables that are not numbers.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not all(name in os.environ for name in (*names, "MASTER_ADDR", "MASTER_PORT")):
            return None
        try:
            place = cls(*(int(os.environ[name]) for name in names))
        except ValueError:
            raise UsageError(f"{', '.join(names)} must be numbers, as torchrun sets them") from None
        return place if place.size > 1 else None

    def open_channel(self) -> RankChannel:
        """Open the process group: gloo on the host, NCCL between CUDA devices. Waits for the other ranks."""
        import torch
        import torch.distributed as dist

        from averaging.optim.ranks import RankChannel

        on_cuda = torch.cuda.is_available()
        if on_cuda:
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
        return RankChannel()


class LeadingRanks:
    """Rank 0's connection to the other ranks. A context manager: at its end the other ranks end."""

    def __init__(self, place: RankPlace, data: Path | None) -> None:
        """`data`: the folder to train on, on every machine of the peer. Waits for the other ranks."""
        self.size, self._data = place.size, data
        self._channel = place.open_channel()
        self._parameters: list[torch.Tensor] = []

    def __enter__(self) -> LeadingRanks:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(SwarmError):
            self._channel.tell(_END)

    def start(
        self, signed: SignedSpecification, inner: torch.optim.Optimizer, device: torch.device
    ) -> torch.optim.Optimizer:
        """Make the other ranks build the run's model. Return the inner optimizer for `swarm.Optimizer`, which
        also steps the other ranks.
        """
        from averaging.optim.process_group import RankLeader

        self._channel.tell(
            "run",
            specification=signed.blob.hex(),
            device=device.type,
            data=str(self._data) if self._data is not None else None,
        )
        mode = signed.training.mode.build()
        self._leader = RankLeader(self._channel, inner, mode, scheduled=True)
        self._parameters = self._leader.whole.own
        return self._leader.inner

    def start_epoch(self, draw: Draw) -> Draw:
        """Tell the other ranks which samples to draw. Return the draw of this rank, which excludes theirs."""
        contents = {"run_id": draw.run_id, "epoch": draw.epoch, "peers": [str(one) for one in draw.others]}
        self._channel.tell("epoch", own=str(draw.peer_id), **contents)
        return draw_of_rank(draw, 0, self.size)

    def begin_step(self, samples: int) -> None:
        """Make every other rank compute the gradient of `samples` samples of its own, on the present
        parameters.
        """
        self._leader.push_if_changed()
        self._channel.tell("backward", samples=samples)

    def end_step(self) -> None:
        """Replace this rank's gradients by the means over all ranks."""
        average_gradients(self._channel, self._parameters)


def average_gradients(channel: RankChannel, parameters: Sequence[torch.Tensor]) -> None:
    """Replace gradients by their means over all ranks. All ranks call it, with equally many samples."""
    import torch

    present = channel.sum([int(p.grad is not None) for p in parameters])
    gradients = []
    for p, anywhere in zip(parameters, present, strict=True):
        if anywhere:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(channel.size)
            gradients.append(p.grad)
    channel.sum_tensors(gradients)


def draw_of_rank(draw: Draw, rank: int, size: int) -> Draw:
    """Return the draw of one rank of a peer: rank 0 has the peer's draw, the others have their own."""
    names = [draw.peer_id, *(_name_of_rank(draw.peer_id, one) for one in range(1, size))]
    others = (*draw.others, *(name for place, name in enumerate(names) if place != rank))
    return Draw(draw.run_id, draw.epoch, names[rank], others)


def _name_of_rank(peer: PeerId, rank: int) -> PeerId:
    return PeerId(hashlib.sha256(b"swarm rank 1\0" + peer.to_bytes() + rank.to_bytes(4, "big")).digest())


@contextlib.contextmanager
def leading(data: Path | None) -> Iterator[LeadingRanks | None]:
    """Yield the connection to the other ranks; None if this process is alone."""
    place = RankPlace.of_environment()
    if place is None:
        yield None
        return
    with LeadingRanks(place, data) as ranks:
        yield ranks


def following_place() -> RankPlace | None:
    """Return the rank of this process if it must follow rank 0; None for rank 0 and for a single process."""
    place = RankPlace.of_environment()
    return place if place is not None and place.rank > 0 else None


def follow(place: RankPlace) -> int:
    """Be one of the ranks that follow rank 0, until it ends. Return the exit code.

    Signals to end are handled by rank 0 only: torchrun sends them to every process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = place.open_channel()
    name, contents = channel.hear()
    if name == "run":
        _FollowingRank(place, channel, contents).train()
    return 0


class _FollowingRank:
    """Model, data and optimizer of a rank that follows."""

    def __init__(self, place: RankPlace, channel: RankChannel, contents: dict[str, Any]) -> None:
        import torch

        from averaging.optim.process_group import RankFollower
        from swarm.run.inner_optimizer import build_optimizer

        self._place, self._channel = place, channel
        specification = verified(bytes.fromhex(contents["specification"])).training
        chosen = specification.task
        task: Task = make_task(chosen.name, chosen.settings, chosen.package)
        device = torch.device(contents["device"])
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.model = task.build_model(specification.seed).to(device)
        self.data = task.load_data(Path(contents["data"]) if contents["data"] is not None else None, device)
        inner = build_optimizer(self.model, specification.optimizer, task)
        self._follower = RankFollower(channel, inner)

    def train(self) -> None:
        """Follow rank 0 until it ends."""
        from swarm.run.microbatches import MicroBatches

        batches = MicroBatches(model=self.model, data=self.data, device=self.device, emit=lambda event: None)
        parameters = self._follower.whole.own
        self.model.train()
        while True:
            name, contents = self._follower.follow()
            if name == "epoch":
                others = tuple(PeerId.parse(text) for text in contents["peers"])
                own = PeerId.parse(contents["own"])
                draw = Draw(contents["run_id"], int(contents["epoch"]), own, others)
                self.data.start_epoch(draw_of_rank(draw, self._place.rank, self._place.size))
            elif name == "backward":
                batches.backward(int(contents["samples"]), self.model.zero_grad)
                average_gradients(self._channel, parameters)
            else:
                return
