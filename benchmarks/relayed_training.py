"""Volunteers behind routers compared with the same volunteers with open ports: samples a second of the whole
run.

A user's commands in network namespaces, controlled only by their printed lines: `swarm bootstrap` on a public
host, `swarm start` and two `swarm join`. A training step takes the same time on each
(`benchmarks.paced_task`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import paced_task
from benchmarks.launch import ROOT
from benchmarks.results import Aim, Failures, Row
from tests.chaos.namespaces import Internet, Process, RouterKind
from tests.chaos.reach_peers import entry_point

SHARE_MIN = 0.9
# connection of all three; None: with open ports
WAYS: dict[str, RouterKind | None] = {"open": None, "punched": "preserving", "relayed": "symmetric"}
WORDS = {
    "punched": "routers that keep ports: holes are punched",
    "relayed": "routers that give each connection another port: a relay of 50 Mbit/s carries all",
}
PASSES = 2
# Epochs that are measured: a whole interval of `state_sync_epochs`, so that one round over the state is among
# them. SETTLING: epochs that come before.
EPOCHS, SETTLING = 10, 3
_READY_S, _EPOCHS_S = 90.0, 60.0
_RUN = """
name = "relayed"
codec = "float16"
target_batch_size = 768
batch_size = 16
state_sync_epochs = {epochs}
[task]
name = "{task}"
[task.settings]
width = 96
layers = 2
heads = 4
context = 32
data_bytes = 4000000
step_s = 0.1
[optimizer]
learning_rate = 3e-3
clip_norm = 1.0
"""

Say = Callable[[str], None]


@dataclass(slots=True)
class Paces(Failures):
    """Samples a second of one way."""

    samples: list[float] = field(default_factory=list)


def rows(say: Say, passes: int = PASSES) -> list[Row]:
    """Measure all ways in turns, and return a row for each way through routers."""
    paces = {way: Paces() for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="swarm-relayed-") as name:
        folder = Path(name)
        paced_task.install(folder)
        (folder / "run.toml").write_text(_RUN.format(task=paced_task.NAME, epochs=EPOCHS), encoding="utf-8")
        for _ in range(passes):
            for way, kind in WAYS.items():
                try:
                    paces[way].samples.append(_samples_per_s(folder, kind))
                except AssertionError as failure:  # raised by the tests' helpers after a timeout
                    paces[way].launches_failed += 1
                    paces[way].fail(str(failure).partition("; last events")[0])
                    say(f"reach, training, {way}: {failure}")
                else:
                    say(f"reach, training, {way}: {paces[way].samples[-1]:.1f} samples/s")
    return [row(way, paces[way], paces["open"]) for way in WORDS]


def row(way: str, ours: Paces, opened: Paces) -> Row:
    """Return the row of one way compared with open ports."""
    return Row(
        identifier=f"reach-training-{way}",
        workload=f"`swarm start` and two `swarm join` behind {WORDS[way]}",
        quantity="samples per second of all peers together, beside the same peers with open ports",
        ours=ours.series_of(f"swarm, {way}", ours.samples, "samples/s"),
        peer=opened.series_of("swarm, open ports", opened.samples, "samples/s"),
        aim=Aim(of="ours / peer", sense="at least", value=SHARE_MIN),
    )


def _samples_per_s(folder: Path, kind: RouterKind | None) -> float:
    """Let three peers train, all behind routers of this kind, and return their pace."""
    with Internet() as internet, ExitStack() as stack:
        _, address = entry_point(internet)
        for name in "abc":
            if kind is None:
                internet.public(name)
            else:
                internet.behind_router(name, kind)

        def volunteer(name: str, *arguments: str) -> Process:
            process = _start(internet, folder, name, *arguments)
            stack.callback(process.kill)
            return process

        founder = volunteer("a", "start", str(folder / "run.toml"), "--bootstrap", address)
        line = founder.wait("join line", lambda event: event["event"] == "listening", _READY_S)["invite"]
        peers = [founder, *(volunteer(name, "join", line, "--yes") for name in "bc")]
        for peer in peers:
            peer.wait("a round of three", _is_round_of_three, _READY_S)
        return pace(peers)


def pace(peers: Sequence[Process]) -> float:
    """Return the samples a second of peers that train together, over the next epochs of the first of them."""
    first = peers[0]
    begin = _epochs(first)[-1]["epoch"] + SETTLING
    _reach(first, begin, _EPOCHS_S)
    began_s = time.monotonic()
    _reach(first, begin + EPOCHS, 2 * _EPOCHS_S)
    seconds = time.monotonic() - began_s
    for peer in peers[1:]:
        _reach(peer, begin + EPOCHS, _EPOCHS_S)
    return samples_between([_epochs(peer) for peer in peers], begin, begin + EPOCHS) / seconds


def samples_between(epochs: Sequence[Sequence[dict[str, Any]]], begin: int, end: int) -> int:
    """Return the samples of all peers in the epochs after `begin` and up to `end`."""
    return sum(event["samples"] for events in epochs for event in events if begin < event["epoch"] <= end)


def _reach(peer: Process, epoch: int, timeout_s: float) -> None:
    peer.wait(
        f"epoch {epoch}", lambda event: event["event"] == "epoch" and event["epoch"] >= epoch, timeout_s
    )


def _epochs(peer: Process) -> list[dict[str, Any]]:
    return [event for event in peer.events if event["event"] == "epoch"]


def _is_round_of_three(event: dict[str, Any]) -> bool:
    return bool(event["event"] == "epoch" and event["peers"] == 3)


def _start(internet: Internet, folder: Path, name: str, *arguments: str) -> Process:
    """Run a command of `swarm` that knows the paced task on a host."""
    path = os.pathsep.join((str(ROOT), str(folder)))
    python = ["env", f"PYTHONPATH={path}", sys.executable, "-P", "-m", "swarm.cli"]
    common = ("--identity", "new", "--device", "cpu", "--json", "--exit-with-parent")
    return Process([*internet.inside(name), *python, *arguments, *common])
