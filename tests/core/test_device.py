"""Tests of device names and of device errors, on a simulated machine with GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from swarm.core.device import (
    check_device_name,
    check_device_present,
    current_device,
    explained_failures,
    first_line,
    is_device_failure,
    is_out_of_memory,
    resolve_device,
)
from swarm.core.errors import SwarmError, UsageError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize(
    "name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:01", "", "cpu:0", "cuda:99999"]
)
def test_an_invalid_device_name_is_refused_without_torch(name: str) -> None:
    with pytest.raises(UsageError, match="a device is auto, cpu, cuda, cuda:N or mps"):
        check_device_name(name)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("name", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_cuda_devices_always_have_an_index(name: str, index: int) -> None:
    assert resolve_device(name) == torch.device("cuda", index)


@pytest.mark.usefixtures("two_gpus")
def test_an_index_beyond_the_last_device_is_refused() -> None:
    with pytest.raises(UsageError, match="--device cuda:7 was given, but this machine has cuda:0 to cuda:1"):
        resolve_device("cuda:7")


def test_cuda_and_mps_are_refused_where_torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    for name in ("cuda", "cuda:0", "mps"):
        with pytest.raises(UsageError, match=f"--device {name} was given, but .* use --device cpu, or auto"):
            resolve_device(name)


def test_mps_is_used_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("mps") == torch.device("mps")
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "memory", "failure"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True, False),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True, False),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"
            ),
            True,
            False,
        ),
        (RuntimeError("CUDA error: out of memory"), True, False),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            True,
            False,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"), False, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (ValueError("out of memory"), False, False),
    ],
)
def test_memory_errors_and_device_failures_are_distinguished(
    error: BaseException, memory: bool, failure: bool
) -> None:
    assert is_out_of_memory(error) is memory
    assert is_device_failure(error) is failure


def test_torchs_accelerator_error_is_a_device_failure() -> None:
    kind = getattr(torch, "AcceleratorError", None)
    if kind is None:
        pytest.skip("this torch has no AcceleratorError")
    error = kind.__new__(kind)
    assert is_device_failure(error)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_the_cpu_and_auto_are_accepted_without_looking_for_devices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.core.device.resolve_device", pytest.fail)
    check_device_present(name)


@pytest.mark.usefixtures("two_gpus")
def test_a_device_that_is_missing_is_found_missing() -> None:
    check_device_present("cuda:1")
    with pytest.raises(UsageError, match="this machine has cuda:0 to cuda:1"):
        check_device_present("cuda:2")


def test_a_cuda_device_becomes_the_current_one_and_the_cpu_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[object] = []

    @contextlib.contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", noted)
    for name in ("cuda:1", "cpu", "mps"):
        with current_device(torch.device(name)):
            pass
    assert entered == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors"),
            r"cuda:1 failed, .* \(.*assert triggered\): start again",
        ),
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory."),
            r"cuda:1 has not enough memory left \(.*\): close other programs",
        ),
        (MemoryError(), r"cuda:1 has not enough memory left \(MemoryError\)"),
    ],
)
def test_errors_of_a_device_become_sentences_with_what_to_do(error: BaseException, sentence: str) -> None:
    with pytest.raises(SwarmError, match=sentence) as raised, explained_failures(torch.device("cuda:1")):
        raise error
    assert "\n" not in str(raised.value)


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explained_failures(torch.device("cpu")):
        raise RuntimeError("shapes cannot be multiplied")
    assert first_line(ValueError("one\ntwo")) == "one"
