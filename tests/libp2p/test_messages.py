"""Tests of the control messages: py-libp2p's generated classes and the multiaddr package are the oracles;
garbage is refused with a sentence.
"""

from __future__ import annotations

import contextlib
import random

import pytest

from swarm.core.errors import PeerError
from swarm.core.identity import Identity
from swarm.core.ids import ADDRESSES_MAX, Address
from swarm.libp2p.logic import messages
from swarm.libp2p.logic.messages import (
    HolePunch,
    Hop,
    HopKind,
    Identify,
    Limit,
    PunchKind,
    Status,
    Stop,
    StopKind,
)
from swarm.libp2p.logic.negotiation import (
    MULTISTREAM,
    PROPOSALS_MAX,
    Answerer,
    decode_line,
    encode_line,
)

PEER = Identity.generate().peer_id
HOPS = [
    Hop(HopKind.RESERVE),
    Hop(HopKind.CONNECT, peer=PEER),
    Hop(
        HopKind.STATUS,
        status=Status.OK,
        expires_s=1_800_000_000,
        addresses=(b"\4\1\2\3\4\6\0\1",),
        limit=Limit(60),
    ),
    Hop(HopKind.STATUS, status=Status.NO_RESERVATION),
]
STOPS = [
    Stop(StopKind.CONNECT, peer=PEER, limit=Limit(3600, 1 << 40)),
    Stop(StopKind.STATUS, status=Status.OK),
]
PUNCHES = [HolePunch(PunchKind.CONNECT, (b"\4\1\2\3\4\6\0\1", b"x")), HolePunch(PunchKind.SYNC)]


@pytest.mark.parametrize("message", PUNCHES, ids=["connect", "sync"])
def test_py_libp2p_reads_a_message_about_hole_punching_and_is_read(message: HolePunch) -> None:
    from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch as Theirs

    theirs = Theirs.FromString(messages.encode_punch(message))
    assert (theirs.type, tuple(theirs.ObsAddrs)) == (message.kind, message.addresses)
    assert messages.decode_punch(theirs.SerializeToString()) == message


@pytest.mark.parametrize("message", HOPS)
def test_py_libp2p_reads_a_hop_message_and_is_read(message: Hop) -> None:
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage

    theirs = HopMessage.FromString(messages.encode_hop(message))
    assert (theirs.type, theirs.status) == (message.kind, message.status)
    assert theirs.peer.id == (message.peer.to_bytes() if message.peer else b"")
    assert tuple(theirs.reservation.addrs) == message.addresses
    assert messages.decode_hop(theirs.SerializeToString()) == message


@pytest.mark.parametrize("message", STOPS)
def test_py_libp2p_reads_a_stop_message_and_is_read(message: Stop) -> None:
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import StopMessage

    theirs = StopMessage.FromString(messages.encode_stop(message))
    assert (theirs.type, theirs.status) == (message.kind, message.status)
    assert messages.decode_stop(theirs.SerializeToString()) == message


def test_the_type_of_a_message_is_written_where_it_is_zero() -> None:
    assert messages.encode_hop(Hop(HopKind.RESERVE)) == b"\x08\x00"


def test_py_libp2p_reads_identify_and_is_read() -> None:
    from libp2p.identity.identify.pb.identify_pb2 import Identify as Theirs

    message = Identify("swarm/1", ("/a", "/b"), (b"\4\1\2\3\4\6\0\1",), b"\4\1\1\1\1\6\0\2", b"key")
    theirs = Theirs.FromString(messages.encode_identify(message))
    assert (theirs.agent_version, list(theirs.protocols)) == ("swarm/1", ["/a", "/b"])
    assert messages.decode_identify(theirs.SerializeToString()) == message


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::1"])
@pytest.mark.parametrize("relayed", [False, True])
def test_an_address_equals_that_of_the_multiaddr_package(host: str, relayed: bool) -> None:
    from multiaddr import Multiaddr

    text = f"/ip{6 if ':' in host else 4}/{host}/tcp/4001" + (f"/p2p/{PEER}/p2p-circuit" if relayed else "")
    raw = messages.encode_address(Address(host, 4001), PEER if relayed else None)
    assert raw == Multiaddr(text).to_bytes()
    assert messages.decode_address(raw) == Address(host, 4001)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x08", "cut"),
        (b"\x08" + b"\xff" * 11, "too long"),
        (b"\x08\x07", "type 7"),
        (b"\x0a\x00", "a number"),
        (b"\x10\x00", "text of the message is a number"),
        (b"\x12\x05\x0a\x03abc", "not an Ed25519 PeerID"),
        (b"\x12\xff\xff\xff\xff\x0f", "longer than the message"),
        (b"\x0b", "wire type 3"),
        (b"\x28\x01" * 300, "more than 256 fields"),
    ],
)
def test_malformed_messages_are_refused_with_a_reason(raw: bytes, why: str) -> None:
    with pytest.raises(PeerError, match=why):
        messages.decode_hop(raw)


def test_an_answer_with_many_addresses_is_cut_to_eight() -> None:
    message = Hop(HopKind.STATUS, status=100, expires_s=1, addresses=(b"x",) * 50)
    assert len(messages.decode_hop(messages.encode_hop(message)).addresses) == ADDRESSES_MAX


def test_a_peer_that_names_many_addresses_is_heard_up_to_eight() -> None:
    message = HolePunch(PunchKind.CONNECT, (b"x" * 5000,) * 50)
    heard = messages.decode_punch(messages.encode_punch(message)).addresses
    assert (len(heard), max(map(len, heard))) == (ADDRESSES_MAX, 128)


def test_the_name_of_a_peer_cannot_move_the_cursor() -> None:
    said = messages.decode_identify(messages.encode_identify(Identify("\x1b[2J" + "a" * 500, ("/x\n",))))
    assert said.agent.startswith("?[2Ja")
    assert len(said.agent) == 128
    assert said.protocols == ("/x?",)


@pytest.mark.parametrize("seed", range(200))
def test_garbage_raises_nothing_but_peer_errors(seed: int) -> None:
    rng = random.Random(seed)
    encoded = [*map(messages.encode_hop, HOPS), *map(messages.encode_stop, STOPS)]
    raw = rng.choice([*encoded, *map(messages.encode_punch, PUNCHES), rng.randbytes(60)])
    bad = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(bad))
        bad[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        bad = bad or bytearray(b"\0")
    for decode in (
        messages.decode_hop,
        messages.decode_stop,
        messages.decode_punch,
        messages.decode_identify,
        messages.decode_address,
        decode_line,
    ):
        with contextlib.suppress(PeerError):
            decode(bytes(bad))


def test_a_protocol_is_agreed_on_after_proposals_that_are_unknown() -> None:
    answerer = Answerer(frozenset(["/a"]))
    assert answerer.answer(MULTISTREAM) == encode_line(MULTISTREAM)
    assert answerer.answer("/b") == encode_line("na")
    assert answerer.answer("/a") == encode_line("/a")
    assert answerer.agreed == "/a"


def test_a_peer_that_proposes_forever_is_given_up() -> None:
    answerer = Answerer(frozenset(["/a"]))
    answerer.answer(MULTISTREAM)
    for _ in range(PROPOSALS_MAX):
        answerer.answer("/b")
    with pytest.raises(PeerError, match="more than 16"):
        answerer.answer("/a")
    with pytest.raises(PeerError, match="does not speak multistream"):
        Answerer(frozenset()).answer("GET / HTTP/1.1")
