"""The two averagers of an optimizer: one for the tensors that its mode averages each epoch, one for the
whole state.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from averaging.allreduce.config import RoundConfig
from averaging.averager import Averager
from averaging.config import AveragerConfig, RunAverager
from averaging.history.certificate import RoundKind
from averaging.history.chain import Chain
from averaging.matchmaking.logic.messages import AveragerName
from averaging.optim.background_round import BackgroundRound, RoundPlan, RunningRound, check_interval_s
from averaging.optim.config import OptimizerConfig
from averaging.optim.grid_round import GridRound
from averaging.optim.history import RunHistory
from averaging.optim.memory import rows_of
from averaging.optim.modes import Mode, ModeTraits
from averaging.optim.state.training_state import TrainingState
from averaging.reduction.feedback import Feedback
from averaging.reduction.lowrank import PowerSgd
from averaging.reduction.powersgd import CODECS, LowRank
from averaging.reduction.robust import MEAN, Aggregation
from averaging.reduction.staging import refuse_overlaps
from averaging.result import PendingRound, RoundResult
from averaging.service import AveragingService
from swarm.compression import resolve
from swarm.compression.adaptive import ADAPTIVE, Role
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node

_log = logging.getLogger(__name__)

_NAMED_MAX = 3  # peers named in one message
_STATE_TIMEOUT_S = 120.0  # timeout of one round over the state, which is larger than the gradients, and rare
# share of the time that a run may spend on waiting for one late peer. A peer that is later is left out of the
# round, and its samples count in the next epoch
_WAITING_SHARE_MAX = 0.1
# longest time that a group waits for a late peer; longer than for a plain averager, because peers join a
# round only at the end of their training step
_GRACE_S_MAX = 30.0
# a round is cancelled this long after the others moved to the next epoch. Too small: slow links lose rounds
# that were about to end
OBSOLETE_ROUND_GRACE_S = 5.0
# allowed relative distance of a state from the one that the electors certify. Too large: peers train
# different models; too small: they download states that rounds would make equal
_TOLERANCE = 0.01
_EXTRA_COUNTS_MAX = 1024  # elements of integer extra tensors, which are sent in a round's metadata
# elements compared at a time; bounds the float32 copies, unless one row is longer
DISTANCE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRound:
    """Result of a round over the state."""

    result: RoundResult
    # relative norm of the difference between this peer's parameters and the average
    drift: float | None = None
    # why this peer must download the state although the round succeeded, because values that are not averaged
    # differ; "": it need not
    deviation: str = ""
    # the peers to download it from; empty: any
    donors: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """How the tensors of an epoch are averaged."""

    codec: str
    # its rule also holds for the state; clipping applies to gradients and pseudo-gradients only
    aggregation: Aggregation = MEAN
    audit: float = 0.0
    error_feedback: bool = False
    strategy: PowerSgd | None = None
    auxiliary: bool = False  # this peer reduces for others and contributes nothing
    state_sync_epochs: int = 0  # interval of rounds over the state; 0: never

    def __post_init__(self) -> None:
        RoundConfig(audit=self.audit)  # raises UsageError now, and not in the first step
        if self.strategy is not None and not isinstance(self.strategy, PowerSgd):
            raise UsageError(
                "a strategy is swarm.PowerSgd(rank=…), or None for all values as they are, "
                f"not {self.strategy!r:.60}"
            )
        if self.strategy is not None and self.codec not in (ADAPTIVE, *CODECS):
            raise UsageError(
                f"with PowerSGD the codec is {', '.join(CODECS)} or {ADAPTIVE}, not {self.codec!r}: "
                "it is for the factors"
            )


class EpochAverager:
    """Owner of the two averagers. Each is created when it is first needed, because the others wait for peers
    with an open averager.
    """

    def __init__(
        self,
        node: Node,
        run_id: str,
        mode: Mode,
        options: AveragingOptions,
        config: OptimizerConfig,
        history: RunHistory | None,
    ) -> None:
        """`history`: of the state; None in modes without a common state."""
        self._node, self._run_id, self._mode, self._state = node, run_id, mode, mode.state
        self._history = history
        self._options, self._config = options, config
        self._epoch_averager: Averager | None = None
        self._state_averager: Averager | None = None
        # one for each of the mode's slots; empty without error feedback
        self._feedbacks: list[Feedback | LowRank] = []
        self._feedback: Any = None  # loaded before there is an averager to take it
        # addresses of the tensors that `_state_averager` averages: loading a state may replace them
        self._state_addresses: list[int] = []

    @property
    def state_sync_epochs(self) -> int:
        """Return the interval of rounds over the state in epochs; 0 for never."""
        return self._options.state_sync_epochs

    @property
    def in_round(self) -> bool:
        """Return whether a group has begun the round of an epoch with this peer as a member, and would have
        to continue without it if it left now.
        """
        return _is_in_round(self._epoch_averager)

    @property
    def in_state_round(self) -> bool:
        """Return whether a group has begun a round over the state with this peer."""
        return _is_in_round(self._state_averager)

    def open(self) -> None:
        """Open the epochs' averager: from now on the others expect this peer in their rounds."""
        if self._epoch_averager is not None:
            return
        self._epoch_averager = self._make_averager(self._mode.tensors(), "epochs", self._options)
        first = self._epoch_averager.feedback
        if first is not None:
            others = range(1, self._mode.traits.slots)
            self._feedbacks = [first, *(self._epoch_averager.new_feedback() for _ in others)]
            self.load_feedback(self._feedback)

    def feedback_state(self) -> Any:
        """Return the state of error feedback: one state, a list for a mode whose rounds alternate between
        parts of the model, or None without error feedback.
        """
        if not self._feedbacks:
            return self._feedback
        states = [feedback.state_dict() for feedback in self._feedbacks]
        return states[0] if len(states) == 1 else states

    def load_feedback(self, state: Any) -> None:
        """Restore the result of `feedback_state`. Raise UsageError when it belongs to another model or
        mode, or a round is running.
        """
        if self._epoch_averager is None:
            self._feedback = state
        elif self._feedbacks and state is not None:
            states = state if isinstance(state, list) else [state]
            if len(states) != len(self._feedbacks):
                raise UsageError(
                    f"the saved error feedback is of {len(states)} parts of the model; "
                    f"this mode has {len(self._feedbacks)}"
                )
            for feedback, one in zip(self._feedbacks, states, strict=True):
                feedback.load_state_dict(one)

    def begin(
        self, epoch: int, is_obsolete: Callable[[], bool], grace_s: float, *, may_have_counted: bool = False
    ) -> RunningRound:
        """Begin the round of `epoch` in the background. If it succeeds, the mode's tensors hold the average
        once its result is taken.

        The round is cancelled `grace_s` after `is_obsolete()` became true: one that is in progress ends
        before that, one without partners does not. In a swarm that is larger than a group there are several,
        one after the other. `may_have_counted`: others may have committed an attempt that failed here.
        """
        self.open()
        assert self._epoch_averager is not None
        if self._feedbacks:
            self._epoch_averager.feedback = self._feedbacks[epoch % len(self._feedbacks)]
        weight, metadata = self._mode.prepare(epoch)
        history = self._history
        if history is not None and history.abstains and not history.is_break:
            weight = 0.0
        plan = RoundPlan(
            averager=self._epoch_averager,
            kind=RoundKind.EPOCH,
            epoch=epoch,
            weight=weight,
            gather=metadata,
            timeout_s=self._config.round_timeout_s,
            may_have_counted=may_have_counted,
            merge=self._mode.merge_metadata,
        )
        return self._begin(plan, is_obsolete, grace_s)

    def _begin(self, plan: RoundPlan, is_obsolete: Callable[[], bool], grace_s: float) -> RunningRound:
        """Begin one round of a group, with its place in the history that it extends, or the successive rounds
        of the grid.
        """
        history, key = self._history, plan.epoch  # without a history the epoch is the key
        if history is not None and history.grid_rounds > 1:
            return GridRound(plan, history, is_obsolete, grace_s)
        lineage = (
            history.round(plan.kind, plan.epoch_after, history.round_key(plan.epoch))
            if history is not None
            else None
        )
        return BackgroundRound(
            plan.step(key if lineage is None else lineage, plan.weight, plan.gather),
            is_obsolete,
            grace_s,
            self._node.clock,
            plan.take,
            check_interval_s(history.size.peers if history is not None else 1),
        )

    def average(
        self, epoch: int, is_obsolete: Callable[[], bool], grace_s: float, *, may_have_counted: bool = False
    ) -> RoundResult:
        """Begin the round of `epoch` and wait for its end; parameters as in `begin`."""
        return self.begin(epoch, is_obsolete, grace_s, may_have_counted=may_have_counted).result()

    def set_computing(self, seconds: float) -> None:
        """Inform the others that this peer computes a step and joins no round for about `seconds`."""
        self._node.service(AveragingService).exchange.set_computing(self._run_id, seconds)

    def cancel(self) -> None:
        """Cancel the rounds in progress: the trainer was interrupted, perhaps before it had them."""
        for averager in (self._epoch_averager, self._state_averager):
            if averager is not None:
                averager.cancel()

    def open_state(self) -> None:
        """Open the averager of the state. Call it after the inner optimizer has created its statistics, so
        that the layouts of all peers agree.
        """
        tensors = self._state.averaged_tensors()
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._state_averager is not None and addresses == self._state_addresses:
            return
        if self._state_averager is not None:
            self._state_averager.close()
        options = replace(self._options, codec="float32", error_feedback=False, strategy=None)
        self._state_averager = self._make_averager(tensors, "state", options)
        self._state_addresses = addresses

    def root_of(self, epoch: int) -> Chain | None:
        """Return the head of the history if its state is of this epoch, else None."""
        root = self._history.root if self._history is not None else None
        return root if root is not None and root.root_epoch == epoch else None

    def average_state(self, is_obsolete: Callable[[], bool]) -> StateRound:
        """Average the state with the others, all with the same weight. The round is cancelled as in
        `begin`.

        The parameters change when the result has arrived, under the state's lock: threads that want a
        snapshot must not wait for a round. In a swarm that is larger than a group only the output of the
        electors' round is canonical; a peer whose state moved far in its last round downloads it.
        """
        self.open_state()
        assert self._state_averager is not None
        state = self._state
        frozen, counters = state.frozen_digest(), state.counters_digest()
        hyperparameters = state.hyperparameters_digest()
        # a round overwrites the parameters; the mode and the drift need their previous values
        before = self._trained_copies()
        moved: list[float] = []  # relative change by each round

        def metadata() -> dict[str, Any]:
            return {
                "counters": counters,
                "extras": state.extra_counts(),
                "frozen": frozen,
                "hyperparameters": hyperparameters,
            }

        def take(pending: PendingRound) -> RoundResult:
            with state.lock:
                result = pending.result()
                if not result.failed:
                    sent = [one for one in result.gathered.values() if isinstance(one, dict)]
                    state.agree_extras([one["extras"] for one in sent if _are_counts(one.get("extras"))])
                    moved.append(relative_distance(before, self._trained()))
                    self._mode.on_state_averaged(before)
                    state.mark_changed(state.epoch)  # one round of several: no state to give
                    before[:] = self._trained_copies()
                return result

        plan = RoundPlan(
            averager=self._state_averager,
            kind=RoundKind.STATE,
            epoch=state.epoch,
            weight=1.0,
            gather=metadata(),
            timeout_s=_STATE_TIMEOUT_S,
            may_have_counted=False,
            merge=lambda _: metadata(),
            take=take,
        )
        running = self._begin(plan, is_obsolete, OBSOLETE_ROUND_GRACE_S)
        result = running.result()
        if result.failed:
            return StateRound(result=result)
        canonical = not isinstance(running, GridRound) or running.made_by_electors
        with state.lock:
            if self._history is not None and result.certificate is not None:
                self._history.commit(result.certificate)
            state.mark_changed(state.epoch, canonical=canonical, root=self.root_of(state.epoch))
        _name_others_settings(result.gathered, hyperparameters)
        deviation, donors = _deviation(result.gathered, counters, frozen)
        if not (canonical or deviation) and moved[-1] > _TOLERANCE and self._history is not None:
            deviation = f"the state differed by {moved[-1]:.1%} between the cells of the grid"
            donors = frozenset(self._history.root.electors)
        return StateRound(result=result, drift=max(moved), deviation=deviation, donors=donors)

    def _trained(self) -> list[torch.Tensor]:
        return [p.detach() for p in self._state.parameters if p.requires_grad]

    def _trained_copies(self) -> list[torch.Tensor]:
        return [p.clone() for p in self._trained()]

    def close(self) -> None:
        """Close both averagers."""
        for averager in (self._epoch_averager, self._state_averager):
            if averager is not None:
                averager.close()

    def _make_averager(
        self, tensors: Sequence[torch.Tensor], name: str, options: AveragingOptions
    ) -> Averager:
        traits, interval_epochs = self._mode.traits, 1 if name == "epochs" else self.state_sync_epochs
        # rounds over the state are rarer, but each may wait only as long as a round of one epoch
        waiting_share_max = _WAITING_SHARE_MAX / max(interval_epochs, 1)
        role: Role = traits.role if name == "epochs" else "statistic"
        # clipping needs a common origin, which parameters do not have
        clip_to_median = options.aggregation.clip_to_median if role.endswith("gradient") else None
        # with the adaptive codec, factors take 16 bits
        role = role if options.strategy is None else "parameter"
        return Averager(
            self._node,
            tensors,
            name=RunAverager(
                name=AveragerName(run=self._run_id, averager=name),
                compatibility_tag=traits.compatibility_tag,
                waiting_share_max=waiting_share_max,
            ),
            target_group_size=traits.group_size or self._config.group_size_max,
            codec=resolve(options.codec, role, sum(tensor.numel() for tensor in tensors)).name,
            aggregation=replace(options.aggregation, clip_to_median=clip_to_median),
            audit=options.audit,
            error_feedback=options.error_feedback,
            strategy=options.strategy,
            auxiliary=options.auxiliary,
            config=AveragerConfig(grace_s_max=_GRACE_S_MAX),
        )


