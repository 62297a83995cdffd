"""Rounds on tensors on a GPU give the same bytes as on the host. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from averaging.allreduce.work import ReductionKernels
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.chunks import unpack
from averaging.reduction.feedback import Feedback
from averaging.reduction.lowrank import PowerSgd, expand
from averaging.reduction.partition import plan_parts
from averaging.reduction.powersgd import LowRank
from averaging.reduction.staging import Staging
from swarm.compression import find, names

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device at hand: rounds over GPU tensors cannot be compared with those on the host",
)

SHAPES = [(300_000,), (400, 500), (), (0,), (700, 1000)]
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)


def tensors(devices: list[str], seed: int = 1) -> list[torch.Tensor]:
    """Return tensors of several dtypes and strides, on the given devices in turn."""
    chance = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=chance) for shape in SHAPES]
    made += [
        torch.randn(500, 40, generator=chance).t(),
        torch.randn(999, generator=chance).to(torch.bfloat16),
    ]
    return [
        torch.empty_like(tensor, device=device).copy_(tensor)
        for tensor, device in zip(
            made, (devices[nth % len(devices)] for nth in range(len(made))), strict=True
        )
    ]


@pytest.mark.parametrize("devices", [["cuda"], ["cpu", "cuda"], ["cuda", "cuda", "cpu"]])
@pytest.mark.parametrize("codec", sorted(set(names())))
@pytest.mark.parametrize("lent", [True, False])
def test_parts_are_encoded_and_averages_written_as_on_the_host(
    codec: str, devices: list[str], lent: bool
) -> None:
    found = find(codec)
    stagings = [Staging(tensors(["cpu"])), Staging(tensors(devices))]
    numel = stagings[0].layout.numel
    plan = plan_parts(numel, [1.0, 1.0], found, 1 << 16)
    feedback = [Feedback(numel, found, cut=staging.cut, queues=staging.queues) for staging in stagings]
    landings = [ResultBuffer(staging.queues) for staging in stagings]
    for _ in range(3):
        messages = []
        for staging, fed_back, landing in zip(stagings, feedback, landings, strict=True):
            bench = ReductionKernels(
                plan, found, 0, staging.take(lent=lent), Averages(plan, found, landing), weights=(1.0, 1.0)
            )
            bench.feedback = fed_back.begin()
            if not lent:  # what happens on the trainer's stream from now on does not reach the round
                before = [tensor.clone() for tensor in staging.tensors]
                for tensor in staging.tensors:
                    tensor.zero_()
            own = [bench.own_values(part).clone() for part in plan.of_reducer(0)]
            sent = bench.encode(plan.parts)
            messages.append(sent)
            for part, message in zip(plan.parts, sent, strict=True):
                assert isinstance(message, bytes)
                bench.averages.keep(part, unpack(message)[1])
            assert all(value.device.type == "cpu" for value in own)
            assert bench.feedback is not None
            with staging.queues.working():
                bench.feedback.commit()
            if not lent:
                for tensor, value in zip(staging.tensors, before, strict=True):
                    tensor.copy_(value)
                staging.add_difference(bench.averages)
            else:
                staging.put(bench.averages)
        assert messages[0] == messages[1]
        assert torch.equal(feedback[0].state_dict()["sender"], feedback[1].state_dict()["sender"])
        for one, other in zip(stagings[0].tensors, stagings[1].tensors, strict=True):
            assert torch.equal(one, other.cpu())


def test_non_finite_values_are_found_on_the_device() -> None:
    mine = tensors(["cuda"])
    mine[1][3, 7] = float("inf")
    staging = Staging(mine)
    plan = plan_parts(staging.layout.numel, [1.0], find("int8"), 1 << 16)
    bench = ReductionKernels(
        plan,
        find("int8"),
        0,
        staging.take(lent=True),
        Averages(plan, find("int8"), ResultBuffer(staging.queues)),
    )
    assert bench.encode(plan.parts)[-1] == 300_000 + 3 * 500 + 7
    bench.withdraw(300_000 + 3 * 500 + 7)
    assert "is inf" in str(bench.withdrawn)


def test_a_snapshot_shows_the_moment_on_the_trainers_stream() -> None:
    staging = Staging([torch.zeros(1 << 24, device="cuda")])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(50):
            staging.tensors[0].add_(1.0)
        vector = staging.take(lent=False)
        staging.tensors[0].add_(1000.0)
    with staging.queues.working():
        assert vector.read(0, 1 << 24).cpu().unique().tolist() == [50.0]


def test_factors_expand_to_the_same_bits_and_matrices_stay_on_the_device() -> None:
    chance = torch.Generator().manual_seed(1)
    p, q = torch.randn(700, 5, generator=chance), torch.randn(300, 5, generator=chance)
    there, here = torch.empty(700, 300, device="cuda"), torch.empty(700, 300)
    expand(p.cuda(), q.cuda(), there)
    expand(p, q, here)
    assert torch.equal(there.cpu(), here)
    mine = [torch.randn(400, 500, generator=chance), torch.randn(77, generator=chance)]
    states = [
        LowRank([tensor.to(device) for tensor in mine], PowerSgd(), find("float32"), seed=b"x")
        for device in ("cpu", "cuda")
    ]
    mean = None
    for state in states:
        state.take(gives=True, keeps=False)
        first = state.first(alike=True)
        mean = first.read(0, first.numel) if mean is None else mean
        second = state.second(mean)
        opened = state.others.begin()
        opened.kept(0, second.numel)
        opened.commit()
        state.commit(second.read(0, second.numel), sent=True)
        state.put()
    assert states[1].state_dict()["held"][0].device.type == "cpu"
    assert torch.allclose(states[1].state_dict()["held"][0], states[0].state_dict()["held"][0], atol=1e-4)
    assert torch.allclose(states[1].tensors[0].cpu(), states[0].tensors[0], atol=1e-4)
