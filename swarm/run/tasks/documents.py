"""Documents to train on: text files, JSON lines, or the files of a data set of the hub."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.core.errors import UsageError
from swarm.core.home import user_path
from swarm.run.tasks.corpus import TEXT_SUFFIXES, files_of
from swarm.run.tasks.model_files import data_files

if TYPE_CHECKING:
    from swarm.run.tasks.causal_lm import LanguageModelSettings

_LINE_BYTES_MAX = 16 << 20
_PART_CHARACTERS = 1 << 14  # of a document
_ROWS = 256  # of a parquet file that are read at once


@dataclass(frozen=True, slots=True)
class Documents:
    """Texts, up to a number of bytes."""

    texts: list[str]
    source: str  # name of the source in messages


def documents_of(folder: Path | None, settings: LanguageModelSettings) -> Documents:
    """Read the documents of a run: from the volunteer's folder, the data set of the run, or the Python
    standard library. Raises UsageError if there are none.
    """
    if folder is not None:
        source, texts = str(folder), _folder_texts(user_path(folder), settings.column)
    elif settings.data is not None and settings.data_revision is not None:
        source = f"{settings.data}, split {settings.split}"
        found = data_files(settings.data, settings.data_revision, settings.split, settings.data_bytes)
        texts = (text for path in found.paths() for text in _texts(path, settings.column))
    else:
        source, library = "the Python standard library", Path(sysconfig.get_path("stdlib"))
        texts = (text for path in files_of(library, {".py"}) for text in _texts(path, settings.column))
    chosen, left = [], settings.data_bytes
    for text in texts:
        if not text.strip():
            continue
        text = text[:left]
        # Split long documents, so that a part of one can be held out.
        length = _PART_CHARACTERS if settings.packing else len(text)
        chosen += [text[first : first + length] for first in range(0, len(text), length)]
        left -= len(text)
        if left <= 0:
            break
    if not chosen:
        raise UsageError(f"{source} has no text: give --data a folder with text files or JSON lines")
    return Documents(chosen, source)


def _folder_texts(folder: Path, column: str) -> Iterator[str]:
    for path in files_of(folder, TEXT_SUFFIXES | {".jsonl"}):
        yield from _texts(path, column)


def _texts(path: Path, column: str) -> Iterator[str]:
    """Yield the documents of one file. Files that this user may not read are skipped."""
    if path.suffix == ".parquet":
        yield from _rows(path, column)
        return
    try:
        if path.suffix == ".jsonl":
            yield from _lines(path, column)
        else:
            yield path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return


def _lines(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(_LINE_BYTES_MAX):
            number += 1
            try:
                table = json.loads(line)
                text = table[column]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(
                    f"{path}, line {number}: expected a table of JSON with the column {column!r}"
                ) from error
            if not isinstance(text, str):
                raise UsageError(f"{path}, line {number}: the column {column!r} is no text")
            yield text


def _rows(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_ROWS, columns=[column]):
            yield from (text for text in batch.column(0).to_pylist() if isinstance(text, str))
    except (OSError, ValueError, IndexError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} has no column {column!r} of text: {error}") from error
