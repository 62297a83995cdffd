"""Copies of run specifications on the disk of a member, so that a run outlives the peer that created it and
the records of the DHT.

The DHT forgets a specification an hour after the last member left. A former member that comes back has a copy
here and publishes it again. A copy on disk is trusted no more than one from the network: only the owner's
signature counts.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swarm.core.errors import PeerError
from swarm.core.files import set_aside, write_private
from swarm.core.ids import RUN_ID
from swarm.run.signed import SPECIFICATION_BYTES_MAX, SignedSpecification, newest, verified

_log = logging.getLogger(__name__)

SPECIFICATIONS_MAX = 64  # runs; above this, the copies that were written longest ago are deleted
_SUFFIX = ".specification"
_PEERS_SUFFIX = ".peers"


class SpecificationStore:
    """A folder with one file per run.

    Calls block on the disk. Disk errors are logged, for the user to see, and not raised: a full disk must not
    end a run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, signed: SignedSpecification) -> None:
        """Save this version, unless a newer one is stored already."""
        stored = self.load(signed.run_id)
        try:
            if stored is None or newest([signed], held=stored) != stored:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_private(self._file(signed.run_id), signed.blob)
            for file in sorted(self._files(), key=lambda file: file.stat().st_mtime_ns)[:-SPECIFICATIONS_MAX]:
                file.unlink(missing_ok=True)
                file.with_suffix(_PEERS_SUFFIX).unlink(missing_ok=True)
        except OSError as error:
            _log.error(
                "the specification of %s cannot be saved in %s: %s", signed.full_name, self._folder, error
            )

    def load(self, run_id: str) -> SignedSpecification | None:
        """Return the copy of one run, or None if there is none that its owner signed. A damaged one is moved
        aside.
        """
        if not RUN_ID.fullmatch(run_id):
            return None
        file = self._file(run_id)
        try:
            with file.open("rb") as stream:
                return verified(stream.read(SPECIFICATION_BYTES_MAX + 1), run_id)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.error("the stored specification %s cannot be read: %s", file, error)
        except PeerError as error:
            set_aside(file, "stored specification", error)
        return None

    def all(self) -> list[SignedSpecification]:
        """Return the valid copies of all runs."""
        try:
            files = sorted(self._files())[:SPECIFICATIONS_MAX]
        except OSError as error:
            _log.error("the stored specifications in %s cannot be listed: %s", self._folder, error)
            return []
        found = (self.load(file.name.removesuffix(_SUFFIX)) for file in files)
        return [signed for signed in found if signed is not None]

    def peers_file(self, run_id: str) -> Path:
        """Return the file of the peers through which this machine last took part in a run: a copy of a peer
        book. It is deleted together with the specification.
        """
        return self._folder / f"{run_id}{_PEERS_SUFFIX}"

    def _file(self, run_id: str) -> Path:
        return self._folder / f"{run_id}{_SUFFIX}"

    def _files(self) -> list[Path]:
        return list(self._folder.glob(f"*{_SUFFIX}"))
