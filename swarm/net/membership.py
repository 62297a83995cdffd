"""This process as a member of an invited run: it shows its capability to every peer that it dials, and
answers only peers that have shown theirs.

A process joins one invited run. All its services answer members of this run only, the DHT included, so that
the peers of an invited run form a swarm of their own. Entry points are the exception: peers without a
capability whose addresses this user, or the invite, names. They take part only in the DHT.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal

import msgpack

from swarm.core.errors import NotInvited, PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.dht.logic.blobs import Handover
from swarm.membership.admission import ENTRY_POINT_METHODS, GUEST_METHODS, Admission
from swarm.membership.capability import CAPABILITY_BYTES_MAX, decode, encode
from swarm.membership.invite import Invite
from swarm.net.rpc import Handlers, Method
from swarm.wire import run_pb2

GuestRights = Literal["none", "call", "train"]

_REFUSED_S = 30.0  # a peer that is not a member is not asked again for this time
_REFUSED_MAX = 4096
_HANDOVER_BYTES_MAX = 160
ADMIT = Method(
    name="/swarm.Run/Admit",
    request=run_pb2.AdmitRequest,
    reply=run_pb2.AdmitReply,
    request_bytes_max=CAPABILITY_BYTES_MAX + _HANDOVER_BYTES_MAX + 100,
    reply_bytes_max=CAPABILITY_BYTES_MAX + _HANDOVER_BYTES_MAX + 100,
)


class RunMembership:
    """The membership of this process in one invited run. It belongs to the network thread."""

    def __init__(
        self, invite: Invite, own: PeerId, entry_points: Iterable[PeerId], now_s: Callable[[], float]
    ) -> None:
        """`now_s` returns swarm time. Raises UsageError when the invite is not valid for this peer."""
        self.invite = invite
        self.own = own
        self.capability = invite.capability_of(own, now_s())
        self.admission = Admission(invite.run)
        # excludes entry points that turn out to be members, whose capability decides
        self._entry_points = set(entry_points)
        # methods for peers that have no capability and are not entry points; a server of a grid sets them
        self.guests: GuestRights = "none"
        self._now_s = now_s
        # peers that turned out not to be members -> (time, reason)
        self._refused: OrderedDict[PeerId, tuple[float, str]] = OrderedDict()

    @property
    def run_id(self) -> str:
        return self.admission.run_id

    def problem(self) -> str:
        """Return why this process is no longer a member; empty if it is one."""
        return self.admission.problem(self.own, self.capability, self._now_s())

    def refusal(self, caller: PeerId, method: str) -> str:
        """Return why this peer may not call this method; empty if it may. Every call of each peer asks."""
        rights = self.admission.standings.get(caller)
        if rights is not None and method in rights.may_call and self._now_s() < rights.expires_s:
            return ""
        refusal = self.admission.refusal(caller, method, self._now_s())
        if not refusal or method == ADMIT.name:
            return ""
        if caller in self._entry_points - self.admission.revoked and method.startswith(ENTRY_POINT_METHODS):
            return ""
        is_excluded = caller in self.admission.revoked or caller in self.admission.removed
        if self.guests != "none" and not is_excluded and method.startswith(GUEST_METHODS):
            return ""
        return refusal

    def training_refusal(self, caller: PeerId) -> str:
        """Return why the backward passes of this peer must not change an expert; empty if they may."""
        if self.guests == "train" or self.admission.roles(caller, self._now_s()) & {"train", "serve"}:
            return ""
        return (
            f"the experts of {self.invite.name} are trained by invited peers only: enter the swarm with an "
            "invite (swarm1…)"
        )

    def may_call(self, peer_id: PeerId, method: str) -> bool:
        """Return whether this peer is known as one that may be called for this method, so that the checks
        before and after dialing are needless. Every call to each peer asks.
        """
        rights = self.admission.standings.get(peer_id)
        return (
            rights is not None
            and method in rights.may_answer
            and peer_id not in self._refused
            and self._now_s() < rights.expires_s
        )

    def check_callee(self, peer_id: PeerId) -> None:
        """Raise NotInvited when this peer must not be called: it was revoked, or has shown no capability."""
        if peer_id in self.admission.revoked or peer_id in self.admission.removed:
            raise NotInvited(f"peer {peer_id} was revoked by the owner of run {self.run_id}")
        refused = self._refused.get(peer_id)
        if refused is not None:
            since_s, reason = refused
            if abs(self._now_s() - since_s) < _REFUSED_S:
                raise NotInvited(reason)
            del self._refused[peer_id]

    def check_role(self, peer_id: PeerId, method: str) -> None:
        """Raise NotInvited when the dialed peer's roles do not include this method."""
        refusal = self.admission.callee_refusal(peer_id, method, self._now_s())
        if refusal:
            raise NotInvited(refusal)

    def request(self) -> run_pb2.AdmitRequest:
        """Return the request with which this process shows its capability to a peer that it dialed."""
        return run_pb2.AdmitRequest(
            run=self.run_id, capability=encode(self.capability), handover=self._handover()
        )

    def check_reply(self, peer_id: PeerId, reply: run_pb2.AdmitReply) -> None:
        """Admit the peer that was dialed. Raises NotInvited if it is neither a member nor an entry point."""
        try:
            if reply.member:
                self._entry_points.discard(peer_id)
                self._hear(reply.handover)
                self.admission.admit(peer_id, decode(reply.capability), self._now_s())
            elif peer_id not in self._entry_points:
                raise NotInvited(f"peer {peer_id} takes no part in run {self.run_id}")
        except PeerError as error:
            self._refused[peer_id] = (self._now_s(), str(error))
            self._refused.move_to_end(peer_id)
            if len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)
            raise

    def answer(self, caller: PeerId, request: run_pb2.AdmitRequest) -> run_pb2.AdmitReply:
        """Admit a caller and show it this process's capability (`ADMIT`). Raises NotInvited."""
        if request.run != self.run_id:
            raise NotInvited(f"this peer takes part in run {self.run_id}, and in no other one")
        self._entry_points.discard(caller)
        self._hear(request.handover)
        self.admission.admit(caller, decode(request.capability), self._now_s())
        self._refused.pop(caller, None)
        return run_pb2.AdmitReply(member=True, capability=encode(self.capability), handover=self._handover())

    def _handover(self) -> bytes:
        known = self.admission.handover
        packed: bytes = msgpack.packb(known.encode()) if known is not None else b""
        return packed

    def _hear(self, raw: bytes) -> None:
        """Apply the handover that a peer shows. Raises PeerError when it does not belong to this run."""
        if not raw or raw == self._handover():
            return
        run = self.invite.run
        try:
            shown = msgpack.unpackb(raw[:_HANDOVER_BYTES_MAX], max_array_len=3, max_map_len=0)
            handover = Handover.decode(shown, run.founder, run.run_id, run.recovery)
        except (ValueError, TypeError, UsageError, msgpack.UnpackException) as error:
            raise PeerError(f"a handover of run {run.run_id} was refused: {error}") from error
        if handover is not None:
            self.admission.hear(handover)


def register(handlers: Handlers, membership: RunMembership | None) -> None:
    """Register the handler of `ADMIT`. A process without a membership says so."""

    def no_member(caller: PeerId, request: run_pb2.AdmitRequest) -> run_pb2.AdmitReply:
        return run_pb2.AdmitReply()

    handlers.direct(ADMIT, no_member if membership is None else membership.answer)
