"""Volunteers on real sockets that pause for their person: with the memory freed, before they begin, and when
the traffic of the day is used up.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from swarm.node import Node
from swarm.run import events
from swarm.run.checkpoints import CheckpointConfig
from swarm.run.contributions import ContributionLog
from swarm.run.hours import Hours
from swarm.run.limits import VolunteerLimits
from swarm.run.parking import tensors_in
from tests.wire.volunteers import HERE, VolunteerThread, created_run

NEVER = Hours(((0, 1),))  # the first second of the day
FREED_S = 30.0


def test_a_pause_frees_the_memory_and_training_continues_from_the_swarms_state(
    texts: Path, tmp_path: Path
) -> None:
    with created_run() as (node, _, signed), Node(bootstrap=node.addresses, listen=HERE) as other:
        assert other.wait_joined(10)
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        checkpoints = CheckpointConfig(folder=tmp_path / "saved", every_s=0.0)
        two = VolunteerThread(other, signed, new=False, data=texts, checkpoints=checkpoints)
        two.wait(events.Contributed)
        two.asked = "free"
        two.wait(events.Paused)
        training = two.volunteer.training
        assert training is not None
        state = list(training.optimizer.inner.state.values())
        tensors = [*training.model.parameters(), *tensors_in(state)]
        assert len(tensors) > len(list(training.model.parameters()))

        def held() -> int:
            return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

        deadline_s = time.monotonic() + FREED_S
        while held():
            assert time.monotonic() < deadline_s, f"{held()} bytes are still held"
            time.sleep(0.05)
        paused_at = len(one.events)
        for _ in range(2):  # one continues alone, and two is behind
            paused_at = one.wait(events.EpochDone, lambda event: event.peers == 1, since=paused_at) + 1
        two.asked = ""
        place = two.wait(events.Resumed)
        two.wait(events.Resynchronised, lambda event: event.loaded, since=place)
        mine = two.events[two.wait(events.EpochDone, lambda event: event.peers == 2, since=place)]
        assert isinstance(mine, events.EpochDone)
        one.wait(
            events.EpochDone,
            lambda event: (event.epoch, event.digest) == (mine.epoch, mine.digest),
            since=paused_at,
        )
        assert held()
        one.stop.set()
        two.stop.set()
        assert two.end().failed_rounds == 0


def test_outside_of_its_hours_a_volunteer_builds_and_downloads_nothing(texts: Path) -> None:
    limits = VolunteerLimits(hours=NEVER)
    with created_run() as (node, _, signed), Node(bootstrap=node.addresses, listen=HERE) as other:
        assert other.wait_joined(10)
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        two = VolunteerThread(other, signed, new=False, data=texts, limits=lambda: limits)
        paused = two.events[two.wait(events.Paused)]
        assert isinstance(paused, events.Paused)
        assert "Until then nothing is downloaded" in paused.reason
        one.wait(events.EpochDone, since=one.wait(events.EpochDone, since=len(one.events)) + 1)
        assert two.volunteer.training is None
        assert not any(isinstance(event, events.StateDownloaded | events.Joined) for event in two.events)
        limits = replace(limits, hours=Hours())
        two.wait(events.Contributed)
        limits = replace(limits, hours=NEVER)
        two.wait(events.Paused, since=two.wait(events.Contributed))
        assert two.volunteer.training is not None
        three = VolunteerThread(other, signed, new=False, data=texts, limits=lambda: limits)
        three.wait(events.Paused)
        three.stop.set()
        assert three.end().samples == 0
        one.stop.set()
        two.stop.set()
        two.end()


def test_a_volunteer_pauses_when_the_days_traffic_is_used_up(texts: Path, tmp_path: Path) -> None:
    log = ContributionLog(tmp_path / "contributions.sqlite")
    limits = VolunteerLimits(daily_bytes_max=1_000_000)
    with created_run() as (node, _, signed), Node(bootstrap=node.addresses, listen=HERE) as other:
        assert other.wait_joined(10)
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        two = VolunteerThread(other, signed, new=False, data=texts, limits=lambda: limits, log=log)
        paused = two.events[two.wait(events.Paused)]
        assert isinstance(paused, events.Paused)
        assert "this day's 1.0 MB of traffic are used up; continues at midnight" in paused.reason
        spent = log.total()
        assert 1_000_000 <= spent.bytes <= sum(other.traffic)
        assert spent.bytes < 5_000_000
        assert spent.samples > 0
        one.stop.set()
        two.stop.set()
        two.end()
