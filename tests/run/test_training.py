"""The volunteer's loop: what it tells for what its optimizer reports, and when it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from averaging.optim.progress.logic.reports import PeerProgress, ProgressView
from averaging.optim.reports import LoadResult, StepReport
from averaging.result import RoundResult
from swarm.core.errors import NotEnoughPeers
from swarm.core.identity import Identity
from swarm.run import events
from swarm.run.microbatches import MicroBatches
from swarm.run.specification import RunSpecification, sign
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
        self.loads: list[LoadResult] = []
        self.reported: list[dict[str, float]] = []

    def report(self, **metrics: float) -> None:
        self.reported.append(metrics)

    def zero_grad(self) -> None:
        return None

    def load_state_from_peers(self, timeout_s: float) -> LoadResult:
        return self.loads.pop(0)

    def step(self) -> StepReport:
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
            epoch=self.epoch, swarm_epoch=self.epoch, samples=8.0, target=16, samples_per_s=40.0, peers=peers
        )


class Volunteering:
    """A training with everything faked around it."""

    def __init__(self, *reports: StepReport | BaseException) -> None:
        self.told: list[Any] = []
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
            emit=self.told.append,
            swarm_s=lambda: self.now_s,
            stats=TrainingStats(),
            validation_schedule=ValidationSchedule(0.05, 1000.0),
            micro_batches=MicroBatches(
                model=model, data=self.data, device=torch.device("cpu"), emit=self.told.append
            ),
        )

    def kinds(self) -> list[str]:
        return [event.kind for event in self.told]


def report(epoch: int = 0, *, stepped: bool = False, **fields: Any) -> StepReport:
    return StepReport(epoch=epoch, stepped=stepped, samples=8, accumulated=0 if stepped else 8, **fields)


def test_an_epoch_is_told_with_what_this_peer_gave() -> None:
    state = RoundResult(failed=False, digest="ef", bytes_sent=500)
    done = report(1, stepped=True, contributed=16, round=ROUND, state_round=state, drift=1e-7, seconds=0.2)
    one = Volunteering(report(), done)
    assert [one.training.step(), one.training.step()] == [False, True]
    assert one.kinds() == ["progress", "contributing", "epoch"]
    epoch = one.told[-1]
    assert (epoch.epoch, epoch.samples, epoch.peers, epoch.sent_bytes, epoch.round_s) == (1, 16, 1, 1500, 0.2)
    assert (epoch.digest, epoch.state_digest, epoch.drift, epoch.validation_loss) == (
        "abcd",
        "ef",
        1e-7,
        1.25,
    )
    accounts = one.training.stats
    assert (accounts.samples, accounts.rounds, accounts.failed_rounds, accounts.sent_bytes) == (
        16,
        1,
        0,
        1500,
    )
    assert accounts.loss_first == accounts.loss_last == pytest.approx(epoch.loss)
    assert (accounts.digest, accounts.digest_epoch) == ("abcd", 1)


def test_each_epoch_draws_anew_and_once() -> None:
    one = Volunteering(
        report(),
        report(1, stepped=True, contributed=16, round=ROUND),
        report(1),
        report(2, stepped=True, round=ROUND),
    )
    for _ in range(4):
        one.training.step()
    assert [draw.epoch for draw in one.data.draws] == [0, 1]
    assert {draw.peer_id for draw in one.data.draws} == {OWNER.peer_id}


def test_a_failed_round_is_told_with_its_reason_and_changes_no_account() -> None:
    failed = RoundResult(
        failed=True,
        reason="round",
        detail="a reducer died",
        left_out={OWNER.peer_id: "closed its connection"},
        bytes_sent=9,
    )
    one = Volunteering(report(round=failed, rounds_failed=2, reason="no round came about"))
    one.training.step()
    told = one.told[0]
    assert (told.kind, told.reason) == (
        "round_failed",
        f"no round came about; a reducer died; {OWNER.peer_id.short}: closed its connection",
    )
    accounts = one.training.stats
    assert (accounts.failed_rounds, accounts.rounds, accounts.samples, accounts.sent_bytes) == (2, 0, 0, 9)


def test_a_resynchronisation_is_told_and_the_samples_of_the_lost_epoch_do_not_count() -> None:
    load = LoadResult(loaded=True, epoch=5, seconds=0.4)
    one = Volunteering(report(), report(5, dropped=16, reason="the swarm is in epoch 5", resynchronised=load))
    one.training.step()
    one.training.step()
    assert one.told[-2] == events.Resynchronised(
        epoch=5, loaded=True, reason="the swarm is in epoch 5", seconds=0.4
    ) or (
        one.told[-1]
        == events.Resynchronised(epoch=5, loaded=True, reason="the swarm is in epoch 5", seconds=0.4)
    )
    assert one.training.stats.samples == 0
    assert math.isnan(one.training.stats.epoch.loss)


def test_a_lone_step_counts_no_round() -> None:
    one = Volunteering(report(1, stepped=True, contributed=16, alone=True))
    one.training.step()
    assert (one.told[-1].peers, one.told[-1].digest, one.training.stats.rounds) == (1, None, 0)


def test_the_run_ends_by_epochs_by_time_or_by_loss() -> None:
    one = Volunteering(report(3, stepped=True, contributed=16, round=ROUND))
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


def test_measuring_takes_its_share_of_the_time_and_no_more() -> None:
    validation_schedule = ValidationSchedule(0.05, 2.0)
    assert validation_schedule.is_due(0.0)
    validation_schedule.finished(0.5, 1.0)
    assert not validation_schedule.is_due(10.9)
    assert validation_schedule.is_due(11.0)
    validation_schedule.finished(0.01, 11.0)
    assert not validation_schedule.is_due(12.9)
    assert validation_schedule.is_due(13.0)


class NoHostRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails when a value is read on the host: on a GPU that waits for everything that the device has to do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a loss was read on the host"
        assert func is not torch.ops.aten.stack.default, "losses were brought to the host"
        return func(*args, **(kwargs or {}))


def test_no_loss_is_read_between_two_reports_of_progress() -> None:
    steps = 50
    one = Volunteering(
        *(report() for _ in range(1 + steps)),
        report(1, stepped=True, contributed=8 * (steps + 2), round=ROUND),
    )
    one.training.step()
    assert one.kinds() == ["progress"]
    one.training.progress_sent_s = math.inf  # the next report of progress is far away
    with NoHostRead():  # type: ignore[no-untyped-call]
        for _ in range(steps):
            one.training.step()
    assert one.training.step()
    with torch.no_grad():
        loss = float(one.data.loss(one.training.model, 8))
    assert one.told[-1].loss == pytest.approx(loss)


def test_a_loss_that_is_nan_is_told_as_nan() -> None:
    one = Volunteering(report(), report(1, stepped=True, contributed=8, round=ROUND))
    with torch.no_grad():
        next(one.training.model.parameters()).fill_(math.nan)
    one.training.step()
    assert math.isnan(one.told[-1].loss)
    one.training.step()
    assert math.isnan(one.told[-1].loss)


@pytest.mark.parametrize("which", ["round", "state_round"])
def test_a_round_that_ran_out_of_memory_makes_the_micro_batch_smaller(which: str) -> None:
    failed = RoundResult(failed=True, reason="memory", detail="cuda:0 has no memory left")
    one = Volunteering(report(rounds_failed=1, **{which: failed}), report())
    one.training.step()
    assert one.training.micro_batches.samples_max == 4
    notice = next(event for event in one.told if event.kind == "notice")
    assert (
        notice.text
        == "a round of averaging does not fit into the memory of cpu: training with 4 samples at a time instead of 8"
    )
    one.training.step()
    assert one.training.micro_batches.samples_max == 4


def test_a_held_out_part_that_does_not_fit_is_told_once_and_measured_no_more() -> None:
    done = [report(epoch, stepped=True, contributed=8, round=ROUND) for epoch in (1, 2)]
    one = Volunteering(*done)
    one.training.validation_schedule = ValidationSchedule(0.05, 0.0)

    def validation_loss(model: torch.nn.Module) -> float:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    one.data.validation_loss = validation_loss  # type: ignore[method-assign]
    assert [one.training.step(), one.training.step()] == [True, True]
    assert one.kinds() == ["contributing", "notice", "epoch", "epoch"]
    assert one.told[-1].validation_loss is None
    assert one.training.model.training


def test_a_step_that_broke_off_without_memory_fetches_the_swarms_state() -> None:
    one = Volunteering(report(), torch.cuda.OutOfMemoryError("CUDA out of memory"), report(4))
    one.optimizer.loads = [LoadResult(loaded=True, epoch=4, seconds=0.5)]
    one.training.step()
    assert one.training.step() is False
    assert [event.kind for event in one.told] == ["progress", "notice", "resynchronised"]
    assert one.told[-1].reason == "memory ran out in the middle of a step"
    assert one.training.stats.epoch.samples == 0
    one.training.step()
    assert one.training.stats.epoch.samples == 8


def test_alone_a_step_that_broke_off_without_memory_is_followed_by_the_next() -> None:
    one = Volunteering(MemoryError(), report())
    one.optimizer.loads = [LoadResult(loaded=False, alone=True, epoch=0)]
    assert [one.training.step(), one.training.step()] == [False, False]
    assert one.training.micro_batches.samples_max == 4


def test_a_state_that_cannot_be_fetched_after_a_step_broke_off_ends_training() -> None:
    one = Volunteering(MemoryError())
    one.optimizer.loads = [LoadResult(loaded=False, epoch=0, reason="no donor answers")]
    with pytest.raises(NotEnoughPeers, match="could not be downloaded: no donor answers"):
        one.training.step()
