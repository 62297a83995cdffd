"""The parts of the memory estimate, and its messages for a CUDA device. No run is needed."""

from __future__ import annotations

import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.core.errors import SwarmError
from swarm.core.identity import Identity
from swarm.run import events
from swarm.run.memory import MemoryEstimate, estimate_memory
from swarm.run.signed import sign
from swarm.run.specification import RunSpecification
from swarm.run.task import TaskDescription
from swarm.run.volunteer import Volunteer
from swarm.run.volunteer_config import VolunteerConfig

PARAMETERS = 100_000_000
TASK = TaskDescription(summary="", sample="", parameters=PARAMETERS, memory_bytes=4 * PARAMETERS)
DEVICE_BYTES = 8_000_000_000


def of(*, on_cuda: bool = False, saves: bool = False, **changes: Any) -> MemoryEstimate:
    table = {"name": "tiny", "target_batch_size": 16, "batch_size": 8, "task": {"name": "bytelm"}, **changes}
    return estimate_memory(RunSpecification.from_table(table, "test"), TASK, on_cuda=on_cuda, saves=saves)


def per_parameter(one: MemoryEstimate, other: MemoryEstimate) -> tuple[float, float]:
    """Return how many bytes per parameter `one` is above `other`, on the host and on the device."""
    host, device = one.host_bytes - other.host_bytes, one.device_bytes - other.device_bytes
    return host / PARAMETERS, device / PARAMETERS


@pytest.mark.parametrize("codec", ["float16", "int8"])
@pytest.mark.parametrize("mode", ["gradients", "local", "diloco"])
def test_error_feedback_is_counted(mode: str, codec: str) -> None:
    """The sender needs two float32 per parameter, and the reducer the same for its shard."""
    more, _ = per_parameter(of(mode=mode, codec=codec, error_feedback=True), of(mode=mode, codec=codec))
    assert more >= 8 + 4
    host, device = per_parameter(
        of(mode=mode, codec=codec, error_feedback=True, on_cuda=True),
        of(mode=mode, codec=codec, on_cuda=True),
    )
    assert device >= 8
    assert 4 <= host < 8


def test_each_mode_adds_the_memory_of_its_buffers() -> None:
    local, diloco = of(mode="local", on_cuda=True), of(mode="diloco", on_cuda=True)
    assert per_parameter(diloco, local)[1] == pytest.approx(4.4), "the outer momentum"
    streaming = of(mode={"name": "diloco", "streaming": 4}, on_cuda=True)
    assert per_parameter(diloco, streaming)[1] == pytest.approx(1.1 * (4 - 2 * 4 / 4)), (
        "a fragment twice instead of the whole"
    )
    gradients, delayed = of(on_cuda=True), of(mode={"name": "gradients", "delayed": True}, on_cuda=True)
    assert per_parameter(delayed, gradients)[1] == pytest.approx(4.4), "the accumulators of the round"
    plain = of(optimizer={"name": "sgd", "momentum": 0.0}, on_cuda=True)
    assert per_parameter(gradients, plain)[1] == pytest.approx(8.8), "AdamW's two statistics"


def test_on_cuda_training_counts_for_the_device_and_state_copies_for_the_host() -> None:
    both, apart = of(), of(on_cuda=True)
    assert both.device_bytes == 0
    assert apart.device_bytes >= (4 + 4 + 8 + 4) * PARAMETERS
    assert apart.host_bytes - (2 << 30) < both.host_bytes - (400 << 20)
    assert per_parameter(of(on_cuda=True, saves=True), apart) == (pytest.approx(1.1 * 2 * 12), 0.0)


def test_the_libraries_of_a_cuda_build_count_where_the_model_is_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("swarm.run.memory.find_spec", lambda name: spec)
    of_cpu_build = of().host_bytes
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert of().host_bytes >= of_cpu_build + (200 << 20)


def test_the_required_memory_of_the_owner_is_a_lower_bound() -> None:
    assert of(requirements={"memory_mb": 1 << 20}).host_bytes == (1 << 20) * 1_000_000


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a machine with two GPUs, the first of which is the current device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    free = {torch.device("cuda", 1): DEVICE_BYTES}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 2 * DEVICE_BYTES))
    monkeypatch.setattr(
        "swarm.run.machine.free_bytes", lambda device=None: free[device] if device is not None else 1 << 40
    )


def volunteer(device: str, emitted: list[events.Event], **settings: Any) -> Volunteer:
    table = {
        "name": "tiny",
        "target_batch_size": 16,
        "batch_size": 8,
        "task": {"name": "bytelm", "settings": settings},
    }
    signed = sign(RunSpecification.from_table(table, "test"), Identity.generate(), version=1, created_s=0.0)
    nothing: Any = None
    return Volunteer(
        nothing, signed, nothing, VolunteerConfig(device=device), emitted.append, threading.Event()
    )


@pytest.mark.usefixtures("second_gpu")
def test_the_sentence_shows_device_and_host_memory_for_a_cuda_device() -> None:
    emitted: list[events.Event] = []
    assert volunteer("cuda:1", emitted).choose_device() == torch.device("cuda", 1)
    (notice,) = emitted
    assert isinstance(notice, events.Notice)
    assert notice.text.startswith("on cuda:1: about ")
    assert "MB of its own memory, of which 8.0 GB are free, and about" in notice.text


@pytest.mark.usefixtures("second_gpu")
def test_a_cuda_device_with_too_little_memory_is_named() -> None:
    with pytest.raises(SwarmError, match=r"and 8.0 GB are free on cuda:1: close other programs"):
        volunteer("cuda:1", [], width=2048, layers=24, heads=16).choose_device()
