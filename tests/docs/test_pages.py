"""The documentation works as shown: its Python runs, its commands run or at least parse, its pages are
complete.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from swarm.libp2p.logic.relaying import RelayLimits
from tests.docs.pages import DOCS, ROOT, Block, blocks, pages, prose
from tests.docs.scene import Scene

_LANGUAGES = {"python", "console"}
_ALL = [block for page in pages() for block in blocks(page)]
_TUTORIALS = DOCS / "tutorials"
_UNPLAYED = {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}


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
