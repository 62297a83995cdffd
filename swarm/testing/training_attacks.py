"""Hostile members, and strangers that claim samples, in a simulated training: the epochs per minute that the
honest peers still complete.

A hostile member is a process of the swarm with manipulated rounds, votes or groups. A stranger is less than a
process: it sends only the answers that keep it in the reports and groups of others, and does no work.
Everything follows from the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from averaging.history.certificate import RoundKind
from averaging.history.electors import FOUNDING_MAX
from averaging.matchmaking.logic.group import WEIGHT_MAX, Group, Member
from averaging.matchmaking.logic.messages import AveragerName, Precedence, VectorSchema
from averaging.matchmaking.service.exchange import GroupExchange
from averaging.matchmaking.service.matchmaking_service import GroupService
from averaging.matchmaking.service.presence import DhtPresence
from averaging.optim.exchange import REPORT
from averaging.optim.progress.logic.reports import SAMPLES_MAX, ProgressReport
from averaging.optim.reports import StepReport
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.logic.records import Record, encode_value, signed
from swarm.dht.service.overlay import STORE
from swarm.dht.service.wire import record_to_wire
from swarm.membership.ledger import MemberLedger
from swarm.net.contacts import contact_to_wire
from swarm.testing.chance import Chance
from swarm.testing.checkers import Violations
from swarm.testing.dht_swarm import service_of
from swarm.testing.identities import SeededIdentity, remembered_signatures
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.records import made_record
from swarm.testing.sabotage import SabotageKind, Saboteur, go_silent
from swarm.testing.training_ledger import HistoryLedger
from swarm.testing.training_swarm import RUN, TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import collector_off, run_virtual
from swarm.wire import state_pb2
from swarm.wire.dht_pb2 import DhtStoreRequest

_CLAIM_S = 1.0  # between two reports of a stranger, each to the next of its victims
_CALL_S = 2.0
_SEARCH_S = 48.0
_RECORDS_AT_ONCE, _RECORDS_S, _RECORD_TTL_S = 8, 2.0, 15.0  # of a writer of records


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Settings of one simulated attack; equal settings give equal runs."""

    seed: int = 1
    members: int = 4  # all members, including hostile ones
    sabotage: SabotageKind = "none"
    elements: int = 8192  # of the model; few: one member reduces them all
    bad: int = 1  # number of attackers: the most senior members except the first
    strangers: int = 0
    writers: int = 0  # identities of one more peer that keep records of progress, and do nothing else
    victim_is_new: bool = False  # it joins when the attack begins
    batch: int = 4  # samples of a step
    compute_s: float = 1.0  # of a step
    epoch_s: float = 16.0  # of all members together
    calm_s: float = 40.0  # before the attack, after the founding
    minutes: float = 15.0  # of the attack
    rounds_free: int = 3  # epochs of the attack that do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackFigures:
    """Results of a simulated attack."""

    epochs_per_minute: float  # of the honest members, once the first rounds of the attack are over
    epochs: int  # that were counted
    rounds_failed: int  # of the honest members
    by_stranger: int  # certificates to which a stranger contributed
    excluded: int  # certificates without a bad member
    without_victim: int  # of those that were counted
    blamed: int  # faults of honest members in the ledgers of honest members, since the attack began
    electors: tuple[int, ...]  # of the head, by index; strangers have those after the members


