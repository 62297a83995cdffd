"""Certificates and chains as bytes: for messages, states and checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import msgpack

from averaging.history.certificate import (
    CONTRIBUTORS_MAX,
    DIGEST_BYTES,
    EPOCH_MAX,
    GRID_ROUNDS_MAX,
    SIGNATURE_BYTES,
    Certificate,
    Proposal,
    RoundKind,
)
from averaging.history.chain import Chain
from averaging.history.electors import CANDIDATES_MAX, ELECTORS_MAX, Known, Register
from averaging.history.lineage import CERTIFICATES_MAX
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId

CHAIN_BYTES_MAX: Final = (2 << 20) - (8 << 10)  # fits into a unary message
# head, line, epoch, the keys of at most 64 electors, and of as many former ones and candidates
ROOT_BYTES_MAX: Final = 8192
# limit for the answer to one question about a history. Too large: a peer with a slow uplink does not answer
# in time
PART_BYTES_MAX: Final = 256 << 10
# limit for all parts together: `CERTIFICATES_MAX` certificates of 64 contributors and 64 electors
PARTS_BYTES_MAX: Final = 4 << 20
# a part with less room left than this has been cut: 256 contributors and 64 electors sign 40 KiB
_CERTIFICATE_BYTES_MAX: Final = 64 << 10
_CHAINS_KEPT_MAX: Final = 4
_ROOT_VALUES: Final = 9
_RUN_CHARACTERS_MAX: Final = 256
_KEY_BYTES: Final = 32
_KNOWN_BYTES: Final = _KEY_BYTES + 1  # the key, then the rounds
_WAS_ELECTOR: Final = 128  # added to the rounds of a former elector


def encode_chain(chain: Chain) -> bytes:
    """Return a chain as bytes, at most `CHAIN_BYTES_MAX`: of a longer one the last certificates."""
    encoded = [msgpack.packb(_certificate(one)) for one in chain.certificates]
    start, size = len(encoded), 0
    while start and size + len(encoded[start - 1]) <= CHAIN_BYTES_MAX - (8 << 10):
        start -= 1
        size += len(encoded[start])
    root = replace(chain, certificates=chain.certificates[:start]).end
    packed: bytes = msgpack.packb([*encode_root(root), encoded[start:]])
    return packed


def encode_part(chain: Chain) -> bytes:
    """Return the first certificates of a chain, at least one, and no more than fit into `PART_BYTES_MAX`."""
    encoded, size = list[bytes](), 0
    for one in chain.certificates:
        encoded.append(msgpack.packb(_certificate(one)))
        size += len(encoded[-1])
        if size > PART_BYTES_MAX and len(encoded) > 1:
            encoded.pop()
            break
    packed: bytes = msgpack.packb([*encode_root(chain), encoded])
    return packed


def is_cut(part: bytes) -> bool:
    """Return whether more may follow after the chain of `encode_part`."""
    return len(part) > PART_BYTES_MAX - _CERTIFICATE_BYTES_MAX


@lru_cache(maxsize=_CHAINS_KEPT_MAX)
def decode_chain(data: bytes) -> Chain:
    """Parse a chain. Raise PeerError when it is malformed or too large. Signatures are not checked here.

    The last few results are kept: a newcomer hears the same history from many peers.
    """
    if len(data) > CHAIN_BYTES_MAX:
        raise PeerError(f"a history has at most {CHAIN_BYTES_MAX} bytes, not {len(data)}")
    try:
        *root_values, encoded = msgpack.unpackb(data)
        if len(encoded) > CERTIFICATES_MAX:
            raise PeerError(f"a history has at most {CERTIFICATES_MAX} certificates, not {len(encoded)}")
        root = decode_root(root_values)
        return replace(root, certificates=tuple(_read(msgpack.unpackb(one)) for one in encoded))
    except PeerError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, UsageError, msgpack.UnpackException) as error:
        raise PeerError(f"not a history: {error}") from None


def encode_root(root: Chain) -> list[Any]:
    """Return the beginning of a chain as values for msgpack: for states, whose history begins at their
    head.
    """
    return [
        root.head,
        encode_peers(root.electors),
        root.root_epoch,
        root.root_line,
        root.root_grid_rounds,
        *encode_register(root.root_register),
    ]


def chain_text(chain: Chain) -> str:
    """Return `encode_chain` as text, which a checkpoint of torch may hold."""
    return encode_chain(chain).hex()


def read_chain_text(text: object) -> Chain:
    """Return the chain of `chain_text`. Raise PeerError when the text is malformed."""
    if not isinstance(text, str) or len(text) > 2 * CHAIN_BYTES_MAX:
        raise PeerError(f"a history in a checkpoint is a text of at most {2 * CHAIN_BYTES_MAX} characters")
    try:
        data = bytes.fromhex(text)
    except ValueError as error:
        raise PeerError(f"not a history: {error}") from None
    return decode_chain(data)


def decode_root(values: object) -> Chain:
    """Return the empty chain of `encode_root`. Raise PeerError when the values are malformed."""
    if not isinstance(values, list) or len(values) != _ROOT_VALUES:
        raise PeerError(f"the beginning of a history has {_ROOT_VALUES} values")
    head, electors, epoch, line, grid_rounds, *register = values
    if type(grid_rounds) is not int or not 1 <= grid_rounds <= GRID_ROUNDS_MAX:
        raise PeerError(f"an epoch has 1 to {GRID_ROUNDS_MAX} rounds, not {grid_rounds!r:.40}")
    if not isinstance(line, bytes) or len(line) not in (0, DIGEST_BYTES):
        raise PeerError(f"the name of a line of history has {DIGEST_BYTES} bytes or none")
    if not isinstance(head, bytes) or len(head) != DIGEST_BYTES:
        raise PeerError(f"a head has {DIGEST_BYTES} bytes")
    if type(epoch) is not int or not 0 <= epoch <= EPOCH_MAX:
        raise PeerError(f"an epoch is between 0 and {EPOCH_MAX}, not {epoch!r:.40}")
    return Chain(
        head=head,
        electors=decode_peers(electors, ELECTORS_MAX),
        certificates=(),
        root_epoch=epoch,
        root_line=line,
        root_grid_rounds=grid_rounds,
        root_register=decode_register(*register),
    )


def encode_register(register: Register) -> tuple[int, int, bytes, bytes]:
    """Return a register as rounds in which contributors become electors at once, seats, peers (of each the
    public key and a byte, its rounds, and 128 more if it was an elector), and a byte for each elector, the
    certificates that it has missed.
    """
    known = (
        one.peer.public_key + bytes([one.rounds + _WAS_ELECTOR * one.was_elector]) for one in register.known
    )
    return register.at_once, register.seats, b"".join(known), bytes(register.misses)


def decode_register(at_once: object, seats: object, known: object, misses: object) -> Register:
    """Parse the values of a register. Raise PeerError when they are malformed."""
    if type(at_once) is not int or type(seats) is not int or not isinstance(known, bytes):
        raise PeerError("a register is two numbers and the bytes of peers")
    if not isinstance(misses, bytes) or len(misses) > ELECTORS_MAX:
        raise PeerError(f"a register has a byte for each of at most {ELECTORS_MAX} electors")
    if len(known) % _KNOWN_BYTES or len(known) > (ELECTORS_MAX + CANDIDATES_MAX) * _KNOWN_BYTES:
        raise PeerError(f"a peer of a register has {_KNOWN_BYTES} bytes")
    found = []
    for start in range(0, len(known), _KNOWN_BYTES):
        rounds = known[start + _KEY_BYTES]
        key = known[start : start + _KEY_BYTES]
        found.append(Known(PeerId(key), rounds % _WAS_ELECTOR, rounds >= _WAS_ELECTOR))
    return Register(at_once=at_once, seats=seats, known=tuple(found), misses=tuple(misses))


def encode_proposal(proposal: Proposal) -> list[Any]:
    """Return a proposal as values for msgpack."""
    return [
        proposal.run,
        proposal.head,
        proposal.epoch,
        proposal.kind.value,
        proposal.group_id,
        encode_peers(proposal.contributors),
        encode_peers(proposal.electors),
        proposal.is_break,
        proposal.grid_rounds,
        proposal.new_hour,
        encode_peers(proposal.gone),
        *encode_register(proposal.register),
        list(proposal.samples),
    ]


def decode_proposal(value: Any) -> Proposal:
    """Parse the values of a proposal. Raise PeerError, ValueError or TypeError when they are malformed."""
    run, head, epoch, kind, group_id, contributors, electors, is_break, grid_rounds = value[:9]
    new_hour, gone, *register, samples = value[9:]
    if not isinstance(run, str) or len(run) > _RUN_CHARACTERS_MAX or type(epoch) is not int:
        raise PeerError("a proposal names a run and an epoch")
    if type(grid_rounds) is not int:
        raise PeerError("a number of rounds is a whole number")
    return Proposal(
        run=run,
        head=_bytes(head),
        epoch=epoch,
        kind=RoundKind(kind),
        group_id=_bytes(group_id),
        contributors=decode_peers(contributors, CONTRIBUTORS_MAX),
        electors=decode_peers(electors, ELECTORS_MAX),
        is_break=bool(is_break),
        grid_rounds=grid_rounds,
        new_hour=bool(new_hour),
        gone=decode_peers(gone, ELECTORS_MAX),
        register=decode_register(*register),
        samples=decode_samples(samples),
    )


def decode_samples(values: Sequence[object]) -> tuple[int, ...]:
    """Return the samples of at most `CONTRIBUTORS_MAX` contributors. Raise PeerError for anything else."""
    if len(values) > CONTRIBUTORS_MAX or any(type(value) is not int for value in values):
        raise PeerError(f"samples of a round are at most {CONTRIBUTORS_MAX} whole numbers")
    return tuple(values)  # type: ignore[arg-type]


def _certificate(certificate: Certificate) -> list[Any]:
    settled: tuple[Any, ...] = ()
    if certificate.settled is not None:
        settled = encode_peers(certificate.electors), *encode_register(certificate.register)
    return [
        encode_proposal(certificate.proposal),
        certificate.result,
        {peer.public_key: signature for peer, signature in certificate.votes.items()},
        {peer.public_key: signature for peer, signature in certificate.goodbyes.items()},
        *settled,
    ]


def _read(value: Any) -> Certificate:
    proposal, result, votes, goodbyes, *settled = value
    return Certificate(
        proposal=decode_proposal(proposal),
        result=_bytes(result),
        votes=_signatures(votes),
        goodbyes=_signatures(goodbyes),
        settled=(decode_peers(settled[0], ELECTORS_MAX), decode_register(*settled[1:])) if settled else None,
    )


def encode_peers(peers: Sequence[PeerId]) -> bytes:
    """Return the public keys of peers, 32 bytes each."""
    return b"".join(peer.public_key for peer in peers)


def decode_peers(keys: object, count_max: int) -> tuple[PeerId, ...]:
    """Return at most `count_max` peers with these public keys. Raise PeerError for anything else."""
    if not isinstance(keys, bytes) or len(keys) % _KEY_BYTES or len(keys) > count_max * _KEY_BYTES:
        raise PeerError(f"a list of at most {count_max} peers is their public keys, {_KEY_BYTES} bytes each")
    return tuple(PeerId(keys[start : start + _KEY_BYTES]) for start in range(0, len(keys), _KEY_BYTES))


def _signatures(value: Any) -> dict[PeerId, bytes]:
    if not isinstance(value, Mapping) or len(value) > CONTRIBUTORS_MAX + ELECTORS_MAX:
        raise PeerError("the votes of a certificate are a map of public keys and signatures")
    found = {PeerId(_bytes(key)): signature for key, signature in value.items()}
    if any(not isinstance(one, bytes) or len(one) != SIGNATURE_BYTES for one in found.values()):
        raise PeerError(f"a signature has {SIGNATURE_BYTES} bytes")
    return found


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise PeerError(f"bytes were expected, not {type(value).__name__}")
    return value
