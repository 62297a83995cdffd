"""The fields of dataclasses and pydantic models, from their source: what the reference and the tests of
settings read. It needs nothing that only the documentation needs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel


@dataclasses.dataclass
class Described:
    """One field, as a reader sees it."""

    name: str
    type: str
    default: str
    meaning: str


def fields_of(class_: type) -> list[Described]:
    """Return the fields in their order, those of base classes first. The comment above or beside a field, or
    the string below it, says its meaning.
    """
    if not issubclass(class_, BaseModel):
        return _own_fields(class_)
    models = [one for one in reversed(class_.__mro__) if issubclass(one, BaseModel) and one is not BaseModel]
    return [_of_model(field, class_) for one in models for field in _own_fields(one)]


def _own_fields(class_: type) -> list[Described]:
    source = textwrap.dedent(inspect.getsource(class_))
    comments = _comments(source)
    lines = source.splitlines()
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = []
    for number, node in enumerate(tree.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        annotation = ast.unparse(node.annotation)
        if annotation.startswith("ClassVar") or "InitVar" in annotation or node.target.id.startswith("_"):
            continue
        assert node.end_lineno is not None
        above: list[str] = []
        line = node.lineno - 1
        while line > 0 and lines[line - 1].lstrip().startswith("#"):
            above.insert(0, lines[line - 1].strip().lstrip("# "))
            line -= 1
        beside = [comments[one] for one in range(node.lineno, node.end_lineno + 1) if one in comments]
        below = tree.body[number + 1] if number + 1 < len(tree.body) else None
        text = (
            below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        )
        default = "required" if node.value is None else _default(node.value)
        if isinstance(node.value, ast.Name):  # a constant: its value says more than its name
            value = getattr(inspect.getmodule(class_), node.value.id)
            default = repr(value) if isinstance(value, int | float | str) else default
        meaning = " ".join([*above, *beside, " ".join(str(text).split())]).strip()
        found.append(Described(node.target.id, annotation, default, meaning))
    return found


def _comments(source: str) -> dict[int, str]:
    """Comments that follow code on their line, by line number."""
    lines = source.splitlines()
    return {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
        and not lines[token.start[0] - 1].lstrip().startswith("#")
        and "type: ignore" not in token.string
    }


def _of_model(field: Described, class_: type[BaseModel]) -> Described:
    """Types with their ranges, and defaults as values, as pydantic knows them."""
    known = class_.model_fields[field.name]
    default = known.get_default(call_default_factory=True) if not known.is_required() else None
    text = (
        "required"
        if known.is_required()
        else "as below"
        if isinstance(default, BaseModel)
        else _plain(default)
    )
    return dataclasses.replace(
        field,
        type=_type(known.annotation, known.metadata),
        default=text,
        meaning=field.meaning or known.description or "",
    )


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words that a writer of TOML files knows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0], arguments[1:])
    if origin is typing.Literal:
        return ", ".join(str(one) for one in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(one) for one in arguments if one is not type(None))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "text", bool: "true, false", int: "integer", float: "number", dict: "table", tuple: "list"}
    bounds = []
    for one in metadata:
        inner = getattr(one, "metadata", [one])
        for bound in inner:
            for attribute, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
                if getattr(bound, attribute, None) is not None:
                    bounds.append(f"{sign} {_plain(getattr(bound, attribute))}")
    return f"{names.get(origin or annotation, str(annotation))} {', '.join(bounds)}".strip()


def _plain(value: Any) -> str:
    """A value as a TOML file has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_plain(one) for one in value) + "]"
    if isinstance(value, int) and value >= 1 << 16 and value.bit_count() == 1:
        return f"2^{value.bit_length() - 1}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _default(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "Field"):
        keywords = {one.arg: one.value for one in node.keywords}
        if "default" in keywords:
            return ast.unparse(keywords["default"])
        if "default_factory" in keywords:
            factory = ast.unparse(keywords["default_factory"])
            return {"dict": "{}", "list": "[]"}.get(factory, f"{factory}()")
        return ast.unparse(node.args[0]) if node.args else "required"
    return ast.unparse(node)
