"""Codecs: how tensors are written as bytes. `find` gives one by its name, `register` adds one of your own."""

from __future__ import annotations

from swarm.compression import blockwise as blockwise  # registers its codecs, as do the two that follow
from swarm.compression import plain as plain
from swarm.compression import sparse as sparse
from swarm.compression.codec import PUBLIC_WIRE_ID_MAX, Buffer, Codec, find, find_wire_id, names, register, view_bytes, view_tensor

__all__ = ["PUBLIC_WIRE_ID_MAX", "Buffer", "Codec", "find", "find_wire_id", "names", "register", "view_bytes", "view_tensor"]
