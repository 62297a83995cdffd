"""Read text as bytes from the files of a folder or from the source of the Python standard library, and split
it into a training and a held-out part.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm.core.errors import UsageError
from swarm.core.home import user_path
from swarm.core.wording import size

VOCABULARY = 256  # values of a byte
VALIDATION_SAMPLES = 64  # of the held-out part, evaluated in one batch
_HELD_OUT_PART = 20  # one file in 20 is held out, by the hash of its path
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
TEXT_SUFFIXES = {
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
    ".json",
    ".toml",
    ".html",
    ".csv",
    ".tex",
}
_FILES_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training bytes and held-out bytes, from different files.

    The same folder gives the same bytes on every machine.
    """

    training: bytearray
    held_out: bytearray
    files: int
    source: str  # name of the source in messages

    @property
    def summary(self) -> str:
        training, held_out = size(len(self.training)), size(len(self.held_out))
        return f"{self.source}: {self.files:,} files, {training} to train on, {held_out} held out"


def read_corpus(folder: Path | None, *, bytes_max: int, sample_bytes: int) -> Corpus:
    """Read up to `bytes_max` bytes from the text files of a folder, in the order of their paths.

    `folder` None means the Python standard library. Raises UsageError if the folder cannot be read or
    contains too little text for samples of `sample_bytes`.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else user_path(folder)
    suffixes = {".py"} if folder is None else TEXT_SUFFIXES
    source = "the Python standard library" if folder is None else str(folder)
    training, held_out, files = bytearray(), bytearray(), 0
    for path in files_of(root, suffixes):
        if len(training) + len(held_out) >= bytes_max:
            break
        try:
            content = path.read_bytes()
        except OSError:
            continue  # skip files that this user may not read
        files += 1
        target = held_out if is_held_out(path.relative_to(root).as_posix()) else training
        target += content[: bytes_max - len(training) - len(held_out)]
    if not held_out and len(training) >= 2 * _HELD_OUT_PART * sample_bytes:
        # The hash held out none of the few files: hold out the end of the text instead.
        cut = len(training) - len(training) // _HELD_OUT_PART
        training, held_out = training[:cut], training[cut:]
    if min(len(training), len(held_out)) <= sample_bytes:
        kinds = ", ".join(sorted(suffixes))
        raise UsageError(
            f"{source} holds too little text "
            f"({len(training) + len(held_out):,} bytes in {files} files ending in {kinds}): "
            f"give a folder with at least {2 * _HELD_OUT_PART * sample_bytes:,} bytes"
        )
    return Corpus(training, held_out, files, source)


def is_held_out(relative_path: str) -> bool:
    """Return whether a file is held out. Only its path decides, so that all volunteers agree."""
    return hashlib.sha256(relative_path.encode(errors="surrogateescape")).digest()[0] % _HELD_OUT_PART == 0


def files_of(root: Path, suffixes: set[str]) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders with these suffixes, in the order of their paths. Raise
    UsageError if there is no such folder.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder that can be read: give --data a folder with text files")
    count = 0
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")
        )
        for name in sorted(names):
            if Path(name).suffix.lower() in suffixes and count < _FILES_MAX:
                count += 1
                yield Path(parent, name)
