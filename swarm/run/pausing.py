"""Pauses of a volunteer. Whether it trains depends on its user's limits, other uses of the machine, and the
run's owner. During a pause its memory is freed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.core.errors import UsageError
from swarm.core.working import working
from swarm.run import machine
from swarm.run.events import Emit, Notice, Paused, Resumed
from swarm.run.limits import Calm, Decision, MachineStatus, MachineUse, VolunteerLimits, decide
from swarm.run.machine_use import MachineProbes, MachineWatch
from swarm.run.parking import ParkedTensors, tensors_in

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from averaging.optim.optimizer import Optimizer
    from swarm.run.training import Training

DECIDE_S = 0.5  # interval of checks for limits and requests to pause
_REST_S_MAX = 5.0  # after a step
_FREE_AFTER_S = 60.0  # a longer pause frees the memory of the host, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests of this machine's user and decisions of the run's owner."""

    asked: str = ""  # "pause" while the user asks for a pause, "free" to free the memory at once; else ""
    paused: bool = False
    ended: bool = False
    banned: bool = False
    not_invited: str = ""  # why this peer may not take part any more


class ProcessorShare:
    """Limits training to a share of the processor: with fewer threads and, if one thread is still too much,
    with pauses after each step.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._share = 1.0
        self._busy = 1.0  # share of the time in which the threads compute

    def apply(self, share: float) -> None:
        """Use this share of all cores from now on, above 0 and at most 1."""
        if share == self._share:
            return
        import torch

        self._share = share
        threads = max(1, int(self._cores * share))
        self._busy = min(1.0, self._cores * share / threads)
        torch.set_num_threads(threads)

    def rest_s(self, step_s: float) -> float:
        """Return how long to wait after a step that took `step_s`."""
        return min(step_s * (1.0 / self._busy - 1.0), _REST_S_MAX)


class Pauses:
    """Decides whether a volunteer trains, and waits while it does not. For the trainer's thread."""

    def __init__(
        self,
        *,
        limits: Callable[[], VolunteerLimits],
        spent: Callable[[], tuple[int, int]],
        requests: Callable[[], Requests],
        probes: MachineProbes | None,
        emit: Emit,
        stop: threading.Event,
    ) -> None:
        """`limits` returns the current limits; it raises UsageError once after a change that is not valid.
        `spent` returns the bytes of today and of this month. `probes`: None to ignore other uses of the
        machine.
        """
        self._read_limits, self._spent, self._requests = limits, spent, requests
        self._emit, self._stop = emit, stop
        self._calm = Calm()
        self.limits = limits()
        self._watch = MachineWatch(probes, lambda: self.limits) if probes is not None else None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the machine while the context lasts."""
        if self._watch is not None:
            self._watch.start()
        try:
            yield
        finally:
            if self._watch is not None:
                self._watch.close()

    def decide(self) -> tuple[Decision, str]:
        """Return the decision and its reason, as a sentence for the user."""
        try:
            self.limits = self._read_limits()
        except UsageError as error:
            self._emit(Notice(text=f"{error}. The preferences stay as they were"))
        limits, wanted = self.limits, self._requests()
        use = self._watch.use if self._watch is not None else MachineUse()
        today, this_month = self._spent()
        status = MachineStatus(
            second_of_day=machine.second_of_day(),
            memory_bytes=machine.used_bytes() if limits.memory_bytes_max is not None else 0,
            asked_to_pause=bool(wanted.asked),
            run_paused=wanted.paused,
            banned=wanted.banned,
            not_invited=wanted.not_invited,
            disturbance=self._calm.disturbance(limits, use, time.monotonic()),
            bytes_today=today,
            bytes_this_month=this_month,
        )
        return decide(limits, status)

    def wait_to_begin(self) -> str:
        """Wait until training may begin, before anything is built or downloaded. Return the reason if it
        never may; empty if it may begin or the volunteer was stopped.
        """
        decision, why = self.decide()
        if decision is Decision.PAUSE:
            self._emit(Paused(reason=f"{why}. Until then nothing is downloaded", member=False))
        while decision is Decision.PAUSE and not self._stop.wait(DECIDE_S):
            if self._requests().ended:
                return "the run's owner ended it"
            decision, why = self.decide()
        return why if decision is Decision.LEAVE else ""

    def pause(
        self,
        training: Training,
        decision: Decision,
        why: str,
        rejoin: Callable[[torch.optim.Optimizer], Optimizer],
        folder: Path | None,
    ) -> str:
        """Wait until training continues. If the run ends first, return the reason.

        With REST the volunteer stays a member. With PAUSE it leaves the run, so that no peer waits for it,
        and frees the memory of an accelerator at once. After a minute, or on request, it also moves the host
        memory into a file in `folder`. When it joins again it downloads the current state.
        """
        began_s, member = time.monotonic(), decision is Decision.REST
        self._emit(Paused(reason=why, member=member))
        if member:
            end_reason = self._rest(training)
            if not end_reason and not self._stop.is_set():
                training.optimizer.pause(False)
        else:
            end_reason = self._leave(training, rejoin, folder)
        if not end_reason and not self._stop.is_set():
            self._emit(Resumed(seconds=time.monotonic() - began_s))
        return end_reason

    def _rest(self, training: Training) -> str:
        training.optimizer.pause(True)
        while not (reason := training.end_reason()) and not self._stop.is_set():
            report = training.optimizer.join_started_round(DECIDE_S)
            if report is not None:  # other peers were at the end of an epoch when they received the pause
                training.record(report)
            if self.decide()[0] is not Decision.REST:
                break
        return reason

    def _leave(
        self, training: Training, rejoin: Callable[[torch.optim.Optimizer], Optimizer], folder: Path | None
    ) -> str:
        inner = training.optimizer.inner
        saved = training.optimizer.state_dict()
        training.optimizer.close()
        inner.zero_grad(set_to_none=True)
        parked = ParkedTensors(
            [
                *training.model.parameters(),
                *training.model.buffers(),
                *tensors_in(list(inner.state.values())),
                *tensors_in(saved),
            ]
        )
        free_s = time.monotonic() + _FREE_AFTER_S
        while not (reason := training.end_reason()) and not self._stop.wait(DECIDE_S):
            if self.decide()[0] is not Decision.PAUSE:
                break
            if folder is not None and (self._requests().asked == "free" or time.monotonic() >= free_s):
                free_s = float("inf")
                try:
                    with working("moving the model to the disk"):
                        parked.to_disk(folder)
                except OSError as error:
                    text = (
                        f"the model stays in memory, because {folder} cannot be written to: "
                        f"{error.strerror or error}"
                    )
                    self._emit(Notice(text=text))
        with working("bringing the model back into memory"):
            parked.restore()  # also at the end of the run: the last checkpoint needs the contents
        if not reason and not self._stop.is_set():
            training.optimizer = rejoin(inner)
            training.optimizer.load_state_dict(saved)
        return reason
