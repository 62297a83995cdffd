"""Tests of certificates derived from PeerIDs: libp2p's own extension is accepted, and one made for another
key is refused.
"""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.errors import PeerError
from swarm.core.identity import Identity
from swarm.net import certificate as tls

ALICE, MALLORY = Identity.generate(), Identity.generate()


def read(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def extension_of(pem: bytes) -> x509.UnrecognizedExtension:
    value = read(pem).extensions.get_extension_for_oid(tls.LIBP2P_EXTENSION).value
    assert isinstance(value, x509.UnrecognizedExtension)
    return value


@pytest.mark.parametrize("make", [tls.client_certificate, tls.server_certificate])
def test_both_certificates_name_their_peer(make: object) -> None:
    assert callable(make)
    pem = make(ALICE).certificate_pem
    assert tls.peer_of(read(pem)) == ALICE.peer_id
    assert read(pem).not_valid_before_utc.year == 2000
    assert read(pem).not_valid_after_utc.year == 9999


def test_py_libp2p_and_swarm_accept_each_others_extension() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID
    from libp2p.security.tls.certificate import (
        create_cert_template,
        generate_certificate,
        verify_certificate_chain,
    )

    key = ec.generate_private_key(ec.SECP256R1())
    ours = (
        create_cert_template()
        .public_key(key.public_key())
        .add_extension(tls.signed_key_extension(ALICE, key.public_key()), critical=False)
    )
    public = verify_certificate_chain([ours.sign(key, hashes.SHA256())])
    assert ID.from_pubkey(public).to_base58() == str(ALICE.peer_id)

    pair = create_new_key_pair(b"\x07" * 32)
    theirs, _ = generate_certificate(pair.private_key, create_cert_template())
    assert str(tls.peer_of(read(theirs.encode()))) == ID.from_pubkey(pair.public_key).to_base58()


def test_an_extension_copied_to_another_key_is_refused() -> None:
    stolen = extension_of(tls.client_certificate(ALICE).certificate_pem)
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(PeerError, match=f"{ALICE.peer_id}, but that peer did not sign"):
        tls.peer_of(tls.courtesy_signed(key.public_key(), stolen))


def test_a_certificate_without_the_extension_is_refused() -> None:
    with pytest.raises(PeerError, match="names no peer"):
        tls.peer_of(read(tls.courtesy_ca()))
    with pytest.raises(PeerError, match="names no peer"):
        tls.peer_of(read(tls.trust_anchor(ALICE.peer_id)))


@given(st.data())
def test_other_bytes_are_refused_as_an_extension(data: st.DataObject) -> None:
    key = ec.derive_private_key(12345, ec.SECP256R1()).public_key()
    raw = bytearray(tls.signed_key_extension(ALICE, key).value)
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    forged = bytes(raw[: data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else bytes(raw)
    with pytest.raises(PeerError):
        tls.peer_of(tls.courtesy_signed(key, x509.UnrecognizedExtension(tls.LIBP2P_EXTENSION, forged)))


def test_the_server_leaf_is_issued_by_the_identity_alone() -> None:
    leaf = read(tls.server_certificate(ALICE).certificate_pem)
    leaf.verify_directly_issued_by(read(tls.trust_anchor(ALICE.peer_id)))
    with pytest.raises(ValueError):
        leaf.verify_directly_issued_by(read(tls.trust_anchor(MALLORY.peer_id)))
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.DNSName
    )
    assert names == [tls.tls_name(ALICE.peer_id)] != [tls.tls_name(MALLORY.peer_id)]


def test_the_cache_of_checked_certificates_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    check = tls.CallerCheck(entries_max=2)
    first, second, third = (tls.client_certificate(Identity.generate()).certificate_pem for _ in range(3))
    known = [check(pem) for pem in (first, second, third)]
    assert len(set(known)) == 3
    checked = 0
    original = tls.peer_of

    def counting(one: x509.Certificate) -> object:
        nonlocal checked
        checked += 1
        return original(one)

    monkeypatch.setattr(tls, "peer_of", counting)
    assert [check(third), check(second)] == [known[2], known[1]]
    assert checked == 0
    assert check(first) == known[0]
    assert checked == 1


@pytest.mark.parametrize("pem", [b"", b"nonsense", b"x" * 100_000])
def test_a_certificate_that_cannot_be_read_is_refused(pem: bytes) -> None:
    with pytest.raises(PeerError, match="the certificate"):
        tls.CallerCheck()(pem)
