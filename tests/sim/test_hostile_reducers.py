"""Reducers that lie, and audits that name them; senders that try to frame a reducer. The real service and
messages, simulated network.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from averaging.allreduce.allreduce import AllReduce
from averaging.allreduce.auditing import Auditor
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.driver import RoundDriver
from averaging.allreduce.kernels import Averaged, ReductionKernels, Spoiled
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.audit import Notary, chance, chunks_max, draw
from averaging.reduction.framing import pack, unpack
from averaging.reduction.partition import plan_chunks
from averaging.reduction.reduce import Contribution
from averaging.reduction.robust import MEAN, Aggregation
from swarm.compression import find
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.rounds import run_round
from swarm.testing.virtual_loop import run_virtual
from swarm.wire.reduce_pb2 import AccountReply, AccountRequest

NUMEL = 40_000
LIAR = 1


@dataclass
class Held:
    """How a round ended for everybody."""

    peers: list[SimulatedPeer]
    outcomes: list[RoundOutcome]

    @property
    def accused(self) -> set[PeerId]:
        return {peer_id for outcome in self.outcomes for peer_id in outcome.accused}

    @property
    def liar(self) -> PeerId:
        return self.peers[LIAR].peer_id


def hold(
    share: float,
    *,
    seed: int = 0,
    aggregation: Aggregation = MEAN,
    codec: str = "float16",
    client: bool = False,
    delay_s: float = 0.0,
) -> Held:
    """One round of four: different weights; the last one may be a client that cannot be dialed."""
    network = SimulatedNetwork(seed, LinkConfig(delay_s=delay_s, jitter=0.5))
    peers = [network.peer(dialable=not (client and place == 3)) for place in range(4)]
    weights = [1.0, 2.0, 1.0, 0.5]
    members = [
        Member(contact=peer.contact, weight=weight, bandwidth=1.0 if peer.contact.addresses else 0.0)
        for peer, weight in zip(peers, weights, strict=True)
    ]
    group = Group(
        group_id=random.Random(seed).randbytes(32), members=tuple(members), codec=codec, gathered=(b"",) * 4
    )
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(NUMEL, generator=generator) for _ in peers]
    config = RoundConfig(chunk_bytes=8192, audit=share, aggregation=aggregation)
    return Held(peers, run_virtual(run_round(network, group, vectors, timeout_s=60.0, config=config)))


@pytest.mark.parametrize(
    "aggregation", [MEAN, Aggregation(rule="centered_clip"), Aggregation(rule="median", clip_to_median=1.2)]
)
@pytest.mark.parametrize("codec", ["float32", "float16"])
@pytest.mark.parametrize("seed", range(4))
def test_honest_reducers_are_never_named(aggregation: Aggregation, codec: str, seed: int) -> None:
    held = hold(1.0, seed=seed, aggregation=aggregation, codec=codec, client=seed % 2 == 1)
    assert not any(outcome.failed for outcome in held.outcomes), [outcome.reason for outcome in held.outcomes]
    assert len({outcome.digest for outcome in held.outcomes}) == 1
    assert not held.accused


def lies(monkeypatch: pytest.MonkeyPatch, alter: Callable[[Contribution], Contribution]) -> None:
    """The reducer at place LIAR reduces something else than what it was sent; it keeps, and shows, the true
    contributions.
    """
    reduce = ReductionKernels.reduce_one

    def lie(
        self: ReductionKernels, chunk: object, contributions: list[Contribution], scratch: object
    ) -> Averaged | Spoiled:
        given = [alter(item) for item in contributions] if self.own == LIAR else contributions
        return reduce(self, chunk, given, scratch)  # type: ignore[arg-type]

    monkeypatch.setattr(ReductionKernels, "reduce_one", lie)


def heavier(item: Contribution) -> Contribution:
    return Contribution(item.place, item.weight * (3.0 if item.place == LIAR else 1.0), item.values)


@pytest.mark.parametrize("seed", range(5))
def test_a_reducer_that_left_a_broken_round_is_not_accused(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first auditor's finding ends the round; others are asked for their accounts when they have left it
    already.
    """
    lies(monkeypatch, heavier)
    held = hold(1.0, seed=seed, delay_s=0.05)
    assert all(outcome.failed for outcome in held.outcomes)
    assert held.accused == {held.liar}


