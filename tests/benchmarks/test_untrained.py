"""Rounds in one process average as real ones do, and the section of untrained models at its smallest size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from averaging.optim.modes import ModeParts
from averaging.optim.optimizer import Diloco
from benchmarks import pages, report, untrained
from benchmarks.lora_averages import product_average
from benchmarks.rounds_in_process import RoundsInProcess

PEERS, NUMEL = 3, 5000


def vectors(seed: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=chance) for _ in range(PEERS)]


@pytest.mark.parametrize(("codec", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("int8", 0.05)])
def test_every_peer_gets_the_weighted_mean_with_the_error_of_the_codec(codec: str, tolerance: float) -> None:
    given, weights = vectors(1), [1.0, 2.0, 5.0]
    mean = torch.stack([w * one for w, one in zip(weights, given, strict=True)]).sum(0) / sum(weights)
    rounds = RoundsInProcess(PEERS, NUMEL, codec, error_feedback=False)
    rounds.average([[one[:2000], one[2000:]] for one in given], weights)
    assert all(torch.equal(one, given[0]) for one in given), "all peers have the same bits"
    torch.testing.assert_close(given[0], mean, rtol=0, atol=tolerance)


def test_error_feedback_delivers_over_many_rounds_what_a_coarse_codec_loses_in_one() -> None:
    wanted, errors = vectors(2), {}
    mean = torch.stack(wanted).mean(0)
    for feedback in (False, True):
        rounds, total, count = (
            RoundsInProcess(PEERS, NUMEL, "int2", error_feedback=feedback),
            torch.zeros(NUMEL),
            40,
        )
        for _ in range(count):
            given = [one.clone() for one in wanted]
            rounds.average([[one] for one in given], [1.0] * PEERS)
            total += given[0]
        errors[feedback] = float((total / count - mean).norm() / mean.norm())
    assert errors[True] < 0.1 < errors[False], errors


def test_a_round_moves_all_modes_one_epoch_forward_and_counts_its_bytes() -> None:
    nets = [torch.nn.Linear(40, 30) for _ in range(PEERS)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    modes = [Diloco().build(ModeParts(inner=torch.optim.SGD(net.parameters(), lr=0.1))) for net in nets]
    for number, (net, mode) in enumerate(zip(nets, modes, strict=True)):
        net(torch.full((4, 40), float(number))).square().mean().backward()
        mode.learner.accumulate(4)
    rounds = RoundsInProcess(PEERS, 40 * 30 + 30, "float32", error_feedback=False)
    rounds.hold(modes)
    assert [mode.state.epoch for mode in modes] == [1] * PEERS
    assert all(torch.equal(net.weight, nets[0].weight) for net in nets)
    sent = rounds.traffic.bytes / PEERS
    assert sent == pytest.approx(2 * (PEERS - 1) / PEERS * 4 * 1230, rel=0.1)


def test_the_product_average_is_the_nearest_matrix_of_the_rank_with_factors_near_the_mean() -> None:
    chance = torch.Generator().manual_seed(3)
    a, b = torch.randn(4, 30, generator=chance), torch.randn(20, 4, generator=chance)
    pairs = [
        (a + 0.1 * torch.randn(4, 30, generator=chance), b + 0.1 * torch.randn(20, 4, generator=chance))
        for _ in range(3)
    ]
    whole = torch.stack([right @ left for left, right in pairs]).mean(0)
    u, s, v = torch.linalg.svd(whole)
    found_a, found_b, error = product_average(pairs)
    torch.testing.assert_close(found_b @ found_a, u[:, :4] * s[:4] @ v[:4], rtol=1e-3, atol=1e-3)
    mean_a = torch.stack([left for left, _ in pairs]).mean(0)
    assert (found_a - mean_a).norm() < 0.1 * mean_a.norm()
    assert 0 < error < 0.1


def test_the_section_stores_trainings_and_draws_loss_over_bytes(tmp_path: Path) -> None:
    scale = replace(untrained.SCALE, steps=6, points=3, data_bytes=1 << 18, width=16, heads=2, samples=4)
    chosen = [setup for setup in untrained.SETUPS if setup.local_steps in (1, 15)]
    setups = [replace(one, local_steps=min(one.local_steps, 3)) for one in (chosen[0], chosen[4], chosen[5])]
    said: list[str] = []
    rows = [row for found in untrained.rows(said.append, tmp_path, setups, scale, (0, 1)) for row in found]
    assert len(said) == 6
    again = [row for found in untrained.rows(said.append, tmp_path, setups, scale, (0, 1)) for row in found]
    assert again == rows
    assert len(said) == 6, "stored trainings are not made again"
    book = report.merge(
        report.load(Path("absent")), rows, run="2026-01-01", about={"machine": {}, "command": ""}
    )
    pages.write(book, tmp_path / "pages")
    drawn = (tmp_path / "pages" / "untrained.svg").read_text()
    assert drawn.count("<polyline") == 3
    assert drawn.count("stroke-dasharray") == 2, "Muon's curve and its name are in dashes"
