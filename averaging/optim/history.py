"""The history of one optimizer's state: what it may commit, which histories of other peers it follows, and
the calls that exchange certificates.

Decisions are in `averaging.history`; this module holds them under a lock, signs, and talks to other peers.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from averaging.history.ahead import Ahead, still_ahead, what_to_follow, work_kept
from averaging.history.certificate import DIGEST_BYTES, Certificate, Proposal, RoundKind, goodbye_statement
from averaging.history.chain import Chain, Relation
from averaging.history.grace import SleepWatch
from averaging.history.known_heads import STRANGE_HEADS_MAX, STRANGE_PAUSE_S, KnownHeads
from averaging.history.lineage import Lineage
from averaging.history.offers import Offers
from averaging.history.round_lineage import RoundLineage
from averaging.optim.exchange import ShownHistory, ask_holders, fetch_history, history_reply, voters_at_head
from averaging.optim.peer_node import PeerNode
from averaging.optim.seats import SwarmSize
from averaging.run_ledger import RunLedger
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import Contact, PeerId
from swarm.core.notify import ChangeEvent
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

_PROBE_INTERVAL_S = 1.0  # interval at which missing electors are looked for
_FETCHES_MAX = 8  # histories fetched at once


class RunHistory:
    """The history of one optimizer. Methods without `async` may be called from any thread."""

    def __init__(
        self,
        node: PeerNode,
        run: str,
        sign: Callable[[bytes], bytes],
        *,
        group_size_max: int,
        introducers: Sequence[PeerId] = (),
        ledger: RunLedger | None = None,
    ) -> None:
        """`sign` signs as this node. `group_size_max`: peers in one round; a larger swarm uses the grid.
        `introducers`: the peers that the user named, in their order. `ledger` counts certificates."""
        self._node, self._run, self.own, self._sign = node, run, node.contact.peer_id, sign
        self.ledger = ledger or RunLedger(self.own, run, node.clock, node.standing)
        self.size = SwarmSize(self.own, group_size_max)
        self._lock, self._comparing, self._wake = threading.Lock(), asyncio.Lock(), ChangeEvent()
        self._lineage = Lineage(run, self.own, node.standing.founding_of(run))
        self._left: Lineage | None = None  # the lineage that `follow` replaced
        self._ahead: Ahead | None = None
        self._heads, self._rounds = KnownHeads(), 0  # `_rounds`: groups of this peer that begin or run
        self._offers = Offers(introducers, lambda: node.dht.service.companions.named_by(run, introducers))
        self._asked: dict[PeerId, Contact] = {}  # peers to ask for their history
        self._is_break = self.waits_briefly = False  # `waits_briefly`: there is no peer to wait for
        self._epoch_s = 0.0  # length of an epoch at the last quorum check
        # `_has_left`: this peer said goodbye and does not vote any more
        self._probed_s, self._has_left = -1e9, False
        self._sleep = SleepWatch(node.clock.swarm_s)
        self.removed = frozenset[PeerId]()  # removed by the run's owner: not waited for; replaced as a whole
        self.has_parted = False  # the history that was followed last is one without this peer's own work
        self.has_counted = False  # a round in it that failed here has this peer's values
        self._strange: list[list[Contact]] = []  # for each head that strangers report, the peers to ask

    # ---- this peer's state

    @property
    def grid_rounds(self) -> int:
        """Return how many rounds the present epoch has; 1: one round covers the whole swarm."""
        return self.size.rounds(self.root)

    def seats(self) -> int:
        """Return `SwarmSize.seats` for this peer's head."""
        return self.size.seats(self.root, is_break=self.is_break)

    @property
    def head(self) -> bytes:
        """Return the head of this peer's history, 32 bytes."""
        with self._lock:
            return self._lineage.head

    @property
    def root(self) -> Chain:
        """Return the empty chain that begins at this peer's head: head, electors and epoch, for the state."""
        with self._lock:
            return self._lineage.present()

    def past(self, heads: Sequence[bytes] = ()) -> Chain:
        """Return `Lineage.chain` of this peer's own state, not of a history that it follows."""
        with self._lock:
            return (self._left or self._lineage).chain(heads)

    @property
    def has_begun(self) -> bool:
        """Return whether there is a certificate before this peer's head."""
        with self._lock:
            return self._lineage.has_begun

    def electors(self) -> list[PeerId]:
        """Return the electors of the head that this peer has or should follow, without those at others."""
        with self._lock:
            elsewhere = self._heads.elsewhere(self._lineage.knows, (self._left or self._lineage).knows)
            return [peer for peer in (self._ahead or self._lineage).electors if peer not in elsewhere]

    @property
    def abstains(self) -> bool:
        """Return whether this peer takes no part in decisions on its head, since it was restored."""
        with self._lock:
            return self._lineage.abstains

    @property
    def is_bound(self) -> bool:
        """Return whether this peer cannot vote on its head before it learns how an earlier attempt ended."""
        with self._lock:
            return self._lineage.is_bound

    @property
    def is_promised(self) -> bool:
        """Return whether a vote of this peer on its head may still become a certificate."""
        with self._lock:
            return self._lineage.is_promised

    @property
    def certified_epoch(self) -> int:
        """Return the epoch that certificates prove, of this history or of one that it should follow."""
        with self._lock:
            return max(self._lineage.epoch, self._ahead.chain.epoch if self._ahead is not None else 0)

    def round_key(self, epoch: int, part: str = "") -> str:
        """Return the key under which peers of the same history meet for a round, or for a part of one."""
        with self._lock:
            suffix = f"{' break' if self._is_break else ''}{f' {part}' if part else ''}"
            return f"{epoch} {self._lineage.head.hex()[:32]}{suffix}"

    def round(self, kind: RoundKind, epoch: int, key: str, *, seats: int = 0) -> RoundLineage:
        """Return the `RoundLineage` of a round that extends this history. `key`: from `round_key`."""
        with self._lock:
            return RoundLineage(
                run=self._run,
                key=key,
                head=self._lineage.head,
                epoch=epoch,
                kind=kind,
                electors=self._lineage.electors,
                register=self._lineage.register,
                new_hour=self._lineage.growth.is_over(self._node.clock.monotonic_s()),
                goodbyes=dict(self._lineage.goodbyes),
                is_break=self._is_break,
                seats=seats,
                grid_rounds=self.size.rounds_wanted,
                peers=self.size.peers,
                may_begin=self._may_begin,
                ended=self._round_ended,
                may_vote=self.may_vote,
                release=self._release,
                leave=self.leave,
                find_contact=self._find_contact,
            )

    def commit(self, certificate: Certificate) -> None:
        """Extend the history with the certificate of this peer's round. Raise PeerError for another head."""
        with self._lock:
            self._lineage.extend(certificate)
            self._moved()

    def commit_alone(self, epoch: int, kind: RoundKind, samples: Sequence[int] = ()) -> None:
        """Extend the history with a step of this peer alone, if it `may_commit_alone`."""
        with self._lock:
            is_break, group_id = not self._lineage.has_quorum(()), self._node.rng.randbytes(DIGEST_BYTES)
            alone = self._lineage.alone(
                epoch=epoch, kind=kind, group_id=group_id, is_break=is_break, sign=self._sign, samples=samples
            )
            self._lineage.extend(alone)
            self._moved()

    def restore(self, past: Chain) -> None:
        """Continue from a checkpoint's chain, which tells where it parted from other histories."""
        valid = past.valid_part(self._run)  # checks signatures: not under the lock, for which the loop waits
        with self._lock:
            self._lineage.adopt(valid)
            self._ahead = None
            self._heads.reconsider()
            self._moved()

    def ask(self, contact: Contact) -> None:
        """Ask a peer soon for the part of its history that follows this peer's head."""
        with self._lock:
            self._asked[contact.peer_id] = contact
        self._node.network.loop.call_soon_threadsafe(self._wake.notify)

    def lacks_certificate(self, now_s: float) -> None:
        """Record that the electors do not certify what the cells have averaged, as `seek_quorum` does."""
        with self._lock:
            self._is_break = self._lineage.may_break(now_s, 0.0)

    def seek_quorum(self, present: Iterable[PeerId], now_s: float, epoch_s: float) -> bool:
        """Return whether this peer may try to commit: with the peers that are `present`, or after the grace,
        with a break. Call it every second or so while it may not.

        `present`: peers that report the same head and vote; `now_s`: monotonic clock; `epoch_s`: of an epoch.
        """
        with self._lock:
            lineage, present, self._epoch_s = self._lineage, set(present), epoch_s
            if self._sleep.has_slept():
                lineage.wake()
            if lineage.has_quorum(present):
                lineage.found_quorum()
                self._is_break = False
                return True
            missing = {*lineage.electors} - {self.own, *present, *self.removed, *lineage.goodbyes}
            knows_others = self._node.peers() or self._offers.introducers  # and may be cut off
            self.waits_briefly = not knows_others or all(map(self._heads.is_gone, missing))
            self._is_break = may = lineage.may_break(now_s, epoch_s, refused=self.waits_briefly)
        if now_s - self._probed_s >= _PROBE_INTERVAL_S:
            self._probed_s = now_s
            self._node.network.loop.call_soon_threadsafe(self._wake.notify)
        return may

    def keep_waiting(self, present: Iterable[PeerId], now_s: float) -> bool:
        """Count the grace while the trainer computes; return whether it is over. As `seek_quorum`."""
        with self._lock:
            waits = self._lineage.is_waiting and not self._lineage.has_quorum(set(present))
            return waits and self._lineage.may_break(now_s, self._epoch_s)

    @property
    def is_break(self) -> bool:
        """Return whether this peer's next commit will be a break: it has waited for a quorum in vain."""
        return self._is_break

    @property
    def may_commit_alone(self) -> bool:
        """Return whether this peer is a quorum by itself, or has waited for one in vain."""
        with self._lock:
            return self._is_break or self._lineage.has_quorum(())

    def quorum_text(self) -> str:
        """Return a sentence about the quorum that this peer waits for, for people."""
        with self._lock:
            return self._lineage.waiting_text()

    def farewell(self) -> bytes:
        """Return the signed promise of a peer that leaves not to vote on this head; empty: it may not."""
        with self._lock:
            if not self._lineage.may_say_goodbye():
                return b""
            self._has_left = True
            statement = goodbye_statement(self._run, self._lineage.head)
        return self._sign(statement)

    def on_goodbye(self, peer: PeerId, signature: bytes) -> None:
        """Count an elector as gone, as soon as this peer has the head that it signed for."""
        with self._lock:
            self._lineage.take_goodbye(peer, signature)

    # ---- other histories

    @property
    def ahead(self) -> Ahead | None:
        """Return the history that this peer should follow, if there is one."""
        return self._ahead

    def is_new(self, peer: PeerId, head: bytes) -> bool:
        """Return whether this head of a peer that counts was not compared with this peer's history yet."""
        with self._lock:
            return bool(head) and self._is_open(head) and self._counts(peer)

    def follow(self, ahead: Ahead) -> None:
        """Continue the history of others from now on, because this peer is about to load a state of it."""
        with self._lock:
            self._left = self._left or self._lineage
            self._lineage = copy.deepcopy(self._lineage)
            self._lineage.adopt(ahead.chain)
            self._moved()

    async def follow_to(self, head: bytes, epoch: int, donors: Iterable[PeerId]) -> bool:
        """Follow the swarm's history up to the head of a state that was downloaded, which may be further than
        what this peer knew when it began to follow. Return whether that head is in the history, and only
        rounds of epochs follow it. Raise PeerError when the state there is not of this epoch.
        """
        if not self.knows(head):
            with self._lock:
                contacts = self._heads.contacts(donors)
            await ask_holders([[one] for one in contacts], _FETCHES_MAX, self._fetch)
            if (ahead := self.ahead) is not None and (chain := ahead.chain.until(head)) is not None:
                self.follow(replace(ahead, chain=chain))
        with self._lock:
            certified, repeatable = self._lineage.epoch_at(head), self._lineage.is_repeatable(head)
        if certified not in (None, epoch):
            raise PeerError(f"the state claims epoch {epoch}, and its certificate says {certified}")
        return certified is not None and repeatable

    def keep_up(self) -> None:
        """Follow the swarm's history, if it continued, on behalf of a peer that has no state."""
        if (ahead := self.ahead) is not None:
            self.follow(ahead)
            self.settle()

    def unfollow(self) -> None:
        """Return to the history before `follow`, unless the other one's state was loaded whole (`settle`)."""
        with self._lock:
            if self._left is not None:
                self.has_parted, self.has_counted = work_kept(self._left, self._lineage, self.own)
                self._lineage, self._left = self._left, None

    def forget(self, peer: PeerId) -> None:
        """Forget what a peer reported: it is banned, or gone."""
        with self._lock:
            self._heads.forget(peer)
            self._offers.forget(peer)
            if self._ahead and self._ahead.contact.peer_id == peer:
                self._ahead = None

    def stay(self) -> None:
        """Stop following: nobody has a state of that history."""
        with self._lock:
            if self._ahead is not None:
                self._heads.dismiss(self._ahead.chain.last_head)
            self._ahead = None
            self._offers.clear()

    def knows(self, head: bytes) -> bool:
        """Return whether this head is in the history that this peer follows."""
        with self._lock:
            return self._lineage.knows(head)

    def settle(self) -> None:
        """Note that the state of the followed history was loaded."""
        with self._lock:
            left, self._left = self._left or self._lineage, None
            self.has_parted, self.has_counted = work_kept(left, self._lineage, self.own)
            self._heads.reconsider()

    def _moved(self) -> None:
        self._offers.clear()
        self.ledger.follow(self._lineage)
        self._is_break = False
        self._ahead = still_ahead(self._ahead, self._lineage)

    # ---- the network thread

    def heard(self, contact: Contact, head: bytes) -> None:
        """Record the head that another peer reports. If it is unknown, its history is compared soon."""
        if not head:
            return
        with self._lock:
            self._heads.heard(contact, head, self._node.clock.monotonic_s(), self._counts)
            if self._is_open(head):
                self._wake.notify()

    def _is_open(self, head: bytes) -> bool:
        """Return whether this head must still be compared. The lock is held."""
        if self._lineage.knows(head) or (self._ahead is not None and self._ahead.chain.last_head == head):
            return False
        return self._lineage.is_waiting or not (self._heads.is_dismissed(head) or self._offers.has(head))

    def _counts(self, peer: PeerId) -> bool:
        """Return whether this peer waits for another one's history. The lock is held."""
        has_standing = not self._lineage.has_begun or self.ledger.has_standing(peer)
        return has_standing or peer in self._lineage.electors or peer in self._offers.introducers

    async def run(self) -> None:
        """Fetch and compare the histories of others, until cancelled. Strangers delay nothing."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_sleep())
            comparing: asyncio.Task[None] | None = None
            while True:
                await self._wake.wait()
                await self.compare()
                if self._strange and (comparing is None or comparing.done()):
                    comparing = tasks.create_task(
                        ask_holders(self._strange, STRANGE_HEADS_MAX, self._fetch, pause_s=STRANGE_PAUSE_S)
                    )

    async def _watch_sleep(self) -> None:
        while True:
            await asyncio.sleep(SleepWatch.TICK_S)
            with self._lock:
                if self._sleep.has_slept():
                    self._lineage.wake()

    async def compare(self) -> None:
        """Fetch the histories of peers that report unknown heads, and look for electors that are missing."""
        async with self._comparing:
            with self._lock:
                now_s, head = self._node.clock.monotonic_s(), self._lineage.head
                needed = self._offers.to_ask(self._lineage, self._heads.reported(now_s))
                holders, self._strange = self._heads.to_ask(needed, self._is_open, self._counts, head, now_s)
                holders += [[one] for one in self._asked.values() if one.is_callable]
                self._asked.clear()
            await ask_holders(holders, _FETCHES_MAX, self._fetch)
            with self._lock:
                voices = self._heads.reported(self._node.clock.monotonic_s())
                chosen = self._offers.choose(self._lineage, voices)
                if chosen is not None and (self._ahead is None or self._ahead.chain != chosen.chain):
                    self._ahead = chosen
                    _log.info("of %s this peer follows that in epoch %d", self._offers, chosen.chain.epoch)

    async def _fetch(self, contact: Contact) -> bool:
        """Fetch a peer's history and compare it. Return whether the peer has answered."""
        with self._lock:
            heads = self._lineage.heads()
        try:
            shown = await fetch_history(self._node.channels, self._run, contact, heads)
            with self._lock:
                self._heads.answered(contact.peer_id)
            self._judge(contact, shown)
            return True
        except NetworkError as error:
            refused = "connection refused" in str(error).lower()
            with self._lock:
                self._heads.missed(contact.peer_id, self._node.clock.monotonic_s(), refused=refused)
        except PeerError as error:
            _log.info("peer %s has no history that can be compared: %s", contact.peer_id, error)
        return False

    def _judge(self, contact: Contact, shown: ShownHistory) -> None:
        with self._lock:
            relation = self._lineage.relation(chain := shown.chain)
            if relation is Relation.SAME:
                for peer, signature in shown.goodbyes.items():
                    self._lineage.take_goodbye(peer, signature, early=False)
            if self._offers.takes(relation, self._lineage, chain, contact):
                return
            if found := what_to_follow(relation, self._lineage, chain, contact, breaks=self._is_break):
                if self._ahead is None or self._ahead.chain.epoch <= chain.epoch:
                    self._ahead = found
            elif relation in (Relation.LOSES, Relation.UNRELATED):
                self._heads.dismiss(chain.last_head)

    async def on_history(self, peer: PeerId, request: state_pb2.HistoryRequest) -> state_pb2.HistoryReply:
        """Answer with the part of this peer's history that the caller lacks."""
        chain = self.past(list(request.heads))
        with self._lock:
            lineage, is_elsewhere = self._left or self._lineage, self._has_left or self._left is not None
            abstains = is_elsewhere or lineage.abstains or lineage.is_promised
            goodbyes = dict(lineage.goodbyes)
        return history_reply(chain, goodbyes, declines=abstains or self._rounds > 0, abstains=abstains)

    async def _may_begin(self, contributors: Sequence[PeerId], members: Collection[PeerId]) -> str:
        """Return why a group of these contributors and members, and other electors, cannot commit; or "".
        Then its round begins.

        An elector in a round of another group votes for no other one before that has ended: each of two
        groups would wait for the vote of the other one's member until the grace was over.
        """
        self._rounds, reason = self._rounds + 1, "the round was cancelled"
        try:
            reason = await self._lacks_voters(contributors, members)
        finally:
            self._rounds -= bool(reason)
        return reason

    def _round_ended(self) -> None:
        self._rounds -= 1

    async def _lacks_voters(self, contributors: Sequence[PeerId], members: Collection[PeerId]) -> str:
        with self._lock:
            if self._is_break or self._lineage.has_quorum(contributors):
                return ""
            head, electors = self._lineage.head, {*self._lineage.electors}
            missing = self._heads.contacts(electors.difference(contributors, [self.own]))
        present = {self.own, *contributors}
        present |= await voters_at_head(self._node.channels, self._run, missing, head, members)
        with self._lock:
            return "" if self._lineage.has_quorum(present) else self._lineage.lacking_text(present)

    def may_vote(self, proposal: Proposal, result: bytes, *, outside: bool = False) -> str:
        """Return why this peer must not vote so; "" once it has promised to. `outside`: of the group."""
        if self._has_left:
            return "this peer leaves the run"
        with self._lock:
            now_s = self._node.clock.monotonic_s()
            if proposal.new_hour and result and self._lineage.growth.is_too_early(now_s, outside=outside):
                return "it admits further electors before an hour has passed"
            reason = self._lineage.refusal(proposal, result, outside=outside)
            if not reason:
                self._lineage.promise(proposal, result, outside=outside)
            return reason

    def _release(self, proposal: Proposal) -> None:
        with self._lock:
            self._lineage.release(proposal)

    def leave(self, proposal: Proposal | None) -> bool:
        """Return `Lineage.leave`. With None no round of this peer may be running."""
        with self._lock:
            return self._lineage.leave(proposal)

    async def _find_contact(self, peer: PeerId) -> Contact | None:
        with self._lock:
            return next(iter(self._heads.contacts([peer])), None)
