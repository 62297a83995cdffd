"""Memory that each mode takes in addition to the model, in bytes per trained parameter: one table for
estimates, tests and documents.

Not included: activations; the temporary tensors of torch's own optimizers (`foreach=True`, the default on
CUDA, takes about one more tensor of the parameters' type while it steps); encoded data of rounds on the
host; epochs captured, and gradients kept, while a peer downloads the state; and temporary copies whose size
is bounded by the largest parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import Diloco, Gossip, Gradients, Local
from swarm.core.errors import UsageError

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPerParameter:
    """Bytes per trained parameter beyond the model's own parameters. On a CPU, device and host are the same
    memory: add them up.
    """

    device: float  # peak, on the parameters' device
    host: float  # peak
    device_kept: float  # the part of `device` that is always allocated
    host_kept: float


@dataclass(frozen=True, slots=True)
class _Need:
    """One kind of tensor that training takes in addition to the parameters."""

    bytes: float
    follows: bool  # on the host when the optimizer offloads, else on the parameters' device
    passing: bool = False  # allocated during one operation only; no two such operations overlap


def bytes_per_parameter(
    mode: ModeSettings,
    *,
    optimizer_statistics: int,
    error_feedback: bool,
    strategy: bool,
    offload: bool,
    element_bytes: int = _FLOAT32,
) -> MemoryPerParameter:
    """Return the memory that training in `mode` takes in addition to the model. Raise UsageError for a mode
    that is not one of this library's.

    `optimizer_statistics`: how many tensors of the parameters' shape and type the inner optimizer keeps: 2
    for Adam and AdamW, 1 for SGD with momentum. `error_feedback`, `strategy` and `offload` are as in
    `swarm.Optimizer` (`strategy`: whether there is one). `element_bytes`: bytes of one parameter, 2 for
    bfloat16. With `offload` the parameters are assumed to be on an accelerator.
    """
    local, vector = _mode_needs(mode, optimizer_statistics, element_bytes)
    needs = [
        _Need(element_bytes, follows=False),  # .grad
        _Need(element_bytes * optimizer_statistics, follows=False),
        *local,
    ]
    host_only: float = 0
    if strategy or error_feedback:  # the sender's residual, and the next one that a round computes
        needs.append(_Need(2 * _FLOAT32 * vector, follows=True))
    # the same for the shard that this peer reduces: half of the vector with two peers, less with more
    if error_feedback and not strategy:
        host_only += 2 * _FLOAT32 * vector / 2
    if offload:  # pinned memory: gradients on their way to the host, or parameters in both directions
        host_only += element_bytes
    if offload and isinstance(mode, Gradients):
        # averaged gradients, while the inner optimizer steps
        needs.append(_Need(element_bytes, follows=False, passing=True))
    device_kept, device_passing = _sum(needs, lambda need: not (need.follows and offload))
    host_kept, host_passing = _sum(needs, lambda need: need.follows and offload)
    host_kept += host_only
    return MemoryPerParameter(
        device=device_kept + device_passing,
        host=host_kept + host_passing,
        device_kept=device_kept,
        host_kept=host_kept,
    )


def _mode_needs(
    mode: ModeSettings, optimizer_statistics: int, element_bytes: int
) -> tuple[list[_Need], float]:
    """Return what the mode itself keeps, and how many elements its rounds average per parameter."""
    if isinstance(mode, Gradients):
        # sums of gradients; with delayed rounds, also those in a round
        needs = [_Need(_FLOAT32 * (2 if mode.delayed else 1), follows=True)]
        # the parameters before a round over the state, to compute the drift; or gradients in the parameters'
        # type, for a step
        needs.append(_Need(element_bytes, follows=False, passing=True))
        if element_bytes != _FLOAT32:  # rounds over the state work on float32
            needs.append(_Need(_FLOAT32 * (1 + optimizer_statistics), follows=False))
        return needs, 1.0
    # the base; and temporarily the base before a round over the state, or suspended progress during a
    # download of the state
    needs = [_Need(_FLOAT32, follows=True), _Need(_FLOAT32, follows=True, passing=True)]
    if isinstance(mode, Local):
        return [*needs, _Need(_FLOAT32, follows=True)], 1.0  # the pseudo-gradient
    if isinstance(mode, Diloco):
        if mode.momentum:
            needs.append(_Need(_FLOAT32, follows=True))
        # the pseudo-gradient of one fragment; while training continues, also the fragment as it was when its
        # round began
        needs.append(_Need((1 + mode.overlapped) * _FLOAT32 / mode.streaming, follows=True))
        return needs, 1.0
    if isinstance(mode, Gossip):
        if mode.momentum:
            needs.append(_Need(_FLOAT32, follows=True))
        # the tensors of a round: progress and base
        return [*needs, _Need(2 * _FLOAT32, follows=True)], 2.0
    raise UsageError(
        f"there is no estimate of the memory that mode {getattr(mode, 'name', mode)!r:.40} takes"
    )


def _sum(needs: list[_Need], counts: Callable[[_Need], bool]) -> tuple[float, float]:
    """Return the bytes of these needs: those that are kept, and the largest of the temporary ones."""
    kept = sum(need.bytes for need in needs if counts(need) and not need.passing)
    return kept, max((need.bytes for need in needs if counts(need) and need.passing), default=0)
