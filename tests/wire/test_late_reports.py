"""Reports of `step` about gradients that are found not to be finite only after they were accepted, as on a
GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from averaging.optim.modes import Mode, ModeParts, ModeSettings
from averaging.optim.optimizer import Diloco, Gradients, Local, Optimizer, StepReport
from swarm.node import Node
from tests.averaging.optim.late import LateLink
from tests.wire.plain_torch import BATCH, TARGET, batch, build, loss_of, next_run
from tests.wire.trainers import QUICK


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(listen="127.0.0.1:0") as one:
        yield one


@dataclass(frozen=True)
class OnDevice:
    """A mode that treats the CPU as a device whose flags arrive late."""

    settings: ModeSettings
    name: str = "on a device"

    def build(self, parts: ModeParts) -> Mode:
        return self.settings.build(replace(parts, make_link=LateLink))


def train(node: Node, mode: Any, target: int, offload: bool) -> tuple[list[StepReport], torch.Tensor]:
    """Train until an epoch is completed; the gradients of the second step are not finite."""
    net = build()
    reports: list[StepReport] = []
    options: dict[str, Any] = {
        "batch_size_per_step": BATCH,
        "config": QUICK,
        "codec": "float32",
        "offload": offload,
    }
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    with Optimizer(inner, node=node, run=next_run(), mode=mode, target_batch_size=target, **options) as opt:
        while not reports or not reports[-1].stepped:
            opt.zero_grad()
            loss_of(net, batch(len(reports))).backward()
            if len(reports) == 1:
                next(net.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
            reports.append(opt.step())
            assert len(reports) < 9
    return reports, torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize(
    "settings",
    [Gradients(), Gradients(delayed=True), Local(), Diloco(streaming=2)],
    ids=lambda one: f"{one!r:.40}",
)
@pytest.mark.parametrize("offload", [False, True])
def test_samples_are_subtracted_by_the_step_that_finds_them_non_finite(
    node: Node, settings: Any, offload: bool
) -> None:
    late, parameters = train(node, OnDevice(settings), TARGET, offload)
    contributed = late[-1].contributed
    assert contributed in (TARGET - BATCH, TARGET), (
        "an epoch that was declared full is closed with what is left of it"
    )
    plain, expected = train(node, settings, contributed, offload)
    assert len(late) == len(plain)
    assert [report.samples for report in late] == [BATCH] * len(late)
    assert [report.samples for report in plain] == [BATCH, 0, *[BATCH] * (len(plain) - 2)]
    assert sum(report.dropped for report in late) == BATCH
    assert (late[0].dropped, late[1].dropped) == (0, 0)
    assert (
        [report.reason for report in late if report.dropped]
        == [plain[1].reason]
        == ["non-finite gradients: parameter 0"]
    )
    assert plain[-1].contributed == contributed
    assert torch.equal(parameters, expected)
