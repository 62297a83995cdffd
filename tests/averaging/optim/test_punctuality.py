"""When a slow peer waits for the round, and how long its steps should be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from averaging.optim.progress.logic.punctuality import absence_s, longest_step, longest_wait_s
from averaging.optim.progress.logic.view import PeerProgress, ProgressView
from swarm.core.ids import PeerId

OWN = PeerId(bytes(32))


def view(
    own_per_s: float, others_per_s: list[float], *, samples: float, target: int = 320, age_s: float = 0.0
) -> ProgressView:
    speeds = {OWN: own_per_s} | {
        PeerId(bytes([number + 1]) * 32): speed for number, speed in enumerate(others_per_s)
    }
    peers = {
        peer: PeerProgress(epoch=3, samples=0, samples_per_s=speed, counted=0.0, age_s=age_s)
        for peer, speed in speeds.items()
    }
    return ProgressView(
        epoch=3,
        swarm_epoch=3,
        samples=samples,
        target=target,
        samples_per_s=sum(speeds.values()),
        peers=peers,
        peers_total=len(peers),
    )


def test_a_step_is_at_most_a_quarter_of_an_epoch() -> None:
    for own, others in ((8.0, [160.0, 160.0]), (160.0, [160.0]), (1.6, [160.0, 160.0])):
        speeds = view(own, others, samples=0)
        epoch_s = speeds.target / speeds.samples_per_s
        assert longest_step(speeds, OWN) / own == pytest.approx(epoch_s / 4)


def test_the_length_of_a_step_is_free_alone_and_before_speeds_are_known() -> None:
    assert math.isinf(longest_step(view(0.0, [160.0], samples=0), OWN))
    assert math.isinf(longest_step(view(10.0, [], samples=0), OWN))
    assert math.isinf(longest_step(view(10.0, [0.0], samples=0), OWN))


def test_a_slow_peer_waits_for_a_round_that_begins_during_its_next_step() -> None:
    # an epoch takes about a second, a step of two samples a quarter
    early, near = view(8.0, [160.0, 160.0], samples=100), view(8.0, [160.0, 160.0], samples=290)
    assert longest_wait_s(early, OWN, 2, has_late_samples=False) == 0.0
    assert 0.25 <= longest_wait_s(near, OWN, 2, has_late_samples=False) <= 0.5


def test_a_peer_with_short_steps_or_of_usual_speed_does_not_wait() -> None:
    short = view(8.0, [160.0, 160.0], samples=3100, target=3200)
    assert longest_wait_s(short, OWN, 2, has_late_samples=False) == 0.0
    usual = view(160.0, [160.0, 160.0], samples=290)
    assert longest_wait_s(usual, OWN, 80, has_late_samples=False) == 0.0


def test_a_peer_reports_the_length_of_its_step_and_is_not_waited_for_beyond_an_epoch() -> None:
    # an epoch of the others takes a second
    slow = view(8.0, [160.0, 160.0], samples=0)
    assert absence_s(slow, OWN, 2) == pytest.approx(0.25)
    assert absence_s(slow, OWN, 8) == pytest.approx(1.0)
    assert math.isinf(absence_s(slow, OWN, 9))
    usual = view(160.0, [160.0, 160.0], samples=0)
    assert absence_s(usual, OWN, 800) == pytest.approx(5.0), "it brings as much as the others"
    assert absence_s(view(0.0, [160.0], samples=0), OWN, 8) == 0.0
    assert absence_s(view(8.0, [], samples=0), OWN, 8) == pytest.approx(1.0)


def test_a_peer_with_late_samples_waits_at_any_speed() -> None:
    usual = view(160.0, [160.0, 160.0], samples=310)
    assert longest_wait_s(usual, OWN, 8, has_late_samples=True) > 0.0
    assert longest_wait_s(view(160.0, [160.0], samples=0), OWN, 8, has_late_samples=True) == 0.0


def test_a_slow_peer_expects_that_the_others_continued_since_their_last_report() -> None:
    # the reports are of the beginning of the epoch, which is nearly over by now
    reported = view(8.0, [160.0, 160.0], samples=0, age_s=0.9)
    assert longest_wait_s(reported, OWN, 2, has_late_samples=False) > 0.0
    assert longest_wait_s(replace(reported, epoch=4), OWN, 2, has_late_samples=False) == 0.0, (
        "of another epoch"
    )


def test_nobody_waits_for_others_that_do_not_train() -> None:
    assert longest_wait_s(view(8.0, [0.0], samples=300), OWN, 8, has_late_samples=True) == 0.0
    assert longest_wait_s(view(0.0, [160.0], samples=300), OWN, 8, has_late_samples=True) == 0.0
