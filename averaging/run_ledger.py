"""The ledger of a run on one node, with its copy on disk. All services of the run on the node share one."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from swarm.core.clock import Clock
from swarm.core.errors import PeerError
from swarm.core.files import write_private
from swarm.core.ids import PeerId
from swarm.membership.ledger import Ledger

_log = logging.getLogger(__name__)

_SAVE_INTERVAL_S = 60.0
_FILE_BYTES_MAX = 1 << 20


class RunLedger:
    """A `Ledger` that any thread may use."""

    def __init__(self, own: PeerId, clock: Clock, path: Path | None = None) -> None:
        """`path`: of the copy on disk; None: the ledger is forgotten when the process ends."""
        self._ledger, self._clock, self._path = Ledger(own), clock, path
        self._lock = threading.Lock()
        self._saved_s = clock.monotonic_s()
        if path is not None:
            self._load(path)

    def certified(self, contributors: Iterable[PeerId]) -> None:
        """Record a certificate of the run."""
        with self._lock:
            self._ledger.certified(contributors, self._clock.swarm_s())

    def contributed(self, samples: Mapping[PeerId, float]) -> None:
        """Record how many samples each member brought to a certified round of this peer."""
        with self._lock:
            self._ledger.contributed(samples, self._clock.swarm_s())

    def fault(self, peer: PeerId, reason: str) -> None:
        """Record that a member of a group kept its round from going well."""
        _log.info("peer %s is passed over for some rounds: %s", peer, reason)
        with self._lock:
            self._ledger.fault(peer, reason, self._clock.swarm_s())

    def is_proven(self, peer: PeerId) -> bool:
        """Return whether a peer has contributed to a certified round of this run."""
        return self._ledger.is_proven(peer)

    def is_passed_over(self, peer: PeerId) -> bool:
        """Return whether this peer forms no group with another one for now, if it can do without it."""
        return self._ledger.is_passed_over(peer)

    def save(self, *, now: bool = False) -> None:
        """Write the copy on disk, if there is one, something changed, and the last one is a minute old or it
        is to be written `now`. Blocks. OSError is logged: a full disk must not stop a run.
        """
        now_s = self._clock.monotonic_s()
        if self._path is None or not (now or now_s - self._saved_s >= _SAVE_INTERVAL_S):
            return
        self._saved_s = now_s
        with self._lock:
            if not self._ledger.changed:
                return
            document = self._ledger.encode()
        try:
            write_private(self._path, json.dumps(document).encode())
        except OSError as error:
            _log.warning("the ledger %s cannot be written: %s", self._path, error)

    def _load(self, path: Path) -> None:
        """Read the copy on disk. A copy that cannot be read is set aside and does not prevent the start."""
        try:
            with path.open("rb") as stream:
                self._ledger.load(json.loads(stream.read(_FILE_BYTES_MAX)))
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("the ledger %s cannot be read, and this peer begins a new one: %s", path, error)
        except (ValueError, RecursionError, PeerError) as error:
            aside = path.with_name(f"{path.name}.damaged")
            with contextlib.suppress(OSError):  # then the next save replaces it
                path.replace(aside)
            _log.warning(
                "the ledger %s is damaged and cannot be read (%s): it was moved to %s, a new one begins",
                path,
                error or type(error).__name__,
                aside.name,
            )
