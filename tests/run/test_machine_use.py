"""Tests of what else a machine does, with stand-ins for NVML, D-Bus, terminals, batteries and sensors."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from swarm.run.limits import MachineUse, VolunteerLimits
from swarm.run.machine_use import MachineProbes, MachineWatch

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
GAME = 999_999_901  # process ids that no process has
NOTEBOOK = 999_999_902


class Nvml:
    """Stands in for the module pynvml, with one device."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.missing = False
        self.computing: list[int] = []
        self.drawing: dict[int, int] = {}  # process id -> percent
        self.handle_of = ""

    def nvmlInit(self) -> None:
        if self.missing:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.handle_of = uuid
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.computing]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:
        if not self.drawing:
            raise self.NVMLError("not found")
        return [SimpleNamespace(pid=pid, smUtil=load, timeStamp=7) for pid, load in self.drawing.items()]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 71

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 5_000_000


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    stand_in = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    return stand_in


def probes(device: torch.device = CPU) -> MachineProbes:
    return MachineProbes(device, list)


def bus(folder: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> None:
    """Make a program `busctl` that answers calls whose arguments contain a key, and fails for all others."""
    cases = "".join(f"*{key}*) echo '{answer}';;\n" for key, answer in answers.items())
    program = folder / "busctl"
    program.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 1;;\nesac\n', encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_others_on_the_gpu_are_programs_that_compute_and_those_that_draw_much(nvml: Nvml) -> None:
    probe = probes(CUDA)
    nvml.computing = [os.getpid()]
    assert probe.device_users() == ()
    assert nvml.handle_of == "GPU-1-2-3"
    nvml.drawing = {GAME: 10}
    assert probe.device_users() == (), "a desktop draws a little all the time"
    nvml.drawing = {GAME: 80}
    assert probe.device_users() == ("another program",)
    nvml.drawing, nvml.computing = {}, [os.getpid(), os.getppid()]
    assert probe.device_users() == (psutil.Process(os.getppid()).name(),)


def test_in_a_container_one_unknown_process_is_this_one(nvml: Nvml) -> None:
    nvml.computing = [NOTEBOOK]
    assert probes(CUDA).device_users() == ()
    nvml.computing = [GAME, NOTEBOOK]
    assert probes(CUDA).device_users() == ("another program",)


def test_without_a_driver_nobody_else_uses_the_gpu_and_nothing_is_known(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.missing = True
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    assert probes(CUDA).device_users() == ()
    assert probes(CUDA).temperature_c() is None


def test_temperature_and_energy_are_those_of_the_gpu_and_the_processor(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensors = {
        "coretemp": [SimpleNamespace(current=64.0), SimpleNamespace(current=80.5)],
        "nvme": [SimpleNamespace(current=99.0)],
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: sensors, raising=False)
    assert probes(CPU).temperature_c() == 80.5
    sensors["coretemp"] = []
    assert probes(CUDA).temperature_c() == 71.0
    assert probes(CPU).temperature_c() is None


@pytest.mark.parametrize(("counters", "of_processor"), [((), None), ((1_500_000, 500_000), 2.0)])
def test_energy_is_that_of_the_gpu_and_of_the_processors_whose_counters_can_be_read(
    nvml: Nvml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counters: tuple[int, ...],
    of_processor: float | None,
) -> None:
    for number, count in enumerate(counters):
        (tmp_path / f"intel-rapl:{number}").mkdir()
        (tmp_path / f"intel-rapl:{number}" / "energy_uj").write_text(f"{count}\n")
    monkeypatch.setattr("swarm.run.machine_use._ENERGY_COUNTERS", tmp_path)
    assert probes(CPU).joules() == of_processor
    assert probes(CUDA).joules() == 5_000.0 + (of_processor or 0.0)
    nvml.missing = True
    assert probes(CUDA).joules() == of_processor


@pytest.mark.parametrize(
    ("battery", "said"),
    [
        (None, None),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=False), True),
        (SimpleNamespace(power_plugged=None), None),
    ],
)
def test_a_machine_runs_on_battery_when_it_is_not_plugged_in(
    monkeypatch: pytest.MonkeyPatch, battery: Any, said: bool | None
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert probes().on_battery() is said


@pytest.mark.parametrize(
    ("answer", "said"), [(0, None), (1, True), (2, False), (3, True), (4, False), (77, None)]
)
def test_a_connection_is_metered_when_the_network_manager_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, said: bool | None
) -> None:
    bus(tmp_path, monkeypatch, {"Metered": f'{{"type":"u","data":{answer}}}'})
    assert probes().metered() is said


def test_without_a_bus_or_with_a_broken_one_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "users", list)
    for answers in ({}, {"Metered": "garbage", "IdleHint": "[]", "GetIdletime": '{"data":[]}'}):
        bus(tmp_path, monkeypatch, answers)
        assert probes().metered() is None
        assert probes().idle_s() is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert probes().metered() is None