def silenced(item: Contribution) -> Contribution:
    return Contribution(item.place, item.weight, bytes(len(item.values)) if item.place == 2 else item.values)


@pytest.mark.parametrize("alter", [heavier, silenced])
@pytest.mark.parametrize("client", [False, True])
def test_a_reducer_that_averages_something_else_is_named(
    alter: Callable[[Contribution], Contribution], client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies(monkeypatch, alter)
    unaudited = hold(0.0, client=client)
    assert not any(outcome.failed for outcome in unaudited.outcomes)  # nobody notices
    held = hold(1.0, client=client)
    assert all(outcome.failed for outcome in held.outcomes)
    assert held.accused == {held.liar}
    for outcome in held.outcomes:
        assert str(held.liar) in str(outcome.reason)  # who did not find out by itself is told
        assert outcome.vector is None
    texts = [text for outcome in held.outcomes for text in outcome.accused.values()]
    assert all("not what its senders' signed values give" in text for text in texts)


SHARE = 0.2  # of the chunks that are audited


@pytest.mark.parametrize("seed", range(40))
def test_a_lie_that_an_audit_of_some_chunks_finds_fails_the_round_for_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies(monkeypatch, heavier)
    held = hold(SHARE, seed=seed)
    assert held.accused <= {held.liar}
    assert {outcome.failed for outcome in held.outcomes} == {bool(held.accused)}


def test_an_audit_of_some_chunks_finds_as_many_lies_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reducer that lies in all of its three chunks is caught with probability 1 - (1 - p)³ a round."""
    lies(monkeypatch, heavier)
    caught = [seed for seed in range(40) if hold(SHARE, seed=seed).accused]
    assert 0.3 < len(caught) / 40 < 0.7, caught  # 0.49 expected


def altered(message: bytes, signature: bytes | None, payload: bytes | None) -> bytes:
    header, old = unpack(message)
    assert header.HasField("contribution")
    if signature is not None:
        header.contribution.signature = signature
    return pack(header, payload if payload is not None else old)


@pytest.mark.parametrize("how", ["nothing", "forged", "other bytes"])
def test_a_contribution_without_a_valid_signature_is_not_averaged(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender cannot make its reducer look dishonest: unsigned values are not taken, and the sender is asked
    for nothing later.
    """
    send = RoundDriver.send

    async def lie(self: RoundDriver, stream: object, message: bytes) -> None:
        header, payload = unpack(message)
        if self.kernels.own == LIAR and header.HasField("contribution"):
            changes = {
                "nothing": (b"", None),
                "forged": (b"\x01" * 64, None),
                "other bytes": (None, bytes(len(payload))),
            }
            message = altered(message, *changes[how])
        await send(self, stream, message)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundDriver, "send", lie)
    held = hold(1.0)
    assert not held.accused
    for outcome in held.outcomes:
        assert not outcome.failed, outcome.reason
        assert "without its sender's signature" in outcome.left_out[held.liar]
        assert outcome.contributions[held.liar] < 0.5  # it is in its own shard alone


