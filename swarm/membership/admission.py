"""Admission: who may do what in an invited run. One object per process; every service asks it.

Each member counts uses for itself: it remembers which PeerIDs it has admitted through each grant of their
capabilities. If there are more than the grant allows, those that signed first stay. Members that have met the
same peers therefore agree. docs/decisions/0031 describes the limits of this.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarm.core.errors import NotInvited
from swarm.core.ids import PeerId
from swarm.core.wording import counted
from swarm.dht.logic.blobs import Handover
from swarm.membership.capability import ROLES, Grant, Grants, Rights, Role, check_rooted
from swarm.membership.invite import RunIdentity

# Roles of which a caller needs one, by the prefix of the method's name. The longest matching prefix counts.
# Methods that are not listed accept any member.
NEEDED_ROLES: dict[str, frozenset[Role]] = {
    "/swarm.Groups/": frozenset({"train", "serve"}),  # servers average the replicas of an expert in groups
    "/swarm.Reduce/": frozenset({"train", "serve"}),
    "/swarm.Expert/": frozenset({"train", "serve"}),
    "/swarm.Expert/Describe": frozenset({"train", "serve", "observe"}),
    "/swarm.Expert/State": frozenset({"train", "serve", "observe"}),  # to download experts
    "/swarm.Run/Report": frozenset({"train"}),
}
# The same for the callee: roles that a peer needs to host experts, serve state or take part in groups.
CALLEE_ROLES: dict[str, frozenset[Role]] = {
    "/swarm.Groups/": frozenset({"train", "serve"}),
    "/swarm.Reduce/": frozenset({"train", "serve"}),
    "/swarm.Expert/": frozenset({"serve"}),
    "/swarm.State/": frozenset({"train"}),
}
# Methods that peers without a capability may call if the grid allows it: forward passes, and those for
# finding experts. `HostingService` decides about backward passes.
GUEST_METHODS = (
    "/swarm.Node/",
    "/swarm.Dht/Ping",
    "/swarm.Dht/Find",
    "/swarm.Expert/Describe",
    "/swarm.Expert/Call",
    "/swarm.Expert/Exchange",
)
# Methods that entry points may call. These are peers that this process, or its inviter, named by address;
# they have no capability.
ENTRY_POINT_METHODS = ("/swarm.Node/", "/swarm.Dht/")
_METHODS_MAX, _METHOD_CHARACTERS_MAX = 64, 64  # remembered for each peer: callers choose the names
_REVOKED = "the owner of the run has revoked this peer's invite"


def _lacking(roles: frozenset[Role], method: str) -> frozenset[Role]:
    """Return the roles of which a caller lacks one for a method; empty if it may call it."""
    fitting = max((prefix for prefix in NEEDED_ROLES if method.startswith(prefix)), key=len, default="")
    needed = NEEDED_ROLES.get(fitting, roles)
    return frozenset() if roles & needed else needed


def _lacking_callee(roles: frozenset[Role], method: str) -> frozenset[Role]:
    """Return the roles of which a callee lacks one for a method; empty if it has one."""
    for prefix, needed in CALLEE_ROLES.items():
        if method.startswith(prefix) and not roles & needed:
            return needed
    return frozenset()


def _owners_rights() -> Rights:
    """Return the rights of an owner. Each owner has its own: they remember the methods that it called."""
    return Rights(roles=frozenset(ROLES), expires_s=math.inf, signed_s=0, grants=())


def _remember(methods: set[str], method: str) -> None:
    """Remember that a peer's roles allow a method: each call asks."""
    if len(methods) < _METHODS_MAX and len(method) <= _METHOD_CHARACTERS_MAX:
        methods.add(method)


@dataclass(slots=True)
class _Uses:
    """The peers that were admitted through one grant: when each signed."""

    expires_s: int
    signed_s: dict[PeerId, int] = field(default_factory=dict)


