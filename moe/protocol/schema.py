"""Schemas of experts: the trees of tensors that an expert takes and returns, each tensor with a dtype and the
shape behind its first dimension, the batch. One dimension of a tensor may be a sequence, of which callers may
send shorter ones than the schema says; all sequences of a call have one length.

A tree is a tensor, or a tuple, list or dictionary (with text as keys) of trees. Only the flat list of a
tree's tensors is sent, dictionaries in the order of their keys. A schema is made by calling the module once
with sample inputs. Its digest is sent with every request, so that two peers that mean different things by one
name notice before anything is computed.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack
import torch

from moe.protocol.codecs import UNCOMPRESSED, WireCodecs
from swarm.core.errors import PeerError, UsageError

LEAVES_MAX = 64
NESTING_MAX = 8
SCHEMA_BYTES_MAX = 8192
ELEMENTS_PER_SAMPLE_MAX = 1 << 28
_RANK_MAX = 8
_KEY_CHARACTERS_MAX = 64
_DIGEST_BYTES = 16
_LENGTHS_MAX = 256  # lengths of sequences of which a schema is kept
_CONTEXT = b"swarm expert schema 1\0"

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a tree: (batch, *shape) of this dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sequence: int | None = None  # number of the dimension in `shape` that may be shorter; None: all are fixed
    # computed once, because every call needs them
    elements: int = field(init=False, repr=False, compare=False)  # of one sample
    sample_bytes: int = field(init=False, repr=False, compare=False)  # of one sample, uncompressed

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", math.prod(self.shape))
        object.__setattr__(self, "sample_bytes", self.elements * self.dtype.itemsize)

    @property
    def is_floating(self) -> bool:
        """Return whether the tensor has floating-point elements. Only such tensors have gradients."""
        return self.dtype.is_floating_point

    def at(self, length: int) -> Leaf:
        """Return the tensor with a sequence of this length, and nothing that may vary."""
        if self.sequence is None:
            return self
        before, behind = self.shape[: self.sequence], self.shape[self.sequence + 1 :]
        return Leaf(self.dtype, (*before, length, *behind))

    def __str__(self) -> str:
        sizes = [str(size) for size in self.shape]
        if self.sequence is not None:
            sizes[self.sequence] = f"1 to {sizes[self.sequence]}"
        return f"{_NAMES[self.dtype]}({', '.join(('batch', *sizes))})"


Tree: TypeAlias = "Leaf | tuple[Tree, ...] | list[Tree] | dict[str, Tree]"


@dataclass(frozen=True)
class ExpertSchema:
    """The inputs and outputs of an expert. `inputs` is a tuple of trees, the positional arguments; `outputs`
    is one tree, the module's return value. `codecs`: those in which callers send and get the tensors unless
    they choose others.
    """

    inputs: Tree
    outputs: Tree
    codecs: WireCodecs = UNCOMPRESSED

    def __post_init__(self) -> None:
        for count, leaf in enumerate((*leaves(self.inputs), *leaves(self.outputs)), 1):
            if count > LEAVES_MAX or leaf.elements > ELEMENTS_PER_SAMPLE_MAX or len(leaf.shape) > _RANK_MAX:
                raise UsageError(
                    f"an expert has at most {LEAVES_MAX} tensors in and out, "
                    f"of at most {_RANK_MAX} dimensions behind the batch "
                    f"and {ELEMENTS_PER_SAMPLE_MAX:,} elements a sample"
                )
        if not isinstance(self.inputs, tuple) or not self.input_leaves or not self.output_leaves:
            raise UsageError("an expert takes at least one tensor, and returns at least one")
        varying = [leaf for leaf in (*self.input_leaves, *self.output_leaves) if leaf.sequence is not None]
        if varying and (
            len({leaf.shape[leaf.sequence or 0] for leaf in varying}) > 1
            or all(leaf.sequence is None for leaf in self.input_leaves)
        ):
            raise UsageError("the sequences of an expert have one length, which an input decides")

    @functools.cached_property
    def sequence_length(self) -> int:
        """Return the largest length of the sequences that may be shorter; 0 when there are none."""
        return next((leaf.shape[leaf.sequence] for leaf in self.input_leaves if leaf.sequence is not None), 0)

    def length_of(self, inputs: Sequence[torch.Tensor]) -> int:
        """Return the length of the sequences in these flat inputs; 0 when none may vary."""
        for leaf, tensor in zip(self.input_leaves, inputs, strict=False):
            if leaf.sequence is not None and tensor.ndim > leaf.sequence + 1:
                return tensor.shape[leaf.sequence + 1]
        return self.sequence_length

    def at(self, length: int) -> ExpertSchema:
        """Return the schema of a call whose sequences have this length (`length_of`), in which nothing
        varies. Its digest is another one. Raises UsageError when the expert does not take that length.
        """
        longest = self.sequence_length
        if not longest and not length:
            return self
        if not 1 <= length <= longest:
            raise UsageError(
                f"this expert takes sequences of 1 to {longest}, not {length}: {self}"
                if longest
                else f"this expert takes one length of sequences only: {self}"
            )
        found = self._by_length.get(length)
        if found is None:
            inputs, outputs = _at(self.inputs, length), _at(self.outputs, length)
            if len(self._by_length) >= _LENGTHS_MAX:
                self._by_length.clear()
            found = self._by_length[length] = ExpertSchema(inputs, outputs, self.codecs)
        return found

    @functools.cached_property
    def _by_length(self) -> dict[int, ExpertSchema]:
        return {}

    @functools.cached_property
    def sample_bytes_max(self) -> int:
        """Return the bytes that a sample takes in the larger direction of a forward or backward call,
        uncompressed.
        """
        sent = sum(leaf.sample_bytes for leaf in (*self.input_leaves, *self.gradient_leaves))
        outputs = sum(leaf.sample_bytes for leaf in self.output_leaves)
        return max(sent, outputs, sum(leaf.sample_bytes for leaf in self.input_gradient_leaves))

    def with_shorter(self, shorter: ExpertSchema) -> ExpertSchema:
        """Return this schema with sequences that may be shorter: the dimensions in which `shorter` differs,
        which was made from shorter samples. Raises UsageError when it differs in more than that.
        """
        return ExpertSchema(
            _with_shorter(self.inputs, shorter.inputs),
            _with_shorter(self.outputs, shorter.outputs),
            self.codecs,
        )

    @functools.cached_property
    def input_leaves(self) -> tuple[Leaf, ...]:
        """Return the tensors of the inputs, flat."""
        return tuple(leaves(self.inputs))

    @functools.cached_property
    def output_leaves(self) -> tuple[Leaf, ...]:
        """Return the tensors of the outputs, flat."""
        return tuple(leaves(self.outputs))

    @functools.cached_property
    def gradient_leaves(self) -> tuple[Leaf, ...]:
        """Return the tensors that a backward pass takes in addition to the inputs: the floating-point
        outputs, in order.
        """
        return tuple(leaf for leaf in self.output_leaves if leaf.is_floating)

    @functools.cached_property
    def input_gradient_leaves(self) -> tuple[Leaf, ...]:
        """Return the tensors that a backward pass returns: the floating-point inputs, in order."""
        return tuple(leaf for leaf in self.input_leaves if leaf.is_floating)

    @functools.cached_property
    def packed(self) -> bytes:
        """Return the schema in its wire format, msgpack. Raises UsageError when it is longer than
        SCHEMA_BYTES_MAX.
        """
        parts = [_to_wire(self.inputs), _to_wire(self.outputs)]
        if any(self.codecs.names):  # the digest of a schema without codecs is that of earlier versions
            parts.append(list(self.codecs.names))
        packed: bytes = msgpack.packb(parts)
        if len(packed) > SCHEMA_BYTES_MAX:
            raise UsageError(
                f"the schema of an expert has at most {SCHEMA_BYTES_MAX} bytes, not {len(packed)}"
            )
        return packed

    @functools.cached_property
    def digest(self) -> bytes:
        """Return the first 16 bytes of the SHA-256 of the packed schema."""
        return hashlib.sha256(_CONTEXT + self.packed).digest()[:_DIGEST_BYTES]

    @classmethod
    def unpack(cls, packed: bytes) -> ExpertSchema:
        """Parse a schema that a peer sent. Raises PeerError when it is not one."""
        if len(packed) > SCHEMA_BYTES_MAX:
            raise PeerError(f"a schema has at most {SCHEMA_BYTES_MAX} bytes, not {len(packed)}")
        try:
            inputs, outputs, *more = msgpack.unpackb(packed)
            codecs = _codecs_from_wire(*more) if more else UNCOMPRESSED
            return cls(_from_wire(inputs, 0), _from_wire(outputs, 0), codecs)
        except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
            raise PeerError(f"not the schema of an expert: {error}") from None

    @classmethod
    def from_samples(
        cls, inputs: Sequence[Any], outputs: Any, codecs: WireCodecs = UNCOMPRESSED
    ) -> ExpertSchema:
        """Make a schema from sample arguments and the module's result for them. Raises UsageError when these
        are not trees of tensors with one batch size.
        """
        input_tree, input_tensors = flatten(tuple(inputs))
        output_tree, output_tensors = flatten(outputs)
        schema = cls(input_tree, output_tree, codecs)
        batch_of(input_tensors)
        batch = batch_of([*input_tensors[:1], *output_tensors])
        if not batch:
            raise UsageError("sample inputs have at least one sample")
        return schema

    def __str__(self) -> str:
        return f"{_to_text(self.inputs)} -> {_to_text(self.outputs)}"


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Yield the tensors of a tree, in the order in which they are flattened."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        for part in _children(tree):
            yield from leaves(part)


def flatten(value: Any, depth: int = 0) -> tuple[Tree, list[torch.Tensor]]:
    """Return the tree of a nested value, and its tensors. Raises UsageError when the value holds anything but
    tensors with a first dimension.
    """
    if isinstance(value, torch.Tensor):
        if value.ndim == 0 or value.dtype not in _NAMES:
            raise UsageError(
                "an expert's tensors have the batch as their first dimension, "
                f"and a dtype of {', '.join(_DTYPES)}: not {value!r:.80}"
            )
        return _leaf_of(value.dtype, value.shape[1:]), [value]
    if depth > NESTING_MAX:
        raise UsageError(f"an expert's inputs and outputs are nested at most {NESTING_MAX} deep")
    tensors: list[torch.Tensor] = []
    if isinstance(value, dict):
        if not all(isinstance(key, str) and len(key) <= _KEY_CHARACTERS_MAX for key in value):
            raise UsageError(
                f"the keys of an expert's dictionaries are texts of at most {_KEY_CHARACTERS_MAX} characters"
            )
        table: dict[str, Tree] = {}
        for key in sorted(value):
            table[key], more = flatten(value[key], depth + 1)
            tensors += more
        return table, tensors
    if isinstance(value, tuple | list):
        parts: list[Tree] = []
        for one in value:
            tree, more = flatten(one, depth + 1)
            parts.append(tree)
            tensors += more
        return (tuple(parts) if isinstance(value, tuple) else parts), tensors
    raise UsageError(
        "an expert takes and returns tensors, and tuples, lists and dictionaries of them: "
        f"not {type(value).__name__}"
    )


@functools.lru_cache(maxsize=1024)  # every call of an expert has tensors of few shapes
def _leaf_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Leaf:
    return Leaf(dtype, tuple(shape))


def unflatten(tree: Tree, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild the nested value from its flat tensors, of which there must be as many as the tree has."""
    return _rebuild(tree, iter(tensors))


