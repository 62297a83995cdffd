"""The result of `Averager.step`, and the handle of a round that still runs in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from averaging.history.certificate import Certificate
from averaging.matchmaking.logic.messages import SearchFailure
from swarm.core.errors import DeadlineExceeded, UsageError
from swarm.core.ids import PeerId
from swarm.runtime.waits import WaitEvent

# "": it did not fail
RoundFailure: TypeAlias = (
    SearchFailure | Literal["", "nobody contributes", "round", "quorum", "memory", "closed"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """The result of a step. When `failed`, the tensors are unchanged, `reason` gives the reason in one word
    and `detail` in a sentence.

    Reasons: "alone" nobody else holds the averager; "deadline" no group, or no result, in time; "schema" the
    others' tensors or codec differ; "passed" the round of this key took place without this peer;
    "unreachable" other holders are known, and none answers; "few" too few peers for a group; "nobody
    contributes" all weights were 0; "round" the round failed (`detail` names the peer and the cause);
    "quorum" the group cannot commit for the run, since most of the peers that decide are out of reach;
    "memory" this peer ran out of memory, on a device or on the host (`detail` says which), and a later step
    may succeed; "cancelled"; "closed".
    """

    failed: bool
    reason: RoundFailure = ""
    detail: str = ""  # after a retry, also the reason of the previous failure
    peers: tuple[PeerId, ...] = ()  # members of the last group, in group order
    # fraction of the elements to which each member contributed
    contributions: Mapping[PeerId, float] = field(default_factory=dict)
    # with which each member counted in the average: less than it asked for where the run caps it
    weights: Mapping[PeerId, float] = field(default_factory=dict)
    gathered: Mapping[PeerId, Any] = field(default_factory=dict)  # what each member passed as `gather`
    # fraction of the elements in which `clip_to_median` shortened its values
    clipped: Mapping[PeerId, float] = field(default_factory=dict)
    # peers that lied, by two votes in one attempt or as reducers according to this peer's audits, and how; of
    # all attempts
    accused: Mapping[PeerId, str] = field(default_factory=dict)
    # peers that dropped out or were left out, and why; of all attempts
    left_out: Mapping[PeerId, str] = field(default_factory=dict)
    # weight of these tensors in the next round: an equal part of the weights that went in
    weight: float = 0.0
    digest: str = ""  # hex, over the averaged bytes: equal on all members
    # per phase: staging, matchmaking, …, write_back, total
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    attempts: int = 0  # groups in which the round was tried
    group_id: str = ""  # hex; "" when no group came about
    certificate: Certificate | None = None  # the proof that the round was committed; None: it was not
    # others may have committed what this peer voted for: it does not know
    unresolved: bool = False

    def without_memory(self, detail: str) -> RoundResult:
        """Return this result as failed because this peer ran out of memory."""
        return replace(
            self,
            failed=True,
            reason="memory",
            detail=detail,
            contributions={},
            weights={},
            clipped={},
            weight=0.0,
            digest="",
        )


class PendingRound:
    """A round in the background. Its averager takes no other step until the result was taken, or the round
    was cancelled.
    """

    def __init__(
        self,
        finish: Callable[[RoundResult], RoundResult],
        release: Callable[[PendingRound], None],
        ended: WaitEvent,
    ) -> None:
        self._finish = finish  # writes back, in the thread that takes the result
        self._release = release
        self._ended = ended
        self._lock = threading.Lock()
        self._started = False
        self._outcome: RoundResult | None = None
        self._error: Exception | None = None  # a bug here, not a result of the network
        self._result: RoundResult | None = None
        self._discarded: Literal["", "cancelled", "closed"] = ""  # why there will be no result
        self._committed = False
        self._future: concurrent.futures.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None  # the task that runs the round, once it has started

    @property
    def done(self) -> bool:
        """Return whether the network part has ended, so that `result` would not wait."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the network part has ended; return False if it has not within `timeout_s`. Writes
        nothing.
        """
        return self._ended.wait(timeout_s)

    def cancel(self) -> None:
        """Cancel the round; other members see this peer leave. The tensors stay unchanged. Does nothing once
        the round is committed: then `result` has the average, until the next step.
        """
        self._discard("cancelled")

    def result(self, timeout_s: float | None = None) -> RoundResult:
        """Wait for the end and write the average into the tensors, in this thread. A second call returns the
        same result.

        Raises DeadlineExceeded when the round has not ended within `timeout_s`; the round continues.
        """
        if not self._ended.wait(timeout_s):
            raise DeadlineExceeded(
                f"the round has not ended within {timeout_s:g} s; it continues in the background"
            )
        with self._lock:
            if self._result is None:
                outcome = self._outcome
                if self._error is not None and not self._discarded:
                    self._release(self)
                    raise self._error
                if (self._discarded and not self._committed) or outcome is None:
                    reason: Literal["cancelled", "closed"] = self._discarded or "closed"
                    texts = {
                        "cancelled": "the round was cancelled here",
                        "closed": "the averager was closed during the round",
                    }
                    outcome = RoundResult(failed=True, reason=reason, detail=texts[reason])
                try:
                    self._result = self._finish(outcome)
                finally:
                    self._release(self)
            return self._result

    # --- for the averager

    def attach(self, future: concurrent.futures.Future[None]) -> None:
        """Set the future of the coroutine that runs the round."""
        self._future = future
        future.add_done_callback(self._settled)

    def started(self) -> bool:
        """Mark the round as started. The coroutine calls this first; if it returns False, the round was
        cancelled before, and the coroutine must do nothing.
        """
        with self._lock:
            self._started, self._task = not self._discarded, asyncio.current_task()
        return self._started

    def end(self, outcome: RoundResult | None, error: Exception | None = None) -> None:
        """Mark the round as ended: the coroutine touches no tensor any more. Without an outcome and an error
        it was cancelled.
        """
        with self._lock:
            self._outcome, self._error = outcome, error
            if outcome is not None and not outcome.failed:
                self._committed = True  # with the others: a cancellation comes too late
        self._over()

    @property
    def abandoned(self) -> bool:
        """Return whether the caller cancelled a round that was committed nevertheless, and took no result."""
        return bool(self._discarded) and self._committed and self._result is None

    def wait_given_up(self, timeout_s: float) -> None:
        """Wait for the end of a round that was cancelled; return at once for one that was not."""
        if self._discarded:
            self._ended.wait(timeout_s)

    def close(self) -> None:
        """Discard the round because the averager closes. A result that is ready can still be taken."""
        if not self.done:
            self._discard("closed")

    def _discard(self, why: Literal["cancelled", "closed"]) -> None:
        with self._lock:
            if self._result is not None:
                return
            self._discarded = self._discarded or why
            task = self._task
        if self._future is not None:
            self._future.cancel()
        elif task is not None:  # Ctrl-C came before `attach`
            task.get_loop().call_soon_threadsafe(task.cancel)
        else:  # nor will it start
            self._ended.set()
        if self.done and not self._committed:
            self._release(self)

    def _settled(self, future: concurrent.futures.Future[None]) -> None:
        if not self._started:  # cancelled before its first line; a coroutine that ran calls `end` itself
            self._over()

    def _over(self) -> None:
        self._ended.set()
        if self._discarded and not self._committed:
            self._release(self)


def check_step(weight: float, timeout_s: float, apply: str) -> None:
    """Raise UsageError for invalid arguments of `step`."""
    if not isinstance(weight, int | float) or isinstance(weight, bool):
        raise UsageError(f"weight is a number, not {weight!r}")
    if not 0.0 < timeout_s < float("inf"):
        raise UsageError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    if apply not in ("replace", "delta"):
        raise UsageError(f'apply is "replace" or "delta", not {apply!r}')
