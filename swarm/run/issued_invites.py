"""The invites to a run that were made on this machine, without their secrets, for the owner's dashboard."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.core.errors import UsageError
from swarm.core.files import write_private
from swarm.core.ids import PeerId
from swarm.membership.invite import Invite

_log = logging.getLogger(__name__)

KEPT_MAX = 500  # invites of a run; if there are more, the oldest are dropped
_FILE_BYTES_MAX = 1 << 20
_SUFFIX = ".issued"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedInvite:
    """An invite that was issued here. `subject` names it, and is what `swarm change --revoke` takes."""

    subject: str  # the PeerID of its key, or of the peer that it is for
    roles: tuple[str, ...]
    uses: int
    made_s: float
    expires_s: float


class IssuedInvites:
    """The file of one run."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._path = folder / f"{run_id}{_SUFFIX}"

    def all(self) -> list[IssuedInvite]:
        """Return the invites in the order in which they were made. Entries that cannot be read are left
        out.
        """
        try:
            with self._path.open("rb") as stream:
                lines = stream.read(_FILE_BYTES_MAX).splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                value = json.loads(line)
                PeerId.parse(str(value["subject"]))
                found.append(IssuedInvite(**{**value, "roles": tuple(map(str, value["roles"]))}))
            except (ValueError, TypeError, KeyError, UsageError):
                continue
        return found

    def add(self, invite: Invite, made_s: float) -> None:
        """Add a new invite to the file. Disk errors are logged and not raised."""
        last = invite.grants[-1]
        made = IssuedInvite(
            subject=str(invite.subject),
            roles=tuple(last.roles),
            uses=last.uses,
            made_s=made_s,
            expires_s=float(last.expires_s),
        )
        kept = [*self.all(), made][-KEPT_MAX:]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_private(self._path, b"".join(json.dumps(asdict(one)).encode() + b"\n" for one in kept))
        except OSError as error:
            _log.warning("%s, the list of invites, cannot be written: %s", self._path, error)