def _deviation(
    gathered: Mapping[PeerId, object], counters: bytes, frozen: bytes
) -> tuple[str, frozenset[PeerId]]:
    """Return why this peer must download the state, and the donors to ask, from the metadata of all members
    of a round over the state. Both are empty when this peer agrees with the others. One version of the frozen
    parameters wins everywhere, even without a majority: peers that began with different ones cannot become
    equal otherwise.
    """
    held = _digests(gathered, "frozen")
    votes = Counter(held.values())
    winner = max(votes, key=lambda digest: (votes[digest], digest), default=frozen)
    if frozen and winner != frozen:
        return (
            "the frozen parameters of this peer differ from those of others",
            frozenset(peer for peer, digest in held.items() if digest == winner),
        )
    most = Counter(_digests(gathered, "counters").values()).most_common(1)
    if most and most[0][0] != counters and most[0][1] * 2 > len(gathered):
        return "most peers have other step counters", frozenset()
    return "", frozenset()


def _name_others_settings(gathered: Mapping[PeerId, object], hyperparameters: bytes) -> None:
    """Log the peers whose hyperparameters or schedule differ from this peer's. They are never copied from
    peer to peer.
    """
    held = _digests(gathered, "hyperparameters")
    others = [peer.short for peer, digest in held.items() if digest != hyperparameters]
    if others:
        _log.warning(
            "%d of %d peers have other hyperparameters or schedules than this one (%s): "
            "pass the same optimizer and scheduler on all peers",
            len(others),
            len(gathered),
            ", ".join(others[:_NAMED_MAX]),
        )


