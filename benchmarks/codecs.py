"""Codecs on one thread: bits per element, throughput compared with a memory copy, and the error on two
distributions.

A part is encoded and decoded block by block, as a reducer does it. hivemind's counterpart, where one exists,
works on the same values in another process, in turn with the codec of swarm.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from averaging.reduction.partition import Chunk
from averaging.reduction.reduce import blocks
from benchmarks.codec_values import VALUES, relative_error
from benchmarks.environments import HIVEMIND_VERSION
from benchmarks.hostile import one_thread
from benchmarks.launch import Launch
from benchmarks.results import Aim, Row, Series
from swarm.compression import Codec, find

ELEMENTS = 1 << 20  # one part: 4 MiB in float32
ROUNDS = 15
TIMEOUT_S = 60.0
CODECS = ("float32", "float16", "bfloat16", "int8", "int4", "int2", "sign", "topk")
# hivemind's blockwise codec needs a package for GPUs
COUNTERPARTS = {"float32": "NONE", "float16": "FLOAT16", "int8": "UNIFORM_8BIT"}
ENCODE_AIMS = {"int8": 1.0, "int4": 1.0}  # GB/s of float32


@dataclass(slots=True)
class Measured:
    """The measurements of one codec of one system."""

    encode: list[float] = field(default_factory=list)  # GB/s of float32
    decode: list[float] = field(default_factory=list)
    bits: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)

    def add(self, elements: int, encode_s: float, decode_s: float) -> None:
        self.encode.append(4e-9 * elements / encode_s)
        self.decode.append(4e-9 * elements / decode_s)


class SwarmCodec:
    """A codec of swarm that encodes and decodes one part."""

    def __init__(self, codec: Codec, elements: int) -> None:
        self._codec = codec
        self._values = {name: make(elements) for name, make in VALUES.items()}
        self._blocks = blocks(Chunk(0, 0, 0, elements), codec)
        self._encoded = torch.empty(codec.encoded_bytes(elements), dtype=torch.uint8)
        self._decoded = torch.empty(elements)
        self.measured = Measured(bits=8 * len(self._encoded) / elements)
        self.measured.errors = {name: self._error(values) for name, values in self._values.items()}

    def round(self) -> None:
        values = self._values["N(0, 1)"]
        started_s = time.perf_counter()
        payload = self._encode(values)
        encoded_s = time.perf_counter()
        self._decode(payload)
        self.measured.add(values.numel(), encoded_s - started_s, time.perf_counter() - encoded_s)

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the encoded part as one contiguous tensor. Codecs that return a view are copied into it."""
        for block in self._blocks:
            place = self._encoded[block.first_byte : block.end_byte]
            view = self._codec.encode(values[block.start : block.stop], place)
            if self._codec.name == "float32":
                place.copy_(torch.frombuffer(view, dtype=torch.uint8))
        return self._encoded

    def _decode(self, payload: torch.Tensor) -> torch.Tensor:
        for block in self._blocks:
            place = self._decoded[block.start : block.stop]
            found = self._codec.decode(payload[block.first_byte : block.end_byte], place)
            if found is not place:
                place.copy_(found)
        return self._decoded

    def _error(self, values: torch.Tensor) -> float:
        return relative_error(self._decode(self._encode(values)), values)


def rows(
    say: Callable[[str], None],
    hivemind: Path | None,
    *,
    names: tuple[str, ...] = CODECS,
    elements: int = ELEMENTS,
    rounds: int = ROUNDS,
) -> list[Row]:
    """Measure the section and return its rows. `hivemind` is its interpreter; None measures swarm alone."""
    found: list[Row] = []
    with one_thread(), contextlib.ExitStack() as stack:
        launch = None
        if hivemind is not None:
            worker = Launch(
                "hivemind's codecs",
                python=hivemind,
                module="benchmarks.workers.hivemind_codecs",
                configurations=[{"elements": elements}],
            )
            launch = stack.enter_context(worker)
            launch.receive("ready", TIMEOUT_S)
        limit = f"memory copy {_copy_gb_per_s(elements):.3g} GB/s"
        for name in names:
            own, theirs = SwarmCodec(find(name), elements), Measured()
            for nth in range(rounds + 1):
                own.round()
                if launch is not None and name in COUNTERPARTS:
                    _their_round(launch, COUNTERPARTS[name], theirs, elements, errors=nth == 0)
                if nth == 0:  # warm-up
                    for samples in (own.measured.encode, own.measured.decode, theirs.encode, theirs.decode):
                        samples.clear()
            new = _rows_of(name, own.measured, theirs if theirs.encode else None, limit)
            say(
                f"{name}, {own.measured.bits:.4g} bits: "
                + ", ".join(f"{row.quantity} {row.ours.median:.3g}" for row in new)
            )
            found += new
    return found


def _their_round(launch: Launch, codec: str, measured: Measured, elements: int, *, errors: bool) -> None:
    launch.send("round", codec=codec, errors=errors)
    (answer,) = launch.receive("done", TIMEOUT_S)
    measured.add(elements, answer["encode_s"], answer["decode_s"])
    measured.bits = answer["bits"]
    measured.errors |= answer["errors"]


def _rows_of(name: str, ours: Measured, theirs: Measured | None, limit: str) -> list[Row]:
    def row(
        what: str,
        quantity: str,
        unit: str,
        own: list[float],
        peer: list[float],
        aim: Aim | None = None,
        bound: str = "",
    ) -> Row:
        other = f"hivemind {HIVEMIND_VERSION} {COUNTERPARTS.get(name, '')}"
        return Row(
            identifier=f"codec-{CODECS.index(name)}-{name}-{what}",
            workload=f"codec {name}, {ours.bits:.4g} bits per element",
            quantity=quantity,
            ours=Series(name=f"swarm {name}: {quantity}", unit=unit, samples=tuple(own)),
            peer=Series(name=f"{other} ({theirs.bits:.4g} bits): {quantity}", unit=unit, samples=tuple(peer))
            if theirs
            else None,
            aim=aim,
            shown="ours / peer",
            limit=bound,
        )

    fast = Aim(of="ours", sense="at least", value=ENCODE_AIMS[name]) if name in ENCODE_AIMS else None
    peer = theirs or Measured()
    return [
        row("1-encode", "encode, of float32", "GB/s", ours.encode, peer.encode, fast, limit),
        row("2-decode", "decode, of float32", "GB/s", ours.decode, peer.decode, None, limit),
        *(
            row(
                f"{nth}-error",
                f"relative L2 error, {values}",
                "of the norm",
                [error],
                [peer.errors[values]] if theirs else [],
            )
            for nth, (values, error) in enumerate(ours.errors.items(), 3)
            if name != "float32"
        ),
    ]


def _copy_gb_per_s(elements: int) -> float:
    """Return the best GB/s of a few copies on one thread, from one part to another of the same size."""
    source, target = torch.ones(elements), torch.zeros(elements)
    best_s = float("inf")
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        target.copy_(source)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 4e-9 * elements / best_s
