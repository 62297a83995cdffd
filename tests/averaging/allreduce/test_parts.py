"""The parts of a round: framing, assembly of the result, versions of averages, the failure detector."""

from __future__ import annotations

import pytest
import torch

from averaging.allreduce.logic.assembly import Assembly
from averaging.allreduce.logic.failure_detector import TIMEOUT_S_MAX, FailureDetector
from averaging.allreduce.logic.versions import (
    Version,
    decode_places,
    digest_payload,
    digest_round,
    encode_places,
    winners,
)
from averaging.reduction.framing import pack, unpack
from averaging.reduction.partition import plan_chunks
from averaging.reduction.reduce import first_bad
from swarm.compression import find
from swarm.core.errors import PeerError
from swarm.wire.reduce_pb2 import ExchangeAverage, ExchangeContribution, ExchangeHeader, ExchangeWithdrawal

CODEC = find("float32")


# ---- framing


@pytest.mark.parametrize("chunk", [0, 1, 127, 128, 1 << 20])
@pytest.mark.parametrize("contributors", [b"", b"\x0f", bytes(32)])
def test_a_packed_message_is_unpacked_unchanged(chunk: int, contributors: bytes) -> None:
    header = ExchangeHeader(average=ExchangeAverage(chunk=chunk, contributors=contributors))
    message = pack(header, memoryview(b"payload"))
    found, payload = unpack(message)
    assert bytes(payload) == b"payload"
    assert (found.average.chunk, found.average.contributors) == (chunk, contributors)
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
def test_a_malformed_frame_is_refused(message: bytes) -> None:
    with pytest.raises(PeerError):
        unpack(message)


def test_an_empty_header_has_no_kind() -> None:
    header, payload = unpack(b"\x00\x00\x00\x00")
    assert header.WhichOneof("kind") is None
    assert not payload
    assert ExchangeHeader(contribution=ExchangeContribution(chunk=0)).WhichOneof("kind") == "contribution"


# ---- assembly


def test_places_of_members_survive_encoding() -> None:
    assert decode_places(encode_places([0, 3, 8], 9), 9) == (0, 3, 8)
    assert decode_places(b"\x00", 4) == ()
    for raw, members in [(b"", 1), (b"\x10", 4), (b"\x01\x00", 4), (bytes(33), 256)]:
        with pytest.raises(PeerError, match="not a set of members"):
            decode_places(raw, members)


def test_a_shard_is_assembled_from_its_chunks() -> None:
    plan = plan_chunks(4096, [1.0, 0.0, 1.0], CODEC, 4096)
    assert [(chunk.reducer, chunk.numel) for chunk in plan.chunks] == [
        (0, 1024),
        (0, 1024),
        (2, 1024),
        (2, 1024),
    ]
    assembly = Assembly(plan, CODEC, range(3))
    everybody, two = encode_places([0, 1, 2], 3), encode_places([0, 1], 3)
    for reducer, chunk, contributors, size, message in [
        (0, 2, everybody, 4096, "does not reduce"),
        (0, 9, everybody, 4096, "does not reduce"),
        (1, 0, everybody, 4096, "does not reduce"),
        (0, 0, everybody, 4000, "with 4000 bytes"),
        (0, 0, b"\xff", 4096, "not a set"),
    ]:
        with pytest.raises(PeerError, match=message):
            assembly.announce(reducer, chunk, contributors, size)
    assert assembly.share(0) == "0 of 2 chunks"
    assert assembly.announce(0, 1, everybody, 4096) is plan.chunks[1]
    assert assembly.share(0) == "1 of 2 chunks"
    assert (assembly.outstanding(0), assembly.outstanding(1), assembly.outstanding(2)) == (1, 0, 2)
    with pytest.raises(PeerError, match="second average"):
        assembly.announce(0, 1, everybody, 4096)
    for reducer, chunk in [(0, 0), (2, 2), (2, 3)]:
        assembly.announce(reducer, chunk, two, 4096)
    chunks = [
        Version(0, everybody if chunk == 1 else two, digest_payload(bytes([chunk]))) for chunk in range(4)
    ]
    for chunk in (3, 1, 0, 2):
        assert not assembly.complete
        assert assembly.arriving(chunks_reducer := plan.chunks[chunk].reducer) == 2 - sum(
            index in assembly.held for index in (0, 1, 2, 3) if plan.chunks[index].reducer == chunks_reducer
        )
        assembly.settle(chunk, chunks[chunk])
    assert assembly.complete
    pairs = [(version.digest, version.contributors) for version in chunks]
    assert assembly.digest() == digest_round(pairs)
    assert assembly.digest() != digest_round([*pairs[:3], (pairs[3][0], everybody)])
    assert assembly.fractions() == {0: 1.0, 1: 1.0, 2: 0.25}
    assert assembly.result() == assembly.digest() + bytes([0b100]), "2 is in a quarter of the vector"
    assert assembly.result() == assembly.result(dict(enumerate(chunks)))
    assert assembly.covered() == 1.0
    nobody = encode_places([], 3)
    assembly.settle(3, Version(1, nobody, digest_payload(b"")))
    assert assembly.covered() == 0.75
    with pytest.raises(PeerError, match="takes 0"):
        assembly.check(3, nobody, 4096)


