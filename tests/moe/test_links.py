"""The link to a CUDA device: the streams that its calls use, and their order. `FakeCuda` stands for
`torch.cuda`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
import torch

from moe.server.devices import DeviceFailed, using
from moe.server.links import ExpertDeviceLink, link_of

DEVICE = torch.device("cpu")


class _Stream:
    """A stream that knows which calls are over before its next one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.known = device, set[str]()

    def wait_event(self, event: _Event) -> None:
        self.known |= event.known


class _Event:
    def __init__(self, blocking: bool) -> None:
        assert blocking, "a thread that spins takes a core from others"
        self.known: set[str] = set()
        self.synchronized = False

    def record(self, stream: _Stream) -> None:
        self.known = set(stream.known)

    def synchronize(self) -> None:
        self.synchronized = True


class FakeCuda:
    """The part of `torch.cuda` that a link uses."""

    Stream: TypeAlias = _Stream
    Event: TypeAlias = _Event

    def __init__(self) -> None:
        self.default = _Stream(DEVICE)
        self.current = _Stream(DEVICE)  # a user's own
        self.entered: list[_Stream] = []
        self.devices: list[torch.device] = []
        self.emptied = 0

    def default_stream(self, device: torch.device) -> _Stream:
        return self.default

    def current_stream(self, device: torch.device) -> _Stream:
        return self.current

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.entered.append(stream)
        yield
        self.current = before

    def empty_cache(self) -> None:
        self.emptied += 1

    def call(self, name: str) -> None:
        self.current.known = {*self.current.known, name}


def test_computation_comes_after_the_copy_of_its_inputs_and_not_after_later_copies() -> None:
    cuda = FakeCuda()
    link = ExpertDeviceLink(DEVICE, cuda)
    with link.using():
        assert cuda.current is cuda.default
        cuda.call("compute 0")
        source = torch.arange(5, dtype=torch.uint8)
        arrival = link.send(source)
        inward = cuda.entered[-1]
        assert inward is not cuda.default
        assert "compute 0" not in inward.known  # the copy runs during the computation
        with cuda.stream(inward):
            cuda.call("later copy")
        assert torch.equal(arrival.use(), source)
        assert "later copy" not in cuda.default.known
        with cuda.stream(inward):
            cuda.call("copy 1")
        later = link.send(source)
        assert "copy 1" not in cuda.default.known  # before it is used nothing waits for it
        later.use()
        assert "copy 1" in cuda.default.known


def test_a_copy_to_the_host_comes_after_its_computation_and_is_waited_for_by_its_own_event() -> None:
    cuda = FakeCuda()
    link = ExpertDeviceLink(DEVICE, cuda)
    with link.using():
        cuda.call("compute 0")
        source = torch.arange(5, dtype=torch.uint8)
        copy: Any = link.fetch(source)
        outward = cuda.entered[-1]
        assert outward is not cuda.default
        assert "compute 0" in outward.known
        cuda.call("compute 1")
        assert "compute 1" not in outward.known
        assert copy.arrival.kept is source  # alive until the copy is over
    assert not copy.arrival.event.synchronized
    assert torch.equal(copy.wait(), source)
    assert copy.arrival.event.synchronized
    assert "compute 1" not in copy.arrival.event.known  # nothing waits for later computation


def test_copies_in_and_out_do_not_wait_for_each_other() -> None:
    cuda = FakeCuda()
    link = ExpertDeviceLink(DEVICE, cuda)
    link.send(torch.zeros(1, dtype=torch.uint8))
    inward = cuda.entered[-1]
    link.fetch(torch.zeros(1, dtype=torch.uint8))
    assert cuda.entered[-1] is not inward
    link.empty_cache()
    assert cuda.emptied == 1


def test_only_cuda_devices_have_a_link() -> None:
    assert link_of(torch.device("cpu")) is None
    assert link_of(torch.device("meta")) is None


def test_the_device_and_its_default_stream_are_current_in_any_thread_that_uses_it() -> None:
    cuda = FakeCuda()
    device = torch.device("cuda", 3)
    with using(device, cuda):
        assert cuda.devices == [device]
        assert cuda.current is cuda.default
    assert cuda.current is not cuda.default


def test_a_sticky_device_error_names_the_device_and_other_errors_are_unchanged() -> None:
    with (
        pytest.raises(
            DeviceFailed, match=r"cpu cannot be used any more .* device-side assert triggered$"
        ) as caught,
        using(DEVICE),
    ):
        raise RuntimeError(
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"
        )
    assert caught.value.device == DEVICE
    for error in (
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("shapes differ"),
        ValueError("no"),
    ):
        with pytest.raises(type(error), match=str(error)), using(DEVICE):
            raise error


class LostCuda(FakeCuda):
    """CUDA after a device-side assert: every call fails, that of setting a device too."""

    def __init__(self, *, entering: bool, leaving: bool) -> None:
        super().__init__()
        self.entering, self.leaving = entering, leaving

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        if self.entering:
            raise RuntimeError("CUDA error: device-side assert triggered")
        try:
            yield
        finally:
            if self.leaving:
                raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(("entering", "leaving"), [(True, False), (False, True)])
def test_a_device_that_is_lost_is_reported_when_not_even_the_current_device_can_be_set(
    entering: bool, leaving: bool
) -> None:
    context = using(DEVICE, LostCuda(entering=entering, leaving=leaving))
    with pytest.raises(DeviceFailed, match=r"device-side assert triggered$"), context:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_leaving_the_context_of_a_lost_device_without_an_error_is_none() -> None:
    """The thread that computed nothing there ends, and the one that did reports the failure."""
    with using(DEVICE, LostCuda(entering=False, leaving=True)):
        pass
