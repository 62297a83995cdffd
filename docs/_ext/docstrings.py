"""Docstrings of this project are prose with `backticks`. This makes them reStructuredText without surprises.

A star, a bar or a trailing underscore in a docstring is text, `a` in backticks is code, and what is indented
after a colon is an example. Formatting of a docstring can therefore never break the build; a broken link in a
page still does.
"""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"(``.+?``|`[^`]+`)")
_SPECIAL = re.compile(r"([\\*|]|_(?=\W|$))")


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx; registered before napoleon, which then finds its sections."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    return {"parallel_read_safe": True}


def _process(app: Any, what: str, name: str, object_: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)


def as_restructured_text(lines: list[str]) -> list[str]:
    """The same text with markup escaped; indented examples become literal blocks, sections such as `Raises:`
    stay.
    """
    made: list[str] = []
    example = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if not line.strip():
            made.append("")
            continue
        if example and indented:
            made.append(line)
            continue
        example = False
        made.append(_escaped(line))
        following = next((one for one in lines[number + 1 :] if one.strip()), "")
        blank = number + 1 < len(lines) and not lines[number + 1].strip()
        if line.rstrip().endswith(":") and not indented and blank and following.startswith("    "):
            made[-1] = made[-1].rstrip() + ":"  # a double colon opens a literal block
            example = True
    return made


def _escaped(line: str) -> str:
    parts = _CODE.split(line)
    for number, part in enumerate(parts):
        if number % 2:
            # a literal stands between spaces or punctuation: `name`s becomes ``name``\ s
            before = r"\ " if re.search(r"\w$", parts[number - 1]) else ""
            after = r"\ " if re.match(r"\w", parts[number + 1]) else ""
            parts[number] = f"{before}``{part.strip('`')}``{after}"
        else:
            parts[number] = _SPECIAL.sub(r"\\\1", part)
    return "".join(parts)
