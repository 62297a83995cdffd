"""Watch the other uses of a machine, so that a volunteer does not disturb them: user input, other programs,
battery, connection and temperature.

Everything is read from the operating system. A value that cannot be read is None and never pauses a
volunteer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from swarm.run.limits import MachineUse, VolunteerLimits

if TYPE_CHECKING:
    import torch

_TICK_S = 0.5
_COMMAND_S_MAX = 2.0
_GRAPHICS_LOAD_MIN = 30  # a graphics program, such as a game, counts from this load of the GPU in percent
_PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_ENERGY_COUNTERS = Path("/sys/class/powercap")
_NETWORK_MANAGER = ("org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager")
_LOGIN = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
_MUTTER = (
    "org.gnome.Mutter.IdleMonitor",
    "/org/gnome/Mutter/IdleMonitor/Core",
    "org.gnome.Mutter.IdleMonitor",
)
_METERED = {1: True, 2: False, 3: True, 4: False}  # NMMetered: yes, no, guess-yes, guess-no; 0: unknown


class MachineProbes:
    """Reads the present state of this machine. `own_programs` returns the ids of the processes that are this
    user's volunteers, which are not counted as other programs.
    """

    def __init__(self, device: torch.device, own_programs: Callable[[], Collection[int]]) -> None:
        self._gpu = _Gpu(device) if device.type == "cuda" else None
        self._own_programs = own_programs
        # seconds: monotonic clock, idle time of the cores, time of own programs
        self._load_before: tuple[float, float, float] | None = None

    def device_users(self) -> tuple[str, ...]:
        """Return the names of other programs that compute on the device."""
        return self._gpu.others(self._own) if self._gpu is not None else ()

    def other_load(self) -> float | None:
        """Return the share of all cores that other programs have used since the last call; None on the first
        call.
        """
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        own_s = sum(_processor_s(one) for one in self._own())
        now, before = (time.monotonic(), idle_s, own_s), self._load_before
        self._load_before = now
        if before is None:
            return None
        cores_s = max((now[0] - before[0]) * (psutil.cpu_count() or 1), 1e-3)
        used_s = cores_s - (now[1] - before[1]) - (now[2] - before[2])
        return min(max(used_s / cores_s, 0.0), 1.0)

    def idle_s(self) -> float | None:
        """Return the seconds since a person last used keyboard, mouse or terminal."""
        if sys.platform == "darwin":
            found = re.search(r'"HIDIdleTime" = (\d+)', _output(["ioreg", "-c", "IOHIDSystem"]))
            return int(found[1]) / 1e9 if found else None
        answers = [one for one in (_desktop_idle_s(), _terminal_idle_s()) if one is not None]
        return min(answers, default=None)

    def on_battery(self) -> bool | None:
        """Return whether the machine runs on battery; None if it has no battery."""
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        return None if battery is None or battery.power_plugged is None else not battery.power_plugged

    def metered(self) -> bool | None:
        """Return whether NetworkManager reports the connection as metered."""
        answer = _property(*_NETWORK_MANAGER, _NETWORK_MANAGER[0], "Metered")
        return _METERED.get(answer) if isinstance(answer, int) else None

    def temperature_c(self) -> float | None:
        """Return the highest temperature of the device and the processor in degrees Celsius."""
        found = [] if self._gpu is None else self._gpu.temperature_c()
        sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
        found += [one.current for name in _PROCESSOR_SENSORS for one in sensors.get(name, [])]
        return max(found, default=None)

    def joules(self) -> float | None:
        """Return the energy that device and processor have used since a fixed moment, as far as it can be
        read.
        """
        found = [] if self._gpu is None else self._gpu.joules()
        for counter in _ENERGY_COUNTERS.glob("intel-rapl:?/energy_uj"):
            with contextlib.suppress(OSError, ValueError):
                found.append(int(counter.read_text()) / 1e6)
        return sum(found) if found else None

    def _own(self) -> set[int]:
        own = {os.getpid(), *self._own_programs()}
        for pid in tuple(own):
            with contextlib.suppress(psutil.Error):
                own.update(one.pid for one in psutil.Process(pid).children(recursive=True))
        return own


class MachineWatch:
    """Runs the probes in a thread of its own, each at its own interval, and only those that the limits need.
    `use` is the last known state; any thread may read it.
    """

    def __init__(self, probes: MachineProbes, limits: Callable[[], VolunteerLimits]) -> None:
        self.use = MachineUse()
        self._probes, self._limits = probes, limits
        self._due_s: dict[str, float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watches the machine", daemon=True)

    def start(self) -> None:
        """Read the state once, then continue in the background until `close`."""
        self.read(time.monotonic())
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._end.set()

    def read(self, now_s: float) -> None:
        """Run the probes that are due."""
        limits = self._limits()
        use = self.use
        for name, wanted, every_s in (
            ("device_users", limits.yields_gpu, _TICK_S),
            ("idle_s", limits.idle_s > 0.0, 1.0),
            ("other_load", limits.idle_s > 0.0, 1.0),
            ("on_battery", not limits.on_battery, 5.0),
            ("temperature_c", limits.temperature_c_max is not None, 2.0),
            ("metered", not limits.on_metered, 20.0),
        ):
            if wanted and now_s >= self._due_s.get(name, float("-inf")):
                self._due_s[name] = now_s + every_s
                use = replace(use, **{name: self._answer(name)})
        self.use = use

    def _answer(self, name: str) -> Any:
        """Return the value of a probe, or None if it fails: sensors fail in different ways on different
        systems.
        """
        try:
            return getattr(self._probes, name)()
        except (
            OSError,
            psutil.Error,
            RuntimeError,
            ArithmeticError,
            LookupError,
            ValueError,
            AttributeError,
        ):
            return getattr(MachineUse(), name)

    def _run(self) -> None:
        while not self._end.wait(_TICK_S):
            self.read(time.monotonic())


class _Gpu:
    """One CUDA device, as NVML sees it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._handle, self._seen_us = device, None, 0

    def others(self, own_programs: Callable[[], set[int]]) -> tuple[str, ...]:
        nvml, handle = self._open()
        if handle is None:
            return ()
        try:
            computing = {one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except nvml.NVMLError:
            return ()
        drawing = self._drawing(nvml, handle)
        if computing | drawing <= {os.getpid()}:
            return ()  # the usual case: no need to inspect all processes
        own = own_programs()
        # In a container NVML reports process ids of the host, so one of them may be this process.
        others = sorted(computing - own)[1 if own.isdisjoint(computing) else 0 :]
        others += sorted(drawing - computing - own)
        return tuple(dict.fromkeys(_program(pid) for pid in others if not _is_volunteer(pid)))

    def temperature_c(self) -> list[float]:
        nvml, handle = self._open()
        if handle is None:
            return []
        try:
            return [float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))]
        except nvml.NVMLError:
            return []

    def joules(self) -> list[float]:
        nvml, handle = self._open()
        if handle is None:
            return []
        try:
            return [nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3]
        except nvml.NVMLError:
            return []

    def _drawing(self, nvml: Any, handle: Any) -> set[int]:
        """Return the programs that keep the GPU busy with graphics."""
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_us)
        except nvml.NVMLError:
            return set()
        self._seen_us = max((one.timeStamp for one in samples), default=self._seen_us)
        return {one.pid for one in samples if one.smUtil >= _GRAPHICS_LOAD_MIN}

    def _open(self) -> tuple[Any, Any]:
        """Return the NVML library and its handle of the device; None if this machine has no NVML."""
        import pynvml
        import torch

        if self._handle is None:
            try:
                pynvml.nvmlInit()
                uuid = torch.cuda.get_device_properties(self._device).uuid
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except pynvml.NVMLError:
                return pynvml, None
        return pynvml, self._handle