class Stranger:
    """A peer that claims an impossible number of samples, joins groups, and sends nothing."""

    def __init__(self, peer: SimulatedPeer, victims: Callable[[], list[TrainingPeer]]) -> None:
        """`victims` returns the honest processes."""
        self._peer, self._victims = peer, victims
        self._claim = state_pb2.Claim(samples=SAMPLES_MAX, samples_per_s=1e6)
        self._dht = service_of(peer)
        peer.handlers.unary(REPORT, self._on_report)

    async def run(self, contacts: list[Contact]) -> None:
        """Attack until cancelled. `contacts`: of peers of the DHT."""
        await self._dht.join(contacts)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report())
            tasks.create_task(self._join_groups())

    async def _on_report(self, caller: PeerId, request: state_pb2.ReportRequest) -> state_pb2.ReportReply:
        self._follow(request.claim)
        return state_pb2.ReportReply(claim=self._claim)

    def _follow(self, claim: state_pb2.Claim) -> None:
        """Claim the epoch and head of an honest peer."""
        now_s = self._peer.clock.swarm_s()
        if claim.epoch >= self._claim.epoch:
            self._claim.epoch, self._claim.head = claim.epoch, claim.head
        self._claim.at_s, self._claim.since_s = now_s, max(now_s - 30.0, 0.0)

    async def _report(self) -> None:
        while True:
            for victim in self._victims():
                request = state_pb2.ReportRequest(run=RUN, claim=self._claim, full=True)
                try:
                    contact = victim.peer.contact
                    reply = await self._peer.caller.call(contact, REPORT, request, timeout_s=_CALL_S)
                    self._follow(reply.claim)
                except SwarmError:
                    pass
                await asyncio.sleep(_CLAIM_S)

    async def _join_groups(self) -> None:
        peer, exchange = self._peer, self._exchange()
        honest = {one.peer.peer_id for one in self._victims()}
        others = [one.peer_id for one in peer.network.peers.values() if one.peer_id not in honest]
        exchange.blocklist_of(RUN).ban(others)  # strangers do not ask one another
        go_silent(peer)
        while not (schema := self._schema()):  # noqa: ASYNC110 - it polls what honest peers have
            await asyncio.sleep(_CLAIM_S)
        presence = DhtPresence(
            dht=self._dht,
            name=AveragerName(run=RUN, averager="epochs"),
            own=lambda: peer.contact,
            schema=schema,
        )
        await presence.declare()
        service = GroupService(
            exchange=exchange,
            presence=presence,
            name=AveragerName(run=RUN, averager="epochs"),
            schema=schema,
            rng=Chance(peer.network.seed, "stranger", peer.index),
            supervisor=peer.supervisor,
            target_group_size=self._size(),
        )
        member = Member(contact=peer.contact, weight=WEIGHT_MAX, bandwidth=1e9, grid_rounds=1)
        while True:
            epoch, head = self._claim.epoch, self._claim.head
            now_s = asyncio.get_running_loop().time()
            found = await service.find(
                member=member,
                round_key=f"{epoch} {head.hex()[:32]}",
                deadline_s=now_s + _SEARCH_S,
                precedence=Precedence(electors=frozenset(honest)),  # or nobody would follow it
            )
            if isinstance(found, Group):
                while self._claim.head == head:  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(_CLAIM_S)
                service.round_over(committed=False)
            else:
                await asyncio.sleep(_CLAIM_S)

    def _exchange(self) -> GroupExchange:
        peer = self._peer
        return GroupExchange(handlers=peer.handlers, caller=peer.caller, own=peer.peer_id, clock=peer.clock)

    def _averagers(self) -> Iterator[Any]:
        for one in self._victims():
            if one.optimizer is not None and one.optimizer._averager._epoch_averager is not None:
                yield one.optimizer._averager._epoch_averager

    def _schema(self) -> VectorSchema | None:
        return next((averager.schema for averager in self._averagers()), None)

    def _size(self) -> int:
        size: int = next(one._groups.machine._target_group_size for one in self._averagers())
        return size


class RecordWriter:
    """A peer that keeps records of progress as many identities, which name an address where nobody is."""

    def __init__(self, peer: SimulatedPeer, identities: int) -> None:
        self._peer = peer
        self._identities = [SeededIdentity(f"writer {number}") for number in range(identities)]

    async def run(self, victims: Callable[[], list[TrainingPeer]]) -> None:
        """Write until cancelled. `victims` returns the honest processes."""
        while True:
            now_s = self._peer.clock.swarm_s()
            report = ProgressReport(epoch=0, samples=1, rate=1.0, at_s=now_s, since_s=now_s)
            value = encode_value({**report.encode(), "addresses": ["/ip4/203.0.113.9/tcp/9/tls/http"]})
            records = [self._record(one, value, round(1e6 * now_s)) for one in self._identities]
            for first in range(0, len(records), _RECORDS_AT_ONCE):
                some = [record_to_wire(one) for one in records[first : first + _RECORDS_AT_ONCE]]
                request = DhtStoreRequest(sender=contact_to_wire(self._peer.contact), records=some)
                for victim in victims():
                    with contextlib.suppress(SwarmError):
                        await self._peer.caller.call(victim.peer.contact, STORE, request, timeout_s=_CALL_S)
            await asyncio.sleep(_RECORDS_S)

    def _record(self, identity: SeededIdentity, value: bytes, now_us: int) -> Record:
        key, writer = Key(f"run.{RUN}", "progress"), identity.peer_id
        record = made_record(key, value, writer, now_us, ttl_s=_RECORD_TTL_S, subkey=str(writer))
        return signed(record, identity)


def run_attack(attack: Attack) -> AttackFigures:
    """Run one attack in virtual time."""
    with collector_off(), remembered_signatures():
        return run_virtual(_AttackRun(attack).main())


