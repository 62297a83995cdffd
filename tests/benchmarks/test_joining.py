"""The joining section, in a short form with real processes."""

from __future__ import annotations

import pytest

from benchmarks.joining import Arrivals, join_at_once
from benchmarks.report import ORDER
from benchmarks.sections import SECTIONS


@pytest.mark.slow
def test_newcomers_of_the_short_form_load_and_contribute() -> None:
    arrivals = join_at_once(lambda text: None, 2, 1)
    assert not arrivals.reasons
    assert len(arrivals.loaded_s) == len(arrivals.contributed_s) == 2


def test_a_figure_needs_all_newcomers() -> None:
    arrivals = Arrivals(loaded_s=[1.0, 3.0], contributed_s=[4.0])
    assert arrivals.series("loaded", arrivals.loaded_s, 2).samples == (3.0,)
    missing = arrivals.series("contributing", arrivals.contributed_s, 2)
    assert (missing.samples, missing.failed) == ((), 1)
    assert "joining" in SECTIONS
    assert "joining" in ORDER
