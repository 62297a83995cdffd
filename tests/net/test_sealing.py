"""Tests of the frames of the bulk path: a frame opens at its own place only."""

from __future__ import annotations

import hmac
import itertools

import pytest

from swarm.core.identity import Identity
from swarm.net.logic import sealing
from swarm.net.logic.sealing import (
    BODY_BYTES_MAX,
    HEADER_BYTES,
    TAG_BYTES,
    TOKEN_BYTES,
    BulkSecret,
    FrameError,
    FrameKey,
    FrameKind,
    frame_bytes,
    sealed_bytes,
)

CALLER, CALLEE, THIRD = (Identity.generate().peer_id for _ in range(3))
SECRET = BulkSecret(bytes(range(32)), CALLER, CALLEE)


def seal(key: FrameKey, body: bytes, kind: FrameKind = FrameKind.DATA) -> bytes:
    return bytes(key.seal(kind, body, bytearray(frame_bytes(len(body)))))


def read(key: FrameKey, frame: bytes) -> tuple[FrameKind, bytes]:
    assert sealed_bytes(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
    kind, body = key.open(frame[:HEADER_BYTES], memoryview(frame)[HEADER_BYTES:])
    return kind, bytes(body)


def read_as_far_as_it_goes(key: FrameKey, frame: bytes) -> None:
    """Open a frame whose header may announce another size: its reader would take bytes of the next one."""
    size = sealed_bytes(frame[:HEADER_BYTES])
    key.open(frame[:HEADER_BYTES], memoryview(frame)[HEADER_BYTES:][:size])


def test_frames_open_in_order_at_the_other_end() -> None:
    out, into = SECRET.key(1, from_caller=True), SECRET.key(1, from_caller=True)
    for kind, body in ((FrameKind.OPEN, b"/swarm.Test/Talk"), (FrameKind.DATA, b""), (FrameKind.END, b"x")):
        assert read(into, seal(out, body, kind)) == (kind, body)


def test_buffer_may_be_larger_than_the_frame() -> None:
    buffer = bytearray(b"\xff" * 1000)
    frame = bytes(SECRET.key(1, from_caller=True).seal(FrameKind.DATA, b"body", buffer))
    assert len(frame) == HEADER_BYTES + 4 + TAG_BYTES
    assert read(SECRET.key(1, from_caller=True), frame) == (FrameKind.DATA, b"body")


def test_only_a_message_that_fits_is_opened_into_the_receivers_buffer() -> None:
    out, into = SECRET.key(1, from_caller=True), SECRET.key(1, from_caller=True)
    frames = [seal(out, bytes(range(1, 9)), kind) for kind in (FrameKind.DATA, FrameKind.DATA, FrameKind.END)]
    frames.append(seal(out, b""))
    for frame, size, fits in zip(frames, (12, 7, 12, 12), (True, False, False, False), strict=True):
        buffer = bytearray(size)
        sealed = memoryview(frame)[HEADER_BYTES:]
        _, body = into.open(frame[:HEADER_BYTES], sealed, memoryview(buffer))
        assert isinstance(body, memoryview) == fits
        assert bytes(body) == (b"" if frame is frames[3] else bytes(range(1, 9)))
        assert buffer == (bytes(range(1, 9)) + bytes(4) if fits else bytes(size))
    altered = bytearray(seal(out, b"values"))
    altered[-1] ^= 1
    with pytest.raises(FrameError):
        into.open(altered[:HEADER_BYTES], memoryview(altered)[HEADER_BYTES:], memoryview(bytearray(12)))


def test_no_bit_of_a_frame_can_be_changed() -> None:
    frame = seal(SECRET.key(1, from_caller=True), b"some values")
    for place, bit in itertools.product(range(len(frame)), range(8)):
        altered = bytearray(frame)
        altered[place] ^= 1 << bit
        key = SECRET.key(1, from_caller=True)
        with pytest.raises(FrameError):
            read_as_far_as_it_goes(key, bytes(altered))


@pytest.mark.parametrize(
    "other",
    [
        SECRET.key(1, from_caller=False),
        SECRET.key(2, from_caller=True),
        SECRET.key(0, from_caller=True),
        BulkSecret(bytes(32), CALLER, CALLEE).key(1, from_caller=True),
        BulkSecret(SECRET.secret, THIRD, CALLEE).key(1, from_caller=True),
        BulkSecret(SECRET.secret, CALLER, THIRD).key(1, from_caller=True),
        BulkSecret(SECRET.secret, CALLEE, CALLER).key(1, from_caller=False),
    ],
    ids=["reflected", "later stream", "earlier stream", "connection", "caller", "callee", "roles exchanged"],
)
def test_frame_of_another_direction_stream_or_connection_does_not_open(other: FrameKey) -> None:
    frame = seal(SECRET.key(1, from_caller=True), b"values")
    with pytest.raises(FrameError, match="altered"):
        read(other, frame)


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 0)])
def test_repeated_skipped_and_reordered_frames_do_not_open(order: tuple[int, ...]) -> None:
    out = SECRET.key(1, from_caller=True)
    frames = [seal(out, b"%d" % nth) for nth in range(3)]
    into = SECRET.key(1, from_caller=True)
    for nth in order[:-1]:
        read(into, frames[nth])
    with pytest.raises(FrameError):
        read(into, frames[order[-1]])


