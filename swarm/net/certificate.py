"""Mutual TLS from PeerIDs only (docs/decisions/0001).

The server's leaf certificate is issued by its identity. The caller creates the trust anchor itself, from the
public key inside the PeerID that it wants to reach: nothing has to be fetched or pinned beforehand, and an
impostor fails in the handshake. The caller's certificate is issued under a courtesy CA whose private key is
public; libp2p's TLS extension (OID 1.3.6.1.4.1.53594.1.1) identifies the caller and binds its identity to the
certificate's own key.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import ssl
from collections import OrderedDict
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from swarm.core.errors import PeerError
from swarm.core.identity import Identity, verify
from swarm.core.ids import PeerId

LIBP2P_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX = b"libp2p-tls-handshake:"
_PUBLIC_KEY_PREFIX = bytes.fromhex("08011220")  # libp2p's protobuf PublicKey: type Ed25519, 32 bytes of data
_SIGNATURE_BYTES = 64
_CERTIFICATE_BYTES_MAX = 8192
# Certificates are valid at any time. A wrong clock is reported elsewhere with a clear message, instead of
# failing in the handshake.
_VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_COURTESY_NAME = "swarm courtesy CA: its key is public, it vouches for nobody"
# Public on purpose: this key only makes gRPC request certificates of callers and forward them.
_COURTESY_SECRET = 0x5741524D
_NOBODY = PeerId(hashlib.sha256(b"swarm: the peer of the blank trust anchor").digest())


@dataclass(frozen=True, slots=True)
class KeyAndCertificate:
    """A private key and its certificate, both PEM. The key is ephemeral (P-256): it lives as long as the
    process.
    """

    key_pem: bytes
    certificate_pem: bytes


def tls_name(peer_id: PeerId) -> str:
    """Return the DNS name in the server's certificate. It is a hash, since PeerIDs are case-sensitive and DNS
    names are not.
    """
    return f"{hashlib.sha256(peer_id.to_bytes()).hexdigest()[:40]}.peer.invalid"


def server_certificate(identity: Identity) -> KeyAndCertificate:
    """Issue a leaf certificate for a new key, signed by the identity. It carries the libp2p extension too,
    for clients without a trust anchor.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder("leaf", str(identity.peer_id), key.public_key())
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(tls_name(identity.peer_id))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(signed_key_extension(identity, key.public_key()), critical=False)
    )
    return as_pem(key, builder.sign(identity.private_key, None))


def trust_anchor(peer_id: PeerId) -> bytes:
    """Return the CA certificate (PEM) under which only this peer can issue a leaf. An anchor's own signature
    is not checked, so any key may sign it, and one certificate is made into those of all peers.
    """
    blank = _blank_anchor()
    name, length = str(_NOBODY).encode(), len(str(peer_id))
    assert length == len(name), "the PeerIDs of all Ed25519 keys have one length"
    return ssl.DER_cert_to_PEM_cert(
        blank.replace(name, str(peer_id).encode()).replace(_NOBODY.public_key, peer_id.public_key)
    ).encode()


@functools.cache
def _blank_anchor() -> bytes:
    """Return the trust anchor (DER) for a placeholder PeerID, the template of all others."""
    builder = _builder(
        str(_NOBODY), str(_NOBODY), Ed25519PublicKey.from_public_bytes(_NOBODY.public_key)
    ).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(Ed25519PrivateKey.generate(), None).public_bytes(Encoding.DER)


