"""Random and mutated input from one source of random numbers: bytes, msgpack, and protobuf messages made from
their descriptors.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.averaging.history.peers import identity

PEER = identity(100).peer_id
# Bytes and texts with a meaning for decoders. `Maker.learn` adds those of real messages.
BYTES = (b"", b"\x00", bytes(16), bytes(32), b"\xff" * 64, PEER.to_bytes(), PEER.to_bytes()[:-1], b"x" * 5000)
TEXTS = (
    "",
    "a",
    "\x00",
    "run",
    "é\u202e\U0001f600",
    str(PEER),
    "/ip4/127.0.0.1/tcp/9",
    "/ip4/127.0.0.1/tcp/9/tls/http",
    "/dns4/x/tcp/0",
    "ffn.0",
    "ffn.[0:99999999]",
    "run.aaaaaaaaaaaaaaaaaaaa",
    "float16",
    "x" * 5000,
    "[" * 3000,
)
NUMBERS = (0, 1, 2, 3, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e18, 1.8e9, 1e308, float("nan"), float("inf"), float("-inf"))
_DEPTH_MAX = 4
_LEARNED_MAX = 100  # of one type
_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
}


class Learned:
    """Real messages by their type, and the values of their fields."""

    def __init__(self, *messages: Message) -> None:
        self.messages: dict[type[Message], list[Message]] = {}
        self.values: dict[str, list[Any]] = {}
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        """Keep a copy of a message, unless there are enough of its type."""
        kept = self.messages.setdefault(type(message), [])
        if len(kept) >= _LEARNED_MAX:
            return
        copy = type(message)()
        copy.CopyFrom(message)
        kept.append(copy)
        for name, value in _values_of(copy):
            self.values.setdefault(name, []).append(value)


class Maker:
    """Makes values. `seed` determines all of them, together with what was learned."""

    def __init__(self, seed: str, learned: Learned | None = None) -> None:
        self.rng = random.Random(seed)
        self._learned = learned or Learned()

    def raw(self, seeds: list[bytes]) -> bytes:
        """Return random bytes, random msgpack, or one of the seeds with some changes."""
        choice = self.rng.random()
        if choice < 0.15 or not seeds:
            return self.rng.randbytes(self.rng.choice((0, 1, 4, 40, 400)))
        if choice < 0.25:
            return bytes(msgpack.packb(self.value()))
        if choice < 0.6:
            return self._remade(self.rng.choice(seeds))
        return self.mutated(self.rng.choice(seeds))

    def mutated(self, raw: bytes) -> bytes:
        """Return bytes with a few places changed, cut out, repeated or replaced."""
        data = bytearray(raw)
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            place = self.rng.randrange(len(data) + 1)
            kind = self.rng.randrange(6)
            if kind == 0:
                del data[place:]
            elif kind == 1:
                del data[place : place + self.rng.choice((1, 2, 8))]
            elif kind == 2 and data:
                data[place % len(data)] ^= 1 << self.rng.randrange(8)
            elif kind == 3:
                data[place:place] = self.rng.choice(BYTES)[:64]
            elif kind == 4 and data:
                data[place % len(data)] = self.rng.randrange(256)
            else:
                data[place : place + 4] = struct.pack("<I", self.rng.choice(NUMBERS) & 0xFFFFFFFF)
        return bytes(data)

    def value(self, depth: int = 0) -> Any:
        """Return a value that msgpack takes."""
        kinds: list[Callable[[], Any]] = [
            lambda: self.rng.choice(NUMBERS),
            lambda: -self.rng.choice(NUMBERS),
            lambda: self.rng.choice(FLOATS),
            lambda: self.rng.choice(TEXTS),
            lambda: self.rng.choice(BYTES),
            lambda: self.rng.choice((None, True, False)),
        ]
        if depth < _DEPTH_MAX:
            kinds += [
                lambda: [self.value(depth + 1) for _ in range(self.rng.randrange(5))],
                lambda: {self.rng.choice(TEXTS): self.value(depth + 1) for _ in range(self.rng.randrange(4))},
            ]
        return self.rng.choice(kinds)()

    def _remade(self, raw: bytes) -> bytes:
        """Return msgpack with some of its values exchanged; other bytes are mutated."""
        try:
            value = msgpack.unpackb(raw, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            return self.mutated(raw)
        try:
            return bytes(msgpack.packb(self.changed(value)))
        except (ValueError, TypeError, OverflowError):
            return self.mutated(raw)

    def changed(self, value: Any, depth: int = 0) -> Any:
        """Return a value with one place of its tree exchanged."""
        if isinstance(value, bytes) and len(value) > 8 and self.rng.random() < 0.5:
            return self._remade(value) if depth < _DEPTH_MAX else value
        if isinstance(value, list) and value and self.rng.random() < 0.85:
            place = self.rng.randrange(len(value))
            new = [self.changed(one, depth + 1) if at == place else one for at, one in enumerate(value)]
            return new if self.rng.random() < 0.9 else new[:place] + new[place:] * 2
        if isinstance(value, dict) and value and self.rng.random() < 0.85:
            key = self.rng.choice(list(value))
            if self.rng.random() < 0.1:
                return {other: one for other, one in value.items() if other != key}
            return {**value, key: self.changed(value[key], depth + 1)}
        return self.value(depth)

    def message(self, kind: type[Message]) -> Message:
        """Return a message made from its descriptor, or a learned one of this kind with changes."""
        known = self._learned.messages.get(kind)
        if not known or self.rng.random() < 0.3:
            message = kind()
            self._fill(message, 0)
            return message
        message = kind()
        message.CopyFrom(self.rng.choice(known))
        if self.rng.random() < 0.1:
            # the transport refuses bytes that are not a message any more
            with contextlib.suppress(DecodeError):
                return kind.FromString(self.mutated(message.SerializeToString()))
        for _ in range(self.rng.choice((0, 1, 1, 2, 4))):
            self._change(message, 0)
        return message

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self.rng.random() < 0.65:
                self._set(message, field, depth)

    def _change(self, message: Message, depth: int) -> None:
        """Change one field of a message, or of a message inside it."""
        fields: list[FieldDescriptor] = list(message.DESCRIPTOR.fields)
        if not fields:
            return None
        field = self.rng.choice(fields)
        if field.message_type is not None and self.rng.random() < 0.7:
            inner = getattr(message, field.name)
            if not field.is_repeated:
                return self._change(inner, depth + 1)
            if len(inner):
                return self._change(self.rng.choice(list(inner)), depth + 1)
        if self.rng.random() < 0.15:
            return message.ClearField(field.name)
        return self._set(message, field, depth)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        name = field.name
        if field.message_type is not None:
            if depth > _DEPTH_MAX:
                return
            inner = getattr(message, name)
            if not field.is_repeated:
                inner.SetInParent()
                self._fill(inner, depth + 1)
                return
            for _ in range(self.rng.choice((0, 1, 2, 5))):
                self._fill(inner.add(), depth + 1)
        elif field.is_repeated:
            getattr(message, name).extend(self._scalar(field) for _ in range(self.rng.choice((0, 1, 3, 70))))
        else:
            setattr(message, name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        learned = self._learned.values.get(field.full_name)
        if learned and self.rng.random() < 0.5:
            return self.rng.choice(learned)
        if field.type == FieldDescriptor.TYPE_BYTES:
            known = self._learned.values.get(field.full_name, [])
            return (
                self.raw([one for one in known if one]) if self.rng.random() < 0.5 else self.rng.choice(BYTES)
            )
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.rng.choice(TEXTS)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self.rng.random() < 0.5
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return self.rng.choice(FLOATS)
        if field.type == FieldDescriptor.TYPE_ENUM:
            return self.rng.choice((0, 1, 2, 3, 99))
        low, high = _INTEGERS[field.type]
        return min(max(self.rng.choice(NUMBERS) * self.rng.choice((1, 1, -1)), low), high)


def _values_of(message: Message) -> Iterator[tuple[str, Any]]:
    """Yield the full name and value of every scalar in a message."""
    for field, value in message.ListFields():
        for one in value if field.is_repeated else [value]:
            if field.message_type is not None:
                yield from _values_of(one)
            else:
                yield field.full_name, one
