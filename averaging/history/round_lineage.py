"""The link from a round to the history of its run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from averaging.history.certificate import Proposal, RoundKind, genesis
from averaging.history.electors import (
    NEW_REGISTER,
    Register,
    is_quorum,
)
from swarm.core.ids import Contact, PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLineage:
    """The place of a round in the history of its run."""

    run: str
    key: str = ""  # only peers with equal keys meet for the round
    head: bytes  # the head that the round extends
    epoch: int  # epoch of the state after the round
    kind: RoundKind
    electors: tuple[PeerId, ...]  # electors of the head, in order of seniority
    register: Register = NEW_REGISTER  # register of the head
    new_hour: bool = False  # according to this peer's clock, a quarter more electors may be admitted
    goodbyes: Mapping[PeerId, bytes]  # signatures of electors that have left
    is_break: bool = False  # the round commits without a quorum of the electors
    # False: one of several all-reduces of a round, which commits without a quorum; the history only
    # determines whose votes count
    extends: bool = True
    seats: int = 0  # peers that are expected in the electors' cell, where the round is held; 0: it is not
    samples: int = 0  # of this peer in the epoch, in a round of the electors' cell
    grid_rounds: int = 1  # rounds of the next epoch, by this peer's view of the swarm
    peers: int = 0  # in the swarm, as far as this one knows; 0: unknown
    # Given the contributors of a group and all its members, it returns why that group cannot commit, or "".
    may_begin: Callable[[Sequence[PeerId], Collection[PeerId]], Awaitable[str]]
    # Called when a round that `may_begin` allowed has ended here.
    ended: Callable[[], None]
    # Given a proposal and a result (b"": none), it returns why this peer must not vote for it, or "". Since
    # an elector votes once per head, "" is recorded as its vote.
    may_vote: Callable[[Proposal, bytes], str]
    # Called when this attempt can no longer be committed by any peer.
    release: Callable[[Proposal], None]
    # Called when this attempt has ended here with an unknown result. It returns whether the peer's vote in it
    # is still binding.
    leave: Callable[[Proposal], bool]
    # the contact of an elector that is not in the group, to ask it for its vote; None: it is not known
    find_contact: Callable[[PeerId], Awaitable[Contact | None]]

    @property
    def present(self) -> tuple[PeerId, ...]:
        """Return the electors that have not missed the last certificate; all of them if each has. They come
        first in the search for a group: one that is passed over or away neither leads nor is waited for.
        """
        absent = self.register.absent(self.electors)
        return tuple(peer for peer in self.electors if peer not in absent) or self.electors

    def is_quorum_without(self, taken: Collection[PeerId]) -> bool:
        """Return whether the electors of the head, but for those that are `taken`, are a quorum."""
        return is_quorum(self.electors, {*self.electors}.difference(taken), self.goodbyes)

    @property
    def gone(self) -> int:
        """Return the electors that have left with a goodbye, as far as this peer knows: a bit for each
        elector, the lowest for the most senior one.
        """
        return sum(1 << place for place, peer in enumerate(self.electors) if peer in self.goodbyes)

    @property
    def may_be_alone(self) -> bool:
        """Return whether a group of this peer alone may begin: of two peers, the one that is busy with a long
        step signs as an elector. In a larger swarm such groups would compete with those of all others. Before
        the first certificate, and with a break, there is nobody to ask.
        """
        return (
            self.kind is RoundKind.EPOCH
            and self.peers == 2
            and not self.seats
            and self.head != genesis(self.run)
            and not self.is_break
        )
