"""Pages of the documentation for tests: fenced blocks of code, and links.

A comment directly above a block says how it is run:

    <!-- not run: REASON -->            it cannot run in a test; the reason is for the page's next editor
    <!-- background, until: REGEX -->   a command that stays; the page continues when an output line matches
    <!-- run as: COMMAND -->            run instead of the command that is shown: the same with smaller sizes
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|:{3,})(?P<language>[^`]*)$")
_COMMENT = re.compile(r"^<!-- (?P<text>(?:not run|background|run as)\b.*?) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is where its text begins, `comment` says how it is run."""

    page: Path
    line: int
    language: str
    text: str
    comment: str = ""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def not_run(self) -> str:
        """The reason why the block is not run; empty when it is run."""
        return self.comment.partition("not run:")[2].strip()

    @property
    def until(self) -> str:
        """The pattern of output after which the page may continue; empty for a command that ends by
        itself.
        """
        return self.comment.partition("until:")[2].strip()

    @property
    def commands(self) -> list[str]:
        """The commands of a console block, one a line; `\\` at the end of a line continues it."""
        joined = self.text.replace("\\\n", " ")
        typed = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
        instead = self.comment.partition("run as:")[2].strip()
        return [instead] if instead else typed


def pages() -> list[Path]:
    """Return every Markdown document that is part of the repository's own text."""
    found = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(path for path in found if "build" not in path.relative_to(ROOT).parts)


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order; those inside another block belong to it."""
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].strip() != opening["fence"]:
            end += 1
        comment = _COMMENT.match(lines[number - 1]) if number else None
        text = "\n".join(lines[number + 1 : end]) + "\n"
        yield Block(page, number + 2, opening["language"].strip(), text, comment["text"] if comment else "")
        number = end + 1


def prose(page: Path) -> list[tuple[int, str]]:
    """Return the lines of a page that are in no fenced block, with their numbers."""
    taken: set[int] = set()
    for block in blocks(page):
        taken.update(range(block.line - 1, block.line + block.text.count("\n") + 1))
    lines = page.read_text(encoding="utf-8").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if number not in taken]


def anchors(page: Path) -> set[str]:
    """Return the places within a page that a link can name: its headings, as GitHub and Sphinx write them."""
    found = set()
    for _, line in prose(page):
        heading = re.match(r"#{1,6} (.*)", line)
        if heading:
            text = re.sub(r"[^\w\- ]", "", heading[1].lower().replace("`", ""))
            found.add(text.strip().replace(" ", "-"))
    return found
