"""The client of libp2p's DHT: py-libp2p's generated class is the oracle of its messages, sorting by distance
that of its search; hostile answers cost a bounded number of questions.
"""

from __future__ import annotations

import hashlib
import random

import pytest
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiaddr import Multiaddr

from swarm.core.errors import PeerError
from swarm.core.ids import Address, Contact, PeerId
from swarm.libp2p.logic.kad import (
    ASKED_MAX,
    NEAREST,
    PARALLEL,
    PROVIDERS_MAX,
    KadKind,
    ServerSearch,
    decode_answer,
    encode_question,
    run_key,
)

KEY = run_key("bytelm")


def peer(number: int) -> Contact:
    raw = hashlib.sha256(number.to_bytes(8, "big")).digest()
    return Contact(PeerId(raw), (Address("203.0.113.7", 1 + number % 65535),))


def distance(one: Contact, key: bytes) -> int:
    here = hashlib.sha256(one.peer_id.to_bytes()).digest()
    return int.from_bytes(here, "big") ^ int.from_bytes(hashlib.sha256(key).digest(), "big")


def add(message: Message, field: str, peer_id: bytes, *addresses: str) -> None:
    one = getattr(message, field).add()
    one.id = peer_id
    one.addrs.extend(Multiaddr(text).to_bytes() for text in addresses)


def test_questions_are_those_of_py_libp2p() -> None:
    for kind in KadKind:
        message = Message.FromString(encode_question(kind, KEY))
        assert (message.type, message.key) == (kind, KEY)
    own = Contact(peer(1).peer_id, (Address("203.0.113.7", 4000), Address("2001:db8::1", 4001)))
    message = Message.FromString(encode_question(KadKind.ADD_PROVIDER, KEY, own))
    (provider,) = message.providerPeers
    assert provider.id == own.peer_id.to_bytes()
    assert [str(Multiaddr(raw)) for raw in provider.addrs] == [one.multiaddr for one in own.addresses]


def test_a_key_is_a_multihash_of_the_run() -> None:
    assert KEY[:2] == bytes([0x12, 32])
    assert len(KEY) == 34
    assert run_key("bytelm2") != KEY


def test_an_answer_yields_tcp_addresses_of_servers_and_grpc_ports_of_providers() -> None:
    message = Message(type=Message.GET_PROVIDERS, key=KEY)
    one, two = peer(1).peer_id, peer(2).peer_id
    add(message, "closerPeers", one.to_bytes(), "/ip4/203.0.113.1/tcp/4001", "/ip4/203.0.113.1/tcp/443/ws")
    add(message, "closerPeers", two.to_bytes(), "/ip4/203.0.113.2/udp/4001/quic-v1", "/dns4/a.example/tcp/1")
    add(message, "closerPeers", b"\x12\x20" + bytes(32), "/ip4/203.0.113.3/tcp/4001")  # an RSA key's
    add(message, "providerPeers", two.to_bytes(), "/ip4/203.0.113.2/tcp/4001", peer(2).addresses[0].multiaddr)
    add(message, "providerPeers", one.to_bytes(), "/ip4/203.0.113.1/tcp/4001")
    answer = decode_answer(message.SerializeToString())
    assert answer.closer == (Contact(one, (Address("203.0.113.1", 4001),)),)
    assert answer.providers == (peer(2),)


def test_more_providers_than_are_taken_do_not_hide_the_servers() -> None:
    message = Message(type=Message.GET_PROVIDERS, key=KEY)
    add(message, "closerPeers", peer(1).peer_id.to_bytes(), "/ip4/203.0.113.1/tcp/4001")
    for number in range(1000):
        add(message, "providerPeers", peer(number).peer_id.to_bytes(), peer(number).addresses[0].multiaddr)
    answer = decode_answer(message.SerializeToString())
    assert len(answer.closer) == 1
    assert len(answer.providers) == PROVIDERS_MAX


@pytest.mark.parametrize("seed", range(30))
def test_damaged_answers_raise_nothing_but_sentences(seed: int) -> None:
    rng = random.Random(seed)
    message = Message(type=Message.GET_PROVIDERS, key=KEY)
    for number in range(3):
        add(message, "closerPeers", peer(number).peer_id.to_bytes(), "/ip4/203.0.113.1/tcp/4001")
        add(message, "providerPeers", peer(number).peer_id.to_bytes(), peer(number).addresses[0].multiaddr)
    good = message.SerializeToString()
    for _ in range(100):
        raw = bytearray(good if rng.random() < 0.8 else rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(4)):
            if raw:
                raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            answer = decode_answer(bytes(raw[: rng.randrange(len(raw) + 1)]))
        except PeerError:
            continue
        assert all(one.addresses for one in (*answer.closer, *answer.providers))


def searched(lookup: ServerSearch, rng: random.Random, answers: dict[PeerId, list[Contact]]) -> int:
    """Run a search in which those answer that have an answer, in any order. Return how many were asked."""
    waiting: list[Contact] = []
    asked = 0
    while True:
        due = lookup.due()
        asked += len(due)
        waiting += due
        assert len(waiting) <= PARALLEL
        if not waiting:
            return asked
        one = waiting.pop(rng.randrange(len(waiting)))
        if one.peer_id in answers:
            lookup.on_answer(one.peer_id, answers[one.peer_id])
        else:
            lookup.on_failure(one.peer_id)


@pytest.mark.parametrize("seed", range(20))
def test_a_search_finds_the_nearest_of_a_network_in_which_each_knows_some(seed: int) -> None:
    rng = random.Random(seed)
    everybody = [peer(seed * 10_000 + number) for number in range(300)]
    near = sorted(everybody, key=lambda one: distance(one, KEY))
    answers = {}
    for one in everybody:
        # as routing tables have it: all of the own neighbourhood, and some of everywhere
        close = sorted(everybody, key=lambda two: one.peer_id.dht_id ^ two.peer_id.dht_id)[:30]
        known = {two.peer_id: two for two in (*close, *rng.sample(everybody, 40))}
        answers[one.peer_id] = sorted(known.values(), key=lambda two: distance(two, KEY))[:20]
    lookup = ServerSearch(KEY, rng.sample(everybody, 2))
    assert searched(lookup, rng, answers) <= ASKED_MAX
    assert lookup.nearest[:10] == near[:10]
    assert len(lookup.nearest) == NEAREST


@pytest.mark.parametrize("seed", range(10))
def test_peers_that_do_not_answer_are_left_out(seed: int) -> None:
    rng = random.Random(seed)
    everybody = [peer(number) for number in range(40)]
    live = rng.sample(everybody, 15)
    lookup = ServerSearch(KEY, everybody)
    searched(lookup, rng, {one.peer_id: [] for one in live})
    assert lookup.nearest == sorted(live, key=lambda one: distance(one, KEY))


def test_answers_that_name_ever_nearer_peers_end_after_a_bounded_number_of_questions() -> None:
    class Endless(dict[PeerId, list[Contact]]):
        made = 1000

        def __contains__(self, key: object) -> bool:
            return True

        def __getitem__(self, key: PeerId) -> list[Contact]:
            Endless.made += 100
            return [peer(Endless.made + number) for number in range(100)]

    lookup = ServerSearch(KEY, [peer(1)])
    assert searched(lookup, random.Random(1), Endless()) <= ASKED_MAX
