"""The small machines of a round: framing, assembly of the result, votes, liveness."""

from __future__ import annotations

import pytest
import torch

from averaging.assembly import Assembly, decode_places, encode_places
from averaging.chunks import pack, unpack
from averaging.commit import Ballot, Verdict, Votes, digest_payload, digest_round
from averaging.liveness import Liveness, LivenessConfig
from averaging.partition import plan_parts
from averaging.reduce import first_bad
from swarm.compression import find
from swarm.errors import PeerError, UsageError
from swarm.wire.reduce_pb2 import ExchangeAverage, ExchangeChunk, ExchangeHeader, ExchangeWithdrawal

CODEC = find("float32")


# ---- framing


@pytest.mark.parametrize("part", [0, 1, 127, 128, 1 << 20])
@pytest.mark.parametrize("contributors", [b"", b"\x0f", bytes(32)])
def test_framing(part: int, contributors: bytes) -> None:
    header = ExchangeHeader(average=ExchangeAverage(part=part, contributors=contributors))
    message = pack(header, memoryview(b"payload"))
    found, payload = unpack(message)
    assert bytes(payload) == b"payload"
    assert (found.average.part, found.average.contributors) == (part, contributors)
    assert (len(message) - len(payload)) % 16 == 0
    assert pack(header, b"payload") == message  # padding is not added twice
    assert unpack(pack(ExchangeHeader(withdrawal=ExchangeWithdrawal(reason="why"))))[0].withdrawal.reason == "why"


@pytest.mark.parametrize(
    "message",
    [b"", b"\x00\x00", b"\xff\xff\xff\xffabc", b"\x09\x00\x00\x00short", b"\x02\x00\x00\x00\xff\xff", b"\x00\x20\x00\x00" + bytes(9000)],
)
def test_framing_refuses(message: bytes) -> None:
    with pytest.raises(PeerError):
        unpack(message)


def test_an_empty_header_is_of_no_kind() -> None:
    header, payload = unpack(b"\x00\x00\x00\x00")
    assert header.WhichOneof("kind") is None
    assert not payload
    assert ExchangeHeader(chunk=ExchangeChunk(part=0)).WhichOneof("kind") == "chunk"


# ---- assembly


def test_places() -> None:
    assert decode_places(encode_places([0, 3, 8], 9), 9) == (0, 3, 8)
    for raw, members in [(b"", 1), (b"\x00", 4), (b"\x10", 4), (b"\x01\x00", 4), (bytes(33), 256)]:
        with pytest.raises(PeerError, match="not a set of members"):
            decode_places(raw, members)


def test_assembly() -> None:
    plan = plan_parts(4096, [1.0, 0.0, 1.0], CODEC, 4096)
    assert [(part.reducer, part.numel) for part in plan.parts] == [(0, 1024), (0, 1024), (2, 1024), (2, 1024)]
    assembly = Assembly(plan, CODEC)
    everybody, two = encode_places([0, 1, 2], 3), encode_places([0, 1], 3)
    for reducer, part, contributors, size, message in [
        (0, 2, everybody, 4096, "does not reduce"),
        (0, 9, everybody, 4096, "does not reduce"),
        (1, 0, everybody, 4096, "does not reduce"),
        (0, 0, everybody, 4000, "with 4000 bytes"),
        (0, 0, b"\xff", 4096, "not a set"),
    ]:
        with pytest.raises(PeerError, match=message):
            assembly.announce(reducer, part, contributors, size)
    assert assembly.share(0) == "0 of 2 parts"
    assert assembly.announce(0, 1, everybody, 4096) is plan.parts[1]
    assert assembly.share(0) == "1 of 2 parts"
    assert (assembly.outstanding(0), assembly.outstanding(1), assembly.outstanding(2)) == (1, 0, 2)
    with pytest.raises(PeerError, match="second average"):
        assembly.announce(0, 1, everybody, 4096)
    for reducer, part in [(0, 0), (2, 2), (2, 3)]:
        assembly.announce(reducer, part, two, 4096)
    parts = [(digest_payload(bytes([part])), everybody if part == 1 else two) for part in range(4)]
    for part in (3, 1, 0, 2):
        assert not assembly.complete
        assembly.settle(part, *parts[part])
    assert assembly.complete
    assert assembly.digest() == digest_round(parts)
    assert assembly.digest() != digest_round([*parts[:3], (parts[3][0], everybody)])
    assert assembly.fractions() == {0: 1.0, 1: 1.0, 2: 0.25}


def test_the_first_bad_element() -> None:
    values = torch.zeros(100)
    values[70] = float("nan")
    assert first_bad(values, 10.0) == 70
    values[33] = -11.0
    assert first_bad(values, 10.0) == 33
    assert first_bad(values[71:], 10.0) is None


# ---- votes


def votes_of(count: int) -> Votes:
    return Votes(range(count), 0, lambda place: f"peer {place}")


A, B = bytes(32), bytes([1]) * 32


def test_all_hold_the_same() -> None:
    votes = votes_of(3)
    for place in (1, 2):
        votes.add(Ballot(place=place, digest=A))
        assert votes.verdict() is None
    assert votes.missing == [0]
    votes.add(Ballot(place=0, digest=A))
    assert votes.verdict() == Verdict(None)