def test_idle_time_is_what_the_desktop_says_or_since_a_terminal_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "users", list)
    bus(tmp_path, monkeypatch, {"GetIdletime": '{"type":"t","data":[123456]}'})
    assert probes().idle_s() == 123.456
    bus(tmp_path, monkeypatch, {"IdleHint": '{"type":"b","data":false}'})
    assert probes().idle_s() == 0.0
    since_us = int((time.time() - 600) * 1e6)
    bus(
        tmp_path,
        monkeypatch,
        {"IdleHint": '{"type":"b","data":true}', "IdleSinceHint": f'{{"data":{since_us}}}'},
    )
    assert probes().idle_s() == pytest.approx(600, abs=60)
    terminal = tmp_path / "tty"
    terminal.touch()
    os.utime(terminal, (time.time() - 30, time.time()))
    monkeypatch.setattr(
        psutil, "users", lambda: [SimpleNamespace(terminal=str(terminal)), SimpleNamespace(terminal=None)]
    )
    assert probes().idle_s() == pytest.approx(30, abs=25)


def test_load_of_others_is_what_neither_idles_nor_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"s": 100.0, "idle": 0.0, "own": 0.0}
    monkeypatch.setattr("swarm.run.machine_use.time.monotonic", lambda: now["s"])
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(idle=now["idle"]))
    monkeypatch.setattr(
        "swarm.run.machine_use._processor_s", lambda pid: now["own"] if pid == os.getpid() else 0.0
    )
    probe = probes()
    assert probe.other_load() is None
    now.update(s=110.0, idle=10.0, own=20.0)  # of 40 core seconds 10 idle, 20 own
    assert probe.other_load() == pytest.approx(0.25)
    now.update(s=120.0, idle=50.0, own=20.0)
    assert probe.other_load() == 0.0


class Counted(MachineProbes):
    """Answers nothing, and counts which probes were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in MachineUse.__slots__:
            return lambda: self.asked.append(name)
        return super().__getattribute__(name)


def test_probes_run_only_if_limits_need_them_and_at_their_own_intervals() -> None:
    limits = VolunteerLimits(yields_gpu=False, on_battery=True, on_metered=True)
    counted = Counted()
    watch = MachineWatch(counted, lambda: limits)
    watch.read(0.0)
    assert counted.asked == []
    limits = VolunteerLimits(idle_s=60.0, temperature_c_max=80.0)
    for tick in range(120):  # a minute
        watch.read(tick * 0.5)
    times = {name: counted.asked.count(name) for name in MachineUse.__slots__}
    assert times == {
        "device_users": 120,
        "idle_s": 60,
        "other_load": 60,
        "on_battery": 12,
        "temperature_c": 30,
        "metered": 3,
    }


@pytest.mark.parametrize("error", [OSError(5, "no sensor"), psutil.AccessDenied(1), NotImplementedError()])
def test_a_probe_that_fails_knows_nothing_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Regression: it ended the volunteer at the start, and later the watching, so that a pause lasted
    forever.
    """

    def fails() -> None:
        raise error

    monkeypatch.setattr(psutil, "sensors_battery", fails, raising=False)
    monkeypatch.setattr("swarm.run.machine_use._output", lambda command: '{"type":"u","data":1}')
    watch = MachineWatch(probes(), VolunteerLimits)
    watch.read(0.0)
    assert watch.use == MachineUse(metered=True)
