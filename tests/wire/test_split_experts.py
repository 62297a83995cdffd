"""A batch that is larger than a server's `max_batch_size`, over real sockets."""

from __future__ import annotations

import copy

import pytest
import torch

from moe.client.remote import RemoteExpert
from tests.wire.expert_pair import expert, network, pair, sgd


@pytest.mark.parametrize("samples", [7, 40, 9000], ids=["one request", "inline", "streamed"])
def test_a_batch_of_any_size_equals_the_local_module(samples: int) -> None:
    local = network()
    with pair({"ffn.0": expert(copy.deepcopy(local), sgd)}, max_batch_size=max(samples // 4, 8)) as two:
        remote: RemoteExpert = two.remote()
        x = torch.randn(samples, 16, requires_grad=True)
        mirror = x.detach().clone().requires_grad_()
        y, wanted = remote(x), local(mirror)
        assert torch.allclose(y, wanted, atol=1e-5)
        torch.manual_seed(0)
        direction = torch.randn(16)
        y.backward(direction.expand(samples, 16), retain_graph=True)
        wanted.backward(direction.expand(samples, 16))
        assert x.grad is not None
        assert mirror.grad is not None
        counts = two.server.statistics().experts["ffn.0"].counts
        assert counts.backward_samples == samples
        assert counts.backward_requests == (1 if samples == 7 else -(-samples // (samples // 4)))