def test_an_auxiliary_member_has_no_opinion() -> None:
    votes = votes_of(2)
    votes.add(Ballot(place=1))
    votes.add(Ballot(place=0, digest=A))
    assert votes.verdict() == Verdict(None)


def test_one_failure_fails_all() -> None:
    votes = votes_of(3)
    votes.add(Ballot(place=2, failure="its disk is on fire"))
    verdict = votes.verdict()
    assert verdict is not None
    assert verdict.failure == "peer 2 could not finish: its disk is on fire"


def test_different_bytes() -> None:
    votes = votes_of(3)
    votes.add(Ballot(place=0, digest=A))
    votes.add(Ballot(place=1, digest=B))
    verdict = votes.verdict()
    assert verdict is not None
    assert verdict.failure is not None
    assert "peer 0" in verdict.failure
    assert "peer 1" in verdict.failure


def test_the_dead_are_not_asked() -> None:
    votes = votes_of(3)
    votes.add(Ballot(place=0, digest=A))
    votes.add(Ballot(place=1, digest=A))
    assert votes.verdict() is None
    votes.bury(2)
    assert votes.verdict() == Verdict(None)
    assert votes.live == {0, 1}
    votes.bury(0)  # nobody buries itself
    assert 0 in votes.live


def test_a_vote_is_cast_once() -> None:
    votes = votes_of(2)
    votes.add(Ballot(place=1, digest=A))
    votes.add(Ballot(place=1, digest=A))
    with pytest.raises(PeerError, match="votes once"):
        votes.add(Ballot(place=1, digest=B))
    with pytest.raises(PeerError, match="votes once"):
        votes.add(Ballot(place=1, failure="changed my mind"))
    with pytest.raises(PeerError, match="32 bytes"):
        Ballot(place=1, digest=b"short")


# ---- liveness

CONFIG = LivenessConfig()


def ticks(liveness: Liveness, start_s: float, count: int, step_s: float = 0.1) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Tick `count` times; (when, whom) for beats and for deaths."""
    beats, dead = [], []
    for nth in range(1, count + 1):
        now_s = start_s + nth * step_s
        sent, lost = liveness.tick(now_s)
        beats += [(round(now_s, 6), place) for place in sent]
        dead += [(round(now_s, 6), place) for place, _ in lost]
    return beats, dead


def known(ours: list[int], theirs: list[int]) -> Liveness:
    liveness = Liveness(ours, theirs, CONFIG, 0.0)
    for place in (*ours, *theirs):
        liveness.heard(place)
    return liveness


def test_a_silent_peer_dies_within_a_second() -> None:
    beats, dead = ticks(known([1], []), 0.0, 20)
    assert beats == [(0.1, 1)]
    assert dead == [(0.9, 1)]


def test_one_that_beats_us_is_probed_first() -> None:
    beats, dead = ticks(known([], [2]), 0.0, 20)
    assert beats == [(0.3, 2)]
    assert dead == [(0.9, 2)]


def test_answers_keep_it_alive() -> None:
    liveness = known([1], [])
    for nth in range(100):
        beats, dead = ticks(liveness, nth * 0.1, 1)
        assert not dead
        for _, place in beats:
            liveness.answered(place, 0.01)
    liveness.answered(7, 0.1)  # nobody we know


def test_anything_heard_counts_and_spares_beats() -> None:
    liveness = known([1], [])
    for nth in range(50):
        liveness.heard(1)
        assert ticks(liveness, nth * 0.05, 1, 0.05) == ([], [])


def test_our_own_absence_is_not_their_silence() -> None:
    """Stopped for ten seconds, or starved of processor time, this process accuses nobody for it."""
    liveness = known([1], [2])
    assert ticks(liveness, 0.0, 3, 10.0)[1] == []


def test_a_slow_peer_gets_more_time() -> None:
    liveness = known([1], [])
    ticks(liveness, 0.0, 1)
    liveness.answered(1, 0.6)
    assert liveness.patience_s(1) == pytest.approx(0.3 + 3 * 0.6)
    liveness.answered(1, 60.0)
    assert liveness.patience_s(1) == pytest.approx(0.3 + CONFIG.patience_s_max)


def test_a_new_peer_gets_time_to_begin() -> None:
    _, dead = ticks(Liveness([1], [], CONFIG, 0.0), 0.0, 50)
    assert dead == [(3.3, 1)]


def test_unanswered_beats_are_repeated_and_the_forgotten_left_alone() -> None:
    liveness = known([1, 2], [])
    assert [place for _, place in ticks(liveness, 0.0, 1)[0]] == [1, 2]
    liveness.unanswered(1)
    liveness.forget(2)
    assert [place for _, place in ticks(liveness, 0.1, 1)[0]] == [1]
    liveness.heard(2)
    liveness.unanswered(2)
    assert [place for _, place in ticks(liveness, 0.2, 10)[1]] == [1]


def test_liveness_config() -> None:
    with pytest.raises(UsageError):
        LivenessConfig(beat_s=0.0)
    with pytest.raises(UsageError):
        LivenessConfig(patience_s_max=0.1)
