"""What one search for a group knows about the other peers: who should come, where each stands, who may lead,
whom it still waits for.

Pure bookkeeping for `averaging.matchmaking.logic.matchmaking`; time is a parameter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.messages import (
    Answer,
    Holder,
    Leader,
    LookForGroup,
    PeerStatus,
    Rank,
    SearchFailed,
)
from swarm.core.backoff import backoff_s
from swarm.core.ids import Contact, PeerId

PEERS_MAX = 1024  # remembered in one search
_AVOID_FIRST_S = 0.02  # a leader that refused is asked again after this, doubled with each refusal
_AVOID_MAX_S = 1.0
# a peer that is seeking and ranks after us is about to join; longer than this it is not waited for
_JOIN_WAIT_S = 1.0
# a follower notices within this that its leader is dead: its ping interval, the ping's timeout, and a little
_LEADER_LOSS_S = 2.0
_BUSY_MAX_S = 3600.0
_CLOCK_OFF_NOTED_S = 3.0
_NAMES_MAX = 3


@dataclass(slots=True)
class PeerState:
    """One other peer, as this search knows it."""

    contact: Contact
    expected: bool = False  # it holds the averager by its presence record
    standing: PeerStatus | None = None  # None: not heard in this search
    round_key: str = ""
    rank: Rank | None = None
    can_lead: bool = True
    follows: Leader | None = None
    busy_until_s: float = -math.inf
    heard_s: float = -math.inf
    turn: int = 0  # of what it said last about itself: what it said before may arrive after it
    asked_s: float = -math.inf
    asking: bool = False
    failed: str = ""  # why the last call to it failed; "" when it did not
    failures: int = 0  # in a row
    refusals: int = 0
    avoid_until_s: float = -math.inf
    was_seeking: bool = False  # at some time in this search, under our key
    seeking_since_s: float = -math.inf  # with this rank
    text: str = ""
    clock_off_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTableConfig:
    # holders that one search asks; all searches of a round ask the same ones. Too small: groups split; too
    # large: traffic grows with N²
    seek_peers_max: int = 64
    # a peer that is not there yet is asked again after this. It tells us itself when it starts: this mends
    # lost messages
    seek_again_s: float = 0.5
    failed_again_s: float = 2.0  # the same for a peer that did not answer twice
    # the same for one that did not answer once: one failed call is not yet a dead peer
    mistrust_s: float = 0.2


class PeerTable:
    def __init__(
        self, *, seek: LookForGroup, started_s: float, patience: GracePeriod, config: PeerTableConfig
    ) -> None:
        self.seek = seek
        self.started_s = started_s
        self.free_s = started_s  # since when we follow nobody, and could lead
        self.peers: dict[PeerId, PeerState] = {}
        self._patience = patience
        self._config = config

    # --- what is heard

    def on_holders(self, holders: Mapping[PeerId, Holder], unreachable: Iterable[PeerId]) -> None:
        """Take in the presence records; of very many holders, the ones that everybody chooses under this
        round key.
        """
        chosen = sorted(holders, key=self._lot)[: self._config.seek_peers_max]
        suspects = set(unreachable)
        for peer_id in [
            peer_id for peer_id, peer in self.peers.items() if peer.expected and peer_id not in holders
        ]:
            self.peers[peer_id].expected = False
            if self.peers[peer_id].standing is None:
                del self.peers[peer_id]
        for peer_id in chosen:
            holder = holders[peer_id]
            peer = self._peer(holder.contact)
            if peer is None:
                return
            peer.expected = True
            if peer.standing is None:
                peer.can_lead = bool(holder.contact.addresses)
                if holder.schema != self.seek.schema:
                    peer.standing, peer.text = PeerStatus.REFUSED, holder.schema_text
                elif peer_id in suspects and not peer.failed:
                    peer.failed = "it did not answer a moment ago"

    def on_seek(self, seek: LookForGroup, now_s: float) -> None:
        """A peer said that it is looking."""
        peer = self._peer(seek.contact)
        if peer is None:
            return
        peer.contact = seek.contact
        if not self._heard(peer, seek.turn, now_s, seek.clock_off_s):
            return
        if seek.schema != self.seek.schema:
            peer.standing, peer.text = PeerStatus.REFUSED, seek.schema_text
            return
        self._seeking(peer, seek.rank, seek.round_key, seek.can_lead, now_s)

    def on_answer(self, peer_id: PeerId, answer: Answer, now_s: float) -> bool:
        """A peer said where it stands, in answer to a Seek or to a Join. False: its newer word overtook this
        one.
        """
        peer = self.peers.get(peer_id)
        if peer is None:
            return False
        peer.asking = False
        if not self._heard(peer, answer.turn, now_s, answer.clock_off_s):
            return False
        peer.text, peer.round_key, peer.follows = answer.text, answer.round_key, None
        if answer.standing is PeerStatus.SEEKING:
            self._seeking(peer, Rank(answer.deadline_s, peer_id), answer.round_key, answer.can_lead, now_s)
            return True
        peer.standing = answer.standing
        if answer.standing is PeerStatus.BUSY:
            peer.busy_until_s = now_s + min(max(answer.expected_s, 0.0), _BUSY_MAX_S)
            for member in answer.members:
                self._taken(self.peers.get(member), peer)
        if answer.standing is PeerStatus.FOLLOWING and answer.leader is not None:
            peer.follows = answer.leader
            if peer.rank is None or peer.rank.deadline_s != answer.deadline_s:
                peer.seeking_since_s = now_s
            peer.rank = Rank(answer.deadline_s, peer_id)
            peer.was_seeking = peer.was_seeking or answer.round_key == self.seek.round_key
            if answer.round_key == self.seek.round_key:
                self._hearsay(answer.leader, now_s)
        return True

    def on_failure(self, peer_id: PeerId, text: str) -> None:
        if (peer := self.peers.get(peer_id)) is not None:
            peer.asking = False
            peer.failed = text or "no answer"
            peer.failures += 1

    def refused(self, peer_id: PeerId, now_s: float) -> None:
        """It did not lead us: do not ask it again at once, and find out where those stand who may have joined
        it.
        """
        peer = self.peers[peer_id]
        peer.refusals += 1
        peer.avoid_until_s = now_s + backoff_s(peer.refusals, _AVOID_FIRST_S, _AVOID_MAX_S)
        for other in self.peers.values():
            if other.standing in (PeerStatus.SEEKING, PeerStatus.FOLLOWING):
                other.asked_s = -math.inf

    # --- what follows from it

    def to_ask(
        self, now_s: float, busy_with: Callable[[PeerId], bool], *, first_only: bool
    ) -> list[PeerState]:
        """Whom to send a Seek now; they are marked as asked. `first_only`: only who has not been asked at
        all.
        """
        due = []
        for peer_id, peer in self.peers.items():
            if first_only and peer.asked_s > -math.inf:
                continue
            if (
                peer.contact.addresses
                and not peer.asking
                and not busy_with(peer_id)
                and now_s >= self._ask_at_s(peer)
            ):
                peer.asking, peer.asked_s = True, now_s
                due.append(peer)
        return due

    def next_ask_s(self, busy_with: Callable[[PeerId], bool]) -> float:
        times = [
            self._ask_at_s(p)
            for peer_id, p in self.peers.items()
            if p.contact.addresses and not p.asking and not busy_with(peer_id)
        ]
        return min(times, default=math.inf)

    def best_leader(self, now_s: float) -> PeerState | None:
        """The lowest rank among those who are looking under our key, can lead, and rank before us."""
        best: PeerState | None = None
        for peer in self.peers.values():
            if not self._may_lead(peer) or now_s < peer.avoid_until_s:
                continue
            if best is None or best.rank is None or (peer.rank is not None and peer.rank < best.rank):
                best = peer
        return best

    def next_leader_s(self) -> float:
        """When a leader that refused may be asked again."""
        return min(
            (peer.avoid_until_s for peer in self.peers.values() if self._may_lead(peer)), default=math.inf
        )

    def wait_until_s(self, peer: PeerState) -> float:
        """Until when a group that is large enough waits for this peer; minus infinity when it does not."""
        peer_id = peer.contact.peer_id
        if not self.may_come(peer):
            return -math.inf
        grace_until_s = self.started_s + self._patience.grace_s(peer_id)
        if peer.standing is None:  # asked and not answered yet; what cannot be asked may still come by itself
            return math.inf if peer.contact.addresses else grace_until_s
        same_key = peer.round_key == self.seek.round_key
        if peer.standing is PeerStatus.SEEKING and same_key:
            return max(peer.seeking_since_s, self.free_s) + _JOIN_WAIT_S
        if peer.standing is PeerStatus.FOLLOWING and same_key:
            return self._leaves_s(peer)
        if peer.was_seeking or (peer.standing is PeerStatus.BUSY and same_key and peer.round_key):
            return -math.inf  # it found a group for this round, without us
        if peer.standing is PeerStatus.BUSY:
            return min(
                peer.busy_until_s + self._patience.grace_s(peer_id), self.started_s + 2 * self._patience.max_s
            )
        return grace_until_s

    def _leaves_s(self, peer: PeerState) -> float:
        """By when a peer that follows somebody else comes to us, if it does."""
        # It follows us, and its call is on the way; or its leader hears of us and sends it here; or its
        # leader, which ranks before us, is taken (or we would follow it too), and sends it away: those in a
        # group with it are known to be busy.
        leader = self.peers.get(peer.follows.contact.peer_id) if peer.follows is not None else None
        return max(peer.seeking_since_s, self.free_s) + (
            _LEADER_LOSS_S if leader is not None and leader.failed else _JOIN_WAIT_S
        )

    def may_come(self, peer: PeerState) -> bool:
        """Whether this peer can still be in a group with us."""
        if not self.seek.can_lead and not (peer.can_lead and peer.contact.addresses):
            return False  # two peers that cannot be dialed cannot meet
        return not peer.failed and peer.standing not in (PeerStatus.REFUSED, PeerStatus.PASSED)

    def company(self) -> int:
        """How many others are known who can still be in a group with us."""
        return sum(self.may_come(peer) for peer in self.peers.values())

    def hopeless(self) -> bool:
        """Nobody who is known can be in a group with us any more. A single failed call does not prove that."""
        return not any(
            self.may_come(peer) or (peer.failed and peer.failures < 2) for peer in self.peers.values()
        )

    def observe(self, members: frozenset[PeerId]) -> None:
        """The round begins: remember who was there and who was idle."""
        for peer_id, peer in self.peers.items():
            if (
                peer_id not in members
                and peer.standing is PeerStatus.IDLE
                and not peer.failed
                and not peer.was_seeking
            ):
                self._patience.missed(peer_id)

    def explain(self, deadline: bool) -> SearchFailed:
        """Say in words why there is no group."""
        peers = list(self.peers.values())
        if not peers:
            return SearchFailed(
                reason="alone", detail="no other peer holds this averager, by the presence records in the DHT"
            )
        kinds = {
            "schema": [p for p in peers if not p.failed and p.standing is PeerStatus.REFUSED],
            "passed": [p for p in peers if not p.failed and p.standing is PeerStatus.PASSED],
            "unreachable": [p for p in peers if p.failed],
        }
        hopeless = not deadline or not any(self.may_come(peer) for peer in peers)
        reason = "deadline"
        if hopeless:
            reason = next((kind for kind in ("passed", "schema", "unreachable") if kinds[kind]), "few")
        return SearchFailed(reason=reason, detail=self._sentence(peers, kinds))

    # --- inside

    def _sentence(self, peers: list[PeerState], kinds: dict[str, list[PeerState]]) -> str:
        parts = [
            _count(
                kinds["schema"],
                "has other tensors or another codec",
                lambda p: f"{p.text or 'unknown'}; here {self.seek.schema_text or 'unknown'}",
            ),
            _count(kinds["passed"], f"has finished round {self.seek.round_key!r} without this peer"),
            _count(kinds["unreachable"], "does not answer", lambda p: p.failed),
        ]
        rest = [p for p in peers if self.may_come(p)]
        idle = [p for p in rest if p.standing in (None, PeerStatus.IDLE)]
        elsewhere = [
            p for p in rest if p.standing is PeerStatus.SEEKING and p.round_key != self.seek.round_key
        ]
        taken = [p for p in rest if p.standing in (PeerStatus.BUSY, PeerStatus.FOLLOWING)]
        near = [p for p in rest if p.standing is PeerStatus.SEEKING and p.round_key == self.seek.round_key]
        parts += [
            _count(idle, "holds this averager and is not averaging now"),
            _count(
                elsewhere,
                f"looks for another round than {self.seek.round_key!r}",
                lambda p: repr(p.round_key),
            ),
            _count(taken, "is in a group that was full or begun"),
            _count(near, "was looking too, but no group came about in time"),
            _count(
                [p for p in peers if abs(p.clock_off_s) > _CLOCK_OFF_NOTED_S],
                "has another time",
                lambda p: f"{p.clock_off_s:+.0f} s from ours: check the clocks",
            ),
        ]
        return "; ".join(part for part in parts if part)

    def _lot(self, peer_id: PeerId) -> bytes:
        return hashlib.sha256(self.seek.round_key.encode() + b"\0" + peer_id.public_key).digest()

    def _peer(self, contact: Contact) -> PeerState | None:
        peer = self.peers.get(contact.peer_id)
        if peer is None:
            if contact.peer_id == self.seek.contact.peer_id or len(self.peers) >= PEERS_MAX:
                return None
            peer = self.peers[contact.peer_id] = PeerState(contact=contact)
        return peer

    def _heard(self, peer: PeerState, turn: int, now_s: float, clock_off_s: float) -> bool:
        """It lives; whether what it said is its latest word."""
        peer.heard_s, peer.clock_off_s = now_s, clock_off_s
        peer.failed, peer.failures = "", 0
        latest = turn >= peer.turn
        peer.turn = max(turn, peer.turn)
        return latest

    def _seeking(self, peer: PeerState, rank: Rank, round_key: str, can_lead: bool, now_s: float) -> None:
        # who says that it follows us while we do not hold its call has lost it: its pings do not make it a
        # newcomer
        ours = (
            peer.standing is PeerStatus.FOLLOWING
            and peer.follows is not None
            and peer.follows.contact.peer_id == self.seek.contact.peer_id
        )
        if (
            (peer.standing is not PeerStatus.SEEKING and not ours)
            or peer.rank != rank
            or peer.round_key != round_key
        ):
            peer.refusals, peer.avoid_until_s, peer.seeking_since_s = 0, -math.inf, now_s
        peer.standing, peer.rank, peer.round_key, peer.can_lead = (
            PeerStatus.SEEKING,
            rank,
            round_key,
            can_lead,
        )
        if round_key == self.seek.round_key and not peer.was_seeking:
            peer.was_seeking = True
            self._patience.arrived(peer.contact.peer_id, now_s - self.started_s)

    def _taken(self, member: PeerState | None, teller: PeerState) -> None:
        """By what `teller` says, it is in a round with this peer."""
        if member is None or (
            member.standing is not None and member.round_key == self.seek.round_key != teller.round_key
        ):
            return  # it said itself that it looks for our round: it has ended theirs sooner than `teller`
        if member.standing in (None, PeerStatus.SEEKING, PeerStatus.FOLLOWING):
            member.standing, member.round_key, member.busy_until_s = (
                PeerStatus.BUSY,
                teller.round_key,
                teller.busy_until_s,
            )

    def _hearsay(self, leader: Leader, now_s: float) -> None:
        """Somebody follows this peer. Believed at once when we know nothing better; otherwise it is asked."""
        peer = self._peer(leader.contact)
        if peer is None:
            return
        if peer.standing is None and not peer.failed and not peer.asking:
            peer.standing, peer.rank, peer.round_key = PeerStatus.SEEKING, leader.rank, self.seek.round_key
            peer.seeking_since_s = now_s
        else:
            peer.asked_s = -math.inf

    def _may_lead(self, peer: PeerState) -> bool:
        if (
            peer.standing is not PeerStatus.SEEKING
            or peer.failed
            or not peer.can_lead
            or not peer.contact.addresses
            or peer.rank is None
        ):
            return False
        return peer.round_key == self.seek.round_key and (
            peer.rank < self.seek.rank or not self.seek.can_lead
        )

    def _ask_at_s(self, peer: PeerState) -> float:
        if peer.standing is PeerStatus.REFUSED:
            return (
                peer.asked_s + 8 * self._config.failed_again_s if peer.asked_s > -math.inf else self.started_s
            )
        if peer.failed:
            return peer.asked_s + (
                self._config.mistrust_s if peer.failures <= 1 else self._config.failed_again_s
            )
        return peer.asked_s + self._config.seek_again_s


def _count(peers: list[PeerState], what: str, why: Callable[[PeerState], str] | None = None) -> str:
    """`2 peers (…abcd, …efgh): what: why`, or nothing."""
    if not peers:
        return ""
    names = ", ".join(peer.contact.peer_id.short for peer in peers[:_NAMES_MAX]) + (
        ", …" if len(peers) > _NAMES_MAX else ""
    )
    reasons = sorted({why(peer) for peer in peers[:_NAMES_MAX]}) if why is not None else []
    number = "1 peer" if len(peers) == 1 else f"{len(peers)} peers"
    return f"{number} ({names}) {what if len(peers) == 1 else _plural(what)}" + (
        f" ({', '.join(reasons)})" if reasons else ""
    )


def _plural(what: str) -> str:
    verb, _, rest = what.partition(" ")
    verbs = {"has": "have", "does": "do", "holds": "hold", "looks": "look", "is": "are", "was": "were"}
    return f"{verbs[verb]} {rest}".replace("and is not", "and are not")
