"""The two averagers of an optimizer: one over what its mode averages each epoch, one over the whole state now
and then.
"""

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
from averaging.optim.config import OptimizerConfig
from averaging.optim.memory import rows_of
from averaging.optim.modes import Mode, ModeTraits
from averaging.optim.state.training_state import TrainingState
from averaging.reduction.feedback import Feedback
from averaging.reduction.lowrank import PowerSgd
from averaging.reduction.powersgd import CODECS, LowRank
from averaging.reduction.robust import MEAN, Aggregation
from averaging.result import PendingRound, RoundResult
from averaging.service import AveragingService
from swarm.compression import resolve
from swarm.compression.adaptive import ADAPTIVE
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node

_POLL_S = 0.002
_LOOK_S = 0.04
_CANCEL_S_MAX = 2.0
_DISTANCE_ELEMENTS = 1 << 22  # compared at once: bounds the float32 copies, unless one row is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised:
    """How a round over the state ended."""

    result: RoundResult
    drift: float | None = None  # relative norm by which this peer's parameters differed from the average
    in_step: bool = True  # False: most others have other step counters or another schedule than this peer


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """How the tensors of the epochs are averaged."""

    codec: str
    # its rule holds for the state, too; clipping is for gradients and pseudo-gradients
    aggregation: Aggregation = MEAN
    audit: float = 0.0
    error_feedback: bool = False
    strategy: PowerSgd | None = None

    def __post_init__(self) -> None:
        if self.strategy is not None and not isinstance(self.strategy, PowerSgd):
            raise UsageError(
                f"a strategy is swarm.PowerSgd(rank=…), or None for all values as they are, not {self.strategy!r:.60}"
            )
        if self.strategy is not None and self.codec not in (ADAPTIVE, *CODECS):
            raise UsageError(
                f"with PowerSGD the codec is {', '.join(CODECS)} or {ADAPTIVE}, not {self.codec!r}: it is for the factors"
            )


