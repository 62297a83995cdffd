"""Codecs for downloads of the state: the donor encodes, and the digests are of what is sent.

What is rounded here is the weights themselves, not a gradient that the next one corrects: only formats of 16
bits are offered. The rounding is the same on every donor, so that newcomers that use one codec hold equal
bytes; they differ from the other peers by it until the next round over the state.
"""

from __future__ import annotations

import threading

import torch

from averaging.optim.state.device_reads import DeviceReads
from averaging.optim.state.snapshot import is_finite
from averaging.optim.state.view import StateView
from swarm.core.errors import UsageError

EXACT = "float32"  # every tensor in its own type
STATE_CODECS = (EXACT, "float16", "bfloat16")


def check_state_codec(codec: str) -> str:
    """Return the codec. Raise UsageError with the names of all when it is another one."""
    if codec not in STATE_CODECS:
        raise UsageError(f"the codecs of a state are {', '.join(STATE_CODECS)}, not {codec!r:.60}")
    return codec


def dtype_of(name: str, dtype: torch.dtype, codec: str) -> torch.dtype:
    """Return the type in which a tensor of this name and type is sent.

    Statistics are never sent as float16: second moments below 6e-8 would become zero, and the first step
    after the download divides by their roots.
    """
    if codec == EXACT or dtype != torch.float32:
        return dtype
    return torch.float16 if codec == "float16" and not name.startswith("s.") else torch.bfloat16


def encode_view(view: StateView, codec: str) -> StateView:
    """Return a copy of a view in host memory, encoded. A tensor with a value that the smaller type cannot
    hold stays as it is. Raise PeerError when the view is lost.
    """
    named = []
    for place, name in enumerate(view.names):
        tensor = view.tensor(place)
        encoded = tensor.to(dtype_of(name, tensor.dtype, codec))
        named.append((name, encoded if is_finite(encoded) else tensor))
    moment = view.epoch, view.version, view.canonical
    made = StateView(moment, {**view.header, "codec": codec}, named, threading.RLock(), DeviceReads())
    made.complete_copy()
    return made
