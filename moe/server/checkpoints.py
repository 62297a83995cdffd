"""Checkpoints of experts: a folder with one file per expert, each replaced atomically. A server killed at any
time resumes from complete files.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from moe.protocol.names import ExpertUid
from moe.server.expert import Expert
from swarm.core.errors import UsageError
from swarm.core.files import replace_durably

_SUFFIX = ".expert.pt"
# What torch raises for a damaged file, by where its unpickler notices it.
_DAMAGED = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    struct.error,
    pickle.UnpicklingError,
)


def saved_names(folder: Path) -> list[ExpertUid]:
    """Return the names of the experts that a folder has checkpoints of."""
    names = []
    for path in sorted(folder.expanduser().glob(f"[!.]*{_SUFFIX}")):
        with contextlib.suppress(UsageError):
            names.append(ExpertUid.parse(path.name.removesuffix(_SUFFIX)))
    return names


class ExpertCheckpoints:
    """The checkpoints of one server. `save` writes experts that have changed since they were last saved or
    loaded.
    """

    def __init__(self, folder: Path, experts: Mapping[ExpertUid, Expert]) -> None:
        self.folder, self._experts = folder, dict(experts)
        self._saved: dict[ExpertUid, tuple[int, int]] = {}  # version and samples when last saved
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f".*{_SUFFIX}.*"):  # of a server that was killed while writing
                leftover.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot keep checkpoints in {folder}: {error}") from error

    def path(self, uid: ExpertUid) -> Path:
        """Return the path of an expert's checkpoint."""
        return self.folder / f"{uid}{_SUFFIX}"

    def load(self) -> list[ExpertUid]:
        """Restore every expert that has a checkpoint, and return their names. Raises UsageError when a
        checkpoint cannot be used.
        """
        resumed = []
        for uid, expert in self._experts.items():
            path = self.path(uid)
            if not path.exists():
                continue
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except _DAMAGED as error:
                raise UsageError(
                    f"the checkpoint {path} cannot be read: {error}. "
                    "Move it away to start that expert from its initial parameters"
                ) from error
            if not isinstance(state, dict):
                raise UsageError(
                    f"{path} is no checkpoint of an expert. "
                    "Move it away to start that expert from its initial parameters"
                )
            with expert.lock:
                try:
                    expert.load_state(state)
                except UsageError as error:
                    raise UsageError(f"the checkpoint {path} does not fit {uid}: {error}") from error
            self._saved[uid] = (expert.version, expert.samples)
            resumed.append(uid)
        return resumed

    def save(self, failed: Collection[torch.device] = ()) -> int:
        """Write the experts that have changed, and return their number. Experts on a `failed` device are left
        out: nothing on it can be trusted.

        Raises OSError when the disk does not take it, and DeviceFailed when a device cannot be read; the
        earlier files stay complete.
        """
        written = 0
        for uid, expert in self._experts.items():
            stamp = (expert.version, expert.samples)
            if self._saved.get(uid) == stamp or expert.device in failed:
                continue
            with expert.lock:
                stamp, state = (expert.version, expert.samples), expert.state()
            replace_durably(self.path(uid), functools.partial(_save_to, state=state))
            self._saved[uid] = stamp
            written += 1
        return written


def _save_to(path: Path, state: object) -> None:
    # by a file object: with a path, torch reports a full disk as a RuntimeError
    with path.open("wb") as file:
        torch.save(state, file)
