"""Checkpoints on disk: the state of one moment as a safetensors file, written completely or not at all, and
verified when it is read.

A file holds parameters and statistics under the model's own names (`model.<name>`,
`optimizer.<name>.<statistic>`, `extra.<number>`), so that any program that reads safetensors can use it.
Counters, hyperparameters and the schedule are msgpack in its metadata, together with the digest of the
state, which reveals a damaged file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from averaging.optim.state.snapshot import digests_of, encode_snapshot, mapping, pack, snapshot_digest
from averaging.optim.state.view import StateView
from swarm.core.errors import PeerError, SwarmError, UsageError

_log = logging.getLogger(__name__)

FORMAT = "swarm.checkpoint/1"
MODEL, STATISTIC, EXTRA = "model.", "optimizer.", "extra."
_FILE = re.compile(r"epoch-(\d{1,13})\.safetensors")
_NAMES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A file that was read and verified."""

    path: Path
    epoch: int
    blob: bytearray  # accepted by `TrainingState.load`
    tensors: dict[str, torch.Tensor]  # by their names in the file


def public_names(names: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """Return the names of a view's tensors in a file. `parameters`: the model's names of its parameters, in
    the optimizer's order.
    """
    found = []
    for name in names:
        kind, _, rest = name.partition(".")
        number, _, key = rest.partition(".")
        if kind == "x":
            found.append(EXTRA + number)
            continue
        parameter = parameters[int(number)] if int(number) < len(parameters) else number
        found.append(MODEL + parameter if kind == "p" else f"{STATISTIC}{parameter}.{key}")
    if len(set(found)) != len(found):
        raise UsageError("two parameters of this model have one name")
    return found


def names_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the model's names of the optimizer's parameters, in its order; a parameter without a name gets
    its number.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = dict.fromkeys(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return [names.get(one, str(number)) for number, one in enumerate(seen)]


def write(
    view: StateView, path: Path, parameters: Sequence[str], about: Mapping[str, str] | None = None
) -> None:
    """Write a view to a temporary file, which replaces `path` when it is completely on the disk. Raise
    SwarmError when that fails.
    """
    named = public_names(view.names, parameters)
    try:
        view.compute_digests()
        tensors = {name: view.tensor(place) for place, name in enumerate(named)}
    except (MemoryError, PeerError) as error:  # a view that could not be copied is closed
        raise SwarmError(
            f"the checkpoint {path} could not be written: there is no memory for a copy of the state"
        ) from error
    order = [[inner, name] for inner, name in zip(view.names, named, strict=True)]
    metadata = {
        "format": "pt",  # readers of safetensors expect torch's tensors under this name
        "swarm": FORMAT,
        "epoch": str(view.epoch),
        "digest": view.digest.hex(),
        "canonical": str(int(view.canonical)),
        "header": base64.b64encode(pack(view.header)).decode(),
        "tensors": json.dumps(order),
        **{f"about.{key}": value for key, value in (about or {}).items()},
    }
    metadata["seal"] = _seal(metadata)
    try:
        replace_durably(path, lambda temporary: save_file(tensors, temporary, metadata))
    except (OSError, SafetensorError) as error:
        raise SwarmError(f"the checkpoint {path} could not be written: {error}") from error


def _seal(metadata: Mapping[str, str]) -> str:
    """Return a digest of all metadata but itself: the state's digest does not cover metadata that is only
    informative.
    """
    sealed = sorted((key, value) for key, value in metadata.items() if key != "seal")
    return hashlib.sha256(json.dumps(sealed).encode()).hexdigest()


def replace_durably(path: Path, write_to: Any) -> None:
    """Let `write_to` fill a temporary file and move it to `path`, so that after a power cut there is either
    the old or the new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_to(temporary)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # the directory entry must be on the disk, too
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: Path) -> Checkpoint:
    """Read a file and verify its digest. Raise PeerError with the reason when it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()  # a method of its own: `file` is not a dictionary
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise PeerError(f"{path} cannot be read: {error}") from error
    if metadata.get("swarm") != FORMAT:
        raise PeerError(f"{path} is no checkpoint of this version of swarm")
    try:
        header = mapping(
            msgpack.unpackb(base64.b64decode(metadata["header"]), raw=False, strict_map_key=False)
        )
        order = json.loads(metadata["tensors"])
        named = [(inner, tensors[name]) for inner, name in order[:_NAMES_MAX]]
        blob = encode_snapshot(int(metadata["epoch"]), header, named)
        if (
            snapshot_digest(len(blob), digests_of(blob)).hex() != metadata["digest"]
            or _seal(metadata) != metadata["seal"]
        ):
            raise PeerError(f"{path} is damaged: its contents are not what was written")
    except (KeyError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise PeerError(f"{path} is damaged: {type(error).__name__} in its description") from error
    return Checkpoint(path=path, epoch=int(metadata["epoch"]), blob=blob, tensors=tensors)


class Checkpoints:
    """A folder with the newest checkpoints of one run. Its methods block: use it in a thread that may wait
    for a disk.
    """

    def __init__(self, folder: Path, *, kept_max: int = 3) -> None:
        if kept_max < 1:
            raise UsageError("at least one checkpoint is kept")
        self.folder, self._kept_max = folder, kept_max

    def save(
        self, view: StateView, parameters: Sequence[str], about: Mapping[str, str] | None = None
    ) -> Path:
        """Write a checkpoint and remove those beyond `kept_max`. Raise SwarmError when the disk does not
        take it.
        """
        path = self.folder / f"epoch-{view.epoch:010d}.safetensors"
        write(view, path, parameters, about)
        # the latter: left by a process that was killed
        for old in [*self.newest_first()[self._kept_max :], *self.folder.glob(".epoch-*.tmp")]:
            old.unlink(missing_ok=True)
        return path

    def newest_first(self) -> list[Path]:
        """Return the files by epoch, without half-written ones."""
        try:
            found = [
                (int(match[1]), path)
                for path in self.folder.iterdir()
                if (match := _FILE.fullmatch(path.name))
            ]
        except OSError:
            return []
        return [path for _, path in sorted(found, reverse=True)]

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest valid checkpoint, and the defects of newer ones."""
        wrong: list[str] = []
        for path in self.newest_first():
            try:
                return read(path), wrong
            except PeerError as error:
                wrong.append(str(error))
        return None, wrong

    def archive(self) -> Path | None:
        """Move the present files to a folder of their own, because the run starts from another state.
        Return that folder, or None when there were no files.
        """
        if not self.newest_first():
            return None
        number = 1
        while (archived := self.folder.with_name(f"{self.folder.name}.earlier-{number}")).exists():
            number += 1
        self.folder.rename(archived)
        return archived
