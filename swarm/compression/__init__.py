"""Codecs: how tensors are written as bytes. `find` gives one by its name, `register` adds one of your own.

Of your own: an object with what `Codec` asks for, a wire id above `PUBLIC_WIRE_ID_MAX`, and `register(it)` in
every process of the swarm before it averages; then its name goes wherever a codec's name does.
`swarm.testing.codec_contract.check_codec` tests it. Peers that lack it, or have another version of it, are
told so when they ask for a group: nothing else is served to them.
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
