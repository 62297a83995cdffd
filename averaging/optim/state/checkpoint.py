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
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from averaging.history.chain import Chain
from averaging.optim.state.snapshot import digests_of, encode_snapshot, mapping, pack, snapshot_digest
from averaging.optim.state.training_state import root_of_header
from averaging.optim.state.view import StateView
from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.files import replace_durably

FORMAT = "swarm.checkpoint/1"
MODEL, STATISTIC, EXTRA = "model.", "optimizer.", "extra."
_FILE = re.compile(r"epoch-(\d{1,13})(?:-([0-9a-f]{1,16}))?\.safetensors")
_LINE_CHARACTERS = 16  # leading characters of a line's name that a file's name contains
_LINES_MAX = (
    8  # lines of history with checkpoints in one folder; the line written to least recently goes first
)
# exceptions that parsing the metadata of a damaged file may raise
_DAMAGE = (
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    msgpack.UnpackException,
)
_NAMES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A file that was read and verified."""

    path: Path
    epoch: int
    blob: bytearray  # accepted by `Optimizer.load_state`
    tensors: dict[str, torch.Tensor]  # by their names in the file
    about: dict[str, str]  # what its writer added


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
    SwarmError when writing fails.
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
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(path, lambda temporary: save_file(tensors, temporary, metadata))
    except (OSError, SafetensorError) as error:
        raise SwarmError(f"the checkpoint {path} could not be written: {error}") from error


def _seal(metadata: Mapping[str, str]) -> str:
    """Return a digest of all metadata but itself: the state's digest does not cover metadata that is only
    informative.
    """
    sealed = sorted((key, value) for key, value in metadata.items() if key != "seal")
    return hashlib.sha256(json.dumps(sealed).encode()).hexdigest()


def _header_of(metadata: Mapping[str, str]) -> Mapping[str, object]:
    return mapping(msgpack.unpackb(base64.b64decode(metadata["header"]), raw=False, strict_map_key=False))


def read(path: Path) -> Checkpoint:
    """Read a file and verify its digest. Raise PeerError with the reason when it is damaged."""
    try:
        # safetensors reports a file without read permission as missing; `open` gives the right error
        with path.open("rb"):
            pass
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()  # `keys` must be called: `file` is not a dictionary and cannot be iterated
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise PeerError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if metadata.get("swarm") != FORMAT:
        raise PeerError(f"{path} is no checkpoint of this version of swarm")
    try:
        header = _header_of(metadata)
        order = json.loads(metadata["tensors"])
        named = [(inner, tensors[name]) for inner, name in order[:_NAMES_MAX]]
        blob = encode_snapshot(int(metadata["epoch"]), header, named)
        if (
            snapshot_digest(len(blob), digests_of(blob)).hex() != metadata["digest"]
            or _seal(metadata) != metadata["seal"]
        ):
            raise PeerError(f"{path} is damaged: its contents are not what was written")
    except _DAMAGE as error:
        raise PeerError(f"{path} is damaged: {type(error).__name__} in its description") from error
    about = {key.removeprefix("about."): value for key, value in metadata.items() if key.startswith("about.")}
    return Checkpoint(path=path, epoch=int(metadata["epoch"]), blob=blob, tensors=tensors, about=about)


def root_of_file(path: Path) -> Chain | None:
    """Return the head of the history that a file's state belongs to, without reading the state; None where
    the file names none, or is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return root_of_header(_header_of(metadata))
    except (OSError, SafetensorError, PeerError, *_DAMAGE):
        return None


def is_of_other_history(root: Chain, past: Chain) -> bool:
    """Return whether a state with the head `root` is in another history than the one whose last certificates
    are `past`. False for a state from before the first of these, about which they say nothing.
    """
    return past.until(root.head) is None and root.root_epoch >= past.root_epoch


class Checkpoints:
    """A folder with the newest checkpoints of one run, of each line of its history. The newest is the one
    written last, whatever its epoch. The methods block: use them in a thread that may wait for a disk.
    """

    def __init__(self, folder: Path, *, kept_max: int = 3) -> None:
        if kept_max < 1:
            raise UsageError("at least one checkpoint is kept")
        self.folder, self._kept_max = folder, kept_max

    def save(
        self, view: StateView, parameters: Sequence[str], about: Mapping[str, str] | None = None
    ) -> Path:
        """Write a checkpoint, and remove those of its line of history beyond the `kept_max` that were written
        last. Raise SwarmError when the disk does not take it.
        """
        root = root_of_header(view.header)
        line = root.root_line.hex() if root is not None else ""
        name = f"epoch-{view.epoch:010d}{'-' if line else ''}{line[:_LINE_CHARACTERS]}.safetensors"
        path = self.folder / name
        newest_ns = max((written_ns for written_ns, _ in self._written()), default=0)
        write(view, path, parameters, about)
        if path.stat().st_mtime_ns <= newest_ns:  # the clock was set back; this file must still be the newest
            os.utime(path, ns=(newest_ns + 1, newest_ns + 1))
        for old in [*self._beyond_limits(), *self.folder.glob(".epoch-*.tmp")]:
            old.unlink(missing_ok=True)  # temporary files were left by a process that was killed
        return path

    def newest_first(self) -> list[Path]:
        """Return the files, the one written last first, without half-written ones."""
        return [path for _, path in sorted(self._written(), reverse=True)]

    def _written(self) -> list[tuple[int, Path]]:
        """Return the files, each with the time at which it was written."""
        try:
            paths = [path for path in self.folder.iterdir() if _FILE.fullmatch(path.name)]
            return [(path.stat().st_mtime_ns, path) for path in paths]
        except OSError:
            return []

    def _beyond_limits(self) -> list[Path]:
        """Return the files to remove: those that each line has too many of, and the oldest lines."""
        by_line: dict[str, list[Path]] = {}
        for path in self.newest_first():
            match = _FILE.fullmatch(path.name)
            assert match is not None
            by_line.setdefault(match[2] or "", []).append(path)
        lines = list(by_line.values())  # the line written to last comes first
        return [
            *(path for paths in lines for path in paths[self._kept_max :]),
            *(path for paths in lines[_LINES_MAX:] for path in paths[: self._kept_max]),
        ]

    def newest_epoch(self) -> int | None:
        """Return the epoch of the file written last, by its name; None when there is no file."""
        return next((int(path.name.split("-")[1].split(".")[0]) for path in self.newest_first()), None)

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
