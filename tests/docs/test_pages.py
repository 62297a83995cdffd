"""The documentation works as shown: its Python runs, its commands run or at least parse, its pages are
complete.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

import swarm
from swarm.libp2p.logic.relaying import RelayLimits
from tests.docs.pages import DOCS, ROOT, Block, blocks, pages, prose
from tests.docs.scene import Scene

_LANGUAGES = {"python", "console"}
_ALL = [block for page in pages() for block in blocks(page)]
_TUTORIALS = DOCS / "tutorials"
# what the diffs on the pages call; those of extras are imported when they are needed
_MADE_IN_DIFFS: dict[str, Callable[[], Any]] = {
    "swarm.Node": lambda: swarm.Node,
    "swarm.Optimizer": lambda: swarm.Optimizer,
    "swarm.ProcessGroupOptimizer": lambda: swarm.ProcessGroupOptimizer,
    "HuggingFaceCallback": lambda: _framework("hugging_face").HuggingFaceCallback,
    "LightningCallback": lambda: _framework("lightning_fit").LightningCallback,
}
_UNPLAYED = {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}


def _framework(name: str) -> Any:
    return pytest.importorskip(f"swarm.frameworks.{name}", exc_type=ImportError)


def _name(value: Path | Block) -> str:
    return value.name if isinstance(value, Block) else value.relative_to(ROOT).as_posix()


def _played(page: Path) -> list[Block]:
    """Return the blocks of a page to run: all of a tutorial, the Python of other pages."""
    languages = _LANGUAGES if _TUTORIALS in page.parents else {"python"}
    return [block for block in blocks(page) if block.language in languages and not block.not_run]


@pytest.mark.parametrize(
    "page", [page for page in pages() if _played(page) and page not in _UNPLAYED], ids=_name
)
def test_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    with Scene(tmp_path) as scene:
        for block in _played(page):
            scene.run(block)


@pytest.mark.parametrize("block", [one for one in _ALL if one.language == "console"], ids=_name)
def test_every_command_shown_exists_with_its_options(block: Block) -> None:
    from swarm.cli.commands import swarm

    shown = block.text.replace("\\\n", " ").splitlines()
    for line in (one[2:] for one in shown if one.startswith("$ swarm ")):
        words = [word for word in shlex.split(line, comments=True) if word not in (">", "demo.jsonl")]
        command = swarm.get_command(click.Context(swarm), words[1])
        if command is None:
            assert words[1].startswith("-"), f"{block.name}: there is no command `swarm {words[1]}`"
            continue
        if "--help" in words:
            continue
        try:
            command.make_context(words[1], words[2:])
        except click.ClickException as error:
            pytest.fail(f"{block.name}: `{line}`: {error.format_message()}")


@pytest.mark.parametrize("block", [one for one in _ALL if "not run" in one.comment], ids=_name)
def test_a_block_that_is_not_run_says_why(block: Block) -> None:
    assert len(block.not_run.split()) >= 3, f"{block.name}: say why it cannot run"


@pytest.mark.parametrize("block", [one for one in _ALL if one.language == "diff"], ids=_name)
def test_a_diff_has_at_most_five_lines_with_arguments_that_exist(block: Block) -> None:
    lines = block.text.splitlines()
    added = [line[1:] for line in lines if line.startswith("+")]
    assert 1 <= len(added) <= 5
    code = "\n".join(line[1:] for line in lines if not line.startswith("-")).replace("…", "...")
    code = re.sub(r"^(for .*:)$(?!\n )", r"\1 ...", code, flags=re.MULTILINE)
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        made = _MADE_IN_DIFFS.get(ast.unparse(call.func))
        if made is not None and not any(ast.unparse(one) == "..." for one in call.args):
            inspect.signature(made()).bind(*call.args, **{one.arg: one for one in call.keywords if one.arg})


def test_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for top in ("swarm", "averaging", "moe")
        for path in (ROOT / top).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message may be written on several lines
    missing = [
        (name, piece.strip())
        for name, piece in _message_pieces(DOCS / "howto" / "troubleshooting.md")
        if piece.strip() and piece.strip() not in joined
    ]
    assert not missing, f"no message says that any longer: {missing}"


def _message_pieces(page: Path) -> list[tuple[str, str]]:
    """Return the fixed pieces of the messages that are headings of a page; `…` stands for what varies."""
    headings = [line for _, line in prose(page) if line.startswith("### `")]
    return [(heading, piece) for heading in headings for piece in heading[len("### `") : -1].split("…")]


def test_limits_of_a_relay_on_the_pages_are_those_of_the_program() -> None:
    limits = RelayLimits()
    everything, one = f"{limits.circuits_max:,} connections", limits.circuits_per_peer_max
    ports = " ".join((DOCS / "howto" / "ports.md").read_text(encoding="utf-8").split())
    assert (
        f"A relay takes in {limits.reservations_max} peers, {limits.reservations_per_prefix_max} of one"
        in ports
    )
    assert f"carries {everything}, {one} of a peer" in ports
    troubles = (DOCS / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
    assert f"the relay carries {everything}, or {one} of one peer" in troubles


def test_the_scorecard_follows_from_the_measurements() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scorecard", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_glossary_has_every_term_once() -> None:
    lines = (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines()
    terms = [
        term.strip()
        for line, below in itertools.pairwise(lines)
        if below.startswith(": ")
        for term in line.split(",")
    ]
    assert len(terms) > 80
    twice = sorted({term for term in terms if terms.count(term) > 1})
    assert not twice, f"the glossary defines {twice} twice"
