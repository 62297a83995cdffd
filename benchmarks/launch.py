"""Start the workers of one system, exchange messages with deadlines, and remove all their processes and
files.

Each worker has a session of its own, in which all its processes can be found and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parent.parent
MARK = "SWARM_BENCHMARK_LAUNCH"  # environment variable of all processes of a launch, descendants included
GONE_TIMEOUT_S = 10.0
LOG_LINES_SHOWN = 6


class LaunchFailed(Exception):
    """A worker died or did not answer in time. The text names it and contains its last log lines."""


class Worker:
    """One process. A thread reads its answers, so that waiting for one can have a deadline."""

    def __init__(self, *, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.name, self._log = name, log
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with log.open("wb") as sink:
            self.started_s = time.monotonic()
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True, name=f"answers of {name}").start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise LaunchFailed(f"{self.name} is gone{self._last_words()}") from error

    def receive(self, kind: str, deadline_s: float) -> dict[str, Any]:
        """Return the next answer of this kind and drop others. Raises LaunchFailed when the worker ends or
        `deadline_s` passes.
        """
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise LaunchFailed(f"{self.name} did not say {kind!r} in time{self._last_words()}") from None
            if answer is None:
                raise LaunchFailed(f"{self.name} ended before it said {kind!r}{self._last_words()}")
            if answer["kind"] == kind:
                return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES_SHOWN:]
        return "; its log ends: " + " | ".join(lines) if lines else ""


class Launch:
    """The workers of one system, as a context manager. All processes that they start carry a mark, are
    counted with them, and are ended with them.
    """

    def __init__(
        self,
        name: str,
        *,
        python: Path,
        module: str,
        configurations: Iterable[dict[str, Any]],
        within: Callable[[int, Sequence[str]], Sequence[str]] = lambda number, command: command,
    ) -> None:
        """`within(number, command)` returns the command that runs a worker elsewhere, for instance in another
        network namespace.
        """
        self.name, self._python, self._module, self._within = name, python, module, within
        self._configurations = list(configurations)
        self._mark = uuid.uuid4().hex
        self.workers: list[Worker] = []
        self._ended: list[Worker] = []

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="swarm-benchmark-"))
        self._since_s = self._folder.stat().st_mtime - 1.0
        try:
            for configuration in self._configurations:
                self.add(configuration)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def add(self, configuration: dict[str, Any], module: str | None = None) -> Worker:
        """Start one more worker. `module` is its program, if it differs from the launch's."""
        number = len(self.workers) + len(self._ended)
        full = {"rank": number, "rendezvous": str(self._folder), **configuration}
        environment = {
            **os.environ,
            MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GRPC_VERBOSITY": "ERROR",
            "TMPDIR": str(self._folder),
        }
        environment.pop("PYTHONPATH", None)
        command = [str(self._python), "-m", module or self._module, json.dumps(full)]
        within = self._within(number, command)
        worker = Worker(
            name=f"{self.name} worker {number}",
            command=within,
            environment=environment,
            log=self._folder / f"{number}.log",
        )
        self.workers.append(worker)
        return worker

    def send(self, do: str, **fields: Any) -> None:
        for worker in self.workers:
            worker.send({"do": do, **fields})

    def receive(self, kind: str, timeout_s: float) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + timeout_s
        return [worker.receive(kind, deadline_s) for worker in self.workers]

    def processes(self, of: Worker | None = None) -> list[psutil.Process]:
        """Return all live processes that this launch started; with `of`, those of one worker, known by its
        session.
        """
        found = _marked(self._mark)
        return [process for process in found if of is None or _session(process.pid) == of.process.pid]

    def processor_s(self) -> float:
        """Return the processor seconds so far of all live processes."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def end(self, worker: Worker) -> None:
        """Kill one worker and all processes of its session; the others continue."""
        for process in self.processes(of=worker):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        worker.process.wait()
        self.workers.remove(worker)
        self._ended.append(worker)

    def _end(self) -> None:
        everyone = [*self.workers, *self._ended]
        deadline_s = time.monotonic() + GONE_TIMEOUT_S
        while alive := _marked(self._mark):
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()  # psutil refuses when the id now belongs to another process
            for worker in everyone:
                worker.process.poll()
            if time.monotonic() > deadline_s:
                raise LaunchFailed(
                    f"{self.name} leaves processes that cannot be ended: {[process.pid for process in alive]}"
                )
            time.sleep(0.02)
        for worker in everyone:
            worker.process.wait()
            for pipe in (worker.process.stdin, worker.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # a message was not sent to a worker that has ended
                        pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        _free_shared_memory(self._since_s)
        _remove_dead_sockets(self._since_s)


def _marked(mark: str) -> list[psutil.Process]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            content = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if wanted in content.split(b"\0"):
            found.append(process)
    return found


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _remove_dead_sockets(since_s: float) -> None:
    """Remove socket files in /tmp that were made since then and have no listener. Killed daemons of hivemind
    leave them.
    """
    listened = Path("/proc/net/unix").read_text(errors="replace")
    for path in Path("/tmp").glob("hivemind-p2p*.sock"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= since_s and str(path) not in listened:
                path.unlink()


def _alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _free_shared_memory(since_s: float) -> None:
    """Remove shared memory made since then and named after a dead process. hivemind's tensors outlive killed
    processes there.
    """
    for path in Path("/dev/shm").glob("torch_*"):
        owner = path.name.split("_")[1]
        with contextlib.suppress(OSError):
            if owner.isdecimal() and not _alive(int(owner)) and path.stat().st_mtime >= since_s:
                path.unlink()


def written_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the memory that these processes have written and share with no other. Unlike the proportional
    set size it does not change when other processes of the machine begin or end.
    """
    return sum(_from_rollup(process, "Private_Dirty:") for process in processes)


def proportional_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the proportional set size of these processes: shared pages count in equal parts."""
    return sum(_from_rollup(process, "Pss:") for process in processes)


def _from_rollup(process: psutil.Process, field: str) -> int:
    """Return a size that the system keeps of a process; 0 when the process has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0) << 10
