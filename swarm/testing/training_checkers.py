"""Invariants of a simulated training, checked after every step and every two virtual seconds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary, WeakSet

from averaging.history.certificate import RoundKind
from averaging.optim.reports import LoadResult, StepReport
from swarm.core.ids import PeerId
from swarm.testing.checkers import CheckLimits, Violations, sizes_of
from swarm.testing.dht_swarm import SwarmMember
from swarm.testing.training_ledger import HistoryLedger
from swarm.testing.training_quorums import Quorums
from swarm.testing.training_swarm import TrainingPeer

# A peer that commits a moment later than others is at most the certificates of one epoch behind them: that of
# the epoch and that of the round over its state. The promise is two epochs
_BEHIND_MAX = 4
# for this long after a first certificate, a round in progress may still make another one
_KNOWN_S = 15.0
# peers of two sides of a cut have found one another in the DHT this long after its end
_MET_AGAIN_S = 30.0
_TABLES_MAX = 5_000
_TASKS_MAX = 400  # of one peer, with the calls that it handles
_SIZES_EVERY_S = 30.0


class TrainingChecks:
    """All invariants of one simulated training."""

    def __init__(self, violations: Violations, step_s_max: float) -> None:
        """`step_s_max`: within which every call of `Optimizer.step` must end."""
        self.violations, self._step_s_max = violations, step_s_max
        self.ledger = HistoryLedger(violations)
        self.quorums = Quorums(violations, self.ledger)
        self.limits = CheckLimits(violations, default_max=_TABLES_MAX)
        self.steps = self.epochs = self.rounds_failed = self.resynchronised = self.given_up = 0
        self.longest_step_s = 0.0
        self.misled = 0  # states of liars that honest peers took
        self.counted_elsewhere = 0  # samples in rounds that failed at the peer that sent them
        self.liars: set[PeerId] = set()
        self.faults_s = -math.inf  # when the last fault ended
        self._misled: WeakSet[TrainingPeer] = WeakSet()  # peers that last downloaded a liar's state
        self._digests: dict[str, set[str]] = {}  # by head: of the states that honest peers made
        self._contacts = _Contacts()
        self._sizes_s = -math.inf  # when sizes were checked last
        self._carried: WeakKeyDictionary[TrainingPeer, int] = WeakKeyDictionary()
        self._behind: WeakKeyDictionary[TrainingPeer, int] = WeakKeyDictionary()  # in a round behind training
        self._heads: WeakKeyDictionary[TrainingPeer, bytes] = WeakKeyDictionary()  # after the last step
        self._states: dict[str, tuple[bytes, int]] = {}  # by head: the parameters, and who had them first

    def on_step(self, one: TrainingPeer, report: StepReport, seconds: float) -> None:
        """Check the report of a step, and what the peer holds after it."""
        now_s = asyncio.get_running_loop().time()
        self.steps += 1
        self.epochs += report.stepped
        self.rounds_failed += report.rounds_failed
        self.resynchronised += report.resynchronised is not None
        self.given_up += report.epochs_given_up
        self.longest_step_s = max(self.longest_step_s, seconds)
        if seconds > self._step_s_max:
            self.violations.add(now_s, f"a step of peer {one.index} took {seconds:.1f} s")
        self.ledger.read(one, now_s)
        self._check_samples(one, report, now_s)
        loaded = report.resynchronised
        if report.stepped and one not in self._misled and not one.lies:
            assert one.optimizer is not None
            self._digests.setdefault(one.optimizer.history_head, set()).add(one.optimizer.state_digest()[1])
        if loaded is not None and loaded.loaded:
            self._check_donors(one, loaded, now_s)
        assert one.optimizer is not None
        # a state of local steps is this peer's own again when progress is carried over to what was loaded
        if report.stepped or (loaded is not None and loaded.loaded and one.optimizer.mode == "gradients"):
            self._check_state(one, now_s)

    def _check_samples(self, one: TrainingPeer, report: StepReport, now_s: float) -> None:
        """Samples trained = contributed + carried + dropped; what is contributed is in the average, and what
        certificates count is not carried.
        """
        before = self._carried.get(one, one.restored)
        self._carried[one] = report.accumulated
        counted_elsewhere = self._counted_elsewhere(one, report)
        self.counted_elsewhere += counted_elsewhere
        if before is None:
            return
        contributed = report.contributed if report.stepped else 0
        behind = self._behind.get(one, 0)
        now_behind = before + one.batch + behind - contributed - report.accumulated - report.dropped
        self._behind[one] = now_behind
        may_be_behind = {0}
        # the same round continues, or the next one has begun, after that one or instead of it
        if one.overlaps:
            may_be_behind |= {behind, before + one.batch, before + one.batch + behind}
        if now_behind not in may_be_behind:
            self.violations.add(
                now_s,
                f"peer {one.index}: {before} samples were carried and {one.batch} trained, {behind} were in "
                f"a round; {contributed} were contributed, {report.accumulated} are carried, {now_behind} "
                f"are in a round, {report.dropped} reported as dropped ({report.reason})",
            )
        averaged = report.round if report.round is not None and not report.round.failed else None
        if averaged is not None and contributed and not averaged.contributions.get(one.peer.peer_id):
            self.violations.add(
                now_s, f"peer {one.index} contributed {contributed} samples to an average that it is not in"
            )
        not_contributed = before + one.batch + behind - contributed
        if report.dropped < min(counted_elsewhere, not_contributed):
            self.violations.add(
                now_s,
                f"peer {one.index}: certificates of rounds that failed here count {counted_elsewhere} of its "
                f"samples; of the {not_contributed} that it had not contributed, {report.dropped} are "
                f"reported as dropped and {report.accumulated} are carried ({report.reason})",
            )

    def _counted_elsewhere(self, one: TrainingPeer, report: StepReport) -> int:
        """Return how many samples of a peer are in rounds that its history has taken over since its last
        step, and whose result it has not applied itself, according to their certificates.
        """
        assert one.optimizer is not None
        before, head = self._heads.get(one), bytes.fromhex(one.optimizer.history_head)
        self._heads[one] = head
        taken_over = self.ledger.between(before, head) if before is not None else None
        applied = report.round.certificate if report.round is not None else None
        return sum(
            certificate.proposal.samples[certificate.proposal.contributors.index(one.peer.peer_id)]
            for certificate in taken_over or ()
            if certificate.proposal.kind is RoundKind.EPOCH
            and certificate.proposal.samples
            and one.peer.peer_id in certificate.workers
            # a round's votes may have been collected in another order
            and not (report.stepped and (report.alone or (applied and certificate.head == applied.head)))
        )

    def _check_donors(self, one: TrainingPeer, loaded: LoadResult, now_s: float) -> None:
        """A liar's state must not be loaded if more than half of the electors are honest and reachable. A
        liar may send the true state: it lies only from its next step on, and in modes with local steps it
        sends the result of the last round.
        """
        self._misled.discard(one)
        assert one.optimizer is not None
        true = self._digests.get(one.optimizer.history_head, ())
        if self.liars.isdisjoint(loaded.donors) or one.optimizer.state_digest()[1] in true:
            return
        self.misled += 1
        self._misled.add(one)
        electors = self.ledger.electors(bytes.fromhex(one.optimizer.history_head)) or ()
        if 2 * len(self.liars.intersection(electors)) < len(electors) and now_s - self.faults_s > _KNOWN_S:
            self.violations.add(now_s, f"peer {one.index} took the state of a liar without any fault")

    def _check_state(self, one: TrainingPeer, now_s: float) -> None:
        """Peers with equal heads have equal parameters, bit for bit. In a swarm that is larger than a group
        that holds for the electors after a round over the state, of which the others take an average of their
        own.
        """
        assert one.optimizer is not None
        if one.lies or one in self._misled:
            return
        certificate = self.ledger.certificates.get(bytes.fromhex(one.optimizer.history_head))
        if certificate is not None and self.ledger.is_of_grid(certificate):
            made = certificate.proposal
            if made.kind is not RoundKind.STATE or one.peer.peer_id not in made.contributors:
                return
        if one.overlaps and one.optimizer.mode != "gradients":  # parameters have progress of this peer alone
            values = bytes.fromhex(one.optimizer.state_digest()[1])
        else:
            values = one.parameters[0].detach().numpy().tobytes()
        known, first = self._states.setdefault(one.optimizer.history_head, (values, one.index))
        if known != values:
            self.violations.add(
                now_s,
                f"peers {first} and {one.index} have head {one.optimizer.history_head[:8]} and different "
                "parameters",
            )

    def _check_founding(self, live: Collection[TrainingPeer], now_s: float) -> None:
        """Check that the run was not begun a second time by peers that could have known of a certificate."""
        second, self.ledger.second_founding = self.ledger.second_founding, None
        founders = [one for one in live if second and one.peer.peer_id in second.proposal.contributors]
        for one in live:
            since_s = self._contacts.has_certificate_s(one)
            if since_s is None or since_s > now_s - _KNOWN_S or one in founders or one.leaving:
                continue
            for founder in founders:
                if self._contacts.apart_s(one, founder) < now_s - _MET_AGAIN_S:
                    self.violations.add(
                        now_s,
                        f"peer {founder.index} took part in a second beginning of the run, though peer "
                        f"{one.index} has a certificate since {since_s:.1f} s, and could be reached",
                    )

    def watch(self, live: Collection[TrainingPeer], now_s: float) -> None:
        """Check properties that hold at any time: certificates, deadlines, sizes."""
        self._contacts.watch(live, self.ledger, now_s)
        for one in live:
            self.ledger.read(one, now_s)
            self._check_founding(live, now_s)
            if one.stepping_since_s is not None and now_s - one.stepping_since_s > self._step_s_max:
                self.violations.add(
                    now_s, f"peer {one.index} has been in one step since {one.stepping_since_s:.1f} s"
                )
            tasks = len(one.peer.supervisor.running) + len(one.peer.handling)
            if tasks > _TASKS_MAX:
                self.violations.add(now_s, f"peer {one.index} has {tasks} tasks")
        self.quorums.watch(live, now_s)
        if now_s - self._sizes_s >= _SIZES_EVERY_S:
            self._sizes_s = now_s
            self.check_sizes(live, now_s)

    def check_sizes(self, live: Iterable[TrainingPeer], now_s: float) -> None:
        """Check that no collection of a peer grows without bound."""
        for one in live:
            self.limits.check([SwarmMember(one.peer, one.node.dht.service)], now_s)
            for name, size in sizes_of(one.optimizer):
                self.limits.check_size(one.index, name, size, now_s)

    def newest(self, live: Collection[TrainingPeer]) -> bytes | None:
        """Return the newest head that a live peer holds."""
        for one in live:  # all of them may have moved since the last watch
            self.ledger.read(one, asyncio.get_running_loop().time())
        heads = {bytes.fromhex(one.optimizer.history_head) for one in live if one.optimizer is not None}
        found = [head for head in heads if head in self.ledger.certificates]
        return max(
            found,
            key=lambda head: (
                self.ledger.certificates[head].proposal.epoch,
                self.ledger.committed_s[head],
                head,
            ),
            default=None,
        )

    def apart(self, live: Collection[TrainingPeer]) -> list[str]:
        """Return a sentence for each live peer that has another history than the newest head's, or is further
        behind than what is being committed now.
        """
        newest = self.newest(live)
        if newest is None:
            return ["no peer holds a certificate"]
        found = []
        for one in live:
            head = bytes.fromhex(one.optimizer.history_head) if one.optimizer is not None else b""
            behind = self.ledger.distance(head, newest)
            if behind is None or behind > _BEHIND_MAX:
                where = "on another history" if behind is None else f"{behind} certificates behind"
                epoch = one.optimizer.epoch if one.optimizer is not None else 0
                found.append(
                    f"peer {one.index} (head {head.hex()[:8]}, epoch {epoch}) is {where} in a healed swarm, "
                    f"whose newest head is {newest.hex()[:8]}"
                )
        return found


class _Contacts:
    """Which peers have a certificate, and which could not reach one another."""

    def __init__(self) -> None:
        # since when each process has one
        self._certificate_s: WeakKeyDictionary[TrainingPeer, float] = WeakKeyDictionary()
        # when messages from one to another were lost last
        self._lost_s: WeakKeyDictionary[TrainingPeer, WeakKeyDictionary[TrainingPeer, float]]
        self._lost_s = WeakKeyDictionary()

    def watch(self, live: Collection[TrainingPeer], ledger: HistoryLedger, now_s: float) -> None:
        """Record the current state of the contacts."""
        for one in live:
            if one.optimizer is not None and bytes.fromhex(one.optimizer.history_head) in ledger.certificates:
                self._certificate_s.setdefault(one, now_s)
            else:
                self._certificate_s.pop(one, None)
            for other in live:
                if one is not other and one.peer.network.silent_between(one.peer, other.peer):
                    self._lost_s.setdefault(one, WeakKeyDictionary())[other] = now_s

    def has_certificate_s(self, one: TrainingPeer) -> float | None:
        """Return since when a process has a certificate; None when it has none."""
        return self._certificate_s.get(one)

    def apart_s(self, one: TrainingPeer, other: TrainingPeer) -> float:
        """Return when messages between two peers were lost last, in one direction or both."""
        both = ((one, other), (other, one))
        return max(
            self._lost_s[source].get(target, -math.inf) if source in self._lost_s else -math.inf
            for source, target in both
        )
