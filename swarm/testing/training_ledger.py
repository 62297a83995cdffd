"""Every certificate that a peer of a simulated training ever held, and what a peer tells of its history."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any
from weakref import WeakKeyDictionary

from averaging.history.certificate import Certificate, genesis
from averaging.history.chain import Chain, after, beginning
from averaging.history.encoding import decode_chain, is_cut
from averaging.optim.exchange import HISTORY
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.core.standing import NO_SPECIFICATION
from swarm.net.rpc import UnaryHandler
from swarm.testing.checkers import Violations
from swarm.testing.training_swarm import RUN, TrainingPeer
from swarm.wire import state_pb2


class HistoryLedger:
    """Every certificate that any peer ever held."""

    def __init__(self, violations: Violations) -> None:
        self._violations = violations
        self._genesis = genesis(RUN)
        self._beginning = beginning(RUN, NO_SPECIFICATION)
        self.foundings = 0  # of the run, after the first one
        self.second_founding: Certificate | None = None  # the last of these, until it is taken
        self.certificates: dict[bytes, Certificate] = {}  # by the head after it
        self.committed_s: dict[bytes, float] = {}  # when the first peer held it
        self.new_breaks: list[Certificate] = []  # until they are taken
        self._following: dict[bytes, dict[bytes, Certificate]] = {}  # by the head that it extends
        # the last head that was read of each process; what is kept of one must not keep it in memory
        self._seen: WeakKeyDictionary[TrainingPeer, bytes] = WeakKeyDictionary()

    def read(self, one: TrainingPeer, now_s: float) -> None:
        """Read what a peer has committed, as another peer would."""
        if one.optimizer is None or not one.optimizer.history_head:
            return
        head = bytes.fromhex(one.optimizer.history_head)
        if self._seen.get(one) == head:
            return
        known, more = self._seen.get(one, self._genesis), True
        while more:  # in parts
            reply = history_after(one, known)
            if reply is None:
                return
            chain = decode_chain(reply.chain)
            for certificate in chain.certificates:
                self._add(certificate, one, now_s)
            known, more = chain.last_head, is_cut(reply.chain)
        self._seen[one] = known

    def _add(self, certificate: Certificate, one: TrainingPeer, now_s: float) -> None:
        head, before = certificate.head, certificate.proposal.head
        if head in self.certificates:
            return
        self.certificates[head], self.committed_s[head] = certificate, now_s
        root = self._root(before)
        if root is not None:
            try:
                certificate.check(root.electors, root.root_register)
            except PeerError as error:
                self._violations.add(now_s, f"peer {one.index} holds an invalid certificate: {error}")
        known = self._following.setdefault(before, {})
        without_break = [other for other in known.values() if not other.proposal.is_break]
        if before == self._genesis:  # no quorum decides about the first certificate (docs/reliability.md)
            self.foundings += bool(known)
            self.second_founding = certificate if known else None
        elif without_break and not certificate.proposal.is_break:
            self._violations.add(
                now_s,
                f"two certificates without a break extend head {before.hex()[:8]} of epoch "
                f"{certificate.proposal.epoch}: {head.hex()[:8]}, held by peer {one.index}, and "
                f"{without_break[0].head.hex()[:8]}",
            )
        known[head] = certificate
        if certificate.proposal.is_break:
            self.new_breaks.append(certificate)

    def is_of_grid(self, certificate: Certificate) -> bool:
        """Return whether the swarm was, or became with this certificate, larger than a group."""
        before = self.certificates.get(certificate.proposal.head)
        rounds_before = before.proposal.grid_rounds if before is not None else 1
        return max(certificate.proposal.grid_rounds, rounds_before) > 1

    def electors(self, head: bytes) -> tuple[PeerId, ...] | None:
        """Return the electors of a head; None when its certificate was never seen."""
        root = self._root(head)
        return root.electors if root is not None else None

    def between(self, head: bytes, ahead: bytes) -> list[Certificate] | None:
        """Return the certificates that lead from one head to another, the newest first; None when none do."""
        found = []
        while ahead != head:
            if ahead not in self.certificates:
                return None
            found.append(self.certificates[ahead])
            ahead = found[-1].proposal.head
        return found

    def _root(self, head: bytes) -> Chain | None:
        if head == self._genesis:
            return self._beginning
        return after(self.certificates[head], b"") if head in self.certificates else None

    def distance(self, head: bytes, ahead: bytes) -> int | None:
        """Return how many certificates lead from one head to another; None when none do."""
        found = self.between(head, ahead)
        return None if found is None else len(found)


def history_after(one: TrainingPeer, head: bytes) -> state_pb2.HistoryReply | None:
    """Return what a peer answers when another one that knows `head` asks for its history; None: it has not
    opened the run yet, or has left it.
    """
    handler = one.peer.handlers.find(HISTORY.name)
    if not isinstance(handler, UnaryHandler):
        return None
    request = state_pb2.HistoryRequest(run=RUN, heads=[head])
    try:
        reply: state_pb2.HistoryReply = _at_once(handler.function(one.peer.peer_id, request))
    except PeerError:
        return None
    return reply


def _at_once(work: Awaitable[Any]) -> Any:
    """Run a coroutine that awaits nothing."""
    try:
        work.__await__().send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the handler waits")
