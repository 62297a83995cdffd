"""Steps of a target batch: their number and result do not depend on the batching of requests."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from moe.server.expert import ComputationFailed, Expert
from moe.server.jobs import Job
from moe.server.passes import BatchPass
from moe.server.transfers import HostTransfer
from swarm.core.errors import UsageError
from swarm.testing.identities import SeededIdentity

CALLER = SeededIdentity("caller").peer_id
WIDTH = 6


def network() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, WIDTH))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def expert(target: int, **options: Any) -> Expert:
    made = Expert(network(), (torch.zeros(1, WIDTH),), sgd, **options)
    made.target_batch_size = target
    return made


def jobs(of: Expert, sizes: list[int], seed: int = 0) -> list[Job]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Job(
            number=number,
            uid="ffn.0",
            expert=of,
            caller=CALLER,
            pass_id=(CALLER, bytes([number])),
            inputs=[torch.randn(size, WIDTH, generator=generator)],
            gradients=[torch.randn(size, WIDTH, generator=generator)],
            keep=False,
            batch=size,
            size_bytes=0,
            codec=None,
        )
        for number, size in enumerate(sizes)
    ]


def compute(of: Expert, batch: list[Job]) -> list[str]:
    """Compute a batch as the computing thread does, and return the failures, "" for none."""
    with of.lock:
        answers = BatchPass(of, HostTransfer()).compute(batch, None)
    return [outcome.failure for one in answers for outcome in one.outcomes()]


@pytest.mark.parametrize(
    "batches",
    [[1] * 16, [2] * 8, [3, 3, 3, 3, 3, 1], [7, 9], [16]],
    ids=["alone", "pairs", "threes", "two", "all"],
)
def test_steps_do_not_depend_on_how_requests_meet(batches: list[int]) -> None:
    """Regression: a server made a step for whatever waited: 7.2, 6.7, 5.0 and 3.0 steps a batch along four
    stages.
    """
    module, one = network(), expert(32)
    many = jobs(one, [8] * 16)
    rest = list(many)
    for count in batches:
        assert not any(compute(one, [rest.pop(0) for _ in range(count)]))
    assert one.version == 4
    assert one.samples == 128
    optimizer = sgd(module.parameters())
    for start in range(0, 16, 4):
        part = many[start : start + 4]
        x: Any = torch.cat([job.inputs[0] for job in part])  # type: ignore[misc]
        gradients: Any = [job.gradients[0] for job in part if job.gradients is not None]
        module(x).backward(torch.cat(gradients))
        optimizer.step()
        optimizer.zero_grad()
    for found, expected in zip(one.module.parameters(), module.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "meet"),
    [
        ([24] * 16, [1] * 16),
        ([24] * 16, [2] * 8),
        ([24] * 16, [16]),
        ([24, 8] * 12, [1] * 24),
        ([24] * 12 + [8] * 12, [1] * 24),
        ([24] * 12 + [8] * 12, [7, 17]),
        ([96] * 4, [1, 3]),
    ],
    ids=["alone", "pairs", "all", "in-turns", "one-after-the-other", "two", "larger-than-the-target"],
)
def test_the_number_of_steps_follows_from_the_samples_alone(sizes: list[int], meet: list[int]) -> None:
    """Regression: what a pass had beyond the target was dropped, so passes of 24 samples made 8 steps instead
    of 12, and two callers' micro-batches of 24 and 8 made 9 or 12 steps, in the order in which they came.
    """
    one = expert(32)
    rest = jobs(one, sizes)
    for count in meet:
        assert not any(compute(one, [rest.pop(0) for _ in range(count)]))
    assert (one.version, one.samples) == (12, 384)
    assert one.samples_to_step == 32


def test_passes_beyond_eight_steps_are_divided_as_those_that_come_alone() -> None:
    together, alone = expert(32), expert(32)
    sizes = [400, 8, 8, 8, 8, 8]
    assert not any(compute(together, jobs(together, sizes)))
    for job in jobs(alone, sizes):
        assert not any(compute(alone, [job]))
    assert (together.version, together.samples_to_step) == (alone.version, alone.samples_to_step) == (10, 25)
    for found, expected in zip(together.module.parameters(), alone.module.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_a_refused_step_of_several_drops_the_rest_of_its_batch_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Expert(
        network(),
        (torch.zeros(1, WIDTH),),
        sgd,
        schedule=lambda inner: torch.optim.lr_scheduler.LambdaLR(
            inner, lambda step: math.inf if step else 1.0
        ),
    )
    one.target_batch_size = 16
    assert not any(compute(one, jobs(one, [32])))
    assert one.version == 1
    assert one.samples_to_step == 16
    assert "step 2 of 2 with one batch was refused" in caplog.text


def test_a_bad_pass_is_left_out_of_the_target_batch() -> None:
    hurt, spared = expert(16), expert(16)
    good = jobs(hurt, [8, 8])
    (bad,) = jobs(hurt, [8], seed=1)
    huge = [torch.full((8, WIDTH), 3e38)]
    poisoned = Job(**{name: getattr(bad, name) for name in bad.__slots__} | {"gradients": huge})
    assert not any(compute(hurt, [good[0]]))
    assert ["not finite" in failure for failure in compute(hurt, [poisoned, good[1]])] == [True, False]
    assert not any(compute(spared, jobs(spared, [8, 8])))
    assert hurt.version == spared.version == 1
    for found, expected in zip(hurt.module.parameters(), spared.module.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_target_batch_is_clipped_and_scheduled_once() -> None:
    one = expert(16, clip_norm=0.5, schedule=lambda inner: torch.optim.lr_scheduler.ExponentialLR(inner, 0.5))
    before = copy.deepcopy(list(one.module.parameters()))
    compute(one, jobs(one, [8]))
    assert all(map(torch.equal, before, one.module.parameters()))
    compute(one, jobs(one, [8], seed=1))
    moved = torch.cat(
        [(a - b).detach().flatten() for a, b in zip(before, one.module.parameters(), strict=True)]
    )
    assert float(moved.norm()) == pytest.approx(0.05, rel=1e-4)
    assert one.optimizer is not None
    assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_sixteen_bits_are_gathered_in_float32(dtype: torch.dtype) -> None:
    """A sum of many small gradients in 16 bits would stop growing."""
    module = torch.nn.Linear(1, 1, bias=False).to(dtype)
    one = Expert(module, (torch.zeros(1, 1, dtype=dtype),), sgd)
    one.target_batch_size = 4096
    (start,) = (tensor.clone() for tensor in one.averaged_tensors())
    x = torch.full((1, 1), 0.01, dtype=dtype)
    for _ in range(4096):
        one.backward([(None, [x], [torch.ones(1, 1, dtype=dtype)])])
    (end,) = one.averaged_tensors()
    assert one.version == 1
    assert float(start - end) == pytest.approx(0.1 * 4096 * 0.01, rel=0.01)


def test_a_state_that_is_replaced_drops_what_was_gathered() -> None:
    one, fresh = expert(16), expert(16)
    compute(one, jobs(one, [8]))
    with one.lock:
        one.load_state(fresh.state().blob, fresh.lineage)
    assert one.samples_to_step == 16
    assert not any(compute(one, jobs(one, [8, 8], seed=2)))
    assert not any(compute(fresh, jobs(fresh, [8, 8], seed=2)))
    assert all(map(torch.equal, one.module.parameters(), fresh.module.parameters()))


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "many"], ids=["negative", "fraction", "bool", "text"])
def test_a_target_batch_is_a_number_of_samples(wrong: Any) -> None:
    with pytest.raises(UsageError, match="target_batch_size is a number of samples"):
        expert(wrong)


def test_a_step_that_is_refused_drops_its_batch() -> None:
    one = expert(16)
    assert one.optimizer is not None
    one.optimizer.param_groups[0]["lr"] = float("inf")
    x = torch.ones(16, WIDTH)
    with pytest.raises(ComputationFailed, match="so it was undone"):
        one.backward([(None, [x], [x])])
    one.optimizer.param_groups[0]["lr"] = 0.1
    one.backward([(None, [x], [x])])
    assert one.version == 1
