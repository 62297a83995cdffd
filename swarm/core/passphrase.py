"""Secrets encrypted with a passphrase: a short text that can be kept on paper or in a password manager.

The key is derived with Argon2id (256 MiB, 3 passes: half a second on a laptop) and the secret is sealed with
XSalsa20-Poly1305, both from libsodium. Cost and form are fixed by the first word of the text, so that a text
from elsewhere cannot ask for more memory or for a weaker key.
"""

from __future__ import annotations

import base64
import binascii

from nacl.exceptions import CryptoError
from nacl.pwhash import argon2id
from nacl.secret import SecretBox
from nacl.utils import random

from swarm.core.errors import UsageError

PASSPHRASE_CHARACTERS_MIN = 8
TEXT_BYTES_MAX = 4096
_FORM = "swarm-secret-1"


def encrypt(secret: bytes, passphrase: str) -> str:
    """Return one line of text from which `decrypt` gets the secret. Raises UsageError if the passphrase is
    too short.
    """
    if len(passphrase) < PASSPHRASE_CHARACTERS_MIN:
        raise UsageError(f"a passphrase has at least {PASSPHRASE_CHARACTERS_MIN} characters")
    salt = random(argon2id.SALTBYTES)
    sealed = _box(passphrase, salt).encrypt(secret)
    return f"{_FORM} {base64.b64encode(salt + sealed).decode()}\n"


def decrypt(text: bytes, passphrase: str) -> bytes:
    """Return the secret. Raises UsageError if the text is something else or the passphrase is wrong."""
    words = text[: TEXT_BYTES_MAX + 1].split()
    try:
        form, encoded = words
        raw = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error):
        form, raw = b"", b""
    if (
        len(text) > TEXT_BYTES_MAX
        or form != _FORM.encode()
        or len(raw) < argon2id.SALTBYTES + SecretBox.NONCE_SIZE + SecretBox.MACBYTES
    ):
        raise UsageError(f"this is no exported identity: one is a line that begins with {_FORM!r}")
    try:
        return _box(passphrase, raw[: argon2id.SALTBYTES]).decrypt(raw[argon2id.SALTBYTES :])
    except CryptoError:
        raise UsageError("the passphrase is wrong, or the exported identity is damaged") from None


def _box(passphrase: str, salt: bytes) -> SecretBox:
    key = argon2id.kdf(
        SecretBox.KEY_SIZE,
        passphrase.encode(),
        salt,
        opslimit=argon2id.OPSLIMIT_MODERATE,
        memlimit=argon2id.MEMLIMIT_MODERATE,
    )
    return SecretBox(key)
