"""Codecs: how tensors are written as bytes. `find` gives one by its name, `register` adds one of your own."""

from __future__ import annotations

from swarm.compression import plain as plain  # registers its codecs
from swarm.compression.codec import PUBLIC_WIRE_ID_MAX, Buffer, Codec, find, find_wire_id, names, register, view_bytes, view_tensor

__all__ = ["PUBLIC_WIRE_ID_MAX", "Buffer", "Codec", "find", "find_wire_id", "names", "register", "view_bytes", "view_tensor"]
