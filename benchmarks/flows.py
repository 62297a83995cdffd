"""Count the files, classes and functions that a reader passes when following one operation through the
source.

`python -m benchmarks.flows` runs four operations under the interpreter's profiler and prints a table; with
`--list` also the files. The first three operations have both ends in one process, so the callee counts, too.
A file counts when one of its functions is called. Files whose classes are only defined while the operation
imports them have a column of their own: a reader who follows the calls does not see them. So have files that
are called anyway while the same peers do nothing, such as the DHT's upkeep.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(f"{ROOT / package}{os.sep}" for package in ("swarm", "averaging", "moe"))
AIMS = {"step": 45, "store": 20, "mixture": 25, "join": 90}
TEXTS = {
    "step": "`opt.step()` through a round (6 steps, 2 peers)",
    "store": "`dht.store` to a replica",
    "mixture": "mixture forward and backward",
    "join": "`swarm join` to the first step",
}
_FIRST_STEP = ("training.py", "Training.step")
_JOIN_S_MAX = 400.0  # under the profiler, on a busy machine
_REST_S = 5.0  # for which peers that do nothing are watched
_SETTLE_S = 1.5  # until two new nodes have introduced each other and looked up their neighbours


@dataclass
class CallRecorder:
    """Records the code of the project that is called."""

    recording: bool = False
    codes: set[CodeType] = field(default_factory=set)
    at_rest: set[CodeType] = field(default_factory=set)

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Serve as a profile function of `sys.setprofile`."""
        if self.recording and event == "call":
            self.codes.add(frame.f_code)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record what all threads call within the context."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def rest(self) -> None:
        """Record what is called for a while after the operation, when this thread does nothing."""
        operation, self.codes = self.codes, set()
        with self.record():
            time.sleep(_REST_S)
        self.codes, self.at_rest = operation, self.codes

    def passed(self) -> Passed:
        """Return what was called so far."""
        called, defined = _called(self.codes)
        at_rest = {file for file, _ in _called(self.at_rest)[0]}
        return Passed(called, defined - {file for file, _ in called}, at_rest)


