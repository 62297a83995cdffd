"""PowerSGD of one averager: the state between rounds, and the steps of a round. The reasons are in
docs/decisions/0016.

A round takes two all-reduces. With M = values + residual, a matrix that differs on each member:

    first     p = the mean of all M q₀, for a q₀ that is alike on all members; its columns are made
              orthonormal
    second    q = the mean of all Mᵀ p; every member's average is then p qᵀ, and the next round starts from q

`p` only gives the directions for the second all-reduce: a member that is missing in the first, or came with
another q₀, makes the approximation worse for one round, but no average wrong. A member's residual becomes M -
p (the q that it sent)ᵀ when the second all-reduce is committed; until then nothing changes. Tensors that are
no matrices, or too small to gain, travel with the second all-reduce, with the usual error feedback.

Matrices are processed on their own device, and only factors leave it. Matrices on a device that is not its
own `exact_device` (MPS) are processed on the host, and their residuals lie there. No clock, no I/O; one round
at a time.

`take`, `put` and `add_difference` run in the trainer's thread and wait for no device: their work on a device
is queued on its current stream, and the host memory from which averages are copied is kept from round to
round.
`first`, `second` and `commit` may wait; they run in threads of the pool if there are devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3

from averaging.reduction.averages import ResultBuffer
from averaging.reduction.devices import NO_QUEUES, Queues
from averaging.reduction.feedback import Feedback
from averaging.reduction.lowrank import (
    Factoring,
    Matrix,
    PowerSgd,
    expand,
    orthonormal,
    product,
    renewed,
    row_blocks,
    seeded,
    subtract_product,
)
from averaging.reduction.vector import FlatVector, HollowVector
from swarm.compression import Codec, exact_device
from swarm.core.errors import UsageError

CODECS = ("float32", "float16", "bfloat16")
START_DIGEST_BYTES = 8
_FORMAT = 1
# Elements of a matrix's average written at a time, where it is not written directly into the tensor.
_WRITTEN_ELEMENTS = 1 << 20
_SLOTS = 4  # averages on their way to a device: two factors are read while the next two are copied


@dataclass(slots=True)
class _Step:
    """The data of one step."""

    gives: bool  # this member contributes
    # M of each matrix, float32, on its processing device; empty for a member that contributes nothing
    given: list[torch.Tensor]
    # copies on devices of the tensors that are no matrices, flat float32, with their targets on the host
    others: list[tuple[torch.Tensor, torch.Tensor]]
    before: list[torch.Tensor] | None  # every tensor's values, for a difference
    first: FlatVector | None = None  # vector of the first all-reduce, once it was computed
    basis: list[torch.Tensor] = field(default_factory=list)  # p of each matrix, on the host
    sent: list[torch.Tensor] = field(default_factory=list)  # q of each matrix as this member gave it
    mean: torch.Tensor | None = None  # mean of the second vector


class LowRank:
    """The average of `tensors` (any float type, device and stride) by low-rank factors."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        settings: PowerSgd,
        codec: Codec,
        *,
        seed: bytes,
        reduces: bool = True,
        queues: Queues | None = None,
    ) -> None:
        """Allocate nothing yet: residuals are made when first needed.

        `seed`: all peers derive the start of the first round from it. `reduces`: see `Feedback`. `queues`: of
        the tensors' devices. Raises UsageError for a codec that loses more than rounding: nobody keeps the
        error of a factor that a reducer encodes.
        """
        if codec.name not in CODECS:
            raise UsageError(
                f"PowerSGD's factors travel in {', '.join(CODECS)}, not in {codec.name}: they are small, "
                "and all else hangs on them"
            )
        self.tensors, self.settings = tuple(tensors), settings
        self.layout = Factoring.of([tuple(tensor.shape) for tensor in tensors], settings)
        self.others = Feedback(self.layout.second_numel, codec, reduces=reduces)
        # for the averages of the two all-reduces
        self.result_buffers = (ResultBuffer(), ResultBuffer())
        self.queues = Queues(tensor.device for tensor in tensors) if queues is None else queues
        self.written = False  # the tensors have changed since the step began
        # what this member gives to the two all-reduces, and, for devices, their averages
        self._p, self._second = (
            self.queues.host_memory(numel) for numel in (self.layout.first_numel, self.layout.second_numel)
        )
        self._basis, self._mean = (
            self.queues.host_memory(numel if self.queues else 0)
            for numel in (self.layout.first_numel, self.layout.second_numel)
        )
        self._seed = seed
        # residuals of the matrices, float32, on their processing device; made when first needed
        self._held: list[torch.Tensor] = []
        self._spare: list[torch.Tensor] = []
        self._starts = [seeded(seed, matrix) for matrix in self.layout.matrices]
        self._step: _Step | None = None

    @property
    def start_digest(self) -> bytes:
        """Return a few bytes that identify the matrices from which this member starts the next round, for
        comparison with the other members.
        """
        state = blake3()
        for start in self._starts:
            state.update(start.numpy().tobytes())
        return state.digest()[:START_DIGEST_BYTES]

    # ---- a round

    def take(self, *, gives: bool, keeps: bool) -> None:
        """Begin a step, in the thread that owns the tensors.

        `gives`: this member contributes. `keeps`: keep the tensors' values for `add_difference`.
        """
        before = [tensor.detach().clone() for tensor in self.tensors] if keeps else None
        given, others = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
        with torch.no_grad():
            for matrix, held, spare in zip(self.layout.matrices, *self._residuals(gives=gives), strict=False):
                values = self.tensors[matrix.place].detach().to(held.device)
                torch.add(values, held.view(values.shape), out=spare.view(values.shape))
                given.append(spare)
            for place, start, stop in self._other_places() if gives else ():
                tensor, target = self.tensors[place].detach(), self._second[start:stop]
                if self.queues.of(tensor.device) is None:
                    target.view(tensor.shape).copy_(tensor)
                else:  # a copy: the trainer may write to the tensor before it has reached the host
                    others.append((tensor.reshape(-1).to(torch.float32, copy=True), target))
        self.queues.fork()  # the round runs after the calls of this thread so far
        self.written = False
        self._step = _Step(gives, given, others, before)

    def first(self, alike: bool) -> FlatVector:
        """Return the vector of the first all-reduce. `alike`: most members start from the same matrices as
        this one; if not, it contributes nothing.
        """
        step = self._open()
        if not (alike and step.gives):
            return HollowVector(self.layout.first_numel)
        if step.first is None:  # every attempt of one step gives the same
            with self.queues.working(), torch.no_grad():
                self._fetch(
                    (product(whole, _to_device_of(start, whole)), self._p[matrix.p_start : matrix.p_stop])
                    for matrix, whole, start in zip(
                        self.layout.matrices, step.given, self._starts, strict=True
                    )
                )
            step.first = FlatVector([self._p], NO_QUEUES)
        return step.first

    def second(self, mean: torch.Tensor | None) -> FlatVector:
        """Return the vector of the second all-reduce, given the `mean` of the first; None for a member that
        receives nothing.
        """
        step = self._open()
        step.basis, step.sent, step.mean = [], [], None
        if mean is not None:
            self._reserve()
            for matrix in self.layout.matrices:
                step.basis.append(
                    orthonormal(mean[matrix.p_start : matrix.p_stop].view(matrix.n, matrix.rank))
                )
        if mean is None or not step.gives:
            return HollowVector(self.layout.second_numel)
        with self.queues.working(), torch.no_grad():
            for given, basis in zip(step.given, step.basis, strict=True):
                step.sent.append(product(given.t(), _to_device_of(basis, given)))
            factors = [
                (q, self._second[matrix.q_start : matrix.q_stop])
                for q, matrix in zip(step.sent, self.layout.matrices, strict=True)
            ]
            self._fetch([*factors, *step.others])
        return FlatVector([self._second], NO_QUEUES)

    def commit(self, mean: torch.Tensor | None, *, sent: bool) -> None:
        """Update the residuals: the second all-reduce is committed with this `mean`. `sent`: this member took
        part in it, even if some reducer left it out.
        """
        step = self._open()
        # the error of q, from encoding it, or because it was left out
        lost = self.others.release(self._factor_elements)
        if mean is None:
            return
        if sent and step.gives:
            try:
                with self.queues.working(), torch.no_grad():
                    for matrix, given, basis, q in zip(
                        self.layout.matrices, step.given, step.basis, step.sent, strict=True
                    ):
                        delivered = q - _to_device_of(
                            lost[matrix.q_start : matrix.q_stop].view(matrix.m, matrix.rank), q
                        )
                        subtract_product(given, _to_device_of(basis, given), delivered)
            finally:
                self.queues.finish()  # the trainer's stream uses this memory in the next step
            self._held, self._spare = step.given, self._held
            step.given = []
        self._starts = [
            renewed(mean[matrix.q_start : matrix.q_stop].view(matrix.m, matrix.rank), self._seed, matrix)
            for matrix in self.layout.matrices
        ]
        step.mean = self._keep_for_devices(step, mean) if self.queues else mean

    def _keep_for_devices(self, step: _Step, mean: torch.Tensor) -> torch.Tensor:
        """Copy the averages to the memory that devices read, where they stay until the next ones come."""
        self.queues.finish_uploads()
        for nth, matrix in enumerate(self.layout.matrices):
            place = self._basis[matrix.p_start : matrix.p_stop].view(matrix.n, matrix.rank)
            step.basis[nth] = place.copy_(step.basis[nth])
        return self._mean.copy_(mean)

    def put(self) -> None:
        """Replace the tensors' values by the averages, in the thread that owns the tensors."""
        self._write(None)

    def add_difference(self) -> None:
        """Add the averages minus the values at `take` to the tensors, which may have changed since."""
        before = self._open().before
        assert before is not None
        self._write(before)

    def _write(self, before: Sequence[torch.Tensor] | None) -> None:
        step = self._open()
        mean = step.mean
        assert mean is not None
        # the largest first: should memory run out, then before anything is written
        order = sorted(
            zip(self.layout.matrices, step.basis, strict=True), key=lambda one: -one[0].n * one[0].m
        )
        with torch.no_grad():
            for matrix, basis in order:
                q = mean[matrix.q_start : matrix.q_stop].view(matrix.m, matrix.rank)
                self._write_matrix(matrix, basis, q, before[matrix.place] if before is not None else None)
                self.written = True
            for place, start, stop in self._other_places():
                tensor = self.tensors[place].detach()
                with self._there(mean[start:stop].view(tensor.shape), tensor.device) as average:
                    _move(tensor, average, before[place] if before is not None else None)
                self.written = True
        self._step = None

    def _write_matrix(
        self, matrix: Matrix, basis: torch.Tensor, q: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        """Write the average p qᵀ: directly into the tensor where possible, else some rows at a time."""
        tensor = self.tensors[matrix.place].detach()
        place = exact_device(tensor.device)
        with self._there(basis, place) as p, self._there(q, place) as q_there:
            if (
                before is None
                and tensor.dtype == torch.float32
                and tensor.is_contiguous()
                and tensor.device == place
            ):
                expand(p, q_there, tensor.view(matrix.n, matrix.m))
                return
            for rows in row_blocks((matrix.n, matrix.m), _WRITTEN_ELEMENTS):
                average = torch.empty(rows.stop - rows.start, matrix.m, dtype=torch.float32, device=place)
                expand(p[rows], q_there, average)
                _move(
                    tensor[rows],
                    average.view(tensor[rows].shape),
                    before[rows] if before is not None else None,
                )

    def _reserve(self) -> None:
        """Allocate memory on the devices for what `_there` copies to them."""
        factors = [max(matrix.n, matrix.m) * matrix.rank for matrix in self.layout.matrices]
        others = [stop - start for _, start, stop in self._other_places()]
        slot_bytes = 4 * max([*factors, *others], default=0)
        if slot_bytes:
            self.queues.reserve(slot_bytes, _SLOTS)

    @contextmanager
    def _there(self, values: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield averaged values on their processing device, for calls on the current stream of this thread
        within the context. This thread does not wait for a CUDA device.
        """
        queue = self.queues.of(device)
        if queue is None or exact_device(device) != device or not values.numel():
            yield values
            return
        upload = queue.upload(values.view(-1).view(torch.uint8))
        assert upload is not None, "at most two of the slots are in use"
        with upload.ready() as payload:
            yield payload.view(torch.float32).view(values.shape)

    def _fetch(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each source to its flat target on the host, within `queues.working`: all copies are begun
        before one is waited for.
        """
        fetches = []
        for source, target in copies:
            queue = self.queues.of(source.device)
            if queue is None:
                target.view(source.shape).copy_(source)
            else:
                fetches.append(queue.fetch(source.reshape(-1), target))
        for fetch in fetches:
            fetch.wait()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, copied to the host: residuals, and the start of the
        next round.
        """
        return {
            "format": _FORMAT,
            "powersgd": [self.settings.rank, self.settings.saving_min],
            "held": [held.to("cpu", copy=True) for held in self._held] or None,
            "starts": [start.clone() for start in self._starts],
            "others": self.others.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises UsageError, with nothing changed, when it is invalid."""
        if state.get("format") != _FORMAT or state.get("powersgd") != [
            self.settings.rank,
            self.settings.saving_min,
        ]:
            raise UsageError(f"this is no saved error feedback of {self.settings.compatibility_tag}")
        matrices = self.layout.matrices
        starts = _matrices(
            state.get("starts"),
            [(matrix.m, matrix.rank) for matrix in matrices],
            "where the next round starts",
        )
        held = state.get("held")
        if held is not None:
            held = _matrices(held, [(matrix.n, matrix.m) for matrix in matrices], "residuals")
        others = state.get("others")
        if not isinstance(others, Mapping):
            raise UsageError("this saved error feedback has nothing of the tensors that travel whole")
        self.others.load_state_dict(others)
        self._starts = [start.clone() for start in starts]
        if held is None:
            self._held = []
        else:
            for own, saved in zip(self._residuals()[0], held, strict=True):
                own.copy_(saved)

    def norms(self) -> tuple[float, float]:
        """Return the Euclidean norms of the error that this member has still to send, and of its error as a
        reducer, for reports.
        """
        others, reducer = self.others.norms()
        return float(
            torch.tensor(
                [others, *(float(held.norm()) for held in self._held)], dtype=torch.float64, device="cpu"
            ).norm()
        ), reducer

    # ---- layout

    @property
    def _factor_elements(self) -> int:
        """Return the number of elements at the beginning of the second vector that are factors."""
        return self.layout.matrices[-1].q_stop if self.layout.matrices else 0

    def _open(self) -> _Step:
        assert self._step is not None, "take comes first"
        return self._step

    def _residuals(self, *, gives: bool = True) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the current residuals, and the memory for the next ones; nothing unless this member
        `gives`.
        """
        if not gives:
            return [], []
        for buffers in (self._held, self._spare):
            if not buffers:
                for matrix in self.layout.matrices:
                    place = exact_device(self.tensors[matrix.place].device)
                    buffers.append(torch.zeros(matrix.n, matrix.m, dtype=torch.float32, device=place))
        return self._held, self._spare

    def _other_places(self) -> list[tuple[int, int, int]]:
        """Return, for each tensor that is no matrix, its place and its range in the second vector, in
        elements.
        """
        starts = self.layout.other_starts
        stops = [*starts[1:], self.layout.second_numel]
        return [*zip(self.layout.others, starts, stops, strict=True)] if starts else []


def _to_device_of(factor: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Return a factor, which lies on the host, on the device of `to`."""
    return factor.to(to.device, non_blocking=True)


def _move(tensor: torch.Tensor, average: torch.Tensor, before: torch.Tensor | None) -> None:
    """Write the average to the tensor, or add average - before; for a tensor on MPS, the average is on the
    host.
    """
    if before is None:
        tensor.copy_(average)
    else:
        tensor.add_((average.to(tensor.device) - before).to(tensor.dtype))


def _matrices(saved: Any, shapes: Sequence[tuple[int, int]], what: str) -> list[torch.Tensor]:
    if not isinstance(saved, list) or len(saved) != len(shapes):
        raise UsageError(f"{what}: there are {len(shapes)} matrices, and this is of others")
    for tensor, shape in zip(saved, shapes, strict=True):
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype != torch.float32
            or tuple(tensor.shape) != shape
        ):
            raise UsageError(f"{what}: a matrix of {shape} in torch.float32 is wanted")
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{what}: NaN or infinity is in it")
    return saved
