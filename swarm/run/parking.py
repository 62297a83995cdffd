"""Free the memory of a model and its optimizer during a pause: that of an accelerator, and that of the host.

The tensors keep empty storages, so that all references to them stay valid. FSDP does the same with parameters
that it gathers for one layer.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from swarm.core.device import release_cached_memory
from swarm.core.errors import SwarmError

if TYPE_CHECKING:
    import torch


class ParkedTensors:
    """Tensors without their contents. The constructor moves the contents from accelerators into host memory;
    `to_disk` moves everything into a file.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the contents of tensors on accelerators into host memory. A storage that views and tied
        parameters share is moved once.
        """
        self._storages = list(_storages(tensors))
        self._copies = {
            place: storage.cpu()  # type: ignore[no-untyped-call]
            for place, storage in enumerate(self._storages)
            if storage.device.type != "cpu"
        }
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._file: IO[bytes] | None = None
        self._empty(self._copies)

    def to_disk(self, folder: Path) -> None:
        """Move the contents into a temporary file, which the system deletes even when the process is killed.
        Raises OSError if the file cannot be written; the contents then stay in memory.
        """
        if self._file is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 -- closed by `restore`
        try:
            for place, storage in enumerate(self._storages):
                source = self._copies.get(place, storage)
                # torch refuses to resize a storage that numpy has seen
                file.write((ctypes.c_char * self._sizes[place]).from_address(source.data_ptr()))
            file.flush()
        except OSError:
            file.close()
            raise
        self._file, self._copies = file, {}
        self._empty(range(len(self._storages)))

    def restore(self) -> None:
        """Bring the contents back. Raises SwarmError when the file is shorter than it was, and RuntimeError
        when a device has no room; it can then be tried again.
        """
        import torch

        if self._file is not None:
            self._file.seek(0)
        for place, storage in enumerate(self._storages):
            size = self._sizes[place]
            source = self._copies.get(place)
            if self._file is not None:
                raw = bytearray(self._file.read(size))
                if len(raw) != size:
                    raise SwarmError("the file that keeps the model during a pause is shorter than it was")
                source = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
            if source is not None:
                storage.resize_(size)
                storage.copy_(source)
        self._copies = {}
        if self._file is not None:
            self._file.close()

    def _empty(self, places: Iterable[int]) -> None:
        emptied = [self._storages[place] for place in places]
        for storage in emptied:
            storage.resize_(0)
        gc.collect()
        for device in {storage.device for storage in emptied}:
            release_cached_memory(device)
        _return_free_memory()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples."""
    import torch

    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _return_free_memory() -> None:
    """Make glibc return freed memory to the system; other allocators do so by themselves."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
