"""The sums over an optimizer's steps that its peer publishes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from averaging.optim.metering import Meter, Pace
from averaging.optim.reports import LoadResult, StepReport
from averaging.result import RoundResult
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId
from swarm.metrics.record import Metrics

PEER = PeerId(bytes(31) + b"\x01")
PACE = Pace(epoch=5, samples_per_s=12.34567)


def report(**fields: Any) -> StepReport:
    known: dict[str, Any] = {"epoch": 5, "stepped": True, "samples": 8, "accumulated": 0, "contributed": 40}
    return StepReport(**{**known, **fields})


def result(**fields: Any) -> RoundResult:
    known: dict[str, Any] = {
        "failed": False,
        "peers": (PEER,),
        "digest": "ab" * 32,
        "bytes_sent": 100,
        "bytes_received": 50,
        "group_id": "cd" * 16,
    }
    return RoundResult(**{**known, "seconds": {"total": 1.5}, **fields})


def metrics(meter: Meter, now_s: float = 1010.0) -> Metrics:
    return meter.metrics(PACE, now_s)


def test_samples_and_bytes_of_rounds_and_downloads_are_counted() -> None:
    meter = Meter(1000.0, name="anna", device="cpu")
    meter.on_step(report(stepped=False, contributed=0), 1001.0)
    meter.on_step(report(round=result(), state_round=result(group_id="ee"), drift=0.5), 1002.0)
    meter.on_load(LoadResult(loaded=True, epoch=5, bytes_received=1000))
    told = metrics(meter)
    assert (told.name, told.device, told.epoch, told.samples_per_s) == ("anna", "cpu", 5, 12.346)
    assert (told.samples, told.contributed_epoch, told.contributed_at_s, told.drift) == (40, 5, 1002.0, 0.5)
    assert (told.bytes_up, told.bytes_down, told.rounds_done, told.rounds_failed) == (200, 1100, 1, 0)
    assert [(one.kind, one.epoch, one.seconds, one.members, one.reason) for one in told.rounds] == [
        ("epoch", 4, 1.5, 1, ""),
        ("state", 5, 1.5, 1, ""),
    ]


def test_a_failed_round_is_published_for_a_while_though_others_follow() -> None:
    meter = Meter(1000.0)
    left = {PEER: "sent nothing for 3 s"}
    meter.on_step(
        report(
            stepped=False,
            round=result(failed=True, reason="round", detail="it broke", left_out=left),
            rounds_failed=2,
        ),
        1001.0,
    )
    for number in range(10):
        meter.on_step(report(round=result(group_id=f"{number:04x}")), 1002.0 + number)
    told = metrics(meter, 1013.0)
    assert [one.reason for one in told.rounds] == ["round", "", "", ""]
    assert told.rounds[0].left == ((str(PEER), "sent nothing for 3 s"),)
    assert (told.rounds_failed, told.rounds_done) == (2, 10)
    assert [one.reason for one in metrics(meter, 1100.0).rounds] == [""] * 4


def test_losses_and_own_metrics_are_the_last_ones() -> None:
    meter = Meter(1000.0)
    meter.set_user_metrics({"loss": 2.0, "accuracy": 0.5})
    meter.set_user_metrics({"loss": 1.5, "validation_loss": 1.75})
    told = metrics(meter)
    assert (told.loss, told.validation_loss, told.own, told.broken) == (1.5, 1.75, {"accuracy": 0.5}, ())
    meter.set_user_metrics({"loss": math.nan, "accuracy": math.inf})
    told = metrics(meter)
    assert (told.loss, told.own, told.broken) == (None, {}, ("accuracy", "loss"))
    meter.set_user_metrics({"loss": 1.0})
    assert metrics(meter).broken == ("accuracy",)


def test_a_call_that_is_refused_changes_nothing() -> None:
    meter = Meter(1000.0)
    with pytest.raises(UsageError):
        meter.set_user_metrics({"loss": 1.0, "not a name": 2.0})
    with pytest.raises(UsageError, match="at most 16"):
        meter.set_user_metrics({f"m{place}": 1.0 for place in range(17)})
    assert (metrics(meter).loss, metrics(meter).own) == (None, {})
    meter.set_user_metrics({"loss": 1.0, **{f"m{place}": 1.0 for place in range(16)}})
    meter.set_user_metrics({"m3": 2.0, "validation_loss": 1.0})
    assert metrics(meter).own["m3"] == 2.0


def test_a_peer_that_does_not_train_is_idle_and_has_no_rate() -> None:
    now_s, meter = 1000.0, Meter(1000.0)

    def step(takes_s: float) -> None:
        nonlocal now_s
        with meter.stepping(lambda: now_s):
            now_s += takes_s
            told = metrics(meter, now_s)
            assert (told.idle_s, told.samples_per_s) == (None, 12.346), "a round may take its time"

    assert metrics(meter, 1100.0).idle_s is None, "it has not begun yet"
    for _ in range(10):
        step(0.01)
        now_s += 1.0
    step(300.0)
    assert metrics(meter, now_s + 19.0).idle_s is None
    told = metrics(meter, now_s + 21.0)
    assert (told.idle_s, told.samples_per_s) == (21.0, 0.0)
    step(0.01)
    assert metrics(meter, now_s).idle_s is None
    for _ in range(30):  # of a large model: a step takes a minute
        now_s += 60.0
        step(1.0)
    assert metrics(meter, now_s + 200.0).idle_s is None
    assert metrics(meter, now_s + 310.0).idle_s == 310.0
    assert Metrics.decode(metrics(meter, now_s + 310.0).encode()).idle_s == 310.0


def test_a_step_that_raises_is_over() -> None:
    meter = Meter(1000.0)
    with pytest.raises(RuntimeError), meter.stepping(lambda: 1000.0):
        raise RuntimeError
    assert metrics(meter, 1100.0).idle_s == 100.0


def test_a_reunion_reports_its_history_and_the_epochs_that_were_given_up() -> None:
    meter = Meter(1000.0)
    loaded = LoadResult(loaded=True, epoch=7, bytes_received=10)
    for given_up in (3, 0, 2):
        meter.on_step(
            report(stepped=False, contributed=0, epochs_given_up=given_up, resynchronised=loaded), 1001.0
        )
    place = Pace(epoch=7, samples_per_s=1.0, head="ab" * 32, line="cd" * 32)
    told = Metrics.decode(meter.metrics(place, 1002.0).encode())
    assert (told.head, told.line, told.epochs_given_up, told.bytes_down) == ("ab" * 8, "cd" * 8, 5, 30)
