"""Docstrings become reStructuredText that shows what was written."""

from __future__ import annotations

import pytest

from docs._ext.docstrings import as_restructured_text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("in its first `step`, or in `load` before", "in its first ``step``, or in ``load`` before"),
        ("`int2`, `sign` and `topk` need it", "``int2``, ``sign`` and ``topk`` need it"),
        ("all `name`s of un`known` ones", r"all ``name``\ s of un\ ``known`` ones"),
        ("a * b_ and `c * d_`", r"a \* b\_ and ``c * d_``"),
    ],
)
def test_code_in_backticks_is_code_and_all_else_is_text(written: str, expected: str) -> None:
    assert as_restructured_text([written]) == [expected]


def test_sections_and_indented_examples_are_kept() -> None:
    lines = ["Args:", "    name: A `text`.", "", "Use it:", "", "    a = `b`"]
    assert as_restructured_text(lines) == [
        "Args:",
        "    name: A ``text``.",
        "",
        "Use it::",
        "",
        "    a = `b`",
    ]
