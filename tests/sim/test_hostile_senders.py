"""Hostile senders in whole rounds: the service and messages are the real ones, the network and time are
simulated.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from averaging.allreduce.config import RoundConfig
from averaging.allreduce.driver import RoundDriver
from averaging.allreduce.kernels import Averaged, ReductionKernels, Spoiled
from averaging.allreduce.logic.versions import digest_payload
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.framing import pack, unpack
from averaging.reduction.robust import Aggregation
from swarm.net.rpc import Stream
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.testing.rounds import run_round
from swarm.testing.virtual_loop import run_virtual

PEERS = 8
NUMEL = 40_000


def round_of(
    vectors: list[torch.Tensor],
    aggregation: Aggregation,
    codec: str = "float32",
    weights: list[float] | None = None,
) -> dict[SimulatedPeer, RoundOutcome]:
    """Everybody's outcome of one round."""
    network = SimulatedNetwork(1)
    peers = [network.peer() for _ in vectors]
    members = [
        Member(contact=peer.contact, weight=weights[n] if weights else 1.0, bandwidth=1.0)
        for n, peer in enumerate(peers)
    ]
    group = Group(
        group_id=random.Random(2).randbytes(32),
        members=tuple(members),
        codec=codec,
        gathered=(b"",) * len(peers),
    )
    config = RoundConfig(chunk_bytes=8192, aggregation=aggregation)
    outcomes = run_virtual(run_round(network, group, vectors, timeout_s=30.0, config=config))
    return dict(zip(peers, outcomes, strict=True))


