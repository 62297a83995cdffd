"""Experts on sequences take every length up to that of their schema, over real sockets. The oracle is the
local module.
"""

from __future__ import annotations

import asyncio
import copy
import os
from typing import Any

import pytest
import torch

import swarm
from moe.classes import ExpertSettings
from moe.classes.transformer import causal_transformer, transformer
from moe.protocol import methods
from swarm.core.errors import UsageError
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertRequest
from tests.wire.expert_pair import UID, network, pair

LENGTH, WIDTH = 12, 8
SETTINGS = ExpertSettings(hidden_dim=WIDTH, sequence_length=LENGTH)


def layer(make: Any = causal_transformer) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module: torch.nn.Module = make(SETTINGS)[0]
        return module


def expert(module: torch.nn.Module | None = None, **options: Any) -> swarm.Expert:
    return swarm.Expert(module or layer(), (torch.zeros(1, LENGTH, WIDTH),), **options)


def sequences(length: int, samples: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(samples, length, WIDTH, generator=generator).requires_grad_()


def check_equal(remote: Any, local: torch.nn.Module, length: int, samples: int = 3) -> None:
    x = sequences(length, samples)
    again = x.detach().clone().requires_grad_()
    y, wanted = remote(x), local(again)
    assert y.shape == (samples, length, WIDTH)
    assert torch.allclose(y, wanted, atol=1e-5)
    for one in (y, wanted):
        one.square().sum().backward()
    assert x.grad is not None
    assert again.grad is not None
    assert torch.allclose(x.grad, again.grad, atol=1e-4)


@pytest.mark.parametrize("make", [transformer, causal_transformer])
def test_every_length_equals_the_local_module(make: Any) -> None:
    """Regression: an expert declared for 128 tokens refused 64."""
    module = layer(make)
    with pair({"ffn.0": expert(copy.deepcopy(module))}) as both:
        for length in (1, 5, LENGTH):
            check_equal(both.remote(), module, length)


def test_batches_in_parts_and_mixtures_and_pipelines_take_shorter_sequences() -> None:
    module = layer()
    hosted = {f"ffn.{number}": expert(copy.deepcopy(module)) for number in range(2)}
    with pair(hosted, max_batch_size=4) as both:
        check_equal(both.remote(), module, 5, samples=11)
        mixture = swarm.RemoteMixtureOfExperts(both.guest, WIDTH, grid="ffn.[0:2]", k_best=2, k_min=2)
        check_equal(mixture, module, 7)  # both experts are equal
        assert mixture(sequences(5, 0)).shape == (0, 5, WIDTH)
        pipeline = swarm.RemoteSequential(both.guest, "ffn.[0:2]", micro_batch_size=2)
        check_equal(pipeline, torch.nn.Sequential(module, module), 7, samples=5)
        assert pipeline(sequences(5, 0)).shape == (0, 5, WIDTH)
        assert both.remote()(sequences(5, 0)).shape == (0, 5, WIDTH)


def test_lengths_that_meet_are_computed_apart() -> None:
    module = layer()
    with pair({"ffn.0": expert(copy.deepcopy(module))}) as both:
        calls = both.calls

        async def call(length: int) -> torch.Tensor:
            reply = await calls.forward(both.replica, UID, [sequences(length).detach()], timeout_s=10.0)
            return reply.outputs[0]

        async def all_together() -> list[torch.Tensor]:
            return await asyncio.gather(*(call(1 + number % LENGTH) for number in range(4 * LENGTH)))

        for number, found in enumerate(both.run(all_together())):
            assert torch.allclose(found, module(sequences(1 + number % LENGTH)), atol=1e-5)


def test_the_expert_learns_from_shorter_sequences_as_the_local_module_does() -> None:
    module = layer()
    local = copy.deepcopy(module)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.05)
    hosted = expert(module, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    with pair({"ffn.0": hosted}) as both:
        remote = both.remote()
        for length in (3, LENGTH, 8):
            check_equal(remote, local, length)
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(module.parameters(), local.parameters(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_a_longer_sequence_is_refused_before_it_is_sent() -> None:
    with pair({"ffn.0": expert()}) as both:
        remote = both.remote()
        for length in (LENGTH + 1, 0):
            with pytest.raises(UsageError, match=f"sequences of 1 to {LENGTH}, not {length}"):
                remote(torch.zeros(2, length, WIDTH))
        assert not both.server.statistics().experts["ffn.0"].refusals


@pytest.mark.parametrize("length", [0, LENGTH + 1, 1 << 31, 4])
def test_a_request_that_claims_another_length_is_refused(length: int) -> None:
    with pair({"ffn.0": expert()}) as both:
        digest = both.replica.schema
        for kind in (expert_pb2.EXPERT_FORWARD, expert_pb2.EXPERT_BACKWARD):
            request = ExpertRequest(
                uid="ffn.0",
                kind=kind,
                schema_digest=digest,
                batch=1,
                sequence_length=length,
                request_id=os.urandom(16),
                tensors=[expert_pb2.TensorHeader(payload_bytes=5 * WIDTH * 4)],
                payload=bytes(5 * WIDTH * 4),
            )
            reply = both.run(both.guest.channels.call(both.host.contact, methods.CALL, request, timeout_s=5))
            assert reply.status == expert_pb2.EXPERT_REFUSED


def test_a_backward_pass_of_another_length_than_the_kept_inputs_is_refused() -> None:
    with pair({"ffn.0": expert()}) as both:
        calls = both.calls

        async def ask() -> expert_pb2.ExpertReply:
            inputs = [sequences(5).detach()]
            reply = await calls.forward(both.replica, UID, inputs, timeout_s=5.0, keep=True)
            assert reply.kept
            size = 3 * 4 * WIDTH * 4
            request = ExpertRequest(
                uid="ffn.0",
                kind=expert_pb2.EXPERT_BACKWARD,
                schema_digest=both.replica.schema,
                batch=3,
                sequence_length=4,
                request_id=reply.request_id,
                inputs_kept=True,
                tensors=[expert_pb2.TensorHeader(payload_bytes=size)],
                payload=bytes(size),
            )
            return await both.guest.channels.call(both.host.contact, methods.CALL, request, timeout_s=5.0)

        reply = both.run(ask())
        assert reply.status == expert_pb2.EXPERT_REFUSED
        assert "sequences of another length" in reply.reason


def test_a_module_that_does_not_say_so_takes_one_length() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
    with pair({"ffn.0": expert(plain)}) as both, pytest.raises(UsageError, match="should be"):
        both.remote()(torch.zeros(2, 5, WIDTH))


class Averaged(torch.nn.Module):
    """Returns one vector for each sequence, and the sequence in another order of dimensions."""

    sequence_dimension = 1

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = x * mask.unsqueeze(-1)
        return {"mean": kept.mean(dim=1), "turned": kept.transpose(1, 2)}


def test_outputs_follow_the_length_where_they_depend_on_it() -> None:
    samples = {"x": torch.zeros(1, LENGTH, WIDTH), "mask": torch.zeros(1, LENGTH)}
    with pair({"ffn.0": swarm.Expert(Averaged(), samples)}) as both:
        x, mask = sequences(5).detach(), torch.ones(3, 5)
        found = both.remote()(x=x, mask=mask)
        for name, wanted in Averaged()(x, mask).items():
            assert torch.allclose(found[name], wanted, atol=1e-6), name


def test_a_wrong_sequence_dimension_is_named() -> None:
    for wrong in (0, 7, "1"):
        module: Any = network(WIDTH)
        module.sequence_dimension = wrong
        with pytest.raises(UsageError, match="sequence_dimension"):
            expert(module)
