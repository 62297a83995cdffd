"""The two averagers of an optimizer: one over what its mode averages each epoch, one over the whole state now and then."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from averaging.averager import Averager
from averaging.reduction.robust import MEAN, Aggregation
from averaging.result import AveragingResult, PendingRound
from averaging.service import AveragingService
from averaging.training.config import OptimizerConfig
from averaging.training.modes import Mode
from averaging.training.state import TrainingState
from swarm.compression import resolve
from swarm.errors import UsageError
from swarm.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node

_POLL_S = 0.002
_POLLS_PER_LOOK = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised:
    """How a round over the state ended."""

    result: AveragingResult
    drift: float | None = None  # relative norm by which this peer's parameters differed from the average
    in_step: bool = True  # False: most others have other step counters or another schedule than this peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the tensors of the epochs are averaged."""

    codec: str
    aggregation: Aggregation = MEAN  # its rule holds for the state, too; clipping is for gradients: parameters have no common origin
    audit: float = 0.0
    error_feedback: bool = False


class Rounds:
    """Averagers are made when they are needed first: others wait for whoever holds one."""

    def __init__(self, node: Node, run_id: str, mode: Mode, state: TrainingState, manner: Manner, config: OptimizerConfig) -> None:
        self._node, self._run_id, self._mode, self._state, self._manner, self._config = node, run_id, mode, state, manner, config
        self._epochs: Averager | None = None
        self._states: Averager | None = None
        self._feedback: dict[str, Any] | None = None  # loaded before there is an averager to have it
        self._states_over: list[int] = []  # addresses of the tensors that `_states` averages: loading may replace them

    def open(self) -> None:
        """Hold the averager of the epochs from now on: others expect this peer in their rounds."""
        if self._epochs is None:
            self._epochs = self._averager(self._mode.tensors(), "epochs", "gradient", self._manner)
            if self._epochs.feedback is not None and self._feedback is not None:
                self._epochs.feedback.load_state_dict(self._feedback)

    def ban(self, peers: frozenset[PeerId]) -> None:
        """Whom no group of this run has from now on."""
        self._node.network.loop.call_soon_threadsafe(lambda: AveragingService.of(self._node).exchange.ban(self._run_id, peers))

    def feedback_state(self) -> dict[str, Any] | None:
        """What error feedback holds; None without."""
        feedback = self._epochs.feedback if self._epochs is not None else None
        return self._feedback if feedback is None else feedback.state_dict()

    def load_feedback(self, state: dict[str, Any] | None) -> None:
        """Go on with what `feedback_state` returned. UsageError: it belongs to something else, or a round is held."""
        if self._epochs is None:
            self._feedback = state
        elif self._epochs.feedback is not None and state is not None:
            self._epochs.feedback.load_state_dict(state)

    def average(self, epoch: int, enough: Callable[[], bool], grace_s: float) -> AveragingResult:
        """One attempt at the round of `epoch`. When it did not fail, the mode's tensors hold the average.

        Given up `grace_s` after `enough()`: a round that has begun ends before that, one that nobody will join does not.
        """
        self.open()
        assert self._epochs is not None
        weight, told = self._mode.prepare()
        pending = self._epochs.step(
            weight=weight, timeout_s=self._config.round_timeout_s, gather=told, round_key=epoch, wait=False, lend=True
        )
        try:
            _wait(pending, enough, grace_s)
            result = pending.result()
        except BaseException:  # Ctrl-C: nothing may go on behind the caller's back
            pending.cancel()
            raise
        assert isinstance(result, AveragingResult)
        return result

    def open_state(self) -> None:
        """Hold the averager of the state; once the inner optimizer has made its statistics, so that all peers' layouts agree."""
        tensors = self._state.averaged()
        over = [tensor.data_ptr() for tensor in tensors]
        if self._states is not None and over == self._states_over:
            return
        if self._states is not None:
            self._states.close()
        aggregation = replace(self._manner.aggregation, clip_to_median=None)
        manner = replace(self._manner, codec=self._config.state_codec, aggregation=aggregation, error_feedback=False)
        self._states = self._averager(tensors, "state", "statistic", manner)
        self._states_over = over

    def synchronise(self, enough: Callable[[], bool], grace_s: float) -> Synchronised:
        """Average the state with the others, all with the same weight; given up as in `average`.

        The parameters move when the result is there, under the lock: threads of the pool that want a snapshot must not wait for a round.
        """
        self.open_state()
        assert self._states is not None
        state = self._state
        before = [p.detach().clone() for p in state.parameters if p.requires_grad]
        counters = state.counters_digest()
        told = {"counters": counters, "extras": state.extra_counts()}
        pending = self._states.step(
            weight=1.0, timeout_s=self._config.state_timeout_s, gather=told, round_key=state.epoch, wait=False, lend=True
        )
        try:
            _wait(pending, enough, grace_s)
            with state.lock:
                result = pending.result()
                if result.failed:
                    return Synchronised(result=result)
                heard = [told for told in result.gathered.values() if isinstance(told, dict)]
                state.agree_extras([told["extras"] for told in heard if _are_counts(told.get("extras"))])
                state.moved(state.epoch, canonical=True)
        except BaseException:  # as above
            pending.cancel()
            raise
        most = Counter(told.get("counters") for told in heard if isinstance(told.get("counters"), bytes)).most_common(1)
        in_step = not most or most[0][0] == counters or most[0][1] * 2 <= len(heard)
        after = [p.detach() for p in state.parameters if p.requires_grad]
        return Synchronised(result=result, drift=_distance(before, after), in_step=in_step)

    def close(self) -> None:
        for averager in (self._epochs, self._states):
            if averager is not None:
                averager.close()

    def _averager(self, tensors: Sequence[torch.Tensor], name: str, role: str, manner: Manner) -> Averager:
        return Averager(
            self._node,
            tensors,
            name=name,
            target_group_size=self._config.group_size_max,
            codec=resolve(manner.codec, role, sum(tensor.numel() for tensor in tensors)).name,
            aggregation=manner.aggregation.rule,
            clip_to_median=manner.aggregation.clip_to_median,
            audit=manner.audit,
            error_feedback=manner.error_feedback,
            config=self._config.of_run(self._run_id),
        )


def _wait(pending: PendingRound, enough: Callable[[], bool], grace_s: float) -> None:
    """Until the round has ended, or `grace_s` after there was enough of waiting."""
    pause, looked, since_s = threading.Event(), 0, math.inf
    while not pending.done:
        pause.wait(_POLL_S)
        looked += 1
        if looked % _POLLS_PER_LOOK:
            continue
        now_s = time.monotonic()
        since_s = min(since_s, now_s) if enough() else math.inf
        if now_s - since_s >= grace_s:
            pending.cancel()
            return


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 62 for one in value)


def _distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """‖one - other‖ / ‖other‖ over all tensors together; 0.0 for two zeros."""
    filled = [(a.float(), b.float()) for a, b in zip(one, other, strict=True) if a.numel()]
    if not filled:
        return 0.0
    apart = math.hypot(*(float((a - b).norm()) for a, b in filled))
    size = math.hypot(*(float(b.norm()) for _, b in filled))
    return apart / size if size else apart


def check_extras(state: TrainingState, counts_max: int = 1024) -> None:
    """UsageError for whole-number extra tensors that are too large to be told in a round's metadata."""
    if len(state.extra_counts()) > counts_max:
        raise UsageError(f"extra_tensors of whole numbers may have {counts_max} elements in all: they are counters, told and not averaged")