def draw(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [1.0 + 0.1 * torch.randn(NUMEL, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("codec", ["float32", "float16"])
@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "centered_clip"])
def test_robust_rules_resist_a_quarter_of_hostile_peers(rule: str, codec: str) -> None:
    vectors = draw(PEERS)
    honest = torch.stack(vectors[:6]).mean(dim=0)
    vectors[6] *= -100.0
    vectors[7] *= 1000.0
    outcomes = list(round_of(vectors, Aggregation(rule=rule), codec).values())
    assert not any(outcome.failed for outcome in outcomes)
    assert len({outcome.digest for outcome in outcomes}) == 1
    found = outcomes[0].vector
    assert found is not None
    assert float((found - honest).norm() / honest.norm()) < 0.2
    assert all(fraction == 1.0 for fraction in outcomes[0].contributions.values())


def test_all_members_learn_which_members_were_clipped() -> None:
    vectors = draw(4)
    vectors[2][: NUMEL // 2] *= 1e4
    outcomes = round_of(vectors, Aggregation(clip_to_median=10.0), "float16", weights=[1.0, 2.0, 1.0, 4.0])
    peers = list(outcomes)
    assert len({outcome.digest for outcome in outcomes.values()}) == 1
    for outcome in outcomes.values():
        assert not outcome.failed
        assert list(outcome.clipped) == [peers[2].peer_id]
        assert 0.5 <= outcome.clipped[peers[2].peer_id] < 0.62  # whole chunks
        assert outcome.vector is not None
        assert float(outcome.vector.abs().max()) < 10.0
    unclipped = round_of(vectors, Aggregation(), "float16")
    assert all(not outcome.clipped for outcome in unclipped.values())


def forged(message: bytes, **changes: bytes) -> bytes:
    """An average with something else in its header."""
    header, payload = unpack(message)
    for name, value in changes.items():
        setattr(header.average, name, value)
    return pack(header, payload)


@pytest.mark.parametrize("clipped", [b"\x10", b"\x01\x00", b"\x0f"])
def test_invalid_reports_of_clipped_members_are_refused(
    clipped: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody of that number, a bitmap of another size, and one who is not in the average (its
    weight is 0).
    """
    give = RoundDriver.send

    async def lie(self: RoundDriver, stream: object, message: bytes) -> None:
        header, _ = unpack(message)
        if self.kernels.own == 1 and header.HasField("average"):
            message = forged(message, clipped=clipped)
        await give(self, stream, message)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundDriver, "send", lie)
    outcomes = round_of(draw(4), Aggregation(clip_to_median=10.0), weights=[1.0, 1.0, 1.0, 0.0])
    liar = list(outcomes)[1].peer_id
    others = [outcome for peer, outcome in outcomes.items() if peer.peer_id != liar]
    # its shard was taken over
    assert not any(outcome.failed for outcome in others), [outcome.reason for outcome in others]
    assert len({outcome.digest for outcome in others}) == 1
    assert all("was lost as a reducer" in outcome.left_out[liar] for outcome in others)
    assert not any(outcome.clipped for outcome in others)


def test_clipped_members_are_known_for_chunks_that_were_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reducer gives its averages to one member only, and then nonsense: what one holds the others fetch,
    the rest is reduced again.
    """
    give, told = RoundDriver.send, [0]

    async def lie(self: RoundDriver, stream: Stream, message: bytes) -> None:
        header, _ = unpack(message)
        if self.kernels.own == 1 and header.HasField("average"):
            told[0] += 1
            if told[0] > 3:
                message = forged(message, clipped=b"\x10")
        await give(self, stream, message)

    monkeypatch.setattr(RoundDriver, "send", lie)
    vectors = draw(4)
    vectors[2] *= 1e4
    outcomes = round_of(vectors, Aggregation(rule="median", clip_to_median=10.0), "float32")
    liar, clipped = list(outcomes)[1].peer_id, list(outcomes)[2].peer_id
    others = [outcome for peer, outcome in outcomes.items() if peer.peer_id != liar]
    assert not any(outcome.failed for outcome in others), [outcome.reason for outcome in others]
    assert len({outcome.digest for outcome in others}) == 1
    for outcome in others:
        assert outcome.clipped == {clipped: 1.0}
        assert "was lost as a reducer" in outcome.left_out[liar]


def test_a_reducer_that_reports_clipping_to_some_members_only_is_outvoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reduce = ReductionKernels.reduce

    def lie(self: ReductionKernels, jobs: Any) -> list[Averaged | Spoiled]:
        done = reduce(self, jobs)
        if self.own != 0:
            return done
        return [
            replace(item, clipped=b"\x01", digest=digest_payload(b"a lie"))
            if isinstance(item, Averaged)
            else item
            for item in done
        ]

    monkeypatch.setattr(ReductionKernels, "reduce", lie)
    outcomes = round_of(draw(3), Aggregation(clip_to_median=10.0))
    kept = list(outcomes.values())[1:]
    assert not any(outcome.failed for outcome in kept), [outcome.reason for outcome in kept]
    assert len({outcome.digest for outcome in kept}) == 1
    assert not any(outcome.clipped for outcome in kept)


def bytes_sent(stranger_bytes_per_s: float) -> list[int]:
    """Return what each member sends in a round of three electors and a stranger that announces this speed."""
    network = SimulatedNetwork(4)
    peers = [network.peer() for _ in range(4)]
    speeds = [125e6] * 3 + [stranger_bytes_per_s]
    group = Group(
        group_id=random.Random(5).randbytes(32),
        members=tuple(
            Member(contact=peer.contact, weight=1.0, bandwidth=speed)
            for peer, speed in zip(peers, speeds, strict=True)
        ),
        codec="float32",
        gathered=(b"",) * len(peers),
        reducers=frozenset(peer.peer_id for peer in peers[:3]),
    )
    outcomes = run_virtual(run_round(network, group, draw(len(peers)), timeout_s=30.0, config=RoundConfig()))
    assert not any(outcome.failed for outcome in outcomes)
    return [outcome.bytes_sent for outcome in outcomes]


def test_a_stranger_that_announces_a_slow_link_does_not_make_all_chunks_small() -> None:
    """Each further chunk costs everybody a header and a message."""
    assert bytes_sent(1.0) == bytes_sent(125e6)
