"""Contacts as protobuf messages. Messages from peers are checked here: a malformed one raises PeerError."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import ADDRESSES_MAX, Contact, PeerId
from swarm.wire.peer_pb2 import Contact as WireContact

_ADDRESS_CHARACTERS_MAX = 300
_NOBODY = PeerId(bytes(32))  # placeholder for parsing single addresses


# Most answers contain the same few contacts. The caches are bounded, also against input from strangers.
@functools.lru_cache(maxsize=2048)
def contact_to_wire(contact: Contact) -> WireContact:
    """Encode a contact. The message is cached: copy it into another one, do not change it."""
    return WireContact(peer_id=contact.peer_id.to_bytes(), addresses=contact.published)


def contact_from_wire(message: WireContact) -> Contact:
    """Decode a contact. Raises PeerError when the PeerID is malformed. Addresses of kinds that this version
    does not know are ignored.
    """
    return _contact(
        message.peer_id, tuple(text[:_ADDRESS_CHARACTERS_MAX] for text in message.addresses[:ADDRESSES_MAX])
    )


@functools.lru_cache(maxsize=4096)
def _contact(raw: bytes, addresses: tuple[str, ...]) -> Contact:
    try:
        peer_id = PeerId.from_bytes(raw)
    except UsageError as error:
        raise PeerError(f"a contact with a malformed PeerID: {error}") from error
    return Contact.of_published(peer_id, [text for text in addresses if _is_known(text)])


@functools.lru_cache(maxsize=4096)
def _is_known(text: str) -> bool:
    """Return whether an address is of a kind that this version knows."""
    try:
        Contact.of_published(_NOBODY, [text])
    except UsageError:
        return False
    return True


def contacts_from_wire(messages: Iterable[WireContact]) -> list[Contact]:
    return [contact_from_wire(message) for message in messages]


def sender_from_wire(message: WireContact, caller: PeerId) -> Contact:
    """Return the contact that a request came with. Raises PeerError when it names another peer than the
    caller.
    """
    contact = contact_from_wire(message)
    if contact.peer_id != caller:
        raise PeerError(f"the request's sender says it is {contact.peer_id.short}, but {caller.short} called")
    return contact