def _processor_s(pid: int) -> float:
    """Return the processor time of a process; 0 if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _is_volunteer(pid: int) -> bool:
    """Return whether a process is a `swarm` command of this or another user."""
    try:
        return any(Path(one).name == "swarm" for one in psutil.Process(pid).cmdline()[:2])
    except psutil.Error:
        return False


def _program(pid: int) -> str:
    """Return the name of a process's program, for messages."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "another program"


def _desktop_idle_s() -> float | None:
    """Return the seconds since the last desktop input, from GNOME or else from the login manager."""
    answer = _bus(["--user", "call", *_MUTTER, "GetIdletime"])
    if isinstance(answer, int):
        return answer / 1e3
    idle = _property(*_LOGIN, "IdleHint")
    if not isinstance(idle, bool):
        return None
    since_us = _property(*_LOGIN, "IdleSinceHint")
    if not idle:
        return 0.0
    return time.time() - since_us / 1e6 if isinstance(since_us, int) and since_us else float("inf")


def _terminal_idle_s() -> float | None:
    """Return the seconds since the last input in a terminal; None if nobody is logged in on one."""
    used_s = []
    for user in psutil.users():
        with contextlib.suppress(OSError):
            if user.terminal:
                used_s.append(Path("/dev", user.terminal).stat().st_atime)
    return max(time.time() - max(used_s), 0.0) if used_s else None


def _property(service: str, path: str, interface: str, name: str) -> object:
    return _bus(["--system", "get-property", service, path, interface, name])


def _bus(arguments: Sequence[str]) -> object:
    """Return the single value of a D-Bus call; None if there is no bus, object or answer."""
    text = _output(["busctl", "--json=short", *arguments])
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        data = json.loads(text)["data"]
        return data[0] if isinstance(data, list) else data
    return None


def _output(command: list[str]) -> str:
    """Return the output of a program; empty if it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S_MAX, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
