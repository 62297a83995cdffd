"""The experts' benchmark: results are checked, and figures count performed calls."""

from __future__ import annotations

import pytest
import torch

from benchmarks.expert_load import EXPERT, WIDTH, module_of, perform
from benchmarks.experts import AIMS, CLIENTS, COUNTS, row_of
from benchmarks.interleaving import Tally
from benchmarks.measured_systems import Round


def order(what: str) -> dict[str, object]:
    return {"what": what, "count": 2, "at_s": 0.0}


@pytest.mark.parametrize("what", ["small", "large", "train"])
def test_right_results_pass_and_wrong_results_fail(what: str) -> None:
    module = module_of(EXPERT[what])
    report = perform(module, order(what), rank=1)
    assert (report["performed"], report["reasons"]) == (2, [])
    assert perform(lambda x: module(x) * 1.01, order(what), rank=1)["reasons"] == ["an output is wrong"]


def test_wrong_gradients_and_failed_calls_are_reported() -> None:
    class Cut(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return module_of("ffn")(x) + 0.0 * x.sum() + (x - x.detach()) * 0.5

    assert perform(Cut(), order("train"), rank=1)["reasons"] == ["a gradient is wrong"]

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise OSError("gone")

    report = perform(fail, order("small"), rank=1)
    assert report["performed"] == 0
    assert report["reasons"] == ["OSError: gone"]


def test_a_figure_counts_calls_per_second_of_all_clients() -> None:
    tally = Tally("ours")
    tally.rounds.append(Round(ok=True, phases={"small": 2.0, "large": 1.0, "train": 4.0}))
    peer = Tally("theirs")
    peer.rounds.append(Round(ok=True, phases={"small": 20.0, "large": 1.0, "train": 4.0}))
    row = row_of("small", tally, peer)
    assert row.ours.median == CLIENTS * COUNTS["small"] / 2.0
    assert row.ratio == pytest.approx(10.0)
    assert row.met is (AIMS["small"] <= 10.0)
    assert set(AIMS) == set(COUNTS) == set(EXPERT)
    assert set(EXPERT.values()) == set(WIDTH)
