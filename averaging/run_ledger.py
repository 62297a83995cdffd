"""The ledger of a run on one node, with its copy on disk. All services of the run on the node share one."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from averaging.history.lineage import Lineage
from averaging.history.receipts import RECEIPT_BYTES_MAX, ReceiptBook, encode_receipt
from averaging.matchmaking.logic.messages import Precedence
from swarm.core.clock import Clock
from swarm.core.errors import PeerError
from swarm.core.files import read_json_copy, set_aside, write_private
from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.membership.ledger import MemberLedger

_log = logging.getLogger(__name__)

_SAVE_INTERVAL_S = 60.0
_FILE_BYTES_MAX = 1 << 20

T = TypeVar("T")


def _nobody(peer: PeerId) -> bool:
    return False


class RunLedger:
    """A `MemberLedger` that any thread may use."""

    def __init__(
        self, own: PeerId, run: str, clock: Clock, standing: PeerStanding, path: Path | None = None
    ) -> None:
        """`standing`: of all runs of this node. `path`: of the copy on disk; None: the ledger is forgotten
        when the process ends.
        """
        self._own, self._run, self._standing = own, run, standing
        self._head = b""  # the head up to which certificates were counted
        self._is_large = False  # according to the last of them, the run is larger than a group
        # Faults by peer in rounds on that head that did not commit. They count unless a group without this
        # peer commits a round on that head: members that learned of it were right to leave this peer's group.
        self._uncertain: dict[PeerId, str] = {}
        self._ledger, self._clock, self._path = MemberLedger(own), clock, path
        self._lock = threading.Lock()
        self._saved_s = clock.monotonic_s()
        self._receipts, self._receipt_saved = ReceiptBook(own, run), b""
        if path is not None:
            read_json_copy(path, "ledger", _FILE_BYTES_MAX, self._ledger.load)
            _read_receipt(_receipt_path(path), self._receipts)

    def follow(self, lineage: Lineage) -> None:
        """Count the certificates that are new in this peer's history, whose electors are members.

        A certificate shows which of its contributors worked; about its own rounds this peer knows more
        (`contributed`).
        """
        if lineage.head == self._head:
            return
        is_continued = not self._head or lineage.knows(self._head)
        new = lineage.chain((self._head,)).certificates if is_continued else ()
        with self._lock:
            self._standing.add_members(self._run, lineage.electors)
            is_extended_here = any(self._own in one.proposal.contributors for one in new[:1])
            self._settle(counts=self._is_large or is_extended_here)
            for one in new:
                worked = () if self._own in one.workers else one.workers
                self._ledger.certified(worked, self._clock.swarm_s())
            self._receipts.follow(lineage.chain())
        self._head, self._is_large = lineage.head, lineage.grid_rounds > 1

    def contributed(self, samples: Mapping[PeerId, float]) -> None:
        """Record that these peers contributed to a round of this peer, each with a number of samples."""
        with self._lock:
            self._ledger.contributed(samples, self._clock.swarm_s())

    def fault(self, peer: PeerId, reason: str, *, held: bool = False, committed: bool = True) -> None:
        """Record that a member of a group kept its round from going well; `held`: as its leader. A fault in a
        round that was not `committed` counts once this peer searches for the next round on the same head, or
        once a group with this peer commits a round on it.
        """
        with self._lock:
            if committed or held:
                self._count(peer, reason, held=held)
            else:
                self._uncertain[peer] = reason

    def _count(self, peer: PeerId, reason: str, *, held: bool = False) -> None:
        _log.info("peer %s is passed over for some rounds: %s", peer, reason)
        self._ledger.fault(peer, self._clock.swarm_s(), held=held)

    def _settle(self, *, counts: bool) -> None:
        """Count the faults that are uncertain, or forget them. The lock is held."""
        faults, self._uncertain = self._uncertain, {}
        for peer, reason in faults.items() if counts else ():
            self._count(peer, reason)

    def _is_doubted(self, peer: PeerId) -> bool:
        return peer in self._uncertain or self._ledger.is_doubted(peer)

    def with_receipts(self, use: Callable[[ReceiptBook], T]) -> T:
        """Call `use` with the receipts of this peer's history, under the lock, and return its result."""
        with self._lock:
            return use(self._receipts)

    @property
    def rounds(self) -> int:
        """Return how many certificates of the run were counted."""
        return self._ledger.rounds

    def has_standing(self, peer: PeerId) -> bool:
        """Return whether a peer is a member of the run, or has contributed to a certified round."""
        return self._standing.is_member(peer, self._run) or self._ledger.is_proven(peer)

    def may_divide(self, peers: Collection[PeerId], size_max: int) -> bool:
        """Return whether peers that seem to be more than `size_max` may be divided into parts that do not
        look for one another: not where strangers alone make up that number.

        Strangers count as at most as many as the others, as in `ReportStanding.peers`. Of a run that is
        large by its certificates no peer knows all members. Before a run has members all peers count.
        """
        if self._is_large or self._standing.founding_of(self._run).is_invited:
            return True
        known = sum(peer == self._own or self.has_standing(peer) for peer in peers)
        return 2 * known > size_max or not self._standing.has_members(self._run)

    def precedence(self, electors: Collection[PeerId], *, passes_over: bool = True) -> Precedence:
        """Return who comes first in a search for a group that extends a head with these electors.
        `passes_over`: whether peers are passed over for their faults.
        """
        deciding = frozenset(electors)
        is_passed_over = functools.partial(self._ledger.is_passed_over, electors=deciding)
        if passes_over:
            with self._lock:
                self._settle(counts=True)
        return Precedence(
            electors=deciding,
            is_member=functools.partial(self._standing.is_member, run=self._run),
            is_proven=self.has_standing,
            is_holding=self._ledger.is_holding,
            is_doubted=self._is_doubted,
            is_passed_over=is_passed_over if electors and passes_over else _nobody,
        )

    def save(self, *, now: bool = False) -> None:
        """Write the copy on disk, if there is one, something changed, and the last one is a minute old or it
        is to be written `now`. Blocks. OSError is logged: a full disk must not stop a run.
        """
        now_s = self._clock.monotonic_s()
        if self._path is None or not (now or now_s - self._saved_s >= _SAVE_INTERVAL_S):
            return
        self._saved_s = now_s
        with self._lock:
            document = self._ledger.encode() if self._ledger.changed else None
            newest = self._receipts.newest
        receipt = encode_receipt(newest) if newest is not None else b""
        try:
            if document is not None:
                write_private(self._path, json.dumps(document).encode())
            if receipt != self._receipt_saved:
                write_private(_receipt_path(self._path), receipt)
                self._receipt_saved = receipt
        except OSError as error:
            _log.warning("the ledger %s cannot be written: %s", self._path, error)


def _receipt_path(ledger: Path) -> Path:
    """Return the file of the receipt beside a ledger, whose name ends with the run's id."""
    return ledger.with_name(f"{ledger.name}.receipt")


def _read_receipt(path: Path, book: ReceiptBook) -> None:
    """Read the receipt of an earlier process. A damaged one is moved aside."""
    try:
        with path.open("rb") as stream:
            book.load(stream.read(RECEIPT_BYTES_MAX + 1))
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.error("the receipt %s cannot be read: %s", path, error)
    except PeerError as error:
        set_aside(path, "receipt", error)
