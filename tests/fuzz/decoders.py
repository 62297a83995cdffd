"""Every decoder of bytes, texts and values that other peers choose. Only SwarmError may come out of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from typing import Any

import base58
import msgpack
import torch

from averaging.allreduce.logic.versions import check_clipped, decode_places
from averaging.history.chain import Chain
from averaging.history.encoding import chain_text, decode_chain, encode_chain, read_chain_text
from averaging.history.receipts import (
    Credit,
    Receipt,
    Totals,
    decode_receipt,
    encode_receipt,
    receipt_statement,
)
from averaging.optim.exchange import parse_chunks_request
from averaging.optim.progress.logic.reports import ProgressReport, ProgressTotal
from averaging.optim.state.snapshot import ALIGNMENT_BYTES, encode_snapshot, read_header, read_tensors
from averaging.optim.state.training_state import TrainingState
from averaging.reduction.framing import unpack
from moe.protocol.names import ExpertGrid, ExpertUid
from moe.protocol.schema import ExpertSchema
from swarm import compression
from swarm.core.errors import SwarmError
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.logic.blobs import blob_key, blob_of
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.records import Record, RecordValidator, decode_value, encode_value
from swarm.dht.logic.summary import missing_entries
from swarm.libp2p.logic import messages
from swarm.libp2p.logic.kad import KadKind, decode_answer, encode_question, run_key
from swarm.libp2p.logic.messages import Hop, HopKind, Identify, Limit, Stop, StopKind
from swarm.libp2p.logic.negotiation import decode_line, encode_line
from swarm.libp2p.logic.yamux import YamuxSession
from swarm.membership.capability import decode as decode_capability
from swarm.membership.invite import PREFIX, Invite
from swarm.metrics.record import Metrics, RoundReport
from swarm.net.logic.lan import NearbyPeer
from swarm.net.logic.lan import decode as decode_nearby
from swarm.net.logic.lan import encode as encode_nearby
from swarm.run.grid import GridSpecification
from swarm.run.recovery import recover
from swarm.run.signed import sign, verified
from swarm.run.specification import RunSpecification
from tests.averaging.history.peers import PEERS, RUN, SIGNERS, certificate, identity, proposal
from tests.fuzz.bulk_port import FRAMES, STATUSES, read_frame, read_status
from tests.fuzz.making import PEER, Maker
from tests.fuzz.messages import CAPABILITIES, INVITES

_NOW_S = 1.8e9
_OWNER, _RECOVERY, _NEXT = (identity(number) for number in (101, 102, 103))
_TABLE = {
    "name": "tiny",
    "target_batch_size": 64,
    "batch_size": 8,
    "task": {"name": "bytelm", "settings": {"width": 16}},
    "recovery_key": str(_RECOVERY.peer_id),
}
_SIGNED = sign(RunSpecification.from_table(_TABLE, "fuzz"), _OWNER, version=1, created_s=1.0)
_GRID = sign(
    GridSpecification.from_table({"experts": ["ffn.[0:4].[0:4]"], "optimizer": {"clip_norm": 1.0}}, "fuzz"),
    _OWNER,
    version=1,
    created_s=1.0,
)
_RECOVERED = recover(_SIGNED, _RECOVERY, _NEXT)
_NAMESPACES = Namespaces()
_RECORDS = ("specification", "progress", "donors", "metrics", "holders.epochs", "presence", "experts")


@dataclass(frozen=True)
class Decoder:
    """A function of bytes, and valid bytes to begin with."""

    name: str
    run: Callable[[bytes], object]
    seeds: list[bytes] = field(default_factory=list)


def _of_value(function: Callable[[Any], object]) -> Callable[[bytes], object]:
    """Return a decoder of values, which gets them as the DHT delivers them."""

    def run(raw: bytes) -> object:
        return function(decode_value(raw))

    return run


def _of_text(function: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda raw: function(raw.decode("utf-8", "replace"))


def _signed_body(function: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Return a decoder of specifications, whose bodies are signed by their owner: a hostile owner."""

    def run(body: bytes) -> object:
        return function(msgpack.packb([body, _OWNER.sign(b"swarm run specification 1\0" + body)]))

    return run