def _digests(gathered: Mapping[PeerId, object], name: str) -> dict[PeerId, bytes]:
    """Return the digest with this name that each member of a round sent."""
    sent = {peer: one for peer, one in gathered.items() if isinstance(one, dict)}
    return {peer: one[name] for peer, one in sent.items() if isinstance(one.get(name), bytes)}


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) for one in value
    )


def _is_in_round(averager: Averager | None) -> bool:
    return averager is not None and averager.runner is not None and averager.runner.in_round


def relative_distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return ‖one - other‖ / ‖other‖ over all tensors together, or ‖one - other‖ when `other` is zero.

    Works on blocks of a bounded size, for any dtype and strides, and waits for each device once.
    """
    norms: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for a, b in zip(one, other, strict=True):
        for left, right in zip(rows_of(a, DISTANCE_ELEMENTS), rows_of(b, DISTANCE_ELEMENTS), strict=True):
            wide = right.to(torch.float32)
            found = torch.linalg.vector_norm(left.to(torch.float32) - wide), torch.linalg.vector_norm(wide)
            norms.setdefault(a.device, []).append(found)
    found_here = [torch.stack([torch.stack(pair) for pair in pairs]).tolist() for pairs in norms.values()]
    distance = math.hypot(*(pair[0] for pairs in found_here for pair in pairs))
    size = math.hypot(*(pair[1] for pairs in found_here for pair in pairs))
    return distance / size if size else distance


def check_codec(options: AveragingOptions, traits: ModeTraits) -> None:
    """Raise UsageError for a codec or a strategy that would damage what this mode averages."""
    codec = options.codec
    if options.strategy is not None and (traits.role == "parameter" or traits.flat):
        why = (
            "averages parameters themselves"
            if traits.role == "parameter"
            else "averages parts of the model, not matrices"
        )
        raise UsageError(f"mode {traits.compatibility_tag.partition(' ')[0]} {why}: PowerSGD is not for it")
    chosen = resolve(codec, traits.role, 0)
    if traits.role == "parameter" and chosen.bits_per_element < 16:
        raise UsageError(
            f"mode {traits.compatibility_tag.partition(' ')[0]} averages parameters themselves: "
            f"{codec} would ruin them; use float16 or finer"
        )


def check_extra_tensors(state: TrainingState, *, are_averaged: bool) -> None:
    """Raise UsageError when the integer extra tensors are too large to be sent in a round's metadata, or when
    extra tensors or parameters share memory although the state is averaged (`are_averaged`).
    """
    if are_averaged:
        try:
            refuse_overlaps(state.averaged_tensors())
        except UsageError as error:
            raise UsageError(
                "the tensors of the state (trained parameters, statistics, extra_tensors, in this order) "
                f"cannot be averaged: {error}"
            ) from None
    if len(state.extra_counts()) > _EXTRA_COUNTS_MAX:
        raise UsageError(
            f"extra_tensors of whole numbers may have {_EXTRA_COUNTS_MAX} elements in all, because all of "
            "them are sent in each round over the state: leave out those that training does not change"
        )
