"""The training loop of a volunteer: its events and statistics for given reports of the optimizer, and its
end.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from averaging.optim.progress.logic.view import PeerProgress, ProgressView
from averaging.optim.reports import LoadResult, StepReport
from averaging.result import RoundResult
from swarm.core.errors import NotEnoughPeers
from swarm.core.identity import Identity
from swarm.core.working import Work, shown_by
from swarm.run import events
from swarm.run.microbatches import MicroBatches, StepSize
from swarm.run.signed import sign
from swarm.run.specification import RunSpecification
from swarm.run.stats import TrainingStats, ValidationSchedule
from swarm.run.task import Draw
from swarm.run.training import Training

OWNER = Identity.generate()
SPECIFICATION = RunSpecification.from_table(
    {
        "name": "tiny",
        "target_batch_size": 16,
        "batch_size": 8,
        "task": {"name": "bytelm"},
        "end": {"epochs": 3, "seconds": 100},
    },
    "test",
)
ROUND = RoundResult(failed=False, peers=(OWNER.peer_id,), digest="abcd", bytes_sent=1000)


class FakeData:
    summary = "nothing"

    def __init__(self) -> None:
        self.draws: list[Draw] = []

    def start_epoch(self, draw: Draw) -> None:
        self.draws.append(draw)

    def loss(self, model: torch.nn.Module, samples: int) -> torch.Tensor:
        return cast(torch.Tensor, model(torch.ones(samples, 1)).pow(2).mean())

    def validation_loss(self, model: torch.nn.Module) -> float:
        return 1.25


class FakeOptimizer:
    def __init__(self, reports: list[StepReport | BaseException]) -> None:
        self.reports, self.epoch = reports, 0
        self.swarm_epoch = 0
        self.loads: list[LoadResult] = []
        self.reported: list[dict[str, float]] = []

    def report(self, **metrics: float) -> None:
        self.reported.append(metrics)

    def zero_grad(self) -> None:
        return None

    def load_state_from_peers(
        self, timeout_s: float, on_progress: Callable[[int, int], None] | None = None
    ) -> LoadResult:
        return self.loads.pop(0)

    def step(self, samples: int) -> StepReport:
        report = self.reports.pop(0)
        if isinstance(report, BaseException):
            raise report
        self.epoch = report.epoch
        return report

    @property
    def progress(self) -> ProgressView:
        mine = PeerProgress(epoch=self.epoch, samples=8, samples_per_s=40.0, counted=8.0, age_s=0.0)
        peers = {OWNER.peer_id: mine}
        return ProgressView(
            epoch=self.epoch,
            swarm_epoch=max(self.epoch, self.swarm_epoch),
            samples=8.0,
            target=16,
            samples_per_s=40.0,
            peers=peers,
        )


class FakeVolunteer:
    """A `Training` with fake data and a fake optimizer."""

    def __init__(self, *reports: StepReport | BaseException) -> None:
        self.events: list[Any] = []
        self.data = FakeData()
        self.now_s = 0.0
        self.optimizer = FakeOptimizer(list(reports))
        model = torch.nn.Linear(1, 1)
        self.training = Training(
            model=model,
            data=self.data,
            optimizer=self.optimizer,  # type: ignore[arg-type]
            signed=sign(SPECIFICATION, OWNER, version=1, created_s=0.0),
            own_peer_id=OWNER.peer_id,
            emit=self.events.append,
            swarm_s=lambda: self.now_s,
            stats=TrainingStats(),
            validation_schedule=ValidationSchedule(0.05, 1000.0),
            micro_batches=MicroBatches(
                model=model, data=self.data, device=torch.device("cpu"), emit=self.events.append
            ),
            step_size=StepSize(emit=self.events.append),
        )

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def report(epoch: int = 0, *, stepped: bool = False, **fields: Any) -> StepReport:
    return StepReport(epoch=epoch, stepped=stepped, samples=8, accumulated=0 if stepped else 8, **fields)


def test_a_peer_that_is_behind_shows_that_it_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.core.working.SHOWN_AFTER_S", 0.0)
    shown, was_shown = list[str](), threading.Event()

    class Slow(FakeOptimizer):
        def step(self, samples: int) -> StepReport:
            assert self.epoch == self.swarm_epoch or was_shown.wait(20.0)
            return super().step(samples)

    def show(work: Work) -> None:
        shown.append(work.what)
        was_shown.set()

    one = FakeVolunteer()
    one.optimizer = one.training.optimizer = Slow([report(), report(5)])
    with shown_by(show):
        one.training.step()
        assert not shown, "it is where the others are"
        one.optimizer.swarm_epoch = 5
        one.training.step()
    assert {*shown} == {"catching up with the swarm"}


def test_an_epoch_event_has_the_contribution_of_this_peer() -> None:
    state = RoundResult(failed=False, digest="ef", bytes_sent=500)
    done = report(1, stepped=True, contributed=16, round=ROUND, state_round=state, drift=1e-7, seconds=0.2)
    one = FakeVolunteer(report(), done)
    assert [one.training.step(), one.training.step()] == [False, True]
    assert one.kinds() == ["progress", "contributing", "epoch"]
    epoch = one.events[-1]
    assert (epoch.epoch, epoch.samples, epoch.peers, epoch.sent_bytes, epoch.round_s) == (1, 16, 1, 1500, 0.2)
    assert (epoch.digest, epoch.state_digest, epoch.drift, epoch.validation_loss) == (
        "abcd",
        "ef",
        1e-7,
        1.25,
    )
    stats = one.training.stats
    assert (stats.samples, stats.rounds, stats.failed_rounds, stats.sent_bytes) == (
        16,
        1,
        0,
        1500,
    )
    assert stats.loss_first == stats.loss_last == pytest.approx(epoch.loss)
    assert (stats.digest, stats.digest_epoch) == ("abcd", 1)


def test_each_epoch_starts_one_new_draw() -> None:
    one = FakeVolunteer(
        report(),
        report(1, stepped=True, contributed=16, round=ROUND),
        report(1),
        report(2, stepped=True, round=ROUND),
    )
    for _ in range(4):
        one.training.step()
    assert [draw.epoch for draw in one.data.draws] == [0, 1]
    assert {draw.peer_id for draw in one.data.draws} == {OWNER.peer_id}


def test_a_failed_round_is_reported_with_its_reason_and_counts_no_samples() -> None:
    failed = RoundResult(
        failed=True,
        reason="round",
        detail="a reducer died",
        left_out={OWNER.peer_id: "closed its connection"},
        bytes_sent=9,
    )
    one = FakeVolunteer(report(round=failed, rounds_failed=2, reason="no round came about"))
    one.training.step()
    event = one.events[0]
    assert (event.kind, event.reason) == (
        "round_failed",
        f"no round came about; a reducer died; {OWNER.peer_id.short}: closed its connection",
    )
    stats = one.training.stats
    assert (stats.failed_rounds, stats.rounds, stats.samples, stats.sent_bytes) == (2, 0, 0, 9)


def test_a_search_that_the_swarm_was_ahead_of_is_no_failed_round() -> None:
    """Regression test: a volunteer that came back from a pause reported a failed round at times."""
    found = RoundResult(failed=True, reason="quorum", detail="1 cannot be reached")
    load = LoadResult(loaded=True, epoch=5, seconds=0.4)
    one = FakeVolunteer(report(5, round=found, resynchronised=load, reason="the swarm was ahead"))
    one.training.step()
    assert [event.kind for event in one.events] == ["resynchronised", "progress"]
    assert one.training.stats.failed_rounds == 0


def test_a_resynchronisation_is_reported_and_drops_the_samples_of_its_epoch() -> None:
    load = LoadResult(loaded=True, epoch=5, seconds=0.4)
    one = FakeVolunteer(
        report(), report(5, dropped=16, reason="the swarm is in epoch 5", resynchronised=load)
    )
    one.training.step()
    one.training.step()
    assert one.events[-2] == events.Resynchronised(
        epoch=5, loaded=True, reason="the swarm is in epoch 5", seconds=0.4
    ) or (
        one.events[-1]
        == events.Resynchronised(epoch=5, loaded=True, reason="the swarm is in epoch 5", seconds=0.4)
    )
    assert one.training.stats.samples == 0
    assert math.isnan(one.training.stats.epoch.loss)


def test_an_epoch_that_is_completed_after_a_download_is_reported_too() -> None:
    load = LoadResult(loaded=True, epoch=5, seconds=0.4)
    one = FakeVolunteer(report(6, stepped=True, contributed=16, round=ROUND, resynchronised=load))
    assert one.training.step()
    assert one.kinds() == ["resynchronised", "contributing", "epoch"]
    assert one.training.stats.samples == 16


def test_a_step_without_other_peers_counts_no_round() -> None:
    one = FakeVolunteer(report(1, stepped=True, contributed=16, alone=True))
    one.training.step()
    assert (one.events[-1].peers, one.events[-1].digest, one.training.stats.rounds) == (1, None, 0)


def test_the_run_ends_by_epochs_by_time_or_by_loss() -> None:
    one = FakeVolunteer(report(3, stepped=True, contributed=16, round=ROUND))
    assert one.training.end_reason() == ""
    one.now_s = 100.0
    assert one.training.end_reason() == "the run ended 100 s after it was created"
    one.now_s = 0.0
    one.training.step()
    assert one.training.end_reason() == "the run ended at epoch 3"
    end = SPECIFICATION.end.model_copy(update={"epochs": None, "loss": 1.3})
    one.training.signed = replace(
        one.training.signed, specification=SPECIFICATION.model_copy(update={"end": end})
    )
    assert one.training.end_reason() == "the run reached the loss 1.3"


def test_validation_takes_at_most_its_share_of_the_time() -> None:
    validation_schedule = ValidationSchedule(0.05, 2.0)
    assert validation_schedule.is_due(0.0)
    validation_schedule.finished(0.5, 1.0)
    assert not validation_schedule.is_due(10.9)
    assert validation_schedule.is_due(11.0)
    validation_schedule.finished(0.01, 11.0)
    assert not validation_schedule.is_due(12.9)
    assert validation_schedule.is_due(13.0)


class NoHostRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails when the host reads a value, which on a GPU would wait for all queued work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a loss was read on the host"
        assert func is not torch.ops.aten.stack.default, "losses were brought to the host"
        return func(*args, **(kwargs or {}))


def test_no_loss_is_read_between_two_progress_events() -> None:
    steps = 50
    one = FakeVolunteer(
        *(report() for _ in range(1 + steps)),
        report(1, stepped=True, contributed=8 * (steps + 2), round=ROUND),
    )
    one.training.step()
    assert one.kinds() == ["progress"]
    one.training.progress_sent_s = math.inf  # the next progress event is far away
    with NoHostRead():  # type: ignore[no-untyped-call]
        for _ in range(steps):
            one.training.step()
    assert one.training.step()
    with torch.no_grad():
        loss = float(one.data.loss(one.training.model, 8))
    assert one.events[-1].loss == pytest.approx(loss)


def test_a_nan_loss_is_reported_as_nan() -> None:
    one = FakeVolunteer(report(), report(1, stepped=True, contributed=8, round=ROUND))
    with torch.no_grad():
        next(one.training.model.parameters()).fill_(math.nan)
    one.training.step()
    assert math.isnan(one.events[-1].loss)
    one.training.step()
    assert math.isnan(one.events[-1].loss)


@pytest.mark.parametrize("which", ["round", "state_round"])
def test_a_round_that_ran_out_of_memory_makes_the_micro_batch_smaller(which: str) -> None:
    failed = RoundResult(failed=True, reason="memory", detail="cuda:0 has no memory left")
    one = FakeVolunteer(report(rounds_failed=1, **{which: failed}), report())
    one.training.step()
    assert one.training.micro_batches.samples_max == 4
    notice = next(event for event in one.events if event.kind == "notice")
    assert (
        notice.text == "a round of averaging does not fit into the memory of cpu: "
        "training with 4 samples at a time instead of 8"
    )
    one.training.step()
    assert one.training.micro_batches.samples_max == 4


def test_validation_that_does_not_fit_is_reported_once_and_disabled() -> None:
    done = [report(epoch, stepped=True, contributed=8, round=ROUND) for epoch in (1, 2)]
    one = FakeVolunteer(*done)
    one.training.validation_schedule = ValidationSchedule(0.05, 0.0)

    def validation_loss(model: torch.nn.Module) -> float:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    one.data.validation_loss = validation_loss  # type: ignore[method-assign]
    assert [one.training.step(), one.training.step()] == [True, True]
    assert one.kinds() == ["contributing", "notice", "epoch", "epoch"]
    assert one.events[-1].validation_loss is None
    assert one.training.model.training


def test_a_step_that_runs_out_of_memory_downloads_the_state() -> None:
    one = FakeVolunteer(report(), torch.cuda.OutOfMemoryError("CUDA out of memory"), report(4))
    one.optimizer.loads = [LoadResult(loaded=True, epoch=4, seconds=0.5)]
    one.training.step()
    assert one.training.step() is False
    assert [event.kind for event in one.events] == ["progress", "notice", "resynchronised"]
    assert one.events[-1].reason == "memory ran out in the middle of a step"
    assert one.training.stats.epoch.samples == 0
    one.training.step()
    assert one.training.stats.epoch.samples == 8


def test_a_step_that_runs_out_of_memory_is_followed_by_the_next_without_other_peers() -> None:
    one = FakeVolunteer(MemoryError(), report())
    one.optimizer.loads = [LoadResult(loaded=False, alone=True, epoch=0)]
    assert [one.training.step(), one.training.step()] == [False, False]
    assert one.training.micro_batches.samples_max == 4


def test_training_ends_when_a_step_ran_out_of_memory_and_no_peer_sends_the_state() -> None:
    one = FakeVolunteer(MemoryError())
    one.optimizer.loads = [LoadResult(loaded=False, epoch=0, reason="no donor answers")]
    with pytest.raises(NotEnoughPeers, match="could not be downloaded: no donor answers"):
        one.training.step()
