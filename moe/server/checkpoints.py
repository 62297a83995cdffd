"""Checkpoints of experts: a folder with one folder per expert, which holds the last generations of its state.
Each file is written completely or not at all, and verified by its digest when it is read
(`averaging.optim.state.checkpoint`). A server killed at any time resumes from complete files; a damaged one
costs its expert that generation, and the other experts nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from averaging.optim.state.checkpoint import Checkpoint, Checkpoints, read
from averaging.optim.state.snapshot import is_finite
from averaging.optim.state.view import StateView
from moe.protocol.names import ExpertUid
from moe.server.expert import Expert
from moe.server.logic.lineage import PAST_MAX, CommonVersion, ExpertLineage
from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.home import user_path

_log = logging.getLogger(__name__)

# Beside these, versions are kept for longer, in case callers ruin an expert without an infinite number.
_OLDER = "older"
_OLDER_MAX = 2
_OLDER_S = 3600.0  # time between two of these older versions
_GENERATIONS = 2  # checkpoints of one expert: the newest may be damaged, for instance by a faulty disk


def saved_names(folder: Path) -> list[ExpertUid]:
    """Return the names of the experts that a folder has checkpoints of."""
    names = []
    with contextlib.suppress(OSError):
        for path in sorted(user_path(folder).iterdir()):
            with contextlib.suppress(UsageError):
                if Checkpoints(path).newest_first():
                    names.append(ExpertUid.parse(path.name))
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
        except OSError as error:
            raise UsageError(f"cannot keep checkpoints in {folder}: {error}") from error

    def generations(self, uid: ExpertUid) -> Checkpoints:
        """Return the checkpoints of one expert."""
        return Checkpoints(self.folder / str(uid), kept_max=_GENERATIONS)

    def load(self) -> list[ExpertUid]:
        """Restore every expert from its newest checkpoint that is not damaged, and return their names.
        Damaged ones are logged as errors. Of an expert with another optimizer, or none, the statistics are
        left out. Raises UsageError when a checkpoint is of another expert.
        """
        return [uid for uid, expert in self._experts.items() if self._load(uid, expert)]

    def save(self, failed: Collection[torch.device] = ()) -> int:
        """Write the experts that have changed, and return their number. Experts on a `failed` device are left
        out, since nothing on it can be trusted, and so are those whose buffers contain NaN or infinity.

        Raises SwarmError when the disk does not take one of them, after the others were written, and
        DeviceFailed when a device cannot be read; the earlier files stay complete.
        """
        written, problem = 0, None
        for uid, expert in self._experts.items():
            stamp = (expert.version, expert.samples)
            if self._saved.get(uid) == stamp or expert.device in failed:
                continue
            try:
                with expert.lock:
                    stamp, about, view = (expert.version, expert.samples), _about(expert), expert.state()
                if not _is_finite(view):
                    _log.error("%s is not saved: its state contains NaN or infinity", uid)
                    continue
                _keep_older(self.generations(uid).save(view, expert.parameter_names, about))
            except SwarmError as error:
                problem = problem or error
                continue
            self._saved[uid] = stamp
            written += 1
        if problem is not None:
            raise problem
        return written

    def _load(self, uid: ExpertUid, expert: Expert) -> bool:
        older = Checkpoints(self.folder / str(uid) / _OLDER)
        for path in (*self.generations(uid).newest_first(), *older.newest_first()):
            try:
                checkpoint = read(path)
                lineage, samples = _read_about(checkpoint)
                if checkpoint.about.get("schema") != expert.schema.digest.hex():
                    raise UsageError(
                        f"the checkpoint {path} does not fit {uid}: it is of an expert with another schema"
                    )
                with expert.lock:
                    _restore(uid, expert, checkpoint, lineage)
                    expert.samples = samples
            except PeerError as error:
                _log.error("a checkpoint of %s is left out: %s", uid, error)
                continue
            self._saved[uid] = (lineage.version, samples)
            return True
        return False


def _restore(uid: ExpertUid, expert: Expert, checkpoint: Checkpoint, lineage: ExpertLineage) -> None:
    """Load a checkpoint into an expert. Raises PeerError when it has NaN or infinity, and UsageError when it
    does not fit: an expert with its initial parameters would soon replace all its checkpoints.
    """
    if not all(is_finite(tensor) for tensor in checkpoint.tensors.values()):
        raise PeerError(f"{checkpoint.path} contains NaN or infinity")
    try:
        expert.load_state(checkpoint.blob, lineage)
        return
    except PeerError as error:
        problem = error
    try:
        expert.load_state(checkpoint.blob, lineage, parameters_only=True)
    except PeerError:
        raise UsageError(
            f"the checkpoint {checkpoint.path} does not fit {uid}: {problem}. Serve it with the options that "
            "it was written with, or choose another folder"
        ) from problem
    _log.warning("%s continues without the statistics in its checkpoint: its optimizer is another one", uid)


def _keep_older(path: Path) -> None:
    """Keep a second link to a new checkpoint, if the last one that is kept for longer is old enough."""
    folder = path.parent / _OLDER
    kept = Checkpoints(folder, kept_max=_OLDER_MAX)
    newest = kept.newest_first()[:1]
    try:
        if newest and path.stat().st_mtime - newest[0].stat().st_mtime < _OLDER_S:
            return
        folder.mkdir(exist_ok=True)
        (folder / path.name).unlink(missing_ok=True)
        os.link(path, folder / path.name)
        for old in kept.newest_first()[_OLDER_MAX:]:
            old.unlink(missing_ok=True)
    except OSError as error:  # for instance a file system without links: the newest generations are there
        _log.warning("no older version of %s is kept: %s", path.parent.name, error)


def _about(expert: Expert) -> dict[str, str]:
    lineage = expert.lineage
    past = [[one.name.hex(), one.version] for one in lineage.past]
    counts = {"version": lineage.version, "past": past, "samples": expert.samples}
    return {"schema": expert.schema.digest.hex(), "expert": json.dumps(counts)}


def _read_about(checkpoint: Checkpoint) -> tuple[ExpertLineage, int]:
    """Return lineage and samples. Raises PeerError when the file is of something else than an expert."""
    try:
        counts = json.loads(checkpoint.about["expert"])
        past = [CommonVersion(bytes.fromhex(name), int(version)) for name, version in counts["past"]]
        return ExpertLineage(int(counts["version"]), tuple(past[-PAST_MAX:])), int(counts["samples"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PeerError(f"{checkpoint.path} is no checkpoint of an expert") from error


def _is_finite(view: StateView) -> bool:
    return all(is_finite(view.tensor(place)) for place in range(len(view.names)))
