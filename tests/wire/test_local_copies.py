"""Trained experts are downloaded as modules of plain torch, with the outputs and the loss of the remote
layers, also when one of three servers lies.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swarm
from averaging.optim.state.snapshot import encode_snapshot
from moe.client.downloading import DownloadedExpert
from swarm.core.errors import NotEnoughPeers, UsageError
from tests.wire.expert_pair import Pair, expert, network, pair, sgd

GRID = "ffn.[0:2].[0:3]"
NAMES = ["ffn.0.0", "ffn.0.1", "ffn.0.2", "ffn.1.0", "ffn.1.2"]  # with a hole
ROOT = Path(__file__).parent.parent.parent


def seeded(seed: int) -> nn.Module:
    module = network()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for one in module.parameters():
            nn.init.normal_(one, std=0.3)
    return module


def make(_: str) -> nn.Module:
    return network()


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    experts = {name: expert(seeded(place), sgd) for place, name in enumerate(NAMES)}
    blocks = {f"block.{stage}": expert(seeded(10 + stage), sgd) for stage in range(3)}
    with pair(experts | blocks) as one:
        yield one


def loss_of(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    return (y[0] if isinstance(y, tuple) else y).square().mean()


@pytest.mark.parametrize("kind", ["mixture", "switch", "pipeline", "expert"])
def test_a_layer_taken_home_has_the_outputs_and_gradients_of_the_remote_one(two: Pair, kind: str) -> None:
    torch.manual_seed(3)
    layer: Any = {
        "mixture": lambda: swarm.RemoteMixtureOfExperts(two.guest, 16, grid=GRID, k_best=2, k_min=2),
        "switch": lambda: swarm.RemoteSwitchMixtureOfExperts(two.guest, 16, grid=GRID, k_min=1),
        "pipeline": lambda: swarm.RemoteSequential(two.guest, "block.[0:3]", micro_batch_size=12),
        "expert": lambda: swarm.RemoteExpert(two.guest, "ffn.1.2"),
    }[kind]()
    x = torch.randn(12, 16, requires_grad=True)
    for _ in range(3):
        loss_of(layer, x).backward()
    layer.eval()
    local = layer.to_local(make)
    found, wanted = local(x), layer(x)
    if kind == "switch":
        torch.testing.assert_close(found[1], wanted[1])
        found, wanted = found[0], wanted[0]
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(one.square().mean(), x)[0] for one in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_a_downloaded_mixture_loads_with_plain_torch_and_has_the_same_loss(two: Pair, tmp_path: Path) -> None:
    layer = swarm.RemoteMixtureOfExperts(two.guest, 16, grid=GRID, k_best=2, k_min=2)
    x = torch.randn(12, 16)
    loss_of(layer, x).backward()
    steps: list[tuple[int, int]] = []
    local = layer.to_local(make, lambda done, total, name: steps.append((done, total)))
    assert steps == [(done, 5) for done in range(1, 6)]
    torch.save({"state": local.state_dict(), "x": x}, tmp_path / "model.pt")
    program = f"""
import sys
import torch
from torch import nn
import swarm
names = {NAMES!r}
make = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
layer = swarm.LocalMixtureOfExperts(16, {{name: make() for name in names}}, grid={GRID!r}, k_best=2)
saved = torch.load({str(tmp_path / "model.pt")!r}, weights_only=True)
layer.load_state_dict(saved["state"])
print(layer(saved["x"]).square().mean().item())
assert not {{"grpc", "swarm.node", "swarm.net"}} & set(sys.modules), sys.modules.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert not done.returncode, done.stderr
    assert float(done.stdout) == pytest.approx(loss_of(layer, x).item(), rel=1e-5)


def test_a_module_of_another_kind_is_refused_by_name(two: Pair) -> None:
    remote = swarm.RemoteExpert(two.guest, "ffn.0.0")
    with pytest.raises(NotEnoughPeers, match="another one"):
        remote.to_local(lambda name: nn.Linear(16, 16))
    with pytest.raises(UsageError, match="make_module"):
        remote.to_local()
    with pytest.raises(NotEnoughPeers, match="nobody hosts"):
        swarm.RemoteExpert(two.guest, "ffn.9.9").download()


def _lie(kind: str, module: nn.Module) -> Any:
    """Return what a hostile server gives as the state of a module."""
    named = {name: one.clone() for name, one in module.state_dict().items()}
    if kind == "huge":
        named = {name: torch.full_like(one, 1e6) for name, one in named.items()}
    elif kind == "nan":
        named["0.weight"][0, 0] = float("nan")
    elif kind == "shape":
        named["0.weight"] = named["0.weight"][:, :4].clone()
    elif kind == "names":
        named = {f"other.{name}": one for name, one in named.items()}
    blob = bytes(encode_snapshot(0, {}, list(named.items())))
    return b"nonsense" * 9 if kind == "bytes" else blob


@pytest.mark.parametrize("kind", ["huge", "nan", "shape", "names", "bytes", "silent"])
def test_one_lying_server_of_three_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = seeded(1)
    with (
        swarm.Node(listen="127.0.0.1:0") as first,
        swarm.Node(bootstrap=first.addresses, listen="127.0.0.1:0") as second,
        swarm.Node(bootstrap=first.addresses, listen="127.0.0.1:0") as third,
        swarm.Node(bootstrap=first.addresses, listen=None) as guest,
    ):
        experts = [expert(copy.deepcopy(module)) for _ in range(3)]
        servers = [
            swarm.ExpertServer(node, {"ffn.0": one})
            for node, one in zip((first, second, third), experts, strict=True)
        ]
        liar = experts[1]

        def lie() -> Any:
            if kind == "silent":
                raise RuntimeError("it says nothing")
            return _lie(kind, module)

        monkeypatch.setattr(liar, "module_state", lie)
        found = swarm.RemoteExpert(guest, "ffn.0").download()
        assert found.keys() == module.state_dict().keys()
        for name, one in module.state_dict().items():
            assert torch.equal(found[name], one), name
        for server in servers:
            server.close()


def test_replicas_that_differ_say_by_how_much() -> None:
    with (
        pair({"ffn.0": expert(seeded(1))}) as two,
        swarm.Node(bootstrap=two.host.addresses, listen="127.0.0.1:0") as node,
        swarm.ExpertServer(node, {"ffn.0": expert(seeded(2))}),
    ):
        layer = swarm.RemoteMixtureOfExperts(two.guest, 16, grid="ffn.[0:1]", k_best=1)
        found = layer.download()["ffn.0"]
        assert isinstance(found, DownloadedExpert)
        assert (found.compared, found.apart > 1.0) == (2, True)


def test_a_newcomer_takes_over_more_experts_than_a_server_gives_at_once() -> None:
    """Regression: a server gave two states at a time, and refused the others, which had other weights."""
    names = [f"ffn.{place}" for place in range(12)]
    with (
        pair({name: expert(seeded(place), sgd) for place, name in enumerate(names)}) as two,
        swarm.Node(bootstrap=two.host.addresses, listen="127.0.0.1:0") as node,
        swarm.ExpertServer(node, {name: expert(seeded(99), sgd) for name in names}) as newcomer,
    ):
        for uid, one in two.server.experts.items():
            torch.testing.assert_close(newcomer.experts[uid].module.state_dict(), one.module.state_dict())
