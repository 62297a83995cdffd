"""The small machines of a round: framing, assembly of the result, votes, liveness."""

from __future__ import annotations

import pytest
import torch

from averaging.allreduce.assembly import Assembly, decode_places, encode_places
from averaging.allreduce.commit import (
    Ballot,
    Next,
    Verdict,
    Version,
    Votes,
    digest_payload,
    digest_round,
    winners,
)
from averaging.allreduce.liveness import FailureDetector, LivenessConfig
from averaging.reduction.chunks import pack, unpack
from averaging.reduction.partition import plan_parts
from averaging.reduction.reduce import first_bad
from swarm.compression import find
from swarm.core.errors import PeerError, UsageError
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
    assert (
        unpack(pack(ExchangeHeader(withdrawal=ExchangeWithdrawal(reason="why"))))[0].withdrawal.reason
        == "why"
    )


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00\x00",
        b"\xff\xff\xff\xffabc",
        b"\x09\x00\x00\x00short",
        b"\x02\x00\x00\x00\xff\xff",
        b"\x00\x20\x00\x00" + bytes(9000),
    ],
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
    assert decode_places(b"\x00", 4) == ()
    for raw, members in [(b"", 1), (b"\x10", 4), (b"\x01\x00", 4), (bytes(33), 256)]:
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
    parts = [Version(0, everybody if part == 1 else two, digest_payload(bytes([part]))) for part in range(4)]
    for part in (3, 1, 0, 2):
        assert not assembly.complete
        assert assembly.arriving(parts_reducer := plan.parts[part].reducer) == 2 - sum(
            index in assembly.held for index in (0, 1, 2, 3) if plan.parts[index].reducer == parts_reducer
        )
        assembly.settle(part, parts[part])
    assert assembly.complete
    assert not assembly.taken_over
    pairs = [(version.digest, version.contributors) for version in parts]
    assert assembly.digest() == digest_round(pairs)
    assert assembly.digest() != digest_round([*pairs[:3], (pairs[3][0], everybody)])
    assert assembly.fractions() == {0: 1.0, 1: 1.0, 2: 0.25}
    assert assembly.covered() == 1.0
    nobody = encode_places([], 3)
    assembly.settle(3, Version(1, nobody, digest_payload(b"")))
    assert assembly.taken_over
    assert assembly.covered() == 0.75
    with pytest.raises(PeerError, match="takes 0"):
        assembly.check(3, nobody, 4096)


def test_an_average_that_is_forgotten_is_lacking_again() -> None:
    plan = plan_parts(4096, [1.0, 0.0, 1.0], CODEC, 4096)
    assembly = Assembly(plan, CODEC)
    assembly.announce(0, 0, encode_places([0], 3), 4096)
    assert assembly.lacking(0) == [1]
    assembly.forget(0)
    assert assembly.lacking(0) == [0, 1]
    assert (assembly.outstanding(0), assembly.arriving(0)) == (2, 0)
    assembly.settle(0, Version(2, encode_places([1], 3), bytes(32)))  # from elsewhere
    assert (assembly.outstanding(0), assembly.lacking(0)) == (1, [1])


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


A, B, C = bytes(32), bytes([1]) * 32, bytes([2]) * 32


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


def test_different_bytes_are_resolved_or_end_the_round() -> None:
    votes = votes_of(3)
    for number in range(1, 9):
        for place, digest in enumerate((A, B, C)):
            votes.add(Ballot(place=place, number=number, digest=digest))
        assert votes.verdict() is None
        assert votes.next() is Next.RESOLVE
        assert votes.differed() == []  # none of them has most on its side
    verdict = votes.verdict()
    assert verdict is not None
    assert verdict.failure is not None
    assert "peer 0" in verdict.failure
    assert "peer 1" in verdict.failure


def test_who_stays_with_what_few_hold_is_not_asked_any_more() -> None:
    votes = votes_of(3)
    for number in range(1, 5):
        for place, digest in enumerate((A, A, B)):
            votes.add(Ballot(place=place, number=number, digest=digest))
        assert votes.differed() == ([2] if number == 4 else [])
    votes.exclude(2)
    assert votes.next() is Next.VOTE
    votes.add(votes.next_ballot(A, {}))
    assert votes.verdict() is None  # peer 1 has not said yet that it goes on without peer 2
    votes.add(Ballot(place=1, number=5, digest=A, excluded=frozenset({2})))
    assert votes.verdict() == Verdict(None)


def test_the_dead_are_not_asked() -> None:
    """But those who live must know that they are not."""
    votes = votes_of(3)
    votes.add(Ballot(place=0, digest=A))
    votes.add(Ballot(place=1, digest=A))
    assert votes.verdict() is None
    assert votes.next() is Next.WAIT
    votes.bury(2)
    assert votes.verdict() is None
    assert votes.next() is Next.VOTE
    votes.add(votes.next_ballot(A, {}))
    assert votes.cast[0].number == 2
    assert votes.verdict() is None
    assert votes.missing == [1]
    votes.add(Ballot(place=1, number=2, digest=A, excluded=frozenset({2})))
    assert votes.verdict() == Verdict(None)
    assert votes.live == {0, 1}
    votes.bury(0)  # nobody buries itself
    assert 0 in votes.live


