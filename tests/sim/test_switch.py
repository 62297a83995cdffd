"""Switch layers over simulated servers: routing by probability, the balancing loss, jitter, grid dropout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moe.client.mixture.switch import RemoteSwitchMixtureOfExperts, SwitchConfig
from swarm.core.errors import UsageError
from swarm.testing.expert_swarm import ExpertSwarm

WIDTH = 6
torch.manual_seed(0)
MODULES = {f"sw.{row}.{column}": nn.Linear(WIDTH, WIDTH) for row in range(2) for column in range(3)}


@pytest.fixture
def swarm() -> Iterator[ExpertSwarm]:
    with ExpertSwarm(seed=21) as one:
        one.serve(MODULES)
        yield one


def layer_of(
    swarm: ExpertSwarm, config: SwitchConfig | None = None, **settings: object
) -> RemoteSwitchMixtureOfExperts:
    torch.manual_seed(1)
    return RemoteSwitchMixtureOfExperts(
        swarm.node,
        WIDTH,
        grid="sw.[0:2].[0:3]",
        config=config,
        **settings,  # type: ignore[arg-type]
    )


def batch(samples: int = 24) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


def switched(layer: RemoteSwitchMixtureOfExperts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output, loss = layer(x)
    assert isinstance(output, torch.Tensor)
    return output, loss


def local_switch(layer: RemoteSwitchMixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Compute the oracle: the most probable expert of the grid, times its probability."""
    scores = layer.gate(x)
    probabilities = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1).softmax(dim=1)
    value, best = probabilities.max(dim=1)
    outputs = torch.stack([module(x) for module in MODULES.values()], dim=1)
    return value[:, None] * outputs[torch.arange(len(x)), best]


def test_values_and_all_gradients_equal_the_local_switch(swarm: ExpertSwarm) -> None:
    layer, x = layer_of(swarm).eval(), batch()
    output, wanted = switched(layer, x)[0], local_switch(layer, x)
    assert torch.allclose(output, wanted, atol=1e-5)
    parameters = [x, *layer.parameters()]
    for found, expected in zip(
        torch.autograd.grad(output.square().sum(), parameters),
        torch.autograd.grad(wanted.square().sum(), parameters),
        strict=True,
    ):
        assert torch.allclose(found, expected, atol=1e-5)


def test_the_loss_and_the_utilization_equal_their_formulas(swarm: ExpertSwarm) -> None:
    layer, x = layer_of(swarm, SwitchConfig(jitter_eps=0.0)), batch()
    _, loss = switched(layer, x)
    scores = layer.gate(x)
    wanted = 0.0
    for dimension, score in enumerate(scores):
        size = score.shape[1]
        share = torch.bincount(score.argmax(dim=1), minlength=size) / len(x)
        used = 0.9 * torch.full((size,), 1.0 / size) + 0.1 * share
        assert torch.allclose(layer.utilization[dimension], used)
        wanted += (size * (used * score.softmax(dim=1).mean(dim=0)).sum()).item()
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert {"utilization_0", "utilization_1"} < set(layer.state_dict())


def test_losses_of_several_batches_can_be_differentiated_together(swarm: ExpertSwarm) -> None:
    layer = layer_of(swarm)
    losses = [switched(layer, batch())[1] for _ in range(3)]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    assert layer.gate.projection.weight.grad is not None


def test_training_on_the_balancing_loss_alone_evens_out_utilization(
    swarm: ExpertSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.client.logic.gate.UTILIZATION_ALPHA", 0.5)
    layer, x = layer_of(swarm), batch(64).detach()
    with torch.no_grad():
        layer.gate.projection.bias[0] += 3.0
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(25):
        _, loss = switched(layer, x)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    assert float(layer.utilization[0].max()) < 0.8


def test_jitter_changes_the_gate_input_only(swarm: ExpertSwarm) -> None:
    layer, x = layer_of(swarm, SwitchConfig(jitter_eps=0.5)), batch()
    before = x.detach().clone()
    losses = {switched(layer, x)[1].item() for _ in range(4)}
    assert torch.equal(x, before)
    assert len(losses) == 4
    layer.eval()
    assert torch.equal(switched(layer, x)[0], switched(layer, x)[0])


def test_the_inputs_of_experts_are_not_jittered(swarm: ExpertSwarm) -> None:
    layer, x = layer_of(swarm, SwitchConfig(jitter_eps=0.01)), batch()
    torch.manual_seed(7)
    output, _ = switched(layer, x)
    torch.manual_seed(7)
    noise = torch.empty_like(x).uniform_(0.99, 1.01)
    scores = layer.gate(x * noise)
    probabilities = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1).softmax(dim=1)
    value, best = probabilities.max(dim=1)
    outputs = torch.stack([module(x) for module in MODULES.values()], dim=1)
    assert torch.allclose(output, value[:, None] * outputs[torch.arange(len(x)), best], atol=1e-5)


def test_grid_dropout_hides_coordinates_in_training_only(swarm: ExpertSwarm) -> None:
    layer, x = layer_of(swarm, SwitchConfig(grid_dropout=0.5, jitter_eps=0.0)), batch()
    asked = []
    for _ in range(12):
        switched(layer, x)
        assert layer.last_forward is not None
        assert layer.last_forward.short_samples == 0
        asked.append(len(layer.last_forward.asked))
        assert layer.last_forward.asked, "when all coordinates were dropped, they are used all the same"
    assert min(asked) < max(asked)
    layer.eval()
    assert torch.allclose(switched(layer, x)[0], local_switch(layer, x), atol=1e-5)


def test_samples_whose_expert_is_dead_are_zeros(swarm: ExpertSwarm) -> None:
    layer, x = layer_of(swarm, forward_timeout_s=2.0).eval(), batch()
    switched(layer, x)
    swarm.crash(swarm.servers[0])
    output, loss = switched(layer, x)
    assert not output.any()
    (output.sum() + loss).backward()  # type: ignore[no-untyped-call]
    assert layer.gate.projection.weight.grad is not None
    assert torch.isfinite(layer.gate.projection.weight.grad).all()


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"grid_dropout": 0.0}, {"jitter_eps": 1.0}):
        with pytest.raises(UsageError):
            SwitchConfig(**wrong)