def same_structure(one: Tree, other: Tree) -> bool:
    """Return whether two trees have the same nesting, whatever their tensors are."""
    if isinstance(one, Leaf) or isinstance(other, Leaf):
        return isinstance(one, Leaf) and isinstance(other, Leaf)
    if isinstance(one, dict) or isinstance(other, dict):
        return (
            isinstance(one, dict)
            and isinstance(other, dict)
            and one.keys() == other.keys()
            and all(map(same_structure, _children(one), _children(other)))
        )
    return type(one) is type(other) and len(one) == len(other) and all(map(same_structure, one, other))


def batch_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the batch size that all tensors have. Raises UsageError when they differ."""
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1:
        raise UsageError(f"all tensors have the same first dimension, the batch; these have {sorted(sizes)}")
    return sizes.pop()


def check(expected: Sequence[Leaf], tensors: Sequence[torch.Tensor], what: str) -> int:
    """Return the batch size of tensors that should have the expected dtypes and shapes. Raises UsageError,
    which names the first tensor that does not.
    """
    if len(tensors) != len(expected):
        raise UsageError(f"the expert has {len(expected)} {what} tensors, not {len(tensors)}")
    for number, (leaf, tensor) in enumerate(zip(expected, tensors, strict=True)):
        shape = tensor.shape
        if tensor.dtype != leaf.dtype or shape[1:] != leaf.shape or not shape:
            name = _NAMES.get(tensor.dtype, str(tensor.dtype))
            raise UsageError(f"{what} {number} should be {leaf}, and is {name}{tuple(tensor.shape)}")
    return batch_of(tensors)


def _at(tree: Tree, length: int) -> Tree:
    if isinstance(tree, Leaf):
        return tree.at(length)
    if isinstance(tree, dict):
        return {key: _at(part, length) for key, part in tree.items()}
    parts = [_at(part, length) for part in tree]
    return tuple(parts) if isinstance(tree, tuple) else parts


def _with_shorter(tree: Tree, shorter: Tree) -> Tree:
    if not same_structure(tree, shorter):
        raise UsageError("the module returns something else for shorter sequences")
    if isinstance(tree, Leaf) and isinstance(shorter, Leaf):
        differing = [
            number
            for number, (size, other) in enumerate(zip(tree.shape, shorter.shape, strict=False))
            if size != other
        ]
        if len(tree.shape) != len(shorter.shape) or tree.dtype != shorter.dtype or len(differing) > 1:
            raise UsageError(f"shorter sequences make {shorter} of {tree}: only one dimension may be shorter")
        return Leaf(tree.dtype, tree.shape, differing[0] if differing else None)
    if isinstance(tree, dict) and isinstance(shorter, dict):
        return {key: _with_shorter(tree[key], shorter[key]) for key in tree}
    assert not isinstance(tree, Leaf | dict)
    assert not isinstance(shorter, Leaf | dict)
    parts = [_with_shorter(part, other) for part, other in zip(tree, shorter, strict=True)]
    return tuple(parts) if isinstance(tree, tuple) else parts


def _children(tree: tuple[Tree, ...] | list[Tree] | dict[str, Tree]) -> Iterator[Tree]:
    return (tree[key] for key in sorted(tree)) if isinstance(tree, dict) else iter(tree)


def _rebuild(tree: Tree, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(tree, Leaf):
        return next(tensors)
    if isinstance(tree, dict):
        return {key: _rebuild(tree[key], tensors) for key in sorted(tree)}
    parts = [_rebuild(part, tensors) for part in tree]
    return tuple(parts) if isinstance(tree, tuple) else parts


def _to_wire(tree: Tree) -> Any:
    if isinstance(tree, Leaf):
        varying = [] if tree.sequence is None else [tree.sequence]
        return [_NAMES[tree.dtype], list(tree.shape), *varying]
    if isinstance(tree, dict):
        return {key: _to_wire(tree[key]) for key in sorted(tree)}
    return ["tuple" if isinstance(tree, tuple) else "list", *map(_to_wire, tree)]


def _from_wire(packed: Any, depth: int) -> Tree:
    if depth > NESTING_MAX + 1:
        raise ValueError("nested too deep")
    if isinstance(packed, dict):
        if not all(isinstance(key, str) and len(key) <= _KEY_CHARACTERS_MAX for key in packed):
            raise ValueError("a key is not a short text")
        return {key: _from_wire(packed[key], depth + 1) for key in sorted(packed)}
    if not isinstance(packed, list) or not packed or not isinstance(packed[0], str):
        raise ValueError("neither a tensor nor a collection")
    if packed[0] in ("tuple", "list"):
        parts = [_from_wire(part, depth + 1) for part in packed[1:]]
        return tuple(parts) if packed[0] == "tuple" else parts
    name, shape, *varying = packed
    if not isinstance(shape, list) or not all(
        type(size) is int and 0 <= size <= ELEMENTS_PER_SAMPLE_MAX for size in shape
    ):
        raise ValueError("a shape is a list of sizes")
    if not varying:
        return Leaf(_DTYPES[name], tuple(shape))
    (sequence,) = varying
    if type(sequence) is not int or not 0 <= sequence < len(shape) or not shape[sequence]:
        raise ValueError("a sequence is the number of one of the dimensions")
    return Leaf(_DTYPES[name], tuple(shape), sequence)


def _codecs_from_wire(names: Any) -> WireCodecs:
    if (
        not isinstance(names, list)
        or len(names) != len(UNCOMPRESSED.names)
        or not all(
            name is None or (isinstance(name, str) and len(name) <= _KEY_CHARACTERS_MAX) for name in names
        )
    ):
        raise ValueError("codecs are names")
    inputs, outputs, gradients, input_gradients = names
    try:
        return WireCodecs(
            inputs=inputs, outputs=outputs, gradients=gradients, input_gradients=input_gradients
        )
    except UsageError as error:  # one that this version does not have
        raise ValueError(str(error)) from None


def _to_text(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return str(tree)
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {_to_text(tree[key])}" for key in sorted(tree)) + "}"
    inner = ", ".join(map(_to_text, tree))
    return f"({inner})" if isinstance(tree, tuple) else f"[{inner}]"