def test_a_reducer_that_shows_other_contributions_than_it_was_sent_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reducer invents inputs that explain its average, but cannot sign for their senders."""
    lies(monkeypatch, silenced)
    answer = Auditor.answer

    def lie(self: Auditor, caller: int, request: AccountRequest) -> AccountReply:
        reply = answer(self, caller, request)
        if self._kernels.own == LIAR and request.place == 2:
            reply.payload = bytes(len(reply.payload))
        return reply

    monkeypatch.setattr(Auditor, "answer", lie)
    held = hold(1.0)
    assert held.accused == {held.liar}
    assert any(
        "was not signed by that member" in text
        for outcome in held.outcomes
        for text in outcome.accused.values()
    )


@pytest.mark.parametrize("how", ["refuses", "short", "silent"])
def test_a_round_fails_when_a_reducer_gives_no_account(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = AllReduce._serve_account

    async def evade(self: AllReduce, caller: PeerId, request: AccountRequest) -> AccountReply:
        reply = await serve(self, caller, request)
        running = self._rounds.get(request.group_id)
        assert isinstance(running, RoundDriver)
        if running.kernels.own != LIAR:
            return reply
        if how == "silent":
            await asyncio.sleep(1000.0)
        if how == "refuses":
            raise PeerError("I would rather not")
        reply.payload = reply.payload[1:]
        return reply

    monkeypatch.setattr(AllReduce, "_serve_account", evade)
    held = hold(1.0)
    assert all(outcome.failed for outcome in held.outcomes)
    # a member that is silent or refuses may have left the round for a good reason
    assert held.accused == ({held.liar} if how == "short" else set())
    assert all(str(held.liar) in str(outcome.reason) for outcome in held.outcomes)


def test_a_member_gets_the_account_of_a_reduced_chunk_once() -> None:
    network = SimulatedNetwork(5)
    peers = [network.peer() for _ in range(2)]
    codec = find("float32")
    plan = plan_chunks(20_000, [1.0, 1.0], codec, 4096)
    group = Group(
        group_id=bytes(32),
        members=tuple(Member(contact=peer.contact, weight=1.0, bandwidth=1.0) for peer in peers),
        codec="float32",
        gathered=(b"",) * 2,
    )
    kernels = ReductionKernels(plan, codec, 0, None, None)  # type: ignore[arg-type]
    auditor = Auditor(group, kernels, Notary(peers[0].identity, random.Random(0)), 0.001)
    for chunk in plan.shard(0):
        auditor.keep(chunk.index, [Contribution(0, 1.0, b"bytes")])
    with pytest.raises(PeerError, match="nothing of the member"):
        auditor.answer(1, AccountRequest(chunk=0, place=1))
    with pytest.raises(PeerError, match="nothing of the member"):
        auditor.answer(1, AccountRequest(chunk=99, place=0))
    assert auditor.answer(1, AccountRequest(chunk=0, place=0)).payload == b"bytes"
    with pytest.raises(PeerError, match="more is asked"):
        auditor.answer(1, AccountRequest(chunk=0, place=0))
    allowed = chunks_max(0.001, 1, len(plan.shard(0)))
    for index in range(1, allowed):
        auditor.answer(1, AccountRequest(chunk=index, place=0))
    with pytest.raises(PeerError, match="more is asked"):
        auditor.answer(1, AccountRequest(chunk=allowed, place=0))


def test_audited_chunks_are_drawn_at_random_from_other_reducers() -> None:
    codec = find("float32")
    plan = plan_chunks(4_000_000, [1.0] * 4, codec, 1 << 14)
    drawn = [{chunk.index for chunk in draw(plan, own, 0.3, 3, random.Random(own))} for own in range(4)]
    for own, chunks in enumerate(drawn):
        assert not chunks & {chunk.index for chunk in plan.shard(own)}
    assert abs(len(set().union(*drawn)) / len(plan.chunks) - 0.3) < 0.05
    assert chance(1.0, 3) == 1.0
    assert chance(0.0, 3) == chance(0.5, 0) == 0.0
    assert len(draw(plan, 0, 1.0, 3, random.Random(0))) == len(plan.chunks) - len(plan.shard(0))


def test_an_audit_is_a_share_of_the_chunks() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="audit is a share"):
            RoundConfig(audit=share)
