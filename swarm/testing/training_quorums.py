"""Checks of the quorums of a simulated training: nobody continues with a break before the grace is over, and
a quorum that is connected and may vote does not pause.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from averaging.history.certificate import Certificate
from averaging.history.electors import is_quorum
from averaging.history.grace import GRACE_S_MIN
from swarm.testing.checkers import Violations
from swarm.testing.training_ledger import HistoryLedger, history_after
from swarm.testing.training_swarm import TrainingPeer

# A peer that can reach a quorum for this long knows of it: it reads the reports of others every few seconds
_NOTICED_S = 10.0
_SAMPLED_S = 2.0  # moments are seen this late at most
# A peer that has voted may not vote again for a moment; one that may not for longer waits for its grace
_VOTES_AGAIN_S = 6.0
# grace of a peer whose electors are all with it or have ended
_BRIEF_GRACE_S = 1.0
# longest pause of a quorum: the running epoch, which loses the samples of other peers, and one failed round
_EPOCHS_MAX = 2.0
_FAILED_ROUND_S = 15.0
_HEADS_MAX = 16  # latest heads of a peer whose times are known


@dataclass(slots=True)
class _AtHead:
    """The times of a peer at one head."""

    since_s: float  # when it was seen there first
    quorum_since_s: float | None = None  # since when it has been able to reach a quorum; None: it is not
    quorum_s: float = -math.inf  # when it last had been able to for `_NOTICED_S`


@dataclass(slots=True)
class _Core:
    """Peers that are a quorum of a head and have been connected and healthy since a moment."""

    peers: list[TrainingPeer]
    since_s: float


class Quorums:
    """Checker of both promises. Call `watch` every two virtual seconds."""

    def __init__(self, violations: Violations, ledger: HistoryLedger) -> None:
        self._violations, self._ledger = violations, ledger
        self.longest_pause_s = 0.0  # of a quorum, beyond the time of an epoch
        self._heads: WeakKeyDictionary[TrainingPeer, dict[bytes, _AtHead]] = WeakKeyDictionary()
        # the head on which each peer does not vote, and since when
        self._declining: WeakKeyDictionary[TrainingPeer, tuple[bytes, float]] = WeakKeyDictionary()
        self._cores: dict[bytes, _Core] = {}

    def watch(self, live: Collection[TrainingPeer], now_s: float) -> None:
        """Check one moment. The ledger has read the histories of these peers."""
        self._check_breaks(live, now_s)
        begun = {one: bytes.fromhex(one.optimizer.history_head) for one in live if one.optimizer is not None}
        heads = {one: head for one, head in begun.items() if head in self._ledger.certificates}
        healthy = [one for one in heads if _is_healthy(one)]
        voting = [one for one in healthy if self._votes(one, heads[one], now_s)]
        connected = {one: [other for other in healthy if _are_connected(one, other)] for one in healthy}
        for one, head in heads.items():
            self._note(one, head, connected.get(one, ()), voting, heads, now_s)
        self._check_pauses(voting, heads, connected, now_s)

    def _votes(self, one: TrainingPeer, head: bytes, now_s: float) -> bool:
        """Return whether a peer may vote on its head. For a moment none may that has voted in a round in
        progress; one that may not for longer is bound by its vote, or was restored.
        """
        answer = history_after(one, head)
        if answer is not None and not answer.abstains:
            self._declining.pop(one, None)
            return True
        since = self._declining.get(one)
        if since is None or since[0] != head:
            since = self._declining[one] = head, now_s
        return answer is not None and now_s - since[1] < _VOTES_AGAIN_S

    # ---- breaks

    def _note(
        self,
        one: TrainingPeer,
        head: bytes,
        reached: Sequence[TrainingPeer],
        voting: Collection[TrainingPeer],
        heads: dict[TrainingPeer, bytes],
        now_s: float,
    ) -> None:
        """Record whether a peer can reach a quorum of its head, or the history that continued it."""
        times = self._heads.setdefault(one, {})
        times[head] = now = times.pop(head, None) or _AtHead(now_s)
        while len(times) > _HEADS_MAX:
            del times[next(iter(times))]
        reached = [other for other in reached if other in voting]
        there = [other.peer.peer_id for other in reached if heads[other] == head]
        electors = self._ledger.electors(head) or ()
        if not (is_quorum(electors, there) or any(self._continues(head, heads[other]) for other in reached)):
            now.quorum_since_s = None
        elif now.quorum_since_s is None:
            now.quorum_since_s = now_s
        elif now_s - now.quorum_since_s >= _NOTICED_S:
            now.quorum_s = now_s

    def _continues(self, head: bytes, ahead: bytes) -> bool:
        """Return whether a history continues this head, first with a certificate without a break."""
        between = self._ledger.between(head, ahead) or ()
        return any(one.proposal.head == head and not one.proposal.is_break for one in between)

    def _check_breaks(self, live: Collection[TrainingPeer], now_s: float) -> None:
        for certificate in self._ledger.new_breaks:
            made_s, head = self._ledger.committed_s[certificate.head], certificate.proposal.head
            grace_s = self._grace_s(certificate, live)
            for one in live:
                times = self._heads.get(one)
                if one.peer.peer_id not in certificate.workers or not times:  # it has begun just now
                    continue
                at_head = times.get(head, _AtHead(made_s))
                since_s = max(at_head.since_s - _SAMPLED_S, at_head.quorum_s)
                if made_s - since_s < grace_s:
                    what = "came to" if since_s > at_head.quorum_s else "could reach a quorum of"
                    self._violations.add(
                        now_s,
                        f"peer {one.index} continued head {head.hex()[:8]} with a break "
                        f"{made_s - since_s:.1f} s after it {what} it; the grace is {grace_s:g} s",
                    )
        self._ledger.new_breaks.clear()

    def _grace_s(self, certificate: Certificate, live: Collection[TrainingPeer]) -> float:
        """Return the shortest grace of those that made a break: brief, where no other elector is there."""
        here = {one.peer.peer_id for one in live if not one.leaving}
        electors = self._ledger.electors(certificate.proposal.head) or ()
        others = here.intersection(electors).difference(certificate.workers)
        return GRACE_S_MIN if others else _BRIEF_GRACE_S

    # ---- pauses

    def _check_pauses(
        self,
        voting: Sequence[TrainingPeer],
        heads: dict[TrainingPeer, bytes],
        connected: dict[TrainingPeer, list[TrainingPeer]],
        now_s: float,
    ) -> None:
        """Check the quorums of all heads: that of a head which has moved is no quorum any more."""
        cores, self._cores = self._cores, {}
        for head in {heads[one]: None for one in voting}:
            there = [one for one in voting if heads[one] == head]
            known = cores.get(head)
            peers = None if known is None else self._quorum(head, known.peers, there, connected)
            if known is not None and peers is not None:
                known.peers = peers
            else:
                peers = self._quorum(head, there, there, connected)
                known = None if peers is None else _Core(peers, now_s)
            if known is not None:
                self._cores[head] = known
                self._check_pause(head, known, now_s)

    def _quorum(
        self,
        head: bytes,
        among: Sequence[TrainingPeer],
        there: Collection[TrainingPeer],
        connected: dict[TrainingPeer, list[TrainingPeer]],
    ) -> list[TrainingPeer] | None:
        """Return peers of these that are all connected and a quorum of a head; None: none were found."""
        electors = self._ledger.electors(head) or ()
        left = [one for one in among if one in there]
        for first in left:
            found = [first]
            for one in left:
                if one is not first and all(one in connected[other] for other in found):
                    found.append(one)
            if is_quorum(electors, [one.peer.peer_id for one in found]):
                return found
        return None

    def _check_pause(self, head: bytes, core: _Core, now_s: float) -> None:
        paused_s = now_s - core.since_s
        target = core.peers[0].config.target_batch_size
        epoch_s = target / sum(one.batch / one.compute_s for one in core.peers)
        self.longest_pause_s = max(self.longest_pause_s, paused_s - epoch_s)
        if paused_s > _EPOCHS_MAX * epoch_s + _FAILED_ROUND_S:
            indices = sorted(one.index for one in core.peers)
            self._violations.add(
                now_s,
                f"peers {indices} are a quorum of head {head.hex()[:8]}, connected and healthy, and have "
                f"committed nothing for {paused_s:.0f} s; an epoch takes them {epoch_s:.0f} s",
            )
            core.since_s = now_s


def _is_healthy(one: TrainingPeer) -> bool:
    """Return whether nothing is wrong with a peer and its links."""
    is_well = not (one.peer.frozen or one.hangs or one.lies or one.leaving) and one.peer.slowness == 1.0
    return is_well and not one.peer.network.config.loss


def _are_connected(one: TrainingPeer, other: TrainingPeer) -> bool:
    """Return whether messages between two peers arrive in both directions."""
    silent = one.peer.network.silent_between
    return not (silent(one.peer, other.peer) or silent(other.peer, one.peer))
