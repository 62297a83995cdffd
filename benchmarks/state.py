"""Downloads of a state of 256 MB from one donor and from three, from slow donors, and their cost for a
training donor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.allreduce import HIVEMIND, Setting
from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed
from benchmarks.results import Aim, Failures, Row, Series

STATE_BYTES = 256_000_000
SLOW_BYTES_PER_S = 50e6 / 8
TIMES = 5
TIMEOUT_S = 200.0
STEADY_TIMEOUT_S = 90.0


@dataclass(slots=True)
class Downloads(Failures):
    """Downloads of one kind."""

    seconds: list[float] = field(default_factory=list)

    def series(self, name: str) -> Series:
        return self.series_of(name, self.seconds)


def rows(setting: Setting, state_bytes: int = STATE_BYTES) -> list[Row]:
    """Measure the section and return its rows."""
    say, megabytes = setting.say, state_bytes // 1_000_000
    one, three = (download(say, donors, state_bytes=state_bytes) for donors in (1, 3))
    peer = (
        None
        if setting.hivemind is None
        else download(say, 1, state_bytes=state_bytes, hivemind=setting.hivemind)
    )
    slow_one, slow_three = (
        download(say, donors, state_bytes=state_bytes, slow=True, times=1) for donors in (1, 3)
    )
    quiet, giving = donor_steps(say, state_bytes)
    theirs = None if peer is None else peer.series(f"{HIVEMIND}: 1 donor")
    copy = f"{state_bytes / setting.copy_bytes_per_s:.2f} s to copy it once in memory"

    def row(
        identifier: str,
        workload: str,
        quantity: str,
        ours: Series,
        other: Series | None,
        aim: Aim | None,
        limit: str,
    ) -> Row:
        return Row(
            identifier=f"state-{identifier}",
            workload=workload,
            quantity=quantity,
            ours=ours,
            peer=other,
            aim=aim,
            limit=limit,
        )

    whole = "until the newcomer has the state, every chunk verified"
    apart = Aim(of="peer / ours", sense="at least", value=4.0)
    several = Aim(of="peer / ours", sense="at least", value=2.5)
    title = f"state download, {megabytes} MB"
    slow = f"{title}, donors of 50 Mbit/s each (paced at the donor)"
    return [
        row("1-donor", f"{title}, 1 donor", whole, one.series("swarm: 1 donor"), theirs, apart, copy),
        row("3-donors", f"{title}, 3 donors", whole, three.series("swarm: 3 donors"), theirs, apart, copy),
        row(
            "slow-donors",
            slow,
            f"{whole}; the peer is our own download from one of them",
            slow_three.series("swarm: 3 slow donors"),
            slow_one.series("swarm: 1 slow donor"),
            several,
            "three times the link of one",
        ),
        row(
            "donor-step",
            f"a donor that trains, state of {megabytes} MB, while a newcomer downloads it",
            "a step that writes the whole state; the peer is the same without a download",
            giving,
            quiet,
            Aim(of="peer / ours", sense="at least", value=0.8),
            copy,
        ),
    ]


def download(
    say: Callable[[str], None],
    donors: int,
    *,
    state_bytes: int = STATE_BYTES,
    slow: bool = False,
    hivemind: Path | None = None,
    times: int = TIMES,
) -> Downloads:
    """Let `times` newcomers download the state one after the other, each in a new process."""
    name = "swarm" if hivemind is None else HIVEMIND
    module = "benchmarks.workers.swarm_state" if hivemind is None else "benchmarks.workers.hivemind_state"
    common = {"elements": state_bytes // 4, "bytes_per_s": SLOW_BYTES_PER_S if slow else 0.0}
    giving = {**common, "gives": True}
    # the other donors download the state from this one, which then leaves
    first = {**giving, "bytes_per_s": 0.0} if slow and donors > 1 else giving
    say(
        f"state of {state_bytes / 1e6:.0f} MB from {donors} "
        f"{'slow ' if slow else ''}donor{'s' if donors > 1 else ''}: {name}"
    )
    found = Downloads()
    try:
        with Launch(name, python=hivemind or OWN_PYTHON, module=module, configurations=[first]) as launch:
            launch.receive("ready", STEADY_TIMEOUT_S)
            for _ in range(donors - 1 + (first is not giving)):
                launch.add(giving).receive("ready", time.monotonic() + STEADY_TIMEOUT_S)
            if first is not giving:  # it only served the state to the other donors at full speed
                launch.end(launch.workers[0])
            for _ in range(times):
                newcomer = launch.add({**common, "gives": False})
                newcomer.receive("ready", time.monotonic() + STEADY_TIMEOUT_S)
                newcomer.send({"do": "load"})
                loaded = newcomer.receive("loaded", time.monotonic() + TIMEOUT_S)
                launch.end(newcomer)
                if loaded["ok"]:
                    found.seconds.append(loaded["seconds"])
                    say(f"  {loaded['seconds']:.2f} s from {loaded['donors']}")
                else:
                    found.failed += 1
                    found.fail(loaded["reason"])
    except LaunchFailed as failure:
        found.launches_failed += 1
        found.fail(str(failure))
    return found


def donor_steps(say: Callable[[str], None], state_bytes: int) -> tuple[Series, Series]:
    """Measure steps of a donor that trains: without a newcomer, and while one downloads slowly."""
    say("steps of a donor, without and with a download")
    common = {"elements": state_bytes // 4, "bytes_per_s": SLOW_BYTES_PER_S * 4}
    with Launch(
        "swarm",
        python=OWN_PYTHON,
        module="benchmarks.workers.swarm_state",
        configurations=[{**common, "gives": True}],
    ) as launch:
        launch.receive("ready", STEADY_TIMEOUT_S)
        [donor] = launch.workers
        donor.send({"do": "train"})
        quiet = donor.receive("trained", time.monotonic() + STEADY_TIMEOUT_S)["steps_s"][2:]
        newcomer = launch.add({**common, "gives": False})
        newcomer.receive("ready", time.monotonic() + STEADY_TIMEOUT_S)
        newcomer.send({"do": "load"})
        donor.send({"do": "train"})
        giving = donor.receive("trained", time.monotonic() + STEADY_TIMEOUT_S)["steps_s"][2:]
    before_ms, during_ms = statistics.median(quiet) * 1e3, statistics.median(giving) * 1e3
    say(f"  {before_ms:.0f} ms, and {during_ms:.0f} ms (most {max(giving) * 1e3:.0f} ms) with a download")
    return (
        Series(name="swarm: steps without a download", unit="s", samples=tuple(quiet)),
        Series(name="swarm: steps while a newcomer downloads", unit="s", samples=tuple(giving)),
    )