_CHECKSUM_BYTES = 4


def _invite_body(invite: Invite) -> bytes:
    return base58.b58decode(invite.text().removeprefix(PREFIX))[:-_CHECKSUM_BYTES]


def _parse_invite_of(body: bytes) -> object:
    """Parse an invite of a hostile issuer, whose checksum is right."""
    checksum = hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
    return Invite.parse(PREFIX + base58.b58encode(body + checksum).decode())


def _record(name: str) -> Callable[[bytes], object]:
    """Return the check of a record of a run under this name."""

    def run(raw: bytes) -> object:
        record = Record(
            key=Key(f"run.{_SIGNED.run_id}", name),
            subkey=str(PEER),
            value=raw,
            issued_at_us=int(_NOW_S * 1e6),
            expiration_us=int(_NOW_S * 1e6) + 60_000_000,
            writer=PEER,
            signature=bytes(64),
        )
        return RecordValidator(_NAMESPACES).refusal(record, int(_NOW_S * 1e6))

    return run


def _state(raw: bytes) -> object:
    blob = bytearray(raw)
    header, start = read_header(blob)
    return read_tensors(blob, header, start)


def _training_state() -> TrainingState:
    return TrainingState(torch.optim.Adam([torch.nn.Parameter(torch.ones(3, 2))], lr=0.1))


def _load_state(raw: bytes) -> None:
    _training_state().load(bytearray(raw))


def _state_seed() -> bytes:
    return bytes(encode_snapshot(3, {"groups": [{"lr": 0.1}]}, [("p.0", torch.ones(3, 2))]))


def _whole_state_seed() -> bytes:
    """Return the state of a model as a donor sends it."""
    view = _training_state().view()
    try:
        view.compute_digests()
        return b"".join(bytes(view.chunk(place)) for place in range(len(view.chunk_digests)))
    finally:
        view.close()


