"""The layout: every module has a place in the import contract, and no two files import each other."""

from __future__ import annotations

import ast
import graphlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "averaging", "moe")
# load public names on first use, and are above all layers
PUBLIC = {"swarm", "averaging", "moe"}


def modules() -> dict[str, Path]:
    """Return every module of the three packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: set[str]) -> set[str]:
    """Return the project's modules that a file imports when it runs, without imports for type checking."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for other in child.orelse:
                    visit(other)
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                found.update(names & known or {child.module})
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found & known


MODULES = modules()
GRAPH = {name: imports_of(path, set(MODULES)) - {name} for name, path in MODULES.items()}


def test_files_do_not_import_each_other_in_a_circle() -> None:
    try:
        graphlib.TopologicalSorter(GRAPH).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def contract(name: str) -> dict[str, list[str]]:
    """Return the import contract of this name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    found: dict[str, list[str]] = next(one for one in settings["contracts"] if one["name"].startswith(name))
    return found


def test_every_folder_of_logic_is_held_to_reach_no_io() -> None:
    held = set(contract("logic reaches no I/O")["source_modules"])
    folders = {name for name in MODULES if name.endswith(".logic")}
    assert folders <= held


@pytest.mark.parametrize("name", sorted(set(MODULES) - PUBLIC))
def test_every_module_has_a_place_in_the_import_contract(name: str) -> None:
    layers = contract("an import points down only")["layers"]
    places = {place.strip() for layer in layers for place in layer.replace("|", ":").split(":")}
    parts = name.split(".")
    above = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    packages = {place.rsplit(".", 1)[0] for place in places} | {
        "swarm.testing",
        "swarm.metrics",
        "swarm.monitor",
    }
    assert above & (places | {"swarm.testing"}) or name in packages, (
        f"{name} stands in no layer of the contract"
    )