def test_whom_others_exclude_is_excluded_and_the_excluded_wait() -> None:
    votes = votes_of(3)
    votes.add(Ballot(place=0, digest=A))
    votes.add(Ballot(place=1, digest=A, excluded=frozenset({2})))
    assert votes.next() is Next.VOTE
    assert votes.electorate == {0, 1}
    outcast = votes_of(3)
    outcast.add(Ballot(place=0, digest=A))
    outcast.add(Ballot(place=1, digest=A, excluded=frozenset({0})))
    outcast.add(Ballot(place=2, digest=A))
    assert outcast.verdict() is None
    outcast.add(Ballot(place=1, number=3, digest=B, excluded=frozenset({0}), committed=True))
    assert outcast.elsewhere() is None  # one of two is not most
    outcast.add(Ballot(place=2, number=3, digest=B, excluded=frozenset({0}), committed=True))
    assert outcast.elsewhere() == B
    outcast.add(outcast.next_ballot(B, {}))
    assert outcast.verdict() == Verdict(None)


def test_what_one_committed_holds_for_who_holds_the_same() -> None:
    votes = votes_of(4)
    votes.add(Ballot(place=0, digest=A))
    votes.add(Ballot(place=1, digest=A, number=2, excluded=frozenset({3}), committed=True))
    assert votes.verdict() == Verdict(None)


def test_the_last_one_left() -> None:
    votes = votes_of(3)
    votes.lone_reason = "nobody else"
    votes.add(Ballot(place=0, digest=A))
    votes.bury(1)
    votes.bury(2)
    assert votes.verdict() == Verdict("nobody else")


def test_the_word_of_a_member_that_is_gone_excludes_nobody_unless_we_voted_so() -> None:
    """Else two members, each excluded by somebody who died, would wait for each other for ever."""
    votes = votes_of(4)
    votes.add(Ballot(place=1, digest=A, excluded=frozenset({2, 3})))
    assert votes.electorate == {0, 1}
    votes.bury(1)
    assert votes.electorate == {0, 2, 3}
    voted = votes_of(4)
    voted.add(Ballot(place=1, digest=A, excluded=frozenset({3})))
    voted.add(voted.next_ballot(A, {}))
    voted.add(Ballot(place=1, number=2, digest=A, excluded=frozenset({2, 3})))
    voted.bury(1)
    assert voted.electorate == {0, 2}, "member 1 may have committed what we voted for without member 3"
    voted.exclude(2)
    assert voted.electorate == {0}


def test_a_vote_is_cast_once() -> None:
    votes = votes_of(2)
    assert votes.add(Ballot(place=1, digest=A))
    assert not votes.add(Ballot(place=1, digest=A))
    with pytest.raises(PeerError, match="votes once"):
        votes.add(Ballot(place=1, digest=B))
    assert votes.add(Ballot(place=1, digest=B, number=2))
    assert not votes.add(Ballot(place=1, digest=A))  # overtaken on its way
    assert votes.cast[1].digest == B
    assert votes.add(Ballot(place=1, digest=B, number=2, committed=True))
    with pytest.raises(PeerError, match="votes once"):
        votes.add(Ballot(place=1, digest=A, number=3, committed=True))
    with pytest.raises(PeerError, match="32 bytes"):
        Ballot(place=1, digest=b"short")
    with pytest.raises(PeerError, match="a ballot's number"):
        Ballot(place=1, number=0)


def test_a_last_vote_passes_on_whom_others_left_out() -> None:
    votes = votes_of(3)
    votes.add(Ballot(place=1, digest=A, left_out={1: "nan", 2: "late"}))
    votes.add(Ballot(place=0, digest=A, left_out={2: "silent"}))
    votes.commit()
    assert votes.cast[0] == Ballot(place=0, digest=A, committed=True, left_out={1: "nan", 2: "silent"})


def test_most_others_hold_everything() -> None:
    votes = votes_of(4)
    votes.add(Ballot(place=1, digest=A))
    assert not votes.overtaken
    votes.add(Ballot(place=2, digest=B))
    assert votes.overtaken


def test_which_version_wins() -> None:
    def version(attempt: int, digest: bytes, contributors: bytes = b"\x07") -> Version:
        return Version(attempt, contributors, digest)

    tables = {
        0: {0: version(0, A), 1: version(1, B), 2: version(1, A), 4: version(0, A, b"\x00")},
        1: {0: version(1, B), 1: version(0, A), 2: version(1, B)},
        2: {0: version(1, B), 4: version(2, B)},
    }
    chosen = winners(tables, range(5))
    assert chosen[0] == (version(1, B), [1, 2])  # most hold it
    assert chosen[1] == (version(0, A), [1])  # the lower attempt
    assert chosen[2] == (version(1, A), [0])  # the smaller digest
    assert 3 not in chosen
    assert chosen[4] == (version(2, B), [2])  # something is better than nothing


# ---- liveness

CONFIG = LivenessConfig()


def ticks(
    liveness: FailureDetector, start_s: float, count: int, step_s: float = 0.1
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Tick `count` times; (when, whom) for beats and for deaths."""
    beats, dead = [], []
    for nth in range(1, count + 1):
        now_s = start_s + nth * step_s
        sent, lost = liveness.tick(now_s)
        beats += [(round(now_s, 6), place) for place in sent]
        dead += [(round(now_s, 6), place) for place, _ in lost]
    return beats, dead


def known(ours: list[int], theirs: list[int]) -> FailureDetector:
    liveness = FailureDetector(ours, theirs, CONFIG, 0.0)
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


def test_anything_heard_and_told_counts_and_spares_beats() -> None:
    liveness = known([1], [])
    for nth in range(50):
        liveness.heard(1)
        liveness.told(1)
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
    _, dead = ticks(FailureDetector([1], [], CONFIG, 0.0), 0.0, 50)
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
