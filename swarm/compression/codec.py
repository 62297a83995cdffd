"""The interface of a codec, and the registry in which a group finds the codec that it agreed on.

A codec turns a flat float32 tensor into bytes and back. It computes on `exact_device` of the tensor's device:
values on a CUDA device are compressed there, and only the result is copied to the host. Codecs have no state;
error feedback, which has, is built on top of them.

Codecs do not depend on torch's default dtype and default device, which belong to the user.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from swarm.core.errors import UsageError

Buffer: TypeAlias = bytes | bytearray | memoryview
_EXACT_DEVICES = ("cpu", "cuda")


def exact_device(device: torch.device) -> torch.device:
    """Return the device that computes, for tensors on `device`, results that all peers must compute alike to
    the bit.

    The CPU and CUDA devices compute themselves: each of their operations rounds as IEEE 754 says. The host
    computes for every other device. Metal (MPS) is the reason: its compiler's fast math may flush subnormal
    numbers and turn a quotient into a product with a reciprocal, and it has no float64.
    """
    return device if device.type in _EXACT_DEVICES else torch.device("cpu")


class Codec(Protocol):
    """An encoding of float32 values as bytes. The size depends only on the number of elements, so that a
    receiver can check it beforehand.
    """

    @property
    def name(self) -> str:
        """Return the name by which users and groups choose it."""
        ...

    @property
    def wire_id(self) -> int:
        """Return its number on the wire, 1 to 65535; a number is never given to another codec."""
        ...

    @property
    def version(self) -> int:
        """Return the version of the encoding; peers with different versions do not share the codec."""
        ...

    @property
    def bits_per_element(self) -> float:
        """Return the number of bits per element on the wire, for long inputs."""
        ...

    @property
    def magnitude_max(self) -> float:
        """Return the largest |value| that it can carry. The encoding of a larger value, infinity or NaN is
        not `is_finite`.
        """
        ...

    @property
    def block_elements(self) -> int:
        """Return the number of elements per block in which a chunk is best processed, for the processor's
        caches.

        An encoding may be cut at every multiple of it: elements `a` to `b` are its bytes from
        `encoded_bytes(a)` to `encoded_bytes(b)`, and the joined encodings of the pieces are the encoding of
        the whole.
        """
        ...

    def encoded_bytes(self, numel: int) -> int:
        """Return the exact size of `numel` encoded elements."""
        ...

    def error_bound(self, magnitude: float) -> float:
        """Return the largest |decoded - given| of any element, when no given |value| exceeds `magnitude`."""
        ...

    def encode(self, values: torch.Tensor, scratch: torch.Tensor) -> memoryview:
        """Return the bytes of `values` (flat, float32, contiguous, any device).

        `scratch` (flat, uint8, host, at least `encoded_bytes`) may be written. The result is a view of
        `scratch`, or of `values` where these already have the encoded form: use it before either changes.
        """
        ...

    def write(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the same bytes to `out` (flat uint8, of exactly `encoded_bytes`, memory of its own), on the
        device of `values`.

        On a CUDA device this is queued like any call of torch: it does not wait, and nothing goes to the
        host. For tensors on a device that is not its own `exact_device` the host computes, and the call waits
        for its copies.
        """
        ...

    def decode(self, payload: Buffer | torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Return the values (flat, float32) of exactly `encoded_bytes(scratch.numel())` bytes, on the device
        of `scratch` (flat, float32, contiguous).

        `payload` may be a flat uint8 tensor (see `view_bytes`). The result is `scratch`, filled, or a
        read-only view of `payload` where this already is float32. Never raises for invalid bytes: a codec
        decodes them to some values, and the caller checks values.
        """
        ...

    def is_finite(self, payload: Buffer | torch.Tensor) -> bool:
        """Return False when some element of `payload` (as for `decode`) decodes to NaN or infinity, or
        `payload` is no encoding at all.

        Much cheaper than decoding and checking. A payload that passes decodes to finite values, for any
        number of elements.
        """
        ...

    def flaw(self, payload: Buffer | torch.Tensor, numel: int) -> str:
        """Return what is wrong with `payload` as an encoding of `numel` elements, in words; "" if nothing is.
        Accepts any bytes.
        """
        ...


_by_name: dict[str, Codec] = {}
_by_wire_id: dict[int, Codec] = {}
WIRE_ID_MAX = 65535
PUBLIC_WIRE_ID_MAX = 1023  # above: for codecs that users add


def register(codec: Codec) -> None:
    """Make `codec` known in this process. Raises UsageError when its name or wire id belongs to
    another one.
    """
    if not 1 <= codec.wire_id <= WIRE_ID_MAX:
        raise UsageError(
            f"the wire id of codec {codec.name!r} is between 1 and {WIRE_ID_MAX}, not {codec.wire_id}"
        )
    for known in (_by_name.get(codec.name), _by_wire_id.get(codec.wire_id)):
        if known is not None and known is not codec:
            raise UsageError(
                f"codec {codec.name!r} ({codec.wire_id}) collides with {known.name!r} ({known.wire_id})"
            )
    _by_name[codec.name] = _by_wire_id[codec.wire_id] = codec


def unregister(name: str) -> None:
    """Make the codec called `name` unknown again, for tests of codecs that a user adds. Raises UsageError if
    there is none.
    """
    codec = find(name)
    del _by_name[codec.name], _by_wire_id[codec.wire_id]


def find(name: str) -> Codec:
    """Return the codec called `name`. Raises UsageError that lists the known codecs."""
    codec = _by_name.get(name)
    if codec is None:
        raise UsageError(f"there is no codec {name!r}; there are {', '.join(sorted(_by_name))}")
    return codec


def find_wire_id(wire_id: int, version: int) -> Codec | None:
    """Return the codec with this wire id and version; None when this process has none."""
    codec = _by_wire_id.get(wire_id)
    return codec if codec is not None and codec.version == version else None


def names() -> list[str]:
    """Return the names of all codecs that this process knows, sorted."""
    return sorted(_by_name)


class _Alias:
    """NumPy's array interface over foreign memory, marked writable: torch warns about every read-only buffer
    that it gets.
    """

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, view: npt.NDArray[np.uint8]) -> None:
        self._owner = view  # keeps the memory alive for as long as an array or tensor uses it
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": view.shape,
            "data": (view.__array_interface__["data"][0], False),
        }


def view_bytes(payload: Buffer) -> torch.Tensor:
    """Return a flat uint8 tensor over the memory of `payload`, without a copy. It must never be written to:
    `payload` may be immutable.
    """
    if not len(payload):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(np.asarray(_Alias(np.frombuffer(payload, np.uint8))))


def view_tensor(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat contiguous host tensor, without a copy."""
    array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array.data
