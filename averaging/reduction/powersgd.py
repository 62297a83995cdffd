"""PowerSGD of one averager: what it keeps between rounds, and what each step of a round makes of it.
docs/decisions/0016 has the reasons.

A round takes two all-reduces. With M = values + residual, a matrix that every member has its own of:

    first     p = the mean of all M q₀, for a q₀ that is alike on all members; its columns are made orthonormal
    second    q = the mean of all Mᵀ p; every member's average is then p qᵀ, and q is what the next round starts from

`p` only says in which directions the second all-reduce looks: whoever is missing in the first, or came with
another q₀, makes the approximation worse for a round and no average wrong. A member's residual becomes M - p
(what it sent as q)ᵀ when the second all-reduce is committed; until then nothing has changed. Tensors that are
no matrices, or too small to gain, travel with the second, with error feedback of the usual kind.

Matrices are worked on where they are, and only factors leave their device; those on a device that is not its
own `exact_device` (MPS) are worked on by the host, and their residuals lie there. No clock, no I/O; one round
at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
TOLD_BYTES = 8
_FORMAT = 1
_WRITTEN_ELEMENTS = 1 << 20  # of a matrix's average at once, where it is not made in the tensor itself


@dataclass(slots=True)
class _Taken:
    """What one step works on."""

    # M of each matrix, float32, where it is worked on; empty for a member that contributes nothing
    given: list[torch.Tensor]
    others: torch.Tensor  # the other tensors' values, flat float32 on the host
    first: FlatVector
    before: list[torch.Tensor] | None  # every tensor's values, for a difference
    basis: list[torch.Tensor]  # p of each matrix, on the host
    sent: list[torch.Tensor]  # q of each matrix as this member gave it
    mean: torch.Tensor | None = None  # of the second vector


class LowRank:
    """Averages `tensors` (any float type, device and stride) by factors."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        terms: PowerSgd,
        codec: Codec,
        *,
        seed: bytes,
        reduces: bool = True,
        queues: Queues | None = None,
    ) -> None:
        """`seed`: from which all peers draw what the first round starts from. `reduces`: see `Feedback`.
        `queues`: of the tensors' devices.

        UsageError for a codec that loses more than rounding: what a reducer loses of a factor is kept by
        nobody.
        """
        if codec.name not in CODECS:
            raise UsageError(
                f"PowerSGD's factors travel in {', '.join(CODECS)}, not in {codec.name}: they are small, and all else hangs on them"
            )
        self.tensors, self.terms = tuple(tensors), terms
        self.layout = Factoring.of([tuple(tensor.shape) for tensor in tensors], terms)
        self.others = Feedback(self.layout.second_numel, codec, reduces=reduces)
        # where the averages of the two all-reduces come to lie
        self.landings = (ResultBuffer(), ResultBuffer())
        self.queues = Queues(tensor.device for tensor in tensors) if queues is None else queues
        self._seed = seed
        # residuals of the matrices, float32, where these are worked on; made when first needed
        self._held: list[torch.Tensor] = []
        self._spare: list[torch.Tensor] = []
        self._starts = [seeded(seed, matrix) for matrix in self.layout.matrices]
        self._taken: _Taken | None = None

    @property
    def told(self) -> bytes:
        """What tells these starting points from others': a few bytes for the other members."""
        state = blake3()
        for start in self._starts:
            state.update(start.numpy().tobytes())
        return state.digest()[:TOLD_BYTES]

    # ---- a round

    def take(self, *, gives: bool, keeps: bool) -> None:
        """A step begins, in the thread whose tensors these are.

        `gives`: this member contributes. `keeps`: `add_difference` will be asked for.
        """
        before = [tensor.detach().clone() for tensor in self.tensors] if keeps else None
        if not gives:
            self._taken = _Taken(
                [],
                torch.empty(0, dtype=torch.float32, device="cpu"),
                HollowVector(self.layout.first_numel),
                before,
                [],
                [],
            )
            return
        matrices = self.layout.matrices
        others = self.queues.host_memory(self.layout.second_numel - self._factor_elements)
        first = self.queues.host_memory(self.layout.first_numel)
        with torch.no_grad():
            given = []
            for matrix, held, spare in zip(matrices, *self._residuals(), strict=True):
                values = self.tensors[matrix.place].detach().to(held.device)
                torch.add(values, held.view(values.shape), out=spare.view(values.shape))
                given.append(spare)
            # what follows, and the round, come after what this thread has asked of the devices
            self.queues.fork()
            with self.queues.working():
                copies = [
                    (self.tensors[place].detach(), others[begin:stop])
                    for place, begin, stop in self._other_places()
                ]
                for matrix, whole, start in zip(matrices, given, self._starts, strict=True):
                    copies.append(
                        (product(whole, _brought(start, whole)), first[matrix.p_start : matrix.p_stop])
                    )
                self._fetch(copies)
        self._taken = _Taken(given, others, FlatVector([first], NO_QUEUES), before, [], [])

    def first(self, *, alike: bool) -> FlatVector:
        """What goes into the first all-reduce. `alike`: most members start from where this one does, so that
        it has something to say.
        """
        taken = self._open()
        return taken.first if alike else HollowVector(self.layout.first_numel)

    def second(self, mean: torch.Tensor | None) -> FlatVector:
        """What goes into the second, after the first all-reduce's `mean`; None for a member that receives
        nothing.
        """
        taken = self._open()
        taken.basis, taken.sent, taken.mean = [], [], None
        if mean is not None:
            for matrix in self.layout.matrices:
                taken.basis.append(
                    orthonormal(mean[matrix.p_start : matrix.p_stop].view(matrix.n, matrix.rank))
                )
        if mean is None or not self._gives(taken):
            return HollowVector(self.layout.second_numel)
        factors = self.queues.host_memory(self._factor_elements)
        with self.queues.working(), torch.no_grad():
            copies = []
            for matrix, given, basis in zip(self.layout.matrices, taken.given, taken.basis, strict=True):
                taken.sent.append(product(given.t(), _brought(basis, given)))
                copies.append((taken.sent[-1], factors[matrix.q_start : matrix.q_stop]))
            self._fetch(copies)
        return FlatVector([factors, taken.others], NO_QUEUES)

    def commit(self, mean: torch.Tensor | None, *, sent: bool) -> None:
        """The second all-reduce is committed, with this `mean`. `sent`: this member took part in it, even if
        it was left out somewhere.
        """
        taken = self._open()
        # of q, when it was encoded, or because it was left out
        lost = self.others.release(self._factor_elements)
        if mean is None:
            return
        taken.mean = mean
        if sent and self._gives(taken):
            with self.queues.working(), torch.no_grad():
                for matrix, given, basis, q in zip(
                    self.layout.matrices, taken.given, taken.basis, taken.sent, strict=True
                ):
                    delivered = q - _brought(
                        lost[matrix.q_start : matrix.q_stop].view(matrix.m, matrix.rank), q
                    )
                    subtract_product(given, _brought(basis, given), delivered)
            self.queues.finish()
            self._held, self._spare = taken.given, self._held
            taken.given = []
        self._starts = [
            renewed(mean[matrix.q_start : matrix.q_stop].view(matrix.m, matrix.rank), self._seed, matrix)
            for matrix in self.layout.matrices
        ]

    def put(self) -> None:
        """Replace the tensors' values by the averages, in the thread whose tensors they are."""
        self._write(None)

    def add_difference(self) -> None:
        """Add the averages minus what `take` found to the tensors, which may have moved on since."""
        before = self._open().before
        assert before is not None
        self._write(before)

    def _write(self, before: Sequence[torch.Tensor] | None) -> None:
        taken = self._open()
        mean = taken.mean
        assert mean is not None
        with torch.no_grad():
            for matrix, basis in zip(self.layout.matrices, taken.basis, strict=True):
                q = mean[matrix.q_start : matrix.q_stop].view(matrix.m, matrix.rank)
                self._write_matrix(matrix, basis, q, before[matrix.place] if before is not None else None)
            for place, start, stop in self._other_places():
                tensor = self.tensors[place].detach()
                average = mean[self._factor_elements :][start:stop].view(tensor.shape)
                _move(tensor, average, before[place] if before is not None else None)
        self.queues.finish()  # other threads may read the tensors from now on
        self._taken = None

    def _write_matrix(
        self, matrix: Matrix, basis: torch.Tensor, q: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        """The average p qᵀ, made in the tensor itself where that can be, else some rows after the other."""
        tensor = self.tensors[matrix.place].detach()
        place = exact_device(tensor.device)
        p, q = basis.to(place, non_blocking=True), q.to(place, non_blocking=True)
        if (
            before is None
            and tensor.dtype == torch.float32
            and tensor.is_contiguous()
            and tensor.device == place
        ):
            expand(p, q, tensor.view(matrix.n, matrix.m))
            return
        for rows in row_blocks((matrix.n, matrix.m), _WRITTEN_ELEMENTS):
            average = torch.empty(rows.stop - rows.start, matrix.m, dtype=torch.float32, device=place)
            expand(p[rows], q, average)
            _move(
                tensor[rows], average.view(tensor[rows].shape), before[rows] if before is not None else None
            )

    def _fetch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
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
        """What resuming needs, copied to the host: residuals, and what the next round starts from."""
        return {
            "format": _FORMAT,
            "powersgd": [self.terms.rank, self.terms.saving_min],
            "held": [held.to("cpu", copy=True) for held in self._held] or None,
            "starts": [start.clone() for start in self._starts],
            "others": self.others.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. UsageError says what is wrong with it, and nothing has
        changed.
        """
        if state.get("format") != _FORMAT or state.get("powersgd") != [
            self.terms.rank,
            self.terms.saving_min,
        ]:
            raise UsageError(f"this is no saved error feedback of {self.terms.terms}")
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
        """The Euclidean norms of what this member has still to send, and of what it lost as a reducer: for
        reports.
        """
        others, reducer = self.others.norms()
        return float(
            torch.tensor(
                [others, *(float(held.norm()) for held in self._held)], dtype=torch.float64, device="cpu"
            ).norm()
        ), reducer

    # ---- what is where

    @property
    def _factor_elements(self) -> int:
        """Of the second vector: so many from its beginning are factors."""
        return self.layout.matrices[-1].q_stop if self.layout.matrices else 0

    def _gives(self, taken: _Taken) -> bool:
        return not isinstance(taken.first, HollowVector)

    def _open(self) -> _Taken:
        assert self._taken is not None, "take comes first"
        return self._taken

    def _residuals(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is held, and memory for what will be."""
        for buffers in (self._held, self._spare):
            if not buffers:
                for matrix in self.layout.matrices:
                    place = exact_device(self.tensors[matrix.place].device)
                    buffers.append(torch.zeros(matrix.n, matrix.m, dtype=torch.float32, device=place))
        return self._held, self._spare

    def _other_places(self) -> list[tuple[int, int, int]]:
        """Each tensor that is no matrix: its place, and where it lies among them, in elements."""
        starts = [start - self._factor_elements for start in self.layout.other_starts]
        stops = [*starts[1:], self.layout.second_numel - self._factor_elements]
        return [*zip(self.layout.others, starts, stops, strict=True)] if starts else []


def _brought(factor: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """A factor, which lies on the host, where the matrix `to` is worked on: queued, so that the host does not
    wait for its device.
    """
    return factor.to(to.device, non_blocking=True)


def _move(tensor: torch.Tensor, average: torch.Tensor, before: torch.Tensor | None) -> None:
    """tensor = average, or += average - before; the average may be on another device."""
    if before is None:
        tensor.copy_(average, non_blocking=tensor.is_cuda)
    else:
        there = average.to(tensor.device, non_blocking=tensor.is_cuda)
        tensor.add_((there - before).to(tensor.dtype))


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