def test_equal_messages_are_never_sealed_equally() -> None:
    keys = [
        SECRET.key(stream, from_caller=from_caller) for stream in range(3) for from_caller in (True, False)
    ]
    sealed = [seal(key, b"the same") for key in keys for _ in range(3)]
    assert len(set(sealed)) == len(sealed)


@pytest.mark.parametrize(
    "header",
    [
        b"\0\0\0\0\x20\0\0\0",
        b"\5\0\0\0\x20\0\0\0",
        b"\3\0\0\0\x0f\0\0\0",
        b"\3\0\0\0" + (BODY_BYTES_MAX + TAG_BYTES + 1).to_bytes(4, "little"),
        b"PRI * HT",
        b"\x16\x03\x01\x02\0\x01\0\x01",
    ],
)
def test_impossible_header_is_refused_before_anything_is_read(header: bytes) -> None:
    with pytest.raises(FrameError, match="no frame"):
        sealed_bytes(header)


def test_key_is_replaced_before_it_encrypts_too_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of 160 bytes is 10 blocks, and its tag is two more."""
    first = SECRET.key(1, from_caller=True)
    with_one_key = [seal(first, bytes(160)) for _ in range(8)]
    monkeypatch.setattr(sealing, "BLOCKS_MAX", 40)
    out, into = (SECRET.key(1, from_caller=True) for _ in range(2))
    sealed = [seal(out, bytes(160)) for _ in range(8)]
    assert [one == other for one, other in zip(sealed, with_one_key, strict=True)] == [True] * 3 + [False] * 5
    assert len(set(sealed)) == len(sealed)
    direction = b"\1" + (1).to_bytes(8) + CALLER.public_key + CALLEE.public_key
    secret = hmac.digest(SECRET.secret, b"swarm bulk 1\0" + direction, "sha256")
    following = FrameKey(hmac.digest(secret, b"swarm bulk 1\0next", "sha256"))
    assert sealed[3:6] == [seal(following, bytes(160)) for _ in range(3)]
    for frame in sealed:
        assert read(into, frame) == (FrameKind.DATA, bytes(160))


def test_frames_that_are_skipped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "BLOCKS_MAX", 40)
    out, into = (SECRET.key(1, from_caller=True) for _ in range(2))
    for size in (0, 15, 160, 200, 16):
        into.skip(len(seal(out, bytes(size))) - HEADER_BYTES)
        assert read(into, seal(out, b"x")) == (FrameKind.DATA, b"x")


def test_token_tells_nothing_and_cannot_be_chosen() -> None:
    assert len(SECRET.token) == TOKEN_BYTES
    assert SECRET.token == BulkSecret(SECRET.secret, CALLER, CALLEE).token
    assert SECRET.token not in SECRET.secret
    assert BulkSecret(bytes(32), CALLER, CALLEE).token != SECRET.token
