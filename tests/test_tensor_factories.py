"""Library code names the dtype and the device of every tensor that it makes: torch's defaults belong to the
user.

Held as a ratchet: ALLOWED lists modules that still rely on a default, and how often. Its numbers may only
fall.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm/compression", "averaging")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# what `torch.set_default_device` redirects (torch.utils._device), and of it what `torch.set_default_dtype`
# gives a dtype
FACTORIES = frozenset(
    {
        *(
            "empty",
            "empty_strided",
            "empty_permuted",
            "zeros",
            "ones",
            "full",
            "eye",
            "arange",
            "range",
            "linspace",
            "logspace",
        ),
        *(
            "tensor",
            "as_tensor",
            "asarray",
            "scalar_tensor",
            "rand",
            "randn",
            "randint",
            "randperm",
            "normal",
        ),
        *("tril_indices", "triu_indices", "vander", "complex", "sparse_coo_tensor"),
    }
)
ALLOWED: dict[str, int] = {}


def implicit(source: str) -> list[int]:
    """Return the lines on which a factory of torch is named without `dtype=` and `device=`; a generator needs
    its device alone.
    """
    complete: set[ast.expr] = set()
    found = []
    for node in ast.walk(ast.parse(source)):  # outer nodes first: a call before the name that it calls
        if isinstance(node, ast.Call):
            named = {keyword.arg for keyword in node.keywords}
            if named >= ({"device"} if _name_in_torch(node.func) == "Generator" else {"dtype", "device"}):
                complete.add(node.func)
        elif (
            isinstance(node, ast.Attribute)
            and node not in complete
            and _name_in_torch(node) in FACTORIES | {"Generator"}
        ):
            found.append(node.lineno)
    return found


def _name_in_torch(node: ast.expr) -> str | None:
    inside = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    return node.attr if inside and isinstance(node, ast.Attribute) else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_factories_are_given_a_dtype_and_a_device(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    lines = implicit(path.read_text(encoding="utf-8"))
    assert len(lines) <= ALLOWED.get(name, 0), (
        f"{name}: torch's defaults decide the dtype or the device of what is made on lines {lines}"
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.empty(3)", [1]),
        ("torch.empty(3, dtype=d)", [1]),
        ("\ntorch.tensor([1.0], device=x)", [2]),
        ("torch.zeros(3, dtype=d, device=x)", []),
        ("make(torch.zeros)", [1]),
        ("torch.Generator()", [1]),
        ("torch.Generator(device=x)", []),
        ("torch.empty_like(x); x.new_empty(3); numpy.empty(3)", []),
        ("torch.full((3,), torch.tensor(1.0), dtype=d, device=x)", [1]),
    ],
)
def test_calls_that_rely_on_a_default_dtype_or_device_are_found(source: str, lines: list[int]) -> None:
    assert implicit(source) == lines