class _AttackRun:
    """State of one attack in progress."""

    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        self._network = SimulatedNetwork(attack.seed, LinkConfig(delay_s=0.03, jitter=0.5))
        self._violations = Violations()
        self._ledger = HistoryLedger(self._violations)
        self._bad = frozenset[PeerId]()
        self._victim: PeerId | None = None
        self._rounds_failed = self._blamed = 0
        self._members = frozenset[PeerId]()

    async def main(self) -> AttackFigures:
        attack, loop = self._attack, asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            swarm = self._swarm = TrainingSwarm(self._network, self._config(), self._on_step, group)
            for _ in range(attack.members):
                await swarm.add(batch=attack.batch, compute_s=attack.compute_s)
            await self._found(attack.calm_s)
            began_s, self._members = loop.time(), frozenset(swarm.live)
            if attack.victim_is_new:
                await swarm.add(batch=attack.batch, compute_s=attack.compute_s)
            peers = [self._network.peer() for _ in range(attack.strangers)]
            strangers = [group.create_task(self._strange(peer)) for peer in peers]
            if attack.writers:
                writer = RecordWriter(self._network.peer(), attack.writers)
                strangers.append(group.create_task(writer.run(self._honest)))
            if attack.sabotage != "none":
                self._turn_bad()
            for number in itertools.count(1):
                await asyncio.sleep(2.0)
                if number % 15 == 0:
                    gc.collect()
                if loop.time() >= began_s + attack.minutes * 60.0:
                    break
            self._blamed = self._faults()
            for one in strangers:
                one.cancel()
            await swarm.close()
        assert not self._violations.count, self._violations.lines
        return self._figures(began_s)

    async def _found(self, calm_s: float) -> None:
        """Train in short epochs until no stranger becomes an elector at once any more, then in long ones."""
        while len(self._ledger.certificates) <= FOUNDING_MAX:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(1.0)
        attack = self._attack
        for one in self._honest():
            assert one.optimizer is not None
            one.optimizer.set_target(round(attack.batch / attack.compute_s * attack.members * attack.epoch_s))
        await asyncio.sleep(calm_s)

    def _config(self) -> TrainingConfig:
        target = self._attack.batch * self._attack.members
        return TrainingConfig(target_batch_size=target, elements=self._attack.elements)

    def _electors(self, electors: Sequence[PeerId]) -> tuple[int, ...]:
        return tuple(peer.index for peer in self._network.peers.values() if peer.peer_id in electors)

    def _honest(self) -> list[TrainingPeer]:
        return [one for peer, one in self._swarm.live.items() if peer not in self._bad]

    def _on_step(self, one: TrainingPeer, report: StepReport, seconds: float) -> None:
        if one.peer.peer_id not in self._bad:
            self._rounds_failed += report.rounds_failed
            self._ledger.read(one, asyncio.get_running_loop().time())

    def _turn_bad(self) -> None:
        """Make the most senior members except the first hostile; their victim is the most junior of the
        others.
        """
        everybody = list(self._swarm.live.values())
        bad = everybody[1 : 1 + self._attack.bad]
        self._bad = frozenset(one.peer.peer_id for one in bad)
        self._victim = next(peer for peer in reversed(self._swarm.live) if peer not in self._bad)
        for one in bad:
            Saboteur(one, self._attack.sabotage, self._victim).begin()

    def _faults(self) -> int:
        """Return how many faults of honest members are in the ledgers of honest members."""
        honest = {one.peer.peer_id for one in self._honest()}
        found = 0
        for one in self._honest():
            optimizer: Any = one.optimizer
            ledger: MemberLedger = optimizer._averager._epoch_averager._groups.ledger._ledger
            found += sum(entry.faults for peer in honest if (entry := ledger.entry(peer)) is not None)
        return found

    async def _strange(self, peer: SimulatedPeer) -> None:
        await Stranger(peer, self._honest).run([one.peer.contact for one in self._honest()])

    def _figures(self, began_s: float) -> AttackFigures:
        committed = sorted(
            (committed_s, self._ledger.certificates[head])
            for head, committed_s in self._ledger.committed_s.items()
            if self._ledger.certificates[head].proposal.kind is RoundKind.EPOCH and committed_s >= began_s
        )
        free = min(self._attack.rounds_free, len(committed))
        counted, since_s = committed[free:], committed[free - 1][0] if free else began_s
        contributors = [one.proposal.contributors for _, one in committed]
        return AttackFigures(
            epochs_per_minute=60.0 * len(counted) / max(counted[-1][0] - since_s, 1.0) if counted else 0.0,
            epochs=len(counted),
            rounds_failed=self._rounds_failed,
            by_stranger=sum(not self._members.issuperset(peers) for peers in contributors),
            excluded=sum(self._bad.isdisjoint(peers) for peers in contributors),
            without_victim=sum(self._victim not in peers for peers in contributors[free:]),
            blamed=self._blamed,
            electors=self._electors(committed[-1][1].electors) if committed else (),
        )