def test_a_forgotten_average_is_missing_again() -> None:
    plan = plan_chunks(4096, [1.0, 0.0, 1.0], CODEC, 4096)
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


A, B = bytes(32), bytes([1]) * 32


def test_the_version_that_most_hold_wins() -> None:
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
    assert chosen[4] == (version(2, B), [2])  # a minority result is better than none


# ---- the failure detector


def ticks(
    liveness: FailureDetector, start_s: float, count: int, step_s: float = 0.1
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Tick `count` times; return (time, member) of heartbeats and of failures."""
    heartbeats, dead = [], []
    for nth in range(1, count + 1):
        now_s = start_s + nth * step_s
        sent, lost = liveness.tick(now_s)
        heartbeats += [(round(now_s, 6), place) for place in sent]
        dead += [(round(now_s, 6), place) for place, _ in lost]
    return heartbeats, dead


def known(ours: list[int], theirs: list[int]) -> FailureDetector:
    liveness = FailureDetector(ours, theirs, 0.0)
    for place in (*ours, *theirs):
        liveness.heard(place)
    return liveness


def test_a_silent_peer_is_marked_failed_within_a_second() -> None:
    heartbeats, dead = ticks(known([1], []), 0.0, 20)
    assert heartbeats == [(0.1, 1)]
    assert dead == [(0.9, 1)]


def test_a_member_that_should_send_heartbeats_is_probed_first() -> None:
    heartbeats, dead = ticks(known([], [2]), 0.0, 20)
    assert heartbeats == [(0.3, 2)]
    assert dead == [(0.9, 2)]


def test_a_member_that_answers_is_not_marked_failed() -> None:
    liveness = known([1], [])
    for nth in range(100):
        heartbeats, dead = ticks(liveness, nth * 0.1, 1)
        assert not dead
        for _, place in heartbeats:
            liveness.answered(place, 0.01)
    liveness.answered(7, 0.1)  # nobody we know


def test_any_message_in_both_directions_replaces_heartbeats() -> None:
    liveness = known([1], [])
    for nth in range(50):
        liveness.heard(1)
        liveness.sent(1)
        assert ticks(liveness, nth * 0.05, 1, 0.05) == ([], [])


def test_time_in_which_this_process_was_stopped_does_not_count_as_silence() -> None:
    """Stopped for ten seconds, or starved of processor time, this process accuses no member because of it."""
    liveness = known([1], [2])
    assert ticks(liveness, 0.0, 3, 10.0)[1] == []


def test_a_slow_peer_gets_more_time() -> None:
    liveness = known([1], [])
    ticks(liveness, 0.0, 1)
    liveness.answered(1, 0.6)
    assert liveness.timeout_s(1) == pytest.approx(0.3 + 3 * 0.6)
    liveness.answered(1, 60.0)
    assert liveness.timeout_s(1) == pytest.approx(0.3 + TIMEOUT_S_MAX)


def test_a_new_peer_gets_time_to_begin() -> None:
    _, dead = ticks(FailureDetector([1], [], 0.0), 0.0, 50)
    assert dead == [(3.3, 1)]


def test_unanswered_heartbeats_are_repeated_and_forgotten_members_get_none() -> None:
    liveness = known([1, 2], [])
    assert [place for _, place in ticks(liveness, 0.0, 1)[0]] == [1, 2]
    liveness.unanswered(1)
    liveness.forget(2)
    assert [place for _, place in ticks(liveness, 0.1, 1)[0]] == [1]
    liveness.heard(2)
    liveness.unanswered(2)
    assert [place for _, place in ticks(liveness, 0.2, 10)[1]] == [1]
