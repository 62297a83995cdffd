"""Every attack on the page about security names a test that exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, ROOT

_ROWS = [line for line in (DOCS / "security.md").read_text().splitlines() if "`tests/" in line]
_NAMED = [
    (path, test) for row in _ROWS for path, test in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
]


def test_the_page_names_a_test_for_every_attack() -> None:
    assert len(_NAMED) == len(_ROWS) >= 25


@pytest.mark.parametrize(("path", "test"), _NAMED, ids=[test for _, test in _NAMED])
def test_a_test_that_the_page_names_exists(path: str, test: str) -> None:
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE)
