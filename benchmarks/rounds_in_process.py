"""Rounds between peers in one process, with the arithmetic of real rounds and no network.

Values are cut into chunks, encoded, reduced by every peer, encoded again and decoded by the code of
`averaging.allreduce.kernels`, with the error feedback of senders and reducers. Counted bytes are those of the
messages that a peer would send, without encryption and the search for a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from averaging.allreduce.kernels import Arrived, Averaged, ReductionKernels
from averaging.allreduce.logic.versions import Version
from averaging.optim.modes import Mode
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.feedback import Feedback, FeedbackRound, Shard
from averaging.reduction.framing import unpack
from averaging.reduction.partition import Plan, plan_chunks
from averaging.reduction.reduce import Contribution, ReductionJob, relative_weights
from averaging.reduction.vector import FlatVector
from swarm.compression import find

_CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class Traffic:
    """Bytes of all peers together. Each byte that one peer sends, another one receives."""

    bytes: int = 0
    rounds: int = 0


class RoundsInProcess:
    """Successive rounds of the same peers over vectors of `numel` elements."""

    def __init__(self, peers: int, numel: int, codec: str, *, error_feedback: bool) -> None:
        self._codec, self._peers = find(codec), peers
        self._plan: Plan = plan_chunks(numel, [1.0] * peers, self._codec, _CHUNK_BYTES)
        self._buffers = [ResultBuffer() for _ in range(peers)]
        self._feedbacks = [Feedback(numel, self._codec) for _ in range(peers)] if error_feedback else []
        self.traffic = Traffic()

    def average(self, vectors: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]) -> None:
        """Replace each peer's tensors, float32 and contiguous, by the weighted mean that it receives."""
        plan, relative = self._plan, relative_weights(weights)
        flat = [FlatVector([tensor.view(-1) for tensor in one]) for one in vectors]
        kernels = [self._kernels(place, vector, relative) for place, vector in enumerate(flat)]
        for one in kernels:
            one.prepare(receives=True)
        sent = [one.encode([chunk for chunk in plan.chunks if chunk.reducer != one.own]) for one in kernels]
        by_chunk: dict[int, list[Contribution]] = {chunk.index: [] for chunk in plan.chunks}
        for place, messages in enumerate(sent):
            for message in messages:
                assert isinstance(message, bytes), "a value that is not finite"
                header, payload = unpack(message)
                self.traffic.bytes += len(message)
                by_chunk[header.contribution.chunk].append(Contribution(place, relative[place], payload))
        held: dict[int, Version] = {}
        averages: list[Averaged] = []
        for one in kernels:
            jobs = [ReductionJob(chunk, by_chunk[chunk.index], own=True) for chunk in plan.shard(one.own)]
            for done in one.reduce(jobs):
                assert isinstance(done, Averaged), "values that cannot be averaged"
                averages.append(done)
                held[done.chunk.index] = Version(0, done.contributors, done.digest)
                self.traffic.bytes += len(done.message) * (self._peers - 1)
        for one, vector in zip(kernels, flat, strict=True):
            one.settle(
                [
                    Arrived(done.chunk, unpack(done.message)[1], done.contributors)
                    for done in averages
                    if done.chunk.reducer != one.own
                ]
            )
            one.conclude(held)
            one.averages.write(vector)
        self.traffic.rounds += 1

    def _kernels(self, place: int, vector: FlatVector, weights: Sequence[float]) -> ReductionKernels:
        averages = Averages(self._plan, self._codec, self._buffers[place])
        return ReductionKernels(
            self._plan,
            self._codec,
            place,
            vector,
            averages,
            weights=weights,
            begin_feedback=self._begin_feedback(place),
        )

    def _begin_feedback(self, place: int) -> Callable[[], FeedbackRound] | None:
        if not self._feedbacks:
            return None
        chunks = self._plan.shard(place)
        start, stop = (chunks[0].start, chunks[-1].stop) if chunks else (0, 0)
        return lambda: self._feedbacks[place].begin(Shard(start=start, stop=stop, members=b"all"))

    def hold(self, modes: Sequence[Mode]) -> None:
        """Run the round of an epoch and apply it on every peer."""
        prepared = [mode.prepare(mode.state.epoch) for mode in modes]
        self.average([mode.tensors() for mode in modes], [weight for weight, _ in prepared])
        for mode in modes:
            with mode.state.lock:
                mode.apply([value for _, value in prepared])
                mode.state.mark_changed(mode.state.epoch + 1)
