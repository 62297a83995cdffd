"""Calls of the trainer that end with an error, or while another thread makes one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from averaging.optim.epochs import EpochLoop
from averaging.optim.reports import LoadResult
from swarm.core.errors import UsageError

RESULT = SimpleNamespace(failed=False, certificate=None, gathered={}, peers=(), left_out={})


class Parts:
    """Mode, tracker, donor, averager and download of an epoch loop. Another peer is in the same epoch."""

    history = None
    learner: Any

    def __init__(self) -> None:
        self.undone: list[str] = []
        self.counted: list[bool] = []  # whether the samples of the peer may be in the state, at each download
        self.interrupts = False
        self.learner, self.clock = self, SimpleNamespace(monotonic_s=lambda: 100.0)
        self.samples, self.state = 4, SimpleNamespace(epoch=3, lock=threading.RLock())
        self.traits = SimpleNamespace(proceeds_alone=False, keeps_progress=False, canonical=True)

    def ignored(self, *_: Any, **__: Any) -> None:
        pass

    set_computing = wait_refresh = begin_epoch = start = changed = open = open_state = ignored

    def swarm_epoch(self) -> int:
        if self.interrupts:
            raise KeyboardInterrupt
        return 3

    def others(self) -> dict[str, Any]:
        return {"other": SimpleNamespace(epoch=3)}

    def wait_full(self, epoch: int, timeout_s: float) -> bool:
        return True

    def refused(self, *, wait: bool) -> Any:
        return SimpleNamespace(samples=0, reason="")

    def average(self, *_: Any, **__: Any) -> Any:
        return RESULT

    def advance(self, *_: Any) -> None:
        raise RuntimeError("out of memory")

    def failed(self, reason: str) -> None:
        self.undone.append(reason)

    def cancel(self) -> None:
        self.undone.append("round")

    def load(self, *_: Any) -> LoadResult:
        return LoadResult(loaded=False, epoch=3, reason="nobody has it")

    def resume(self, *, parted: bool, counted: bool) -> int:
        self.counted.append(counted)
        return 0


def started() -> tuple[Any, EpochLoop]:
    """Return the parts of a loop, and the loop, whose first step was interrupted."""
    parts: Any = Parts()
    loop = EpochLoop(parts, parts, parts, parts, parts, load_timeout_s=60.0)
    parts.open = lambda: setattr(parts, "interrupts", True)  # after the others were found
    with pytest.raises(KeyboardInterrupt):
        loop.step(2)
    parts.interrupts = False
    return parts, loop


def test_interrupted_call_leaves_no_round_and_undoes_what_the_mode_prepared() -> None:
    """Regression test: a round of `join_started_round` continued without an owner after Ctrl-C."""
    parts, loop = started()
    assert parts.undone == ["round", "cancelled"]
    parts.undone, parts.interrupts = [], True
    with pytest.raises(KeyboardInterrupt):
        loop.join_started_round(1.0)
    assert parts.undone == ["round", "cancelled"]


@pytest.mark.parametrize("keeps_samples", [None, False, True])
def test_samples_may_be_counted_after_a_lost_round_until_a_checkpoint_replaces_them(
    keeps_samples: bool | None,
) -> None:
    """Regression test: the samples that were made on a checkpoint's state were dropped at the next download,
    as if others had counted them. A plain state dict of the inner optimizer replaces none.
    """
    parts, loop = started()
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.join_started_round(1.0)
    if keeps_samples is not None:
        loop.resumed(keeps_samples=keeps_samples)
    loop.load(1.0)
    assert parts.counted == [keeps_samples is not False]


@pytest.mark.parametrize("has_counted", [False, True])
def test_samples_that_a_certificate_of_the_loaded_history_counts_do_not_count_again(
    has_counted: bool,
) -> None:
    parts, loop = started()
    parts.history = SimpleNamespace(has_parted=False, has_counted=has_counted)
    loop.load(1.0)
    assert parts.counted == [has_counted]


def test_call_beside_that_of_another_thread_is_refused_and_disturbs_nothing() -> None:
    parts, loop = started()
    parts.undone, errors = [], list[UsageError]()

    def beside() -> None:
        try:
            with loop.turn():
                pass
        except UsageError as error:
            errors.append(error)

    with loop.turn(), loop.turn():  # one call may make another one
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join(30)
    beside()
    assert len(errors) == 1
    assert not parts.undone