def _with_header(function: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Return a decoder of headers of states: what it gets stands before the tensors of a real state."""
    whole = _whole_state_seed()

    def run(header: bytes) -> object:
        (length,) = struct.unpack_from("<I", whole)
        prefix = struct.pack("<I", len(header)) + header
        padding = bytes(-len(prefix) % ALIGNMENT_BYTES)
        start = 4 + length
        return function(prefix + padding + whole[start + -start % ALIGNMENT_BYTES :])

    return run


def _header_seed() -> bytes:
    whole = _whole_state_seed()
    return whole[4 : 4 + struct.unpack_from("<I", whole)[0]]


def _chain() -> Chain:
    """Return a history of two certificates."""
    head, electors, certificates = bytes(32), PEERS[:1], []
    for epoch in (1, 2):
        about = proposal(head, electors, PEERS[:3], epoch=epoch)
        certificates.append(certificate(about, PEERS[:3]))
        head, electors = certificates[-1].head, list(about.electors)
    return Chain(head=bytes(32), electors=tuple(PEERS[:1]), certificates=tuple(certificates))


def _receipt() -> bytes:
    """Return a receipt that a peer has signed."""
    totals = Totals(certificates=16, samples=30, by_peer={peer: Credit(10, 1) for peer in PEERS[:3]})
    signature = SIGNERS[PEERS[0]](receipt_statement(RUN, bytes(32), totals))
    return encode_receipt(Receipt(run=RUN, head=bytes(32), totals=totals, signatures={PEERS[0]: signature}))


def _check_receipt(raw: bytes) -> object:
    """Decode a receipt and check its signatures, as a peer does that has asked for it."""
    receipt = decode_receipt(raw)
    receipt.check(PEERS[:1])
    return encode_receipt(receipt)


def _check_history(raw: bytes) -> object:
    """Decode a history and check its signatures, as a peer does before it follows it."""
    chain = decode_chain(raw)
    chain.check(RUN)
    return encode_chain(chain)


def _codec(name: str, numel: int, raw: bytes) -> object:
    """Decode a payload that passed the checks that a reducer makes."""
    codec = compression.find(name)
    if codec.flaw(raw, numel) or not codec.is_finite(raw):
        return None
    values = codec.decode(raw, torch.empty(numel))
    assert values.shape == (numel,)
    assert bool(values.isfinite().all()), f"{name} decodes to what is not finite although it passed is_finite"
    return None


def _codec_decoders() -> list[Decoder]:
    decoders, chance = [], torch.Generator().manual_seed(1)
    for name in compression.names():
        codec = compression.find(name)
        for numel in (1, 300):
            payload = codec.encode(
                torch.randn(numel, generator=chance),
                torch.zeros(codec.encoded_bytes(numel), dtype=torch.uint8),
            )
            decoders.append(
                Decoder(f"codec {name} of {numel}", functools.partial(_codec, name, numel), [bytes(payload)])
            )
    return decoders


def _name_decoders() -> list[Decoder]:
    return [
        Decoder("name of an expert", _of_text(ExpertUid.parse), [b"ffn.0.1"]),
        Decoder("grid of experts", _of_text(ExpertGrid.parse), [b"ffn.[0:4].[0:4]"]),
        Decoder("PeerID", PeerId.from_bytes, [PEER.to_bytes()]),
        Decoder("PeerID in text", _of_text(PeerId.parse), [str(PEER).encode()]),
        Decoder("address", _of_text(Address.parse), [b"/ip4/127.0.0.1/tcp/9/tls/http"]),
        Decoder("contact", _of_text(Contact.parse), [f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}".encode()]),
        Decoder("key", _of_text(Key.parse), [b"public/runs"]),
        Decoder("capability", decode_capability, CAPABILITIES),
        Decoder("invite", _of_text(Invite.parse), [one.text().encode() for one in INVITES]),
        Decoder("body of an invite", _parse_invite_of, [_invite_body(one) for one in INVITES]),
    ]


def _libp2p_decoders() -> list[Decoder]:
    hop = Hop(HopKind.STATUS, PEER, status=100, expires_s=9, addresses=(b"a",), limit=Limit(9, 9))
    stop = Stop(StopKind.CONNECT, PEER, limit=Limit(9, 9))
    identify = Identify("agent", ("/a", "/b"), (b"a",), b"o", b"k")
    relayed = messages.encode_address(Address("192.0.2.1", 9), PEER)
    session = YamuxSession(is_client=True)
    contact = Contact(PEER, (Address("192.168.7.9", 4000),))
    nearby = NearbyPeer(contact=contact, run_id="a" * 20, run_name="tiny", is_invited=True, who="desk")
    here = [IPv4Interface("192.168.7.1/24")]
    provider = encode_question(KadKind.ADD_PROVIDER, run_key("tiny"), contact)
    number = session.open()
    session.send(number, b"some bytes")
    session.ping(7)
    session.finish(number)
    return [
        Decoder("message to a relay", messages.decode_hop, [messages.encode_hop(hop)]),
        Decoder("message of a relay", messages.decode_stop, [messages.encode_stop(stop)]),
        Decoder("identify", messages.decode_identify, [messages.encode_identify(identify)]),
        Decoder("multiaddr", messages.decode_address, [relayed]),
        Decoder("record of mDNS", lambda raw: decode_nearby(raw, here), [encode_nearby(nearby)]),
        Decoder("answer of libp2p's DHT", decode_answer, [provider]),
        Decoder("line of multistream-select", decode_line, [encode_line("/yamux/1.0.0")[1:]]),
        Decoder("yamux", lambda raw: YamuxSession(is_client=False).receive(raw), [session.output(1 << 20)]),
    ]


def all_decoders() -> list[Decoder]:
    """Return every decoder."""
    bodies = [msgpack.unpackb(one.blob)[0] for one in (_SIGNED, _RECOVERED, _GRID)]
    blobs = [_SIGNED.blob, _RECOVERED.blob, _GRID.blob]
    key = blob_key(_SIGNED.run_id)
    schema = ExpertSchema.from_samples((torch.zeros(2, 8),), torch.zeros(2, 8))
    sequences = schema.with_shorter(ExpertSchema.from_samples((torch.zeros(2, 4),), torch.zeros(2, 4)))
    chain = _chain()
    round_ = RoundReport(
        kind="epoch", epoch=4, at_s=_NOW_S, seconds=1.5, bytes=1000, members=3, left=((str(PEER), "dead"),)
    )
    metrics = Metrics(
        at_s=_NOW_S,
        since_s=_NOW_S - 9,
        every_s=30.0,
        epoch=4,
        samples_per_s=3.0,
        own={"accuracy": 0.5},
        rounds=(round_,),
    )
    values = [encode_value(one) for one in ([1, 2.5, "a"], {"epoch": 3, "samples": 5})]
    report = {"epoch": 4, "samples": 100, "rate": 2.5, "at": _NOW_S, "since": _NOW_S - 5.0, "joining": False}
    progress = [encode_value(report), encode_value([4, 100.0, 2.5, 3, 1.5, _NOW_S, _NOW_S - 5.0, 2])]
    return [
        Decoder("specification", verified, blobs),
        Decoder("specification of a hostile owner", _signed_body(verified), bodies),
        Decoder("blob", lambda raw: blob_of(key, raw), blobs),
        Decoder("blob of a hostile owner", _signed_body(lambda raw: blob_of(key, raw)), bodies),
        Decoder(
            "run file",
            _of_text(lambda text: RunSpecification.from_toml(text, "fuzz")),
            [b'name = "a"\n[task]\n'],
        ),
        Decoder(
            "grid file",
            _of_text(lambda text: GridSpecification.from_toml(text, "fuzz")),
            [b'experts = ["ffn.[0:4]"]\n[optimizer]\nlearning_rate = 0.1\n'],
        ),
        Decoder("DHT value", decode_value, values),
        *(
            Decoder(f"record {name}", _record(name), [*values, *progress, encode_value(metrics.encode())])
            for name in _RECORDS
        ),
        Decoder("summary", lambda raw: missing_entries(key, raw, {}), [bytes(32)]),
        Decoder("metrics", _of_value(Metrics.decode), [encode_value(metrics.encode())]),
        Decoder("progress", _of_value(lambda value: ProgressReport.decode(value, _NOW_S)), progress),
        Decoder("progress total", _of_value(lambda value: ProgressTotal.decode(value, _NOW_S)), progress),
        Decoder("history", _check_history, [encode_chain(chain)]),
        Decoder("receipt", _check_receipt, [_receipt()]),
        Decoder("root of a history", _of_text(read_chain_text), [chain_text(chain).encode()]),
        Decoder("snapshot", _state, [_state_seed(), _whole_state_seed()]),
        Decoder("training state", _load_state, [_state_seed(), _whole_state_seed()]),
        Decoder("header of a snapshot", _with_header(_state), [_header_seed()]),
        Decoder("header of a training state", _with_header(_load_state), [_header_seed()]),
        Decoder("request for chunks", parse_chunks_request, [b"\x0a\x01r\x12\x02aa\x1a\x01\x00"]),
        Decoder("frame", unpack, [b"\x04\x00\x00\x00\x0a\x02\x0a\x00payload"]),
        Decoder("places", lambda raw: decode_places(raw, 9), [b"\xff\x01"]),
        Decoder("clipped places", lambda raw: check_clipped(raw, b"\xff\x01", 9), [b"\xff\x01"]),
        Decoder("frame of the bulk path", read_frame, FRAMES),
        Decoder("status of a bulk stream", read_status, STATUSES),
        Decoder("schema of an expert", ExpertSchema.unpack, [schema.packed, sequences.packed]),
        *_name_decoders(),
        *_libp2p_decoders(),
        *_codec_decoders(),
    ]


def run_decoder(decoder: Decoder, maker: Maker) -> None:
    """Decode one made input. Raises whatever comes out but a SwarmError."""
    with contextlib.suppress(SwarmError):
        decoder.run(maker.raw(decoder.seeds))
