"""The recipe for Ray on a local Ray: an actor that is killed is made again, and its volunteer joins again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.wire.json_commands import Command, commands
from tests.wire.small_run import write_small_run

ray = pytest.importorskip("ray")
DEPLOY = Path(__file__).parents[2] / "deploy"


def peers_of(address: str, home: Path, count: int) -> set[str]:
    """Return the peers of the run as a monitor shows them, once they are as many."""
    with commands() as started:
        started.append(Command(home, (sys.executable,), "monitor", address))
        while True:
            peers = {peer["peer_id"] for peer in started[0].read_until("view")["peers"]}
            if len(peers) >= count:
                return peers


@pytest.mark.chaos
@pytest.mark.filterwarnings("default")  # of Ray's own
def test_a_killed_actor_comes_back_as_a_volunteer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_small_run(
        tmp_path, 'members = "open"\n', target=96, width=16, sections="[end]\nseconds = 150\n"
    )
    monkeypatch.syspath_prepend(str(DEPLOY))
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "volunteers"))
    import ray_volunteers

    here = ("--listen", "127.0.0.1:0", "--preset", "local", "--no-lan")
    with commands() as started:
        started.append(Command(tmp_path / "founder", (sys.executable,), "start", str(file), *here))
        address = started[0].read_until("listening")["addresses"][0]
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
        try:
            actors = [ray_volunteers.Volunteer.options(num_cpus=1).remote() for _ in range(2)]
            arguments = [address, "--listen", "127.0.0.1:0", "--preset", "local"]
            working = [actor.train.remote(arguments) for actor in actors]
            started[0].read_until("joined")
            seen = [started[0].read_until("epoch")["peers"] for _ in range(1)]
            while max(seen) < 3:  # the founder and both actors in one round
                seen.append(started[0].read_until("epoch")["peers"])
            before = peers_of(address, tmp_path / "monitor", 3)
            ray.kill(actors[0], no_restart=False)
            while seen[-1] > 2:
                seen.append(started[0].read_until("epoch")["peers"])
            while seen[-1] < 3:  # the actor is back
                seen.append(started[0].read_until("epoch")["peers"])
            results: list[dict[str, Any]] = ray.get(working, timeout=120)
        finally:
            ray.shutdown()
        finished = started[0].read_until("finished")
        assert [one["finished"]["reason"] for one in results] == [finished["reason"]] * 2
        assert all(one["finished"]["samples"] > 0 for one in results)
        killed, other = (one["joined"]["peer_id"] for one in results)
        assert killed not in before, "the actor that was made again is another peer"
        assert other in before
