"""The mixture benchmark: a layer is compared with the same mixture computed locally, and wrong ones are
reported.
"""

from __future__ import annotations

import time

import torch

from benchmarks import mixture_load as load
from moe.client.logic.gate import ProductKeyGate


def layer(
    gate: ProductKeyGate, x: torch.Tensor, *, k_best: int = load.K_BEST, wrong_gradient: bool = False
) -> torch.Tensor:
    scores = gate(x)
    best = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1).topk(k_best, dim=1)
    seen = x.detach() if wrong_gradient else x
    outputs = torch.stack(
        [load.module_of(row, column)(seen) for row in range(load.ROWS) for column in range(load.COLUMNS)],
        dim=1,
    )
    chosen = outputs.gather(1, best.indices.unsqueeze(-1).expand(-1, -1, load.WIDTH))
    return (best.values.softmax(dim=1).unsqueeze(-1) * chosen).sum(dim=1)


def order() -> dict[str, float]:
    return {"count": 1, "at_s": time.monotonic()}


def test_a_right_layer_passes_and_wrong_layers_fail() -> None:
    gate = ProductKeyGate(load.WIDTH, (load.ROWS, load.COLUMNS))
    load.set_gate(gate.projection)
    right = load.perform(lambda x: layer(gate, x), gate.projection, order())
    assert (right["performed"], right["reasons"]) == (1, [])
    other = load.perform(lambda x: layer(gate, x, k_best=3), gate.projection, order())
    assert other["reasons"] == ["an output is wrong"]
    lossy = load.perform(lambda x: layer(gate, x, wrong_gradient=True), gate.projection, order())
    assert lossy["reasons"] == ["a gradient is wrong"]


def test_an_exception_of_a_layer_is_reported() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    report = load.perform(broken, torch.nn.Linear(load.WIDTH, 8), order())
    assert report["performed"] == 0
    assert report["reasons"] == ["RuntimeError: no"]
