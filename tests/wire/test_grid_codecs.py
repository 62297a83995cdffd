"""Codecs that a server names are used by callers that choose none."""

from __future__ import annotations

import pytest
import torch

import swarm
from moe.protocol.codecs import WireCodecs
from moe.protocol.schema import ExpertSchema
from swarm.core.errors import PeerError
from swarm.run.grid import GridSpecification
from swarm.run.grid_experts import ExpertFactory
from tests.wire.expert_pair import UID, network, pair


@pytest.fixture
def grid() -> GridSpecification:
    return GridSpecification.model_validate(
        {
            "experts": "ffn.[0:2]",
            "hidden_dim": 16,
            "codecs": {"inputs": "int8", "outputs": "float16"},
        }
    )


def test_callers_use_the_codecs_of_the_grid_unless_they_choose_others(grid: GridSpecification) -> None:
    factory = ExpertFactory(grid, device="cpu", module=None, keep_activations_bytes=0)
    expert = factory.make(UID)
    assert expert.schema.codecs == WireCodecs(inputs="int8", outputs="float16")
    x = torch.linspace(-1.0, 1.0, 32).reshape(2, 16)
    exact = expert.module(x).detach()
    with pair({"ffn.0": expert}) as two:
        own, default = two.remote(codecs=WireCodecs(inputs="float32", outputs="float32"))(x), two.remote()(x)
        layer = swarm.RemoteMixtureOfExperts(two.guest, 16, grid="ffn.[0:1]", k_best=1)
        mixture = layer(x)
    assert isinstance(mixture, torch.Tensor)
    assert torch.allclose(own, exact, atol=1e-6)
    for output in (default, mixture):
        assert torch.equal(output, output.half().float())
        assert 0.0 < (output - exact).abs().max() < 0.1


def test_a_schema_carries_its_codecs_and_keeps_its_digest_without_them() -> None:
    sample, module = torch.zeros(1, 16), network()
    plain = ExpertSchema.from_samples((sample,), module(sample))
    coded = ExpertSchema.from_samples((sample,), module(sample), WireCodecs(gradients="float16"))
    assert ExpertSchema.unpack(coded.packed) == coded
    assert coded.digest != plain.digest
    assert ExpertSchema.unpack(plain.packed).codecs == WireCodecs()


def test_a_schema_with_an_unknown_codec_is_refused() -> None:
    sample, module = torch.zeros(1, 16), network()
    coded = ExpertSchema.from_samples((sample,), module(sample), WireCodecs(gradients="float16"))
    with pytest.raises(PeerError, match="schema of an expert"):
        ExpertSchema.unpack(coded.packed.replace(b"float16", b"float17"))


def test_a_grid_with_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="codec"):
        GridSpecification.model_validate({"experts": "ffn.[0:2]", "codecs": {"inputs": "nonsense"}})
