"""Gradients of another replica that cannot be real."""

from __future__ import annotations

import math

import pytest
import torch

from moe.server.logic.others_gradients import LONGER_MAX, OwnGradients, mean_norm, others_norm


def test_the_others_gradients_are_what_the_average_has_beside_ones_own() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2,)]
    own_mean, other_mean = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    own_samples, counted, other_samples = 40.0, 32.0, 8.0  # only part of a replica's samples count
    samples = counted + other_samples
    averaged = [
        (one * counted + two * other_samples) / samples for one, two in zip(own_mean, other_mean, strict=True)
    ]
    sums = {place: one * own_samples for place, one in enumerate(own_mean)}
    found = others_norm(averaged, samples, sums, counted / own_samples) / other_samples
    assert found == pytest.approx(float(torch.cat([one.flatten() for one in other_mean]).norm()), rel=1e-4)
    wanted = float(torch.cat([one.flatten() for one in own_mean]).norm())
    assert mean_norm(sums, own_samples) == pytest.approx(wanted, rel=1e-5)
    # a parameter without a gradient here
    assert others_norm(averaged[:1], 1.0, {}, 0.0) == pytest.approx(float(averaged[0].norm()), rel=1e-5)


def test_a_gradient_that_is_far_longer_than_ones_own_is_not_real() -> None:
    own = OwnGradients()
    assert own.may_be_real(1e9, 32.0), "there is nothing to compare with"
    assert not own.may_be_real(math.inf, 32.0)
    own.note(2.0, 32.0)
    assert own.may_be_real(2.0 * LONGER_MAX, 32.0)
    assert not own.may_be_real(2.0 * LONGER_MAX * 1.01, 32.0)
    assert own.may_be_real(4.0 * LONGER_MAX, 8.0), "a quarter of the samples: twice the noise"
    assert not own.may_be_real(2.1 * LONGER_MAX, 128.0), "more samples have no more noise"
    assert not own.may_be_real(math.nan, 32.0)


def test_a_step_without_own_samples_is_compared_with_earlier_ones() -> None:
    own = OwnGradients()
    own.note(1.0, 8.0)
    for _ in range(100):
        own.note(0.0, 0.0)
    assert not own.may_be_real(100.0, 8.0)
    for _ in range(100):
        own.note(0.01, 8.0)
    assert not own.may_be_real(1.0, 8.0), "old gradients are forgotten"


@pytest.mark.parametrize("own_samples", [1, 8, 64])
@pytest.mark.parametrize("other_samples", [1, 8, 64])
def test_honest_replicas_are_never_refused(own_samples: int, other_samples: int) -> None:
    """Even when the gradients are nothing but noise."""
    generator = torch.Generator().manual_seed(own_samples)
    for _ in range(200):
        own = OwnGradients()
        own.note(float(torch.randn(own_samples, 20, generator=generator).mean(dim=0).norm()), own_samples)
        other = torch.randn(other_samples, 20, generator=generator).mean(dim=0)
        assert own.may_be_real(float(other.norm()), other_samples)
