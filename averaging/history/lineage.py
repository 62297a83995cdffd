"""The lineage of one peer: the history that its state comes from, the promises of its votes, and its relation
to the histories of others. Pure.

A peer without a quorum waits for the grace before it continues by itself with a break, so that a short cut
costs a pause and not a fork. Histories that have parted are united by a rule that is fixed at the moment when
they part, so that identities created later have no influence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from blake3 import blake3

from averaging.history.certificate import (
    Certificate,
    Proposal,
    RoundKind,
    epoch_follows,
    genesis,
    goodbye_statement,
    vote_statement,
)
from averaging.history.chain import Chain, Relation, after, beginning
from averaging.history.electors import (
    FOUNDING_MAX,
    GrowthClock,
    Register,
    electors_after,
    is_quorum,
    leaving,
    seats_of,
)
from averaging.history.grace import Grace
from averaging.history.promises import Promises
from swarm.core.errors import PeerError
from swarm.core.identity import verify
from swarm.core.ids import PeerId
from swarm.core.standing import NO_SPECIFICATION, Founding

# certificates kept; histories that parted for more rounds are compared by their breaks
CERTIFICATES_MAX: Final = 256
PARTINGS_MAX: Final = 8  # heads before breaks that are remembered after their certificates
_DECIDING: Final = "a majority of the {} peers that decide how this run continues"


class Lineage:
    """The history of one peer's state in one run. `now_s` is always a monotonic clock's time in seconds."""

    def __init__(self, run: str, own: PeerId, founding: Founding = NO_SPECIFICATION) -> None:
        """`founding`: how the run begins, as far as this peer knows; others' history may know better."""
        self.run, self.own, self._founding = run, own, founding
        self._root = beginning(run, founding)
        self._certificates: deque[Certificate] = deque(maxlen=CERTIFICATES_MAX)
        self._places: dict[bytes, int] = {}  # number of the certificate that extends each known head
        self._first = 0  # number of the oldest certificate that is kept
        # the empty chains at the heads before breaks whose certificates were dropped
        self._partings: deque[Chain] = deque(maxlen=PARTINGS_MAX)
        self._present: Chain | None = None  # the empty chain at the head, until it moves: asked for often
        self._promises = Promises()  # made by its votes on this head
        self._goodbyes: dict[PeerId, bytes] = {}  # signatures of electors of this head that have left
        self._early_goodbyes: dict[PeerId, bytes] = {}  # signatures of electors for another head than this
        self._grace = Grace()
        # number of the first certificate of this line in which this process took part; no earlier process can
        # have voted on a later head
        self._new_from: int | None = None
        # this head was loaded and may be older: this peer may have voted on it in an earlier process, or
        # others may have continued from it while this process was suspended
        self._restored = False
        self.growth = GrowthClock()

    @property
    def head(self) -> bytes:
        """Return the present head, 32 bytes."""
        return self._certificates[-1].head if self._certificates else self._root.head

    @property
    def electors(self) -> tuple[PeerId, ...]:
        """Return the electors of the present head, the most senior first."""
        return self._certificates[-1].electors if self._certificates else self._root.electors

    @property
    def register(self) -> Register:
        """Return what the present head remembers about the admission of electors."""
        return self._certificates[-1].register if self._certificates else self._root.root_register

    @property
    def knows_founding(self) -> bool:
        """Return whether this peer knows how the run began. A library process that only has a run's id does
        not know whether it has an owner.
        """
        return self._founding != NO_SPECIFICATION

    @property
    def has_begun(self) -> bool:
        """Return whether there is a certificate before the present head."""
        return self.head != genesis(self.run)

    @property
    def epoch(self) -> int:
        """Return the epoch of the state at the present head."""
        return self._certificates[-1].proposal.epoch if self._certificates else self._root.root_epoch

    @property
    def grid_rounds(self) -> int:
        """Return how many rounds the present epoch has; 1: one group has room for the whole swarm."""
        last = self._certificates[-1].proposal if self._certificates else None
        return last.grid_rounds if last is not None else self._root.root_grid_rounds

    @property
    def line(self) -> bytes:
        """Return what tells this history apart from those that it parted from: the head after its last break,
        empty before the first one.
        """
        return self._line_before(len(self._certificates))

    def _line_before(self, index: int) -> bytes:
        for place in reversed(range(index)):
            if self._certificates[place].proposal.is_break:
                return self._certificates[place].head
        return self._root.root_line

    @property
    def is_waiting(self) -> bool:
        """Return whether this peer found no quorum when it last looked for one."""
        return self._grace.is_running

    def knows(self, head: bytes) -> bool:
        """Return whether this head is in the part of the history that is kept."""
        return head == self.head or head in self._places

    def epoch_at(self, head: bytes) -> int | None:
        """Return the epoch of the state at a head of this history; None when it is not known."""
        return self._root_at(head).root_epoch if self.knows(head) else None

    def is_repeatable(self, head: bytes) -> bool:
        """Return whether only rounds of epochs follow this head: those over the state nobody can repeat."""
        return all(one.proposal.kind is RoundKind.EPOCH for one in self.chain([head]).certificates)

    def chain(self, heads: Sequence[bytes] = (), count_max: int = CERTIFICATES_MAX) -> Chain:
        """Return the certificates after the newest of `heads` that is in this history, at most the last
        `count_max`; without such a head the last `count_max` certificates.
        """
        numbers = [self._places[head] for head in heads if head in self._places]
        if self.head in heads:
            numbers.append(self._first + len(self._certificates))
        start = max(max(numbers, default=0) - self._first, len(self._certificates) - count_max, 0)
        certificates = tuple(list(self._certificates)[start:])
        if start == 0:
            return replace(self._root, certificates=certificates)
        root = after(self._certificates[start - 1], self._line_before(start - 1))
        return replace(root, certificates=certificates)

    def present(self) -> Chain:
        """Return the empty chain that begins at the present head."""
        if self._present is None:
            self._present = self.chain((self.head,))
        return self._present

    def partings(self) -> list[Chain]:
        """Return the empty chains at the heads that this history's breaks extend, the newest first. Their
        lines are not filled in.
        """
        kept = [self._root_at(one.proposal.head) for one in self._certificates if one.proposal.is_break]
        return [*self._partings, *kept][: -PARTINGS_MAX - 1 : -1]

    def heads(self) -> list[bytes]:
        """Return heads of this history, the newest first, with growing distances: at most a dozen. Another
        peer finds among them where two histories parted, or a head not far before that.
        """
        known = [self._root.head, *(certificate.head for certificate in self._certificates)]
        found, back = [], 1
        while back <= len(known):
            found.append(known[-back])
            back = back * 2 if back > 1 else 2
        return found if found[-1] == known[0] else [*found, known[0]]

    # ---- changes

    def extend(self, certificate: Certificate) -> None:
        """Take the certificate of a round that this process took part in. Raise PeerError when it extends
        another head. A certificate that others have shown to this peer is adopted, with the state (`adopt`).
        """
        if certificate.proposal.head != self.head:
            raise PeerError("a certificate that extends another head than this peer's")
        self._append(certificate)
        if certificate.proposal.new_hour or certificate.register.at_once:
            self.growth.begin(is_sure=True)
        if self._new_from is None:
            self._new_from = self._places[certificate.proposal.head]
        self._moved(restored=False)

    def adopt(self, chain: Chain) -> None:
        """Continue another history from now on, because this peer loads a state of it. What both share up to
        the newest common head is kept, and only what follows in the chain is taken: `relation` has checked
        it. A chain without a common head replaces everything: check the whole of it before.
        """
        if chain.last_head == self.head:
            return  # promises on this head remain valid
        start = self._last_common(chain)
        if start is not None:
            self._return_to(chain.certificates[start].proposal.head)
        elif self.knows(chain.last_head):
            start = len(chain.certificates)
            self._return_to(chain.last_head)
        else:
            start, self._first, self._new_from = 0, 0, None
            self._root = replace(chain, certificates=())
            for kept in (self._certificates, self._places, self._partings):
                kept.clear()
        if not (self.has_begun or self.knows_founding) and chain.head == self.head:
            self._root = replace(chain, certificates=())
        for certificate in chain.certificates[start:]:
            self._append(certificate)
            if certificate.proposal.new_hour:
                self.growth.begin(is_sure=False)
        self._moved(restored=self._new_from is None)

    def _return_to(self, head: bytes) -> None:
        """Drop the certificates after a known head. This peer may have voted before on what follows it in
        another line, so from here on no head is known to be new.
        """
        if self.head != head:
            self._new_from = None
        while self.head != head:
            dropped = self._certificates.pop()
            del self._places[dropped.proposal.head]

    def _append(self, certificate: Certificate) -> None:
        self._places[certificate.proposal.head] = self._first + len(self._certificates)
        if len(self._certificates) == CERTIFICATES_MAX:
            if self._certificates[0].proposal.is_break:
                self._partings.append(replace(self._root, certificates=()))
            self._root = after(self._certificates[0], self._root.root_line)
            del self._places[self._certificates[0].proposal.head]
            self._first += 1
        self._certificates.append(certificate)

    def _moved(self, *, restored: bool) -> None:
        self._present = None
        self._grace, self._restored = Grace(), restored
        self._promises, self._goodbyes = Promises(), {}
        early, self._early_goodbyes = self._early_goodbyes, {}
        for peer, signature in early.items():
            self.take_goodbye(peer, signature)

    def propose(
        self,
        *,
        epoch: int,
        kind: RoundKind,
        group_id: bytes,
        contributors: Sequence[PeerId],
        is_break: bool,
        new_hour: bool = False,
    ) -> Proposal:
        """Return the proposal of a round of this group on the present head, which has room for the whole
        swarm. Electors whose goodbyes this peer knows leave the list.
        """
        gone = leaving(self.electors, self.register, contributors, self._goodbyes, is_break=is_break)
        electors, register = electors_after(
            self.electors, self.register, contributors, gone=gone, is_break=is_break, new_hour=new_hour
        )
        return Proposal(
            run=self.run,
            head=self.head,
            epoch=epoch,
            kind=kind,
            group_id=group_id,
            contributors=tuple(contributors),
            electors=electors,
            register=register,
            gone=gone,
            new_hour=new_hour,
            is_break=is_break,
        )

    def alone(
        self,
        *,
        epoch: int,
        kind: RoundKind,
        group_id: bytes,
        is_break: bool,
        sign: Callable[[bytes], bytes],
        samples: Sequence[int] = (),
    ) -> Certificate:
        """Return the certificate of a round of this peer alone. The caller has made sure that it is a quorum,
        or that the grace is over.

        `group_id`: 32 random bytes. A process that starts again from an old checkpoint would otherwise come
        to the head of an earlier process, with another state, and could have voted there before.
        """
        own = (self.own,)
        proposal = self.propose(
            epoch=epoch, kind=kind, group_id=group_id, contributors=own, is_break=is_break
        )
        proposal = replace(proposal, samples=tuple(samples))
        result = blake3(b"swarm alone\0" + proposal.digest()).digest()
        signature = sign(vote_statement(proposal.digest(), result))
        return Certificate(
            proposal=proposal, result=result, votes={self.own: signature}, goodbyes=dict(self._goodbyes)
        )

    def refusal(self, proposal: Proposal, result: bytes, *, outside: bool = False) -> str:
        """Return why this peer must not vote for `result` of this proposal (b"": for none); "" when it may.
        Call `promise` before the vote is sent.

        Somebody may hold a certificate for what it voted for before on this head, so it waits until that can
        no longer be (`release`), or continues with a break after the grace.

        An elector that is asked for its vote from `outside` of the group, and has voted in another attempt,
        votes for none: otherwise nobody could tell that the attempts have failed.
        """
        if proposal.run != self.run or proposal.head != self.head:
            return "this peer's history has another head"
        if not proposal.follows(self.electors, self.register):
            return "it names other electors than follow from its contributors"
        if not epoch_follows(proposal, self.epoch):
            return "its epoch does not follow from this peer's history"
        outside = outside or self.own not in proposal.contributors
        if self.abstains and not proposal.is_break and (result or outside):
            return "this peer has restored its state or has slept, and does not vote on this head"
        return self._promises.refusal(proposal, result)

    def promise(self, proposal: Proposal, result: bytes, *, outside: bool = False) -> None:
        """Remember the vote that is about to be sent; `Promises.voted` has the parameters."""
        self._promises = self._promises.voted(proposal, result, outside=outside)

    def leave(self, proposal: Proposal | None) -> bool:
        """Record that this attempt, or any (None), has ended here, and that this peer does not know how it
        ended for others. Return whether its vote there binds it.
        """
        self._promises = self._promises.ended(proposal)
        return self._promises.has_ended if proposal is None else self._promises.binds(proposal)

    def release(self, proposal: Proposal) -> None:
        """Take note that nobody can commit this attempt any more (`Tally.is_dead`)."""
        self._promises = self._promises.released(proposal)

    @property
    def is_bound(self) -> bool:
        """Return whether this peer cannot vote on this head before it learns how an earlier attempt ended."""
        return self._promises.has_ended

    @property
    def is_promised(self) -> bool:
        """Return whether a vote of this peer on this head may still become a certificate."""
        return bool(self._promises.attempt)

    @property
    def abstains(self) -> bool:
        """Return whether this peer takes no part in decisions on this head: it is one of its electors, and
        restored the state from a checkpoint or a donor, so that it does not know how it voted before, or has
        slept.
        """
        return self._restored and self.own in self.electors

    def wake(self) -> None:
        """Record that this process stood still for longer than the shortest grace. Other electors may have
        continued with a break meanwhile. A peer that is a quorum by itself would not ask them: as after a
        restart it takes no part in decisions on this head.
        """
        others = any(peer != self.own and peer not in self._goodbyes for peer in self.electors)
        self._restored = self._restored or (others and self.has_quorum(()))

    # ---- quorums and the grace

    def has_quorum(self, present: Collection[PeerId]) -> bool:
        """Return whether these peers, this one included if it may vote, can commit on the present head."""
        voting = set(present) - {self.own}
        if not (self.abstains or self.is_promised):
            voting.add(self.own)
        return is_quorum(self.electors, voting, self._goodbyes)

    @property
    def goodbyes(self) -> Mapping[PeerId, bytes]:
        """Return the signatures of electors of the present head that have left."""
        return self._goodbyes

    def take_goodbye(self, peer: PeerId, signature: bytes, *, early: bool = True) -> None:
        """Count an elector as gone, now or (`early`) when this peer comes to the head that it signed: one
        that leaves at the end of a round may have committed it a moment earlier.
        """
        if peer in self.electors and peer not in self._goodbyes:
            if verify(peer, goodbye_statement(self.run, self.head), signature):
                self._goodbyes[peer] = signature
            elif early:
                self._early_goodbyes[peer] = signature

    def may_say_goodbye(self) -> bool:
        """Return whether this peer may sign that it does not vote on the present head: it has not voted there
        yet, not even for none. Others may have found that an attempt failed because of its vote; without this
        elector that attempt could have a quorum after all.
        """
        return self.own in self.electors and not (self.is_promised or self._promises.closed or self._restored)

    def found_quorum(self) -> None:
        """Record that a quorum can be reached: the grace begins again."""
        self._grace = Grace()

    def may_break(self, now_s: float, epoch_s: float, *, refused: bool = False) -> bool:
        """Record that there is no quorum, and return whether the grace is over.

        `epoch_s`: how long an epoch takes. `refused`: the hosts of all missing electors refuse connections.
        Call it every second or so while looking for them: longer pauses between two calls do not count.
        """
        return self._grace.is_over(now_s, epoch_s, refused=refused)

    def waiting_text(self) -> str:
        """Return a sentence about the quorum that this peer waits for, for people."""
        waited_s, deciding = self._grace.waited_s, _DECIDING.format(len(self.electors))
        return f"this peer waits for {deciding} ({waited_s:.0f} s so far)"

    def lacking_text(self, present: Collection[PeerId]) -> str:
        """Return why a group cannot commit, when only these electors can be reached."""
        missing = sum(elector not in present for elector in self.electors)
        return f"the group lacks {_DECIDING.format(len(self.electors))}; {missing} cannot be reached"

    # ---- other histories

    def relation(self, chain: Chain) -> Relation:
        """Return how the history that ends with this chain relates to this one. Raise PeerError when it is
        not valid. A certificate with a break after this peer's own head counts only when one of the electors
        made it, and while this peer has no quorum: nobody else may lead it away.
        """
        if chain.last_head == self.head:
            return Relation.SAME
        if self.knows(chain.last_head):
            return Relation.BEHIND
        start = self._last_common(chain)
        if start is None:
            return Relation.UNRELATED
        theirs = chain.certificates[start:]
        common = theirs[0].proposal.head
        root = self._root_at(common)
        is_beginning = common == genesis(self.run)
        if is_beginning and not self.knows_founding and chain.head == common:
            root = replace(chain, certificates=())
        replace(root, certificates=theirs).check(self.run)
        if common == self.head and is_beginning:
            return Relation.AHEAD  # the voices decide whether to follow it
        if common == self.head:
            follows = not theirs[0].proposal.is_break or (
                (self.is_waiting or self.own not in root.electors)
                and any(peer in root.electors for peer in theirs[0].proposal.contributors)
            )
            return Relation.AHEAD if follows else Relation.LOSES
        ours = self._certificates[self._places[common] - self._first]
        electors = () if is_beginning and not self.knows_founding else root.electors
        return Relation.WINS if self._yields(ours, theirs[0], electors, chain.epoch) else Relation.LOSES

    def epochs_after(self, chain: Chain) -> int:
        """Return how many epochs of this history are not part of the one that ends with this chain; 0 where
        no common head is known.
        """
        start = self._last_common(chain)
        if start is None:
            return 0
        common = chain.certificates[start].proposal.head
        if common == self.head:
            return 0
        return max(self.epoch - self._root_at(common).root_epoch, 0)

    def _last_common(self, chain: Chain) -> int | None:
        """Return the index of the first certificate of the chain after the newest common head."""
        for index in reversed(range(len(chain.certificates))):
            if self.knows(chain.certificates[index].proposal.head):
                return index
        return None

    def _root_at(self, head: bytes) -> Chain:
        """Return the empty chain that begins at a known head; its line is not filled in."""
        if head == self.head:
            return self.present()
        place = self._places[head] - self._first
        return after(self._certificates[place - 1], b"") if place else replace(self._root, certificates=())

    def _yields(
        self, ours: Certificate, theirs: Certificate, electors: Sequence[PeerId], their_epoch: int
    ) -> bool:
        """Return whether their history continues, from the certificates with which the two parted.

        The one without a break continues; if both broke, the one with more of the electors, then the one with
        the most senior; the hash decides between liars that signed both. Where no elector took part in either
        (there were none before the first certificate of the run, or all had gone) nothing tells which is
        right: the one that is further continues, as long as this one is young. Later it stays: anybody can
        make a chain from there.
        """
        if electors and ours.proposal.is_break != theirs.proposal.is_break:
            return ours.proposal.is_break
        own_seats, their_seats = (seats_of(one.proposal.contributors, electors) for one in (ours, theirs))
        if own_seats[0] or their_seats[0]:
            return (their_seats, theirs.head) > (own_seats, ours.head)
        since = self._first + len(self._certificates) - self._places[ours.proposal.head]
        return since <= FOUNDING_MAX and (their_epoch, ours.head) > (self.epoch, theirs.head)