def _called(codes: set[CodeType]) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the functions of the project, each with its file, lambdas and comprehensions aside, and the
    files that define classes.
    """
    called, defined = set[tuple[str, str]](), set[str]()
    for code in codes.copy():
        name = code.co_qualname
        if not code.co_filename.startswith(PACKAGES) or "_pb2" in code.co_filename or name.endswith(">"):
            continue
        file = str(Path(code.co_filename).relative_to(ROOT))
        if code.co_flags & inspect.CO_OPTIMIZED:  # a function; the body of a class is not
            called.add((file, name))
        else:
            defined.add(file)
    return called, defined


@dataclass(frozen=True)
class Passed:
    """The functions that an operation calls, each with its file, the files that it only imports, and those
    of which functions are called while nothing is done.
    """

    functions: set[tuple[str, str]]
    only_imported: set[str]
    at_rest: set[str] = field(default_factory=set)

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {file for file, _ in self.functions}

    @property
    def classes(self) -> set[tuple[str, str]]:
        """The classes whose methods are among the functions, each with its file."""
        return {
            (file, name.rsplit(".", 1)[0])
            for file, name in self.functions
            if "." in name and not name.rsplit(".", 1)[0].endswith("<locals>")
        }


def step(recorder: CallRecorder) -> None:
    """Two peers of this process make six steps, the last of which averages."""
    import torch

    import swarm

    with (
        swarm.Node(listen="127.0.0.1:0") as first,
        swarm.Node(bootstrap=first.addresses, listen="127.0.0.1:0") as second,
    ):
        optimizers = []
        for node in (first, second):
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 4)
            inner = torch.optim.AdamW(model.parameters())
            opt = swarm.Optimizer(inner, node=node, run="flows", target_batch_size=48, batch_size_per_step=4)
            optimizers.append((model, opt))

        def train(model: torch.nn.Module, opt: swarm.Optimizer) -> None:
            chance = torch.Generator().manual_seed(1)
            while opt.epoch < 1:
                model(torch.randn(4, 8, generator=chance)).square().mean().backward()
                opt.step()
                opt.zero_grad()

        with recorder.record():
            _run_concurrently([functools.partial(train, *pair) for pair in optimizers])
        recorder.rest()
        for _, opt in optimizers:
            opt.close()


def store(recorder: CallRecorder) -> None:
    """One node stores a record at another."""
    import swarm

    with (
        swarm.Node(listen="127.0.0.1:0") as first,
        swarm.Node(bootstrap=first.addresses, listen="127.0.0.1:0") as second,
    ):
        second.wait_joined(10.0)
        second.dht.store("before", 1, ttl_s=60)
        time.sleep(_SETTLE_S)
        with recorder.record():
            second.dht.store("flows", 2, ttl_s=60)
        recorder.rest()


def mixture(recorder: CallRecorder) -> None:
    """A mixture of two experts on another node, forward and backward."""
    import torch

    import swarm

    with (
        swarm.Node(listen="127.0.0.1:0") as host,
        swarm.Node(bootstrap=host.addresses, listen="127.0.0.1:0") as guest,
    ):
        experts = {
            f"ffn.{number}": swarm.Expert(torch.nn.Linear(8, 8), (torch.zeros(1, 8),), torch.optim.Adam)
            for number in range(2)
        }
        with swarm.ExpertServer(host, experts):
            guest.wait_joined(10.0)
            layer = swarm.RemoteMixtureOfExperts(guest, in_features=8, grid="ffn.[0:2]", k_best=2)
            layer(torch.randn(4, 8)).sum().backward()
            time.sleep(_SETTLE_S)
            with recorder.record():
                layer(torch.randn(4, 8, requires_grad=True)).sum().backward()
            recorder.rest()


def join() -> Passed:
    """`swarm join` of a run that another process created, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HOME": folder, "XDG_STATE_HOME": folder, "PYTHONPATH": str(ROOT)}
        file = str(ROOT / "examples" / "bytelm.toml")
        options = ["--listen", "127.0.0.1:0", "--device", "cpu", "--json"]
        command = [sys.executable, "-m", "swarm.cli", "start", file, "--identity", "new", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as creator:
            try:
                assert creator.stdout is not None
                address = next(
                    event["invite"]
                    for event in map(json.loads, creator.stdout)
                    if event.get("event") == "listening"
                )
                joined = [sys.executable, "-m", "benchmarks.flows", "--join", address]
                done = subprocess.run(
                    joined,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                    timeout=_JOIN_S_MAX,
                    check=True,
                )
            finally:
                creator.kill()
    found = json.loads(done.stdout.splitlines()[-1])
    return Passed({(file, name) for file, name in found["functions"]}, set(found["only_imported"]))


def join_here(address: str) -> None:
    """Join in this process, and print the recorded functions when the first step has begun."""
    recorder = CallRecorder(recording=True)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        recorder.profile(frame, event, argument)
        code = frame.f_code
        if event == "return" and (Path(code.co_filename).name, code.co_qualname) == _FIRST_STEP:
            recorder.recording = False
            passed = recorder.passed()
            found = {"functions": sorted(passed.functions), "only_imported": sorted(passed.only_imported)}
            print(json.dumps(found), flush=True)
            os._exit(0)

    threading.setprofile(profile)
    sys.setprofile(profile)
    from swarm.cli import main

    sys.argv = ["swarm", "join", address, "--yes", "--device", "cpu", "--listen", "127.0.0.1:0", "--json"]
    main()


def measure(name: str) -> Passed:
    """Run one flow and return what it passes."""
    if name == "join":
        return join()
    recorder = CallRecorder()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    try:
        {"step": step, "store": store, "mixture": mixture}[name](recorder)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return recorder.passed()


def _run_concurrently(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Measure the flows that are asked for, and print the table or one flow's files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flows", nargs="*", help=f"any of {', '.join(AIMS)}; none: all")
    parser.add_argument(
        "--list",
        action="store_true",
        help="also print the files, with the number of recorded functions in each",
    )
    parser.add_argument("--join", metavar="ADDRESS", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.join:
        join_here(asked.join)
        return
    print(
        "| flow | files | aim | also at rest | classes | functions | files only imported |\n"
        "|---|--:|--:|--:|--:|--:|--:|"
    )
    for name in asked.flows or AIMS:
        passed = measure(name)
        at_rest = len(passed.files & passed.at_rest) if name != "join" else "–"
        figures = (len(passed.files), AIMS[name], at_rest, len(passed.classes), len(passed.functions))
        print(
            f"| {TEXTS[name]} | {' | '.join(map(str, figures))} | {len(passed.only_imported)} |", flush=True
        )
        if asked.list:
            for file in sorted(passed.files):
                names = sorted(function for one, function in passed.functions if one == file)
                print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
