"""PowerSGD over the real all-reduce: members that die before, between and within its two all-reduces, and
traffic as foretold.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from averaging.allreduce.allreduce import AllReduce
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.allreduce.twophase import TwoPhase, first_group
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.lowrank import PowerSgd
from averaging.reduction.powersgd import LowRank
from swarm.compression import find
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.rounds import all_reduce_of
from swarm.testing.virtual_loop import run_virtual

SHAPES: list[tuple[int, ...]] = [(96, 200), (50,), (40, 3, 30), (7,)]
TERMS = PowerSgd(rank=3)
CONFIG = RoundConfig(chunk_bytes=1024)


@dataclass
class Peer:
    simulated: SimulatedPeer
    service: AllReduce
    tensors: list[torch.Tensor]
    low_rank: LowRank
    weight: float

    async def round(self, group: Group, deadline_s: float = 30.0) -> RoundOutcome:
        self.low_rank.take(gives=self.weight > 0, keeps=False)
        own = self.simulated.peer_id
        phases = TwoPhase(self.low_rank, self.service, own, None, CONFIG)  # type: ignore[arg-type]
        outcome = await phases.run(group, self.simulated.clock.monotonic_s() + deadline_s)
        if outcome.averages is not None:
            self.low_rank.put()
        return outcome


class Party:
    def __init__(
        self, seed: int, weights: list[float], codec: str = "float32", auxiliary: tuple[int, ...] = ()
    ) -> None:
        self.rng, self.chance = random.Random(seed), torch.Generator().manual_seed(seed)
        self.network = SimulatedNetwork(seed, LinkConfig(delay_s=0.02, bandwidth=1e6))
        self.codec, self.auxiliary = codec, auxiliary
        self.peers: list[Peer] = []
        for weight in weights:
            peer = self.network.peer()
            service = all_reduce_of(peer)
            tensors = [torch.zeros(shape) for shape in SHAPES]
            self.peers.append(
                Peer(peer, service, tensors, LowRank(tensors, TERMS, find(codec), seed=b"party"), weight)
            )
        self.fill()

    def fill(self) -> list[list[torch.Tensor]]:
        for peer in self.peers:
            for tensor in peer.tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=self.chance))
        return [[tensor.clone() for tensor in peer.tensors] for peer in self.peers]

    def group(self) -> Group:
        members = tuple(
            Member(
                contact=peer.simulated.contact,
                weight=peer.weight,
                bandwidth=1.0,
                auxiliary=place in self.auxiliary,
            )
            for place, peer in enumerate(self.peers)
        )
        gathered = tuple(peer.low_rank.start_digest + b"\xc3" for peer in self.peers)
        return Group(group_id=self.rng.randbytes(32), members=members, codec=self.codec, gathered=gathered)

    async def round(self, *, deadline_s: float = 30.0) -> list[RoundOutcome]:
        group = self.group()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(peer.round(group, deadline_s)) for peer in self.peers]
        return [task.result() for task in running]

    async def close(self) -> None:
        for peer in self.peers:
            peer.service.close()
        await self.network.close()


def alike(peers: list[Peer]) -> bool:
    return all(
        torch.equal(one, other)
        for peer in peers
        for one, other in zip(peer.tensors, peers[0].tensors, strict=True)
    )


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_all_members_hold_the_same(codec: str) -> None:
    async def scenario() -> None:
        party = Party(1, [1.0, 2.0, 0.0, 0.0], codec, auxiliary=(3,))
        for _ in range(3):
            before = party.fill()
            outcomes = await party.round()
            assert not any(outcome.failed for outcome in outcomes), outcomes
            assert alike(party.peers[:3])
            assert torch.equal(party.peers[3].tensors[0], before[3][0])  # it only helps
            assert len({outcome.digest for outcome in outcomes[:3]}) == 1
            assert len({peer.low_rank.start_digest for peer in party.peers[:3]}) == 1
            exact = (before[0][1] + 2.0 * before[1][1]) / 3.0
            assert torch.allclose(party.peers[2].tensors[1], exact, atol=1e-3)
            assert set(outcomes[0].contributions.values()) == {1.0}
            assert party.peers[2].low_rank.norms()[0] == 0.0
        await party.close()

    run_virtual(scenario())


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_traffic_is_the_size_of_the_factors(codec: str) -> None:
    """Between two members every element travels once as a value and once as an average."""

    async def scenario() -> None:
        party = Party(2, [1.0, 1.0], codec)
        layout = party.peers[0].low_rank.layout
        assert layout.first_numel + layout.second_numel == 3 * (96 + 200 + 40 + 90) + 57
        payload = 2 * sum(
            find(codec).encoded_bytes(numel) for numel in (layout.first_numel, layout.second_numel)
        )
        sent = sum(outcome.bytes_sent for outcome in await party.round())
        messages = 2 * 2 * 4  # an opening and at most three chunks each way, in each of the all-reduces
        assert payload < sent <= payload + 100 * messages
        assert sent < 0.08 * 2 * find(codec).encoded_bytes(sum(torch.Size(shape).numel() for shape in SHAPES))
        await party.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("moment", ["first", "between", "second"])
def test_a_member_that_dies_costs_nobody_else_anything(moment: str, seed: int) -> None:
    """Whatever is committed without it: what the others gave is in the averages, or held by them."""

    async def scenario() -> None:
        party = Party(seed, [1.0, 1.0, 1.0, 1.0])
        before = party.fill()
        victim, others = party.peers[3], party.peers[:3]
        group = party.group()
        between = asyncio.Event()
        if moment != "first":
            second = victim.low_rank.second

            def reached(mean: torch.Tensor | None) -> object:
                between.set()
                return second(mean)

            victim.low_rank.second = reached  # type: ignore[method-assign, assignment]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(peer.round(group)) for peer in party.peers]
            if moment == "first":
                await asyncio.sleep(0.05)
            else:
                await between.wait()
                await asyncio.sleep(0.03 if moment == "second" else 0.0)
            running[3].cancel()
            await party.network.crash(victim.simulated)
        outcomes = [task.result() for task in running[:3]]
        assert not any(outcome.failed for outcome in outcomes), outcomes
        assert alike(others)
        assert len({peer.low_rank.start_digest for peer in others}) == 1
        fraction = outcomes[0].contributions.get(victim.simulated.peer_id, 0.0)
        if fraction == 0.0:
            for nth, matrix in enumerate(others[0].low_rank.layout.matrices):
                held = [peer.low_rank.state_dict()["held"][nth] for peer in others]
                given = [values[matrix.place].reshape(matrix.n, matrix.m) for values in before[:3]]
                average = others[0].tensors[matrix.place].reshape(matrix.n, matrix.m)
                left = 3 * average + sum(held)
                assert torch.allclose(left, sum(given), atol=1e-4)  # type: ignore[arg-type]
        assert fraction < 1.0 or moment != "first"
        await party.close()

    run_virtual(scenario())


def test_a_round_that_fails_in_either_all_reduce_changes_nothing() -> None:
    async def scenario() -> None:
        party = Party(5, [1.0, 1.0, 1.0])
        assert not any(outcome.failed for outcome in await party.round())
        reasons = set()
        for nth in range(20):
            before = party.fill()
            states = [peer.low_rank.state_dict() for peer in party.peers]
            outcomes = await party.round(deadline_s=0.02 + 0.02 * nth)
            reasons |= {"in the first" in (outcome.reason or "") for outcome in outcomes if outcome.failed}
            for peer, outcome, values, state in zip(party.peers, outcomes, before, states, strict=True):
                if outcome.failed:
                    assert all(
                        torch.equal(tensor, value) for tensor, value in zip(peer.tensors, values, strict=True)
                    )
                    found = peer.low_rank.state_dict()
                    for one, other in ((found["held"], state["held"]), (found["starts"], state["starts"])):
                        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
                    assert torch.equal(found["others"]["sender"], state["others"]["sender"])
        assert reasons == {True, False}
        assert not any(outcome.failed for outcome in await party.round())
        assert alike(party.peers)
        await party.close()

    run_virtual(scenario())


def test_a_member_with_another_start_only_receives_in_the_first_all_reduce() -> None:
    async def scenario() -> None:
        party, odd = Party(6, [1.0, 1.0, 1.0]), Party(6, [1.0, 1.0, 1.0])
        for nth in range(2):
            for one in (party, odd):
                one.fill()
                if nth:
                    peer = one.peers[2]
                    state = peer.low_rank.state_dict()
                    if one is odd:  # as one that missed the round before, or comes new
                        state["starts"] = LowRank(
                            peer.tensors, TERMS, find("float32"), seed=b"other"
                        ).state_dict()["starts"]
                    peer.low_rank.load_state_dict(state)
                outcomes = await one.round()
                assert not any(outcome.failed for outcome in outcomes)
                assert set(outcomes[0].contributions.values()) == {1.0}  # its values count all the same
                assert alike(one.peers)
                assert len({peer.low_rank.start_digest for peer in one.peers}) == 1
        await party.close()
        await odd.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_most_contributors_decide_the_start(seed: int) -> None:
    """Not the many that only listen, and with a tie the same one on every member."""

    async def scenario() -> None:
        party = Party(seed, [1.0, 0.0, 2.0, 0.0, 1.0, 0.0])
        starts = [
            LowRank(party.peers[0].tensors, TERMS, find("float32"), seed=name).start_digest
            for name in (b"many", b"few", b"listeners")
        ]
        drawn = [starts[0], starts[2], starts[1], starts[2], starts[0], starts[2]]
        group = replace(party.group(), gathered=tuple(drawn))
        assert [member.weight for member in first_group(group).members] == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        tie = replace(group, gathered=(*drawn[:4], starts[2], starts[2]))
        assert [bool(member.weight) for member in first_group(tie).members].count(True) == 1
        await party.close()

    run_virtual(scenario())


def test_nan_is_refused_at_the_sender_and_its_residual_stays() -> None:
    async def scenario() -> None:
        party = Party(7, [1.0, 1.0, 1.0])
        await party.round()
        party.fill()
        bad = party.peers[1]
        held = bad.low_rank.state_dict()["held"]
        bad.tensors[2][3, 1, 4] = float("nan")
        outcomes = await party.round()
        assert not any(outcome.failed for outcome in outcomes)
        assert all(bad.simulated.peer_id in outcome.left_out for outcome in outcomes)
        assert alike(party.peers)
        assert all(bool(tensor.isfinite().all()) for tensor in bad.tensors)
        assert all(
            torch.equal(one, other)
            for one, other in zip(bad.low_rank.state_dict()["held"], held, strict=True)
        )
        await party.close()

    run_virtual(scenario())


@pytest.mark.parametrize("inline", [True, False])
def test_a_member_without_memory_between_the_all_reduces_fails_alone(
    monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    async def scenario() -> None:
        party = Party(4, [1.0, 1.0, 1.0])
        poor = party.peers[1]
        second = LowRank.second

        def short(self: LowRank, mean: torch.Tensor | None) -> Any:
            if self is poor.low_rank:
                raise MemoryError
            return second(self, mean)

        before = [tensor.clone() for tensor in poor.tensors]
        with monkeypatch.context() as patched:
            patched.setattr(LowRank, "second", short)
            first, failed, last = await party.round()
        assert failed.failed
        assert failed.out_of_memory
        assert failed.reason == f"peer {poor.simulated.peer_id} ran out of memory on the host"
        assert all(torch.equal(tensor, was) for tensor, was in zip(poor.tensors, before, strict=True))
        assert (first.failed, last.failed) == (False, False)
        party.fill()
        assert not any(outcome.failed for outcome in await party.round())
        await party.close()

    monkeypatch.setattr("averaging.allreduce.offload.usable_cores", lambda: 2 if inline else 8)
    run_virtual(scenario())
