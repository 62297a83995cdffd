"""The service around `averaging.reduction.audit`: it signs and checks contributions, keeps those that were
reduced, shows them on request, and audits other reducers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from averaging.allreduce.config import ACCOUNT
from averaging.allreduce.kernels import Recomputation, ReductionKernels
from averaging.allreduce.logic.versions import decode_places, digest_payload
from averaging.matchmaking.logic.group import Group
from averaging.reduction.audit import SIGNATURE_BYTES, Notary, Signed, chunks_max, draw, fault, statement
from averaging.reduction.partition import Chunk
from averaging.reduction.reduce import Contribution
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError
from swarm.core.identity import Signer, verify
from swarm.net.rpc import Caller
from swarm.wire.reduce_pb2 import AccountReply, AccountRequest

Work: TypeAlias = Callable[[Callable[[Recomputation], bytes], Recomputation], Awaitable[bytes]]

_ANSWER_S = 20.0  # timeout for one contribution to a chunk; a busy reducer answers between two chunks


@dataclass(frozen=True, slots=True)
class Finding:
    """The reason why a round must not count. `accused`: the place of the member that lied; None when an audit
    could not be made, which proves nothing.
    """

    reason: str
    accused: int | None


def sign(identity: Signer, group_id: bytes, chunk: int, payload: bytes | memoryview) -> bytes:
    """Sign an encoded contribution to a chunk of this round."""
    return identity.sign(statement(group_id, chunk, digest_payload(payload)))


class Auditor:
    """One member's part in the audits of one round: it shows what its own shard was reduced from, and audits
    other reducers.
    """

    def __init__(self, group: Group, kernels: ReductionKernels, notary: Notary, share: float) -> None:
        self.accused: dict[int, str] = {}  # members that this member itself found lying -> reason
        self._group, self._kernels, self._notary, self._share = group, kernels, notary, share
        # possible auditors of a chunk: all members but its reducer
        self._auditors = max(sum(not member.auxiliary for member in group.members) - 1, 1)
        self._signatures: dict[tuple[int, int], bytes] = {}  # (chunk, place)
        self._used: dict[int, dict[int, Contribution]] = {}  # chunk -> place -> reduced contribution
        # place -> (chunk, place) pairs that it was given
        self._shown: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)

    # ---- as a sender and as a reducer

    def accept(self, place: int, chunk: int, payload: memoryview, signature: bytes) -> None:
        """Accept a contribution. Raises PeerError unless its sender signed it: a contribution that cannot be
        shown later must not be averaged.
        """
        signed = statement(self._group.group_id, chunk, digest_payload(payload))
        if len(signature) != SIGNATURE_BYTES or not self._verify(place, signed, signature):
            raise PeerError(f"a contribution to chunk {chunk} without its sender's signature over it")
        self._signatures.setdefault((chunk, place), signature)

    def own(self, chunk: Chunk) -> bytes:
        """Return this member's contribution to a chunk that it reduces itself, encoded as others' are, so
        that it can be shown. Tensor work.
        """
        return self._kernels.encoded(chunk)

    def keep(self, chunk: int, contributions: Sequence[Contribution]) -> None:
        """Keep the contributions from which a chunk was reduced."""
        self._used[chunk] = {item.place: item for item in contributions}

    def answer(self, caller: int, request: AccountRequest) -> AccountReply:
        """Return a member's contribution to a chunk that this member reduced. Raises PeerError for a chunk
        that was not reduced here, or too many requests.
        """
        item = self._used.get(request.chunk, {}).get(request.place)
        if item is None:
            raise PeerError(
                f"nothing of the member at place {request.place} was reduced here in chunk {request.chunk}"
            )
        shown = self._shown[caller]
        chunks = {chunk for chunk, _ in shown} | {request.chunk}
        if (request.chunk, request.place) in shown or len(chunks) > chunks_max(
            self._share, self._auditors, len(self._used)
        ):
            raise PeerError("more is asked than audits need")
        shown.add((request.chunk, request.place))
        payload = bytes(item.values)  # encoded already, by `own`
        signature = self._signatures.get((request.chunk, request.place))
        if signature is None:
            signature = sign(self._notary.identity, self._group.group_id, request.chunk, payload)
        return AccountReply(payload=payload, signature=signature)

    # ---- as an auditor

    async def audit(self, channels: Caller, work: Work) -> Finding | None:
        """Audit some chunks of other reducers. Return the finding about the first wrong chunk, or None.
        `work` runs tensor work. Call this when every average has arrived and before this member votes: until
        then all others must wait, and keep what is asked for.
        """
        for chunk in draw(
            self._kernels.plan, self._kernels.own, self._share, self._auditors, self._notary.rng
        ):
            finding = await self._look_at(chunk, channels, work)
            if finding is not None:
                if finding.accused is not None:
                    self.accused[finding.accused] = finding.reason
                return finding
        return None

    async def _look_at(self, chunk: Chunk, channels: Caller, work: Work) -> Finding | None:
        reducer = self._group.members[chunk.reducer]
        name = f"peer {reducer.peer_id}"
        digest, contributors = self._kernels.digests[chunk.index]
        if not any(contributors):
            return None  # the average has no contributors, and members that contribute have refused it
        shown: list[Signed] = []
        for place in decode_places(contributors, len(self._group.members)):
            if self._kernels.weights[place] <= 0.0:
                return Finding(
                    f"{name} counts in chunk {chunk.index} a member that contributes nothing", chunk.reducer
                )
            request = AccountRequest(group_id=self._group.group_id, chunk=chunk.index, place=place)
            try:
                reply = await channels.call(reducer.contact, ACCOUNT, request, timeout_s=_ANSWER_S)
            except PeerError as error:
                # not a proof: the reducer may have left the round because another audit was faster, or its
                # node may be closing
                return Finding(
                    f"{name} does not show what its average of chunk {chunk.index} is made of: {error}", None
                )
            except DeadlineExceeded:
                return Finding(f"{name} gave no account of chunk {chunk.index} within {_ANSWER_S:g} s", None)
            except NetworkError as error:
                # the reducer may have failed, but a liar could also stop on purpose: chunks that were drawn
                # but not seen do not count as audited
                return Finding(
                    f"{name} could not be asked for its account of chunk {chunk.index}: {error}", None
                )
            if len(reply.payload) != self._kernels.codec.encoded_bytes(chunk.numel):
                return Finding(
                    f"{name} shows {len(reply.payload)} bytes as a contribution to chunk {chunk.index}",
                    chunk.reducer,
                )
            shown.append(Signed(place, reply.payload, reply.signature))
        wrong = fault(shown, chunk, self._group.group_id, digest_payload, self._verify)
        if wrong:
            return Finding(f"{name} lies about chunk {chunk.index}: {wrong}", chunk.reducer)
        inputs = [Contribution(item.place, self._kernels.weights[item.place], item.payload) for item in shown]
        if await work(self._kernels.recompute, Recomputation(chunk, inputs)) != digest:
            return Finding(
                f"{name} lied: its average of chunk {chunk.index} is not what its senders' signed values "
                "give",
                chunk.reducer,
            )
        return None

    # ---- within

    def _verify(self, place: int, message: bytes, signature: bytes) -> bool:
        return verify(self._group.members[place].peer_id, message, signature)
