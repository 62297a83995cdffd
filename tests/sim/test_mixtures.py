"""Mixture layers over simulated servers: equal to the same mixture computed here, and what they do when servers fail. Virtual time."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from moe.mixture.layer import MixtureConfig, RemoteMixtureOfExperts
from swarm.errors import NotEnoughPeers, UsageError
from swarm.testing.expert_swarm import ExpertSwarm, SimulatedExperts

WIDTH = 8
GRID = "ffn.[0:4].[0:4]"


def experts() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        f"ffn.{row}.{column}": nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        for row in range(4)
        for column in range(4)
    }


MODULES = experts()


def serve_rows(swarm: ExpertSwarm, **settings: float) -> list[SimulatedExperts]:
    """Four servers; each has one row of the grid."""
    return [
        swarm.serve({name: module for name, module in MODULES.items() if name.startswith(f"ffn.{row}.")}, **settings)  # type: ignore[arg-type]
        for row in range(4)
    ]


@pytest.fixture
def swarm() -> Iterator[ExpertSwarm]:
    with ExpertSwarm(seed=5) as one:
        yield one


def local_mixture(
    layer: RemoteMixtureOfExperts, modules: Mapping[str, nn.Module], x: torch.Tensor, alive: set[str] | None = None
) -> torch.Tensor:
    """The oracle: every expert on every sample, the k best of those alive, softmax over them."""
    scores = layer.gate(x)
    names = [name for name in modules if alive is None or name in alive]
    places = [tuple(map(int, name.split(".")[1:])) for name in names]
    logits = torch.stack([scores[0][:, row] + scores[1][:, column] for row, column in places], dim=1)
    best = logits.topk(min(layer.terms.k_best, len(names)), dim=1)
    weights = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(dim=1))
    outputs = torch.stack([modules[name](x) for name in names], dim=1)
    return (weights.unsqueeze(-1) * outputs).sum(dim=1)


def layer_of(swarm: ExpertSwarm, **settings: object) -> RemoteMixtureOfExperts:
    torch.manual_seed(1)
    return RemoteMixtureOfExperts(swarm.node, WIDTH, **{"grid": GRID, "k_best": 4, "timeout_after_k_min_s": 0.5, **settings})  # type: ignore[arg-type]


def batch(samples: int = 32, seed: int = 2) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(layer: RemoteMixtureOfExperts, output: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    return list(torch.autograd.grad((output * direction).sum(), [x, *layer.parameters()]))


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5), (one - other).abs().max()


def output_of(layer: RemoteMixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    output = layer(x)
    assert isinstance(output, torch.Tensor)
    return output


def test_values_and_all_gradients_equal_the_local_mixture(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    layer, x = layer_of(swarm), batch()
    output, wanted = output_of(layer, x), local_mixture(layer, MODULES, x)
    assert torch.allclose(output, wanted, atol=1e-5)
    assert_close(gradients(layer, output, x), gradients(layer, wanted, x))


def test_the_experts_learn_as_local_ones_would(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x, here = layer_of(swarm), batch().detach(), copy.deepcopy(MODULES)
    output_of(layer, x).square().sum().backward()
    local_mixture(layer, here, x).square().sum().backward()
    for server in servers:
        for uid, module in server.modules.items():
            for there, parameter in zip(module.parameters(), here[str(uid)].parameters(), strict=True):
                assert parameter.grad is not None
                assert torch.allclose(there, parameter - 0.1 * parameter.grad, atol=1e-5)


def test_one_call_for_each_expert_and_batch(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer = layer_of(swarm)
    for _ in range(3):
        output_of(layer, batch(256)).sum().backward()  # type: ignore[no-untyped-call]
    for counts in ("forwards", "backwards"):
        calls = {name: count for server in servers for name, count in getattr(server, counts).items()}
        assert calls == dict.fromkeys(MODULES, 3), counts
    assert sum(server.rows.total() for server in servers) == 3 * 256 * 4


def test_those_who_are_gone_are_passed_over_and_the_gate_renormalises(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm), batch()
    output_of(layer, x)
    swarm.crash(servers[1])
    output = output_of(layer, x)
    report = layer.last_forward
    assert report is not None
    assert set(report.failed) == {f"ffn.1.{column}" for column in range(4)}
    survivors = {name for name in MODULES if not name.startswith("ffn.1.")}
    # chosen among all, mixed over those who answered
    scores = layer.gate(x)
    everything = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1)
    best = everything.topk(4, dim=1).indices
    names = [f"ffn.{place // 4}.{place % 4}" for place in range(16)]
    for sample in range(len(x)):
        chosen = [place for place in best[sample].tolist() if names[place] in survivors]
        if not chosen:
            continue  # replaced; below
        weights = everything[sample, chosen].softmax(0)
        wanted = sum(weight * MODULES[names[place]](x[sample : sample + 1])[0] for weight, place in zip(weights, chosen, strict=True))
        assert torch.allclose(output[sample], wanted, atol=1e-5)
    # from now on they are avoided: as if the grid had a hole
    again, wanted_again = output_of(layer, x), local_mixture(layer, MODULES, x, survivors)
    assert layer.last_forward is not None
    assert not layer.last_forward.failed
    assert torch.allclose(again, wanted_again, atol=1e-5)
    assert_close(gradients(layer, again, x), gradients(layer, wanted_again, x))


def test_a_sample_that_lost_all_its_experts_gets_the_next_best(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm, k_best=2, k_min=2), batch()
    with torch.no_grad():
        layer.gate.projection.bias[0] += 100.0  # everybody wants row 0
    output_of(layer, x)
    swarm.crash(servers[0])
    output = output_of(layer, x)
    assert layer.last_forward is not None
    assert len(layer.last_forward.failed) >= 2
    assert torch.allclose(output, local_mixture(layer, MODULES, x, {name for name in MODULES if not name.startswith("ffn.0.")}), atol=1e-5)


def test_who_is_late_is_dropped_then_avoided_for_a_growing_while(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm), batch()
    output_of(layer, x)
    servers[2].peer.frozen = True
    waits_s = []
    begun_s = swarm.now_s
    while swarm.now_s < begun_s + 40.0:
        at_s = swarm.now_s
        output_of(layer, x)
        assert layer.last_forward is not None
        if layer.last_forward.failed:
            waits_s.append(at_s)
            assert set(layer.last_forward.failed.values()) == {"it was too late"}
            assert 0.5 <= layer.last_forward.seconds < 0.7, "k_min was there at once; the others had half a second"
        else:
            assert layer.last_forward.seconds < 0.1
        swarm.sleep(0.1)
    pauses_s = [later - sooner for sooner, later in itertools.pairwise(waits_s)]
    assert len(waits_s) <= 6
    assert all(later > 1.5 * sooner for sooner, later in itertools.pairwise(pauses_s)), pauses_s
    servers[2].peer.frozen = False
    swarm.sleep(61.0)
    output_of(layer, x)
    assert layer.last_forward is not None
    assert not layer.last_forward.failed
    assert any(name.startswith("ffn.2.") for name in layer.last_forward.answered), "it is used again"


def test_an_expert_that_answers_nonsense_is_dropped_and_blamed(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    servers[3].poisoned.add("ffn.3.1")
    layer, x = layer_of(swarm), batch()
    output = output_of(layer, x)
    assert torch.isfinite(output).all()
    assert layer.last_forward is not None
    assert list(layer.last_forward.failed) == ["ffn.3.1"]
    assert "NaN" in layer.last_forward.failed["ffn.3.1"]
    again = output_of(layer, x)
    assert not layer.last_forward.failed
    assert "ffn.3.0" in layer.last_forward.answered, "its server's other experts are used"
    servers[3].poisoned = {"ffn.3.0"}
    found = gradients(layer, again, x)
    assert all(torch.isfinite(one).all() for one in found), "a gradient that is NaN is dropped as well"
    assert layer.last_backward is not None
    assert list(layer.last_backward.failed) == ["ffn.3.0"]


@pytest.mark.parametrize("allowed", [False, True])
def test_with_nobody_left_the_layer_does_what_it_was_told(swarm: ExpertSwarm, allowed: bool) -> None:
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm, allow_zero_outputs=allowed), batch()
    output_of(layer, x)
    for server in servers:
        swarm.crash(server)
    for _ in range(3):
        if allowed:
            output = output_of(layer, x)
            assert not output.any()
            assert output.shape == (32, WIDTH)
            assert not any(one.any() for one in gradients(layer, output, x) if one is not None)
        else:
            with pytest.raises(NotEnoughPeers, match=r"32 of 32 samples got fewer than k_min = 1 answers.*ffn\.\d\.\d.*allow_zero_outputs"):
                layer(x)
    swarm.restart(servers[0])
    assert output_of(layer, x).any(dim=1).all(), "at once: when nobody else is left, those who are avoided are asked"


def test_a_branch_lost_in_the_backward_pass_is_dropped(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x = layer_of(swarm), batch()
    output = output_of(layer, x)
    swarm.crash(servers[0])
    found = gradients(layer, output, x)
    assert layer.last_backward is not None
    assert {name.rpartition(".")[0] for name in layer.last_backward.failed} == {"ffn.0"}
    wanted = gradients(layer, local_mixture(layer, MODULES, x), x)
    assert_close(found[1:], wanted[1:])  # the gate's gradient needs the forward answers only
    assert not torch.allclose(found[0], wanted[0], atol=1e-3)
    assert torch.isfinite(found[0]).all()


def test_backward_k_min_is_an_error_when_it_is_not_met(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm, backward_k_min=4), batch()
    output = output_of(layer, x)
    swarm.crash(servers[0])
    with pytest.raises(NotEnoughPeers, match="backward_k_min = 4"):
        output.sum().backward()  # type: ignore[no-untyped-call]


def test_a_second_backward_pass_of_one_forward_counts_as_well(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x = layer_of(swarm), batch()
    output = output_of(layer, x)
    for _ in range(2):
        output.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert {version for server in servers for version in server.versions.values()} == {2}


def test_a_network_that_delivers_twice_trains_once() -> None:
    with ExpertSwarm(seed=9) as swarm:
        servers = serve_rows(swarm, learning_rate=0.1)
        layer, x = layer_of(swarm), batch()
        swarm.network.config = type(swarm.network.config)(delay_s=0.005, duplication=1.0)
        output_of(layer, x).sum().backward()  # type: ignore[no-untyped-call]
        swarm.sleep(1.0)
        assert sum(server.backwards.total() for server in servers) > 16
        assert {version for server in servers for version in server.versions.values()} == {1}


def test_a_slow_replica_is_hedged_and_used_less(swarm: ExpertSwarm) -> None:
    fast, slow = serve_rows(swarm), serve_rows(swarm)
    layer, x = layer_of(swarm, k_min=4), batch()
    for _ in range(30):
        output_of(layer, x)
    for server in slow:
        server.compute_s = 2.0
    begun_s, before = swarm.now_s, sum(server.forwards.total() for server in slow)
    for _ in range(30):
        assert torch.allclose(output_of(layer, x), local_mixture(layer, MODULES, x), atol=1e-5)
    assert swarm.now_s - begun_s < 6.0, "a step that waited for one slow replica takes two seconds and more"
    after = sum(server.forwards.total() for server in slow) - before
    assert after < 0.25 * 30 * 16
    assert sum(server.forwards.total() for server in fast) > 16 * 30


def test_the_gradient_goes_to_the_replica_that_answered(swarm: ExpertSwarm) -> None:
    one, two = serve_rows(swarm), serve_rows(swarm)
    layer, x = layer_of(swarm), batch()
    for _ in range(10):
        output_of(layer, x).sum().backward()  # type: ignore[no-untyped-call]
    for servers in (one, two):
        for server in servers:
            assert server.forwards == server.backwards
    assert all(server.forwards for server in one + two)


def test_a_full_server_is_passed_over_and_not_blamed(swarm: ExpertSwarm) -> None:
    one, two = serve_rows(swarm), serve_rows(swarm)
    for server in one:
        server.full = True
    layer, x = layer_of(swarm), batch()
    for _ in range(5):
        assert torch.allclose(output_of(layer, x), local_mixture(layer, MODULES, x), atol=1e-5)
        assert layer.last_forward is not None
        assert not layer.last_forward.failed
    assert all(server.forwards for server in two)


def test_inputs_and_losses_that_are_not_finite_reach_no_expert(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x = layer_of(swarm), batch()
    broken = x.detach().clone()
    broken[3, 3] = float("nan")
    with pytest.raises(UsageError, match="NaN or infinity"):
        layer(broken)
    output = output_of(layer, x)
    (output * float("inf")).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert not torch.isfinite(x.grad).any(), "a GradScaler sees it"
    assert not any(server.backwards for server in servers)


def test_inputs_of_another_precision_or_without_gradient(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x = layer_of(swarm), batch()
    output = output_of(layer, x.to(torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.float(), local_mixture(layer, MODULES, x.to(torch.bfloat16).float()), atol=0.05)
    output_of(layer, x.detach()).sum().backward()  # type: ignore[no-untyped-call]
    assert {version for server in servers for version in server.versions.values()} == {1}, "experts learn though no input does"
    with torch.no_grad():
        assert not output_of(layer, x).requires_grad


def test_inputs_with_dimensions_between_are_gated_by_their_mean(swarm: ExpertSwarm) -> None:
    sample = torch.zeros(1, 3, WIDTH)
    swarm.serve(MODULES, sample=sample)
    layer = layer_of(swarm)
    x = torch.randn(6, 3, WIDTH)
    output = output_of(layer, x)
    assert output.shape == x.shape
    weights = torch.stack([output_of(layer, x)[0], output[0]])
    assert torch.equal(weights[0], weights[1])


def test_the_gate_trains_saves_loads_and_copies(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    layer, other, x = layer_of(swarm), layer_of(swarm), batch()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    output_of(layer, x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(output_of(layer, x), output_of(other, x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(output_of(layer, x), output_of(other, x))
    assert torch.equal(output_of(copy.deepcopy(layer), x), output_of(layer, x))
    assert set(layer.state_dict()) == {"gate.projection.weight", "gate.projection.bias"}


def test_newcomers_are_found_and_who_leaves_is_forgotten(swarm: ExpertSwarm) -> None:
    swarm.serve({name: MODULES[name] for name in list(MODULES)[:4]})
    layer, x = layer_of(swarm), batch()
    output_of(layer, x)
    newcomer = swarm.serve({name: MODULES[name] for name in list(MODULES)[4:]})
    swarm.sleep(2.5)
    output_of(layer, x)  # knows the old grid, and reads anew behind the trainer's back
    swarm.sleep(0.5)
    output_of(layer, x)
    assert layer.last_forward is not None
    assert {name for name in layer.last_forward.answered if name in list(MODULES)[4:]}
    swarm.run(swarm.network.crash(newcomer.peer))
    swarm.sleep(60.0)
    output_of(layer, x)
    swarm.sleep(0.5)
    output_of(layer, x)
    assert set(layer.last_forward.asked) <= set(list(MODULES)[:4])
    assert not layer.last_forward.failed


def test_steps_do_not_wait_for_the_dht(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    layer, x = layer_of(swarm), batch()
    output_of(layer, x)
    atlas = layer._remote.calls.atlas
    reads = atlas.reads
    for _ in range(20):
        output_of(layer, x)
        assert layer.last_forward is not None
        assert layer.last_forward.seconds < 0.03
    assert atlas.reads - reads <= 1


def test_wrong_arguments_are_the_callers_fault(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    for wrong in (
        {"k_best": 0},
        {"k_best": 17},
        {"k_min": 5},
        {"grid": "ffn"},
        {"forward_timeout_s": 0.0},
        {"timeout_after_k_min_s": -1.0},
    ):
        with pytest.raises(UsageError):
            layer_of(swarm, **wrong)
    layer = layer_of(swarm)
    for x in (torch.zeros(3, 5), torch.zeros(0, WIDTH), torch.zeros(WIDTH)):
        with pytest.raises(UsageError):
            layer(x)
    with pytest.raises(UsageError, match="1 input tensors, not 2"):
        layer_of(swarm)(torch.zeros(2, WIDTH), torch.zeros(2, WIDTH))  # these experts take one input


def test_replacements_can_be_switched_off(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm, allow_zero_outputs=True, k_best=1, config=MixtureConfig(replacements_max=0)), batch()
    output_of(layer, x)
    swarm.crash(servers[0])
    output = output_of(layer, x)
    scores = layer.gate(x)
    lost = scores[0].argmax(dim=1) == 0
    assert lost.any()
    assert torch.equal(~output.any(dim=1), lost)


def test_a_step_that_is_given_up_leaves_nothing_behind(swarm: ExpertSwarm) -> None:
    serve_rows(swarm, compute_s=5.0)
    layer = layer_of(swarm, forward_timeout_s=1.0)
    with pytest.raises(NotEnoughPeers):
        layer(batch())

    async def tasks() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if "forward" in repr(task.get_coro()).lower()]

    assert swarm.run(tasks()) == []
