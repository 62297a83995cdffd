"""The copy on disk that a member keeps of its run's specification, so that the run outlives both its founder
and the swarm's memory.

The DHT forgets a specification an hour after its last member left. Who took part before and comes back has it
here, and stores it again. What lies on disk is believed no more than what comes from the network: it is the
owner's signature that counts.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from swarm.core.errors import PeerError
from swarm.core.identity import write_private
from swarm.run.specification import SPECIFICATION_BYTES_MAX, SignedSpecification, newest, verified

_log = logging.getLogger(__name__)

KEPT_MAX = 64  # runs; of more, the one that was written longest ago goes
_SUFFIX = ".specification"
_RUN_ID = re.compile(r"[a-z2-7]{20}")


class KeptSpecifications:
    """A folder with a file per run. It blocks; what goes wrong with the disk is logged, since no run must end
    by it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, signed: SignedSpecification) -> None:
        """Keep this version, unless a later one is kept already."""
        kept = self.load(signed.run_id)
        try:
            if kept is None or newest([kept, signed]) != kept:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_private(self._file(signed.run_id), signed.blob)
            for file in sorted(self._files(), key=lambda file: file.stat().st_mtime_ns)[:-KEPT_MAX]:
                file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning(
                "the specification of %s cannot be kept in %s: %s", signed.full_name, self._folder, error
            )

    def load(self, run_id: str) -> SignedSpecification | None:
        """The copy of one run; None when there is none, or none that its owner signed."""
        if not _RUN_ID.fullmatch(run_id):
            return None
        file = self._file(run_id)
        try:
            with file.open("rb") as stream:
                return verified(stream.read(SPECIFICATION_BYTES_MAX + 1), run_id)
        except FileNotFoundError:
            return None
        except (OSError, PeerError) as error:
            _log.warning("the kept specification %s is passed over: %s", file, error)
            return None

    def all(self) -> list[SignedSpecification]:
        """Every run of which there is a good copy."""
        try:
            files = sorted(self._files())[:KEPT_MAX]
        except OSError as error:
            _log.warning("the kept specifications in %s cannot be listed: %s", self._folder, error)
            return []
        found = (self.load(file.name.removesuffix(_SUFFIX)) for file in files)
        return [signed for signed in found if signed is not None]

    def _file(self, run_id: str) -> Path:
        return self._folder / f"{run_id}{_SUFFIX}"

    def _files(self) -> list[Path]:
        return list(self._folder.glob(f"*{_SUFFIX}"))
