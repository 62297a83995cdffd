"""The public API is a list: every name loads, says what it is, and type checkers see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import swarm

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", swarm.__all__)
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    value = getattr(swarm, name)
    assert name == "__version__" or value.__doc__, f"swarm.{name} has no docstring"


def test_an_unknown_name_is_refused_in_the_usual_way() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = swarm.Nonsense  # type: ignore[attr-defined]
    assert set(swarm.__all__) <= set(dir(swarm))


def test_importing_swarm_loads_neither_torch_nor_grpc() -> None:
    program = (
        "import sys, swarm; "
        "print(sorted({'torch', 'grpc', 'libp2p', 'uvloop', 'asyncio'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert output.strip() == "[]"


def test_mypy_sees_every_public_name(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text("import swarm\n" + "".join(f"reveal_type(swarm.{name})\n" for name in swarm.__all__))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(user)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.count("Revealed type") == len(swarm.__all__), done.stdout
    assert "Any" not in "".join(
        line for line in done.stdout.splitlines() if "Revealed" in line and '"Any"' in line
    ), done.stdout
