"""Codecs: how tensors are encoded as bytes. `find` returns a codec by its name, `register` adds a codec of
your own.

Your codec is an object with the members of `Codec` and a wire id above `PUBLIC_WIRE_ID_MAX`. Call
`register(codec)` in every process of the swarm before it averages; then its name can be used as any codec's
name. `swarm.testing.codec_contract.check_codec` tests it. Peers that lack it, or have another version of it,
are refused with that reason when they ask for a group.
"""

from __future__ import annotations

from swarm.compression import blockwise as blockwise  # registers its codecs, as do the two that follow
from swarm.compression import plain as plain
from swarm.compression import sparse as sparse
from swarm.compression.adaptive import ADAPTIVE, Adaptive, resolve
from swarm.compression.codec import (
    PUBLIC_WIRE_ID_MAX,
    Buffer,
    Codec,
    exact_device,
    find,
    find_wire_id,
    names,
    register,
    view_bytes,
    view_tensor,
)

__all__ = [
    "ADAPTIVE",
    "PUBLIC_WIRE_ID_MAX",
    "Adaptive",
    "Buffer",
    "Codec",
    "exact_device",
    "find",
    "find_wire_id",
    "names",
    "register",
    "resolve",
    "view_bytes",
    "view_tensor",
]