class Admission:
    """The peers that this process has admitted to one run."""

    def __init__(self, run: RunIdentity) -> None:
        self.run_id, self.owner, self._founder = run.run_id, run.owner, run.founder
        self.handover = run.handover  # the last handover that this process knows
        # peers and invites of the founder whose capabilities the present owner has confirmed; None: all, if
        # this process knows of no handover
        self._confirmed: frozenset[PeerId] | None = None
        self.revoked: frozenset[PeerId] = frozenset()
        self.removed: frozenset[PeerId] = frozenset()  # peers that were admitted before they were revoked
        # rights by holder; the owner is a holder without a capability
        self.standings: dict[PeerId, Rights] = {self.owner: _owners_rights()}
        self._uses: dict[PeerId, _Uses] = {}  # uses by subject of a grant

    @property
    def holders(self) -> Collection[PeerId]:
        """Return a live view of the admitted peers."""
        return self.standings.keys()

    def admit(self, holder: PeerId, grants: Grants, now_s: float) -> None:
        """Check a peer's capability and remember the peer. The owner needs none.

        Raises NotInvited with the reason if the capability is not valid here and now.
        """
        if holder in self._owners:
            return
        known = self.standings.get(holder)
        if known is not None and known.grants == grants and now_s < known.expires_s:
            return
        if not grants:
            raise NotInvited(self._sentence("a peer joins with an invite (swarm1…)"))
        try:
            standing = check_rooted(self.run_id, self._roots_of(grants), grants, now_s)
        except NotInvited as error:
            raise NotInvited(self._sentence(str(error))) from None
        last = grants[-1]
        if last.kind != "peer" or last.subject != holder:
            raise NotInvited(self._sentence("the capability belongs to another peer"))
        if standing.concerns(self.revoked):
            raise NotInvited(self._sentence(_REVOKED))
        self._count(holder, standing, now_s)
        self.standings[holder] = standing

    def refusal(self, caller: PeerId, method: str, now_s: float) -> str:
        """Return why this peer may not call this method; empty if it may."""
        roles = self.roles(caller, now_s)
        if not roles:
            return self._sentence("a peer joins with an invite (swarm1…), which a member makes for it")
        lacking = _lacking(roles, method)
        if lacking:
            return self._sentence(f"this needs the role {' or '.join(sorted(lacking))}")
        _remember(self.standings[caller].may_call, method)
        return ""

    def callee_refusal(self, callee: PeerId, method: str, now_s: float) -> str:
        """Return why this peer must not be called for this method; empty if it may."""
        lacking = _lacking_callee(self.roles(callee, now_s), method)
        if not lacking:
            if callee in self.standings:
                _remember(self.standings[callee].may_answer, method)
            return ""
        needed = " or ".join(sorted(lacking))
        return self._sentence(f"peer {callee} offers a service for which it lacks the role {needed}")

    def roles(self, peer: PeerId, now_s: float) -> frozenset[Role]:
        """Return the roles of a peer; none if it was not admitted, or its capability has expired."""
        standing = self.standings.get(peer)
        if standing is None:
            return frozenset()
        if now_s >= standing.expires_s:
            del self.standings[peer]
            return frozenset()
        return standing.roles

    def hear(self, handover: Handover) -> None:
        """Admit the owner that the recovery key has named in this checked statement, and the peers that it
        invites. All other changes come with the owner's specification (`follow_owner`).
        """
        known = self.handover
        if known is not None and handover.after < known.after:
            return
        if known is not None and known.owner != self.owner:
            self.standings.pop(known.owner, None)
        self.handover = handover
        self.standings[handover.owner] = _owners_rights()
        self.removed -= {handover.owner}
        self.revoked -= {handover.owner}

    def follow_owner(self, run: RunIdentity, confirmed: Iterable[PeerId]) -> None:
        """Follow the owner that the recovery key has named, according to the specification `run`. Of the
        founder's capabilities only those count that the new owner has confirmed: the founder's key may be
        stolen, and a thief can backdate grants.
        """
        owner = run.owner
        if run.handover is not None:
            self.hear(run.handover)
        self._confirmed = frozenset(confirmed) if owner != self._founder else None
        if owner != self.owner:
            self.standings.pop(self.owner, None)
            self.owner = owner
        self.standings |= {owner: _owners_rights() for owner in self._owners}
        for holder, one in list(self.standings.items()):
            if one.grants:
                try:
                    check_rooted(self.run_id, self._roots_of(one.grants), one.grants, one.signed_s)
                except NotInvited:
                    self._forget(holder)
                    self.removed |= {holder}
        if owner != self._founder:
            self.removed |= {self._founder} - self.standings.keys()
        self.removed -= {owner}

    def uses_of(self, subject: PeerId) -> int:
        """Return how many peers this process has admitted through a grant to this peer or invite."""
        uses = self._uses.get(subject)
        return len(uses.signed_s) if uses is not None else 0

    @property
    def first_subjects(self) -> frozenset[PeerId]:
        """Return the peers and invites at the start of the admitted capability chains."""
        return frozenset(one.grants[0].subject for one in self.standings.values() if one.grants)

    def _roots_of(self, grants: Grants) -> list[PeerId]:
        """Return the owners whose signature a capability may begin with."""
        is_lost = self._confirmed is not None and grants[0].subject not in self._confirmed
        founders = [] if is_lost or self._founder in self._owners else [self._founder]
        return [*self._owners, *founders]

    @property
    def _owners(self) -> list[PeerId]:
        """Return the owner whose specification this process follows, and a later owner if it knows one."""
        named = self.handover.owner if self.handover is not None else self.owner
        return list(dict.fromkeys((self.owner, named)))

    def revoke(self, peers: Iterable[PeerId]) -> None:
        """Replace the list of revoked peers and invites, and forget the affected peers."""
        self.revoked = frozenset(peers) - {*self._owners}
        removed = {holder for holder, one in self.standings.items() if one.concerns(self.revoked)}
        for holder in removed:
            self._forget(holder)
        self.removed |= removed

    def problem(self, peer: PeerId, grants: Grants, now_s: float) -> str:
        """Return why a capability would be refused here, without admitting anybody; empty if it would not."""
        if peer in self._owners:
            return ""
        if any(grant.subject in self.revoked for grant in grants):
            return _REVOKED
        if any(now_s >= grant.expires_s for grant in grants):
            return "this peer's invite has expired"
        return ""

    def _count(self, holder: PeerId, standing: Rights, now_s: float) -> None:
        """Take one use of each grant. Raise NotInvited if one has none left for a peer that signed then."""
        self._uses = {subject: uses for subject, uses in self._uses.items() if now_s < uses.expires_s}
        displaced = set()
        for grant in standing.grants:
            uses = self._uses.get(grant.subject)
            if uses is None or holder in uses.signed_s or len(uses.signed_s) < grant.uses:
                continue
            last = max(uses.signed_s, key=lambda peer: (uses.signed_s[peer], peer))
            if (standing.signed_s, holder) > (uses.signed_s[last], last):
                peers = counted(grant.uses, "peer")
                text = (
                    f"this invite was for {peers} and is used up. Ask for another one: each process that "
                    "runs at the same time takes a use"
                )
                raise NotInvited(self._sentence(text))
            displaced.add(last)
        for peer in displaced:
            self._forget(peer)
        for grant in standing.grants:
            self._use(grant, holder, standing.signed_s)

    def _use(self, grant: Grant, holder: PeerId, signed_s: int) -> None:
        uses = self._uses.setdefault(grant.subject, _Uses(grant.expires_s))
        uses.expires_s = max(uses.expires_s, grant.expires_s)
        uses.signed_s[holder] = min(signed_s, uses.signed_s.get(holder, signed_s))

    def _forget(self, holder: PeerId) -> None:
        """Forget a peer and release its uses."""
        self.standings.pop(holder, None)
        for uses in self._uses.values():
            uses.signed_s.pop(holder, None)

    def _sentence(self, reason: str) -> str:
        return f"run {self.run_id} is for invited peers only: {reason}"