def client_certificate(identity: Identity) -> KeyAndCertificate:
    """Issue the certificate that a caller presents: a leaf under the courtesy CA, with the libp2p extension
    that identifies the caller.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    return as_pem(key, courtesy_signed(key.public_key(), signed_key_extension(identity, key.public_key())))


def courtesy_signed(
    public_key: EllipticCurvePublicKey, extension: x509.UnrecognizedExtension
) -> x509.Certificate:
    """Issue a certificate under the courtesy CA. Anybody can do this: the CA's key is public."""
    builder = (
        _builder("caller", _COURTESY_NAME, public_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(extension, critical=False)
    )
    return builder.sign(_courtesy_key(), hashes.SHA256())


@functools.cache
def courtesy_ca() -> bytes:
    """Return the courtesy CA's certificate (PEM), under which the server requires callers' certificates to be
    issued.
    """
    builder = _builder(_COURTESY_NAME, _COURTESY_NAME, _courtesy_key().public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return builder.sign(_courtesy_key(), hashes.SHA256()).public_bytes(Encoding.PEM)


def signed_key_extension(
    identity: Identity, public_key: EllipticCurvePublicKey
) -> x509.UnrecognizedExtension:
    """Return libp2p's SignedKey: SEQUENCE { publicKey OCTET STRING, signature OCTET STRING } over the
    certificate's SubjectPublicKeyInfo.
    """
    signature = identity.sign(_SIGNED_PREFIX + _public_key_info(public_key))
    content = _octets(_PUBLIC_KEY_PREFIX + identity.peer_id.public_key) + _octets(signature)
    return x509.UnrecognizedExtension(LIBP2P_EXTENSION, b"\x30" + bytes([len(content)]) + content)


def peer_of(certificate: x509.Certificate) -> PeerId:
    """Return the holder of this certificate's key, from its libp2p extension. Raises PeerError when there is
    none or it was made for another key.

    The certificate's issuer proves nothing and is not checked. The TLS handshake has proved that the other
    end holds the certificate's key.
    """
    try:
        extension = certificate.extensions.get_extension_for_oid(LIBP2P_EXTENSION).value
    except x509.ExtensionNotFound:
        raise PeerError("the certificate has no libp2p extension, so it names no peer") from None
    except ValueError as error:
        raise PeerError(f"the certificate's extensions cannot be read: {error}") from None
    if not isinstance(extension, x509.UnrecognizedExtension):
        raise PeerError("the certificate's libp2p extension cannot be read")
    public_key, signature = _read_signed_key(extension.value)
    peer_id = PeerId(public_key)
    key = certificate.public_key()
    if not isinstance(key, EllipticCurvePublicKey) or not verify(
        peer_id, _SIGNED_PREFIX + _public_key_info(key), signature
    ):
        raise PeerError(
            f"the certificate's libp2p extension names {peer_id}, but that peer did not sign this "
            "certificate's key"
        )
    return peer_id


class CallerCheck:
    """Map callers' certificates to PeerIDs, caching the last `entries_max`: one signature check per
    connection, not per call.
    """

    def __init__(self, entries_max: int = 4096) -> None:
        self._entries_max = entries_max
        self._known: OrderedDict[bytes, PeerId] = OrderedDict()

    def __call__(self, certificate_pem: bytes) -> PeerId:
        """Return the certificate's holder. Raises PeerError when the certificate does not prove one."""
        known = self._known.get(certificate_pem)
        if known is not None:
            self._known.move_to_end(certificate_pem)
            return known
        if len(certificate_pem) > _CERTIFICATE_BYTES_MAX:
            raise PeerError(
                f"the certificate has {len(certificate_pem)} bytes; at most {_CERTIFICATE_BYTES_MAX} are read"
            )
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
        except ValueError as error:
            raise PeerError(f"the certificate cannot be read: {error}") from None
        peer_id = peer_of(certificate)
        self._known[certificate_pem] = peer_id
        if len(self._known) > self._entries_max:
            self._known.popitem(last=False)
        return peer_id


def _builder(
    subject: str, issuer: str, public_key: EllipticCurvePublicKey | Ed25519PublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@functools.cache
def _courtesy_key() -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(_COURTESY_SECRET, ec.SECP256R1())


def as_pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> KeyAndCertificate:
    """Return a private key and its certificate as PEM, the key unencrypted."""
    return KeyAndCertificate(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate.public_bytes(Encoding.PEM),
    )


def _public_key_info(public_key: EllipticCurvePublicKey) -> bytes:
    return public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _octets(raw: bytes) -> bytes:
    """Encode a DER OCTET STRING of fewer than 128 bytes."""
    return b"\x04" + bytes([len(raw)]) + raw


def _read_signed_key(raw: bytes) -> tuple[bytes, bytes]:
    """Return the Ed25519 key (32 bytes) and the signature. DER allows only one encoding of them, so the frame
    is compared, not parsed.
    """
    key_bytes = len(_PUBLIC_KEY_PREFIX) + 32
    frame = (
        b"\x30"
        + bytes([4 + key_bytes + _SIGNATURE_BYTES])
        + b"\x04"
        + bytes([key_bytes])
        + _PUBLIC_KEY_PREFIX
    )
    key_end = len(frame) + 32
    if (
        len(raw) != key_end + 2 + _SIGNATURE_BYTES
        or not raw.startswith(frame)
        or raw[key_end : key_end + 2] != b"\x04\x40"
    ):
        raise PeerError("the certificate's libp2p extension is not a SignedKey with an Ed25519 key")
    return raw[len(frame) : key_end], raw[key_end + 2 :]
