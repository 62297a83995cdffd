"""Parsing of the addresses that peers publish in the records of a run."""

from __future__ import annotations

from typing import Any

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import Address, Contact, PeerId

ADDRESSES_MAX = 8  # of one peer, in a record of a run


def contact_of(writer: PeerId, addresses: Any) -> Contact:
    """Parse a contact from a record of `writer`. Raise PeerError when it is malformed."""
    if (
        not isinstance(addresses, list)
        or len(addresses) > ADDRESSES_MAX
        or not all(isinstance(one, str) for one in addresses)
    ):
        raise PeerError("addresses are a short list of multiaddrs")
    try:
        return Contact(writer, tuple(Address.parse(one) for one in addresses))
    except UsageError as error:
        raise PeerError(str(error)) from None