class BackgroundRound:
    """A round in the background, given up `grace_s` after there was enough of waiting for it."""

    def __init__(self, pending: PendingRound, enough: Callable[[], bool], grace_s: float) -> None:
        self._pending, self._enough, self._grace_s = pending, enough, grace_s
        self._since_s, self._looked_s = math.inf, -math.inf

    def done(self) -> bool:
        """Whether `result` would not wait. To be asked now and then: it is here that a round is given up."""
        now_s = time.monotonic()
        if self._pending.done:
            return True
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._since_s = min(self._since_s, now_s) if self._enough() else math.inf
        if now_s - self._since_s < self._grace_s:
            return False
        self._pending.cancel()
        return True

    def result(self) -> RoundResult:
        """Wait for the end; the average is written into the tensors in this thread."""
        try:
            pause = threading.Event()
            while not self.done():
                pause.wait(_POLL_S)
            return self._pending.result()
        except BaseException:  # Ctrl-C: nothing may go on behind the caller's back
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give it up; the tensors are free afterwards."""
        self._pending.cancel()
        self._pending.wait_given_up(_CANCEL_S_MAX)


class EpochAverager:
    """Averagers are made when they are needed first: others wait for whoever holds one."""

    def __init__(
        self,
        node: Node,
        run_id: str,
        mode: Mode,
        state: TrainingState,
        manner: AveragingOptions,
        config: OptimizerConfig,
    ) -> None:
        self._node, self._run_id, self._mode, self._state, self._manner, self._config = (
            node,
            run_id,
            mode,
            state,
            manner,
            config,
        )
        self._epochs: Averager | None = None
        self._states: Averager | None = None
        self._feedbacks: list[Feedback | LowRank] = []  # one for each of the mode's slots, or none
        self._feedback: Any = None  # loaded before there is an averager to have it
        # addresses of the tensors that `_states` averages: loading may replace them
        self._states_over: list[int] = []

    def open(self) -> None:
        """Hold the averager of the epochs from now on: others expect this peer in their rounds."""
        if self._epochs is not None:
            return
        self._epochs = self._averager(self._mode.tensors(), "epochs", self._manner)
        first = self._epochs.feedback
        if first is not None:
            others = range(1, self._mode.traits.slots)
            self._feedbacks = [first, *(self._epochs.new_feedback() for _ in others)]
            self.load_feedback(self._feedback)

    def ban(self, peers: frozenset[PeerId]) -> None:
        """Whom no group of this run has from now on."""
        self._node.network.loop.call_soon_threadsafe(
            lambda: self._node.service(AveragingService).exchange.refusals.ban(self._run_id, peers)
        )

    def feedback_state(self) -> Any:
        """What error feedback holds: one state, or a list of them for a mode whose rounds take turns; None
        without.
        """
        if not self._feedbacks:
            return self._feedback
        states = [feedback.state_dict() for feedback in self._feedbacks]
        return states[0] if len(states) == 1 else states

    def load_feedback(self, state: Any) -> None:
        """Go on with what `feedback_state` returned. UsageError: it belongs to something else, or a round is
        held.
        """
        if self._epochs is None:
            self._feedback = state
        elif self._feedbacks and state is not None:
            states = state if isinstance(state, list) else [state]
            if len(states) != len(self._feedbacks):
                raise UsageError(
                    f"the saved error feedback is of {len(states)} parts of the model; this mode has {len(self._feedbacks)}"
                )
            for feedback, one in zip(self._feedbacks, states, strict=True):
                feedback.load_state_dict(one)

    def begin(self, epoch: int, enough: Callable[[], bool], grace_s: float) -> BackgroundRound:
        """Begin the round of `epoch`. When it did not fail, the mode's tensors hold the average once its
        result is taken.

        Given up `grace_s` after `enough()`: a round that has begun ends before that, one that nobody will
        join does not.
        """
        self.open()
        assert self._epochs is not None
        if self._feedbacks:
            self._epochs.feedback = self._feedbacks[epoch % len(self._feedbacks)]
        weight, told = self._mode.prepare(epoch)
        pending = self._epochs.step(
            weight=weight,
            timeout_s=self._config.round_timeout_s,
            gather=told,
            round_key=epoch,
            wait=False,
            lend=True,
        )
        return BackgroundRound(pending, enough, grace_s)

    def average(self, epoch: int, enough: Callable[[], bool], grace_s: float) -> RoundResult:
        """`begin`, and wait for the end."""
        return self.begin(epoch, enough, grace_s).result()

    def open_state(self) -> None:
        """Hold the averager of the state; once the inner optimizer has made its statistics, so that all
        peers' layouts agree.
        """
        tensors = self._state.averaged()
        over = [tensor.data_ptr() for tensor in tensors]
        if self._states is not None and over == self._states_over:
            return
        if self._states is not None:
            self._states.close()
        manner = replace(self._manner, codec=self._config.state_codec, error_feedback=False, strategy=None)
        self._states = self._averager(tensors, "state", manner)
        self._states_over = over

    def synchronise(self, enough: Callable[[], bool], grace_s: float) -> Synchronised:
        """Average the state with the others, all with the same weight; given up as in `average`.

        The parameters move when the result is there, under the lock: threads of the pool that want a snapshot
        must not wait for a round.
        """
        self.open_state()
        assert self._states is not None
        state = self._state
        # The round writes over the parameters, and nothing else remembers what they were: a mode may need it,
        # and so does the drift.
        before = [p.detach().clone() for p in state.parameters if p.requires_grad]
        counters = state.counters_digest()
        told = {"counters": counters, "extras": state.extra_counts()}
        pending = self._states.step(
            weight=1.0,
            timeout_s=self._config.state_timeout_s,
            gather=told,
            round_key=state.epoch,
            wait=False,
            lend=True,
        )
        flight, pause = BackgroundRound(pending, enough, grace_s), threading.Event()
        try:
            while not flight.done():
                pause.wait(_POLL_S)
            with state.lock:
                result = pending.result()
                if result.failed:
                    return Synchronised(result=result)
                heard = [told for told in result.gathered.values() if isinstance(told, dict)]
                state.agree_extras([told["extras"] for told in heard if _are_counts(told.get("extras"))])
                drift = relative_distance(before, [p.detach() for p in state.parameters if p.requires_grad])
                self._mode.settled(before)
                state.moved(state.epoch, canonical=True)
        except BaseException:  # Ctrl-C, as in a Flight
            flight.cancel()
            raise
        most = Counter(
            told.get("counters") for told in heard if isinstance(told.get("counters"), bytes)
        ).most_common(1)
        in_step = not most or most[0][0] == counters or most[0][1] * 2 <= len(heard)
        return Synchronised(result=result, drift=drift, in_step=in_step)

    def close(self) -> None:
        for averager in (self._epochs, self._states):
            if averager is not None:
                averager.close()

    def _averager(self, tensors: Sequence[torch.Tensor], name: str, manner: AveragingOptions) -> Averager:
        traits, config = self._mode.traits, self._config.of_run(self._run_id)
        role = traits.role if name == "epochs" else "statistic"
        # parameters have no common origin
        clip_to_median = manner.aggregation.clip_to_median if role.endswith("gradient") else None
        role = role if manner.strategy is None else "parameter"  # adaptive: factors take 16 bits
        return Averager(
            self._node,
            tensors,
            name=name,
            target_group_size=traits.group_size or self._config.group_size_max,
            codec=resolve(manner.codec, role, sum(tensor.numel() for tensor in tensors)).name,
            aggregation=manner.aggregation.rule,
            clip_to_median=clip_to_median,
            audit=manner.audit,
            error_feedback=manner.error_feedback,
            strategy=manner.strategy,
            config=replace(config, compatibility_tag=traits.terms),
        )


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 62 for one in value
    )


def relative_distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """‖one - other‖ / ‖other‖ over all tensors together; 0.0 for two zeros.

    Works on pieces of a bounded size, whatever the tensors' type and strides, and waits for each device once.
    """
    norms: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for a, b in zip(one, other, strict=True):
        for left, right in zip(rows_of(a, _DISTANCE_ELEMENTS), rows_of(b, _DISTANCE_ELEMENTS), strict=True):
            wide = right.to(torch.float32)
            found = torch.linalg.vector_norm(left.to(torch.float32) - wide), torch.linalg.vector_norm(wide)
            norms.setdefault(a.device, []).append(found)
    found_here = [torch.stack([torch.stack(pair) for pair in pairs]).tolist() for pairs in norms.values()]
    apart = math.hypot(*(pair[0] for pairs in found_here for pair in pairs))
    size = math.hypot(*(pair[1] for pairs in found_here for pair in pairs))
    return apart / size if size else apart


def check_codec(manner: AveragingOptions, traits: ModeTraits) -> None:
    """UsageError for a codec or a strategy that would ruin what this mode averages."""
    codec = manner.codec
    if manner.strategy is not None and (traits.role == "parameter" or traits.slots > 1):
        why = (
            "averages parameters themselves"
            if traits.role == "parameter"
            else "averages parts of the model, not matrices"
        )
        raise UsageError(f"mode {traits.terms.partition(' ')[0]} {why}: PowerSGD is not for it")
    chosen = resolve(codec, traits.role, 0)
    if traits.role == "parameter" and chosen.bits_per_element < 16:
        raise UsageError(
            f"mode {traits.terms.partition(' ')[0]} averages parameters themselves: {codec} would ruin them; use float16 or finer"
        )


def check_extras(state: TrainingState, counts_max: int = 1024) -> None:
    """UsageError for whole-number extra tensors that are too large to be told in a round's metadata."""
    if len(state.extra_counts()) > counts_max:
        raise UsageError(
            f"extra_tensors of whole numbers may have {counts_max} elements in all: they are counters, told and not averaged"
        )
