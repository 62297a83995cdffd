"""`swarm export` of a grid: the parameters as a file for plain torch, and a checkpoint of the whole grid that
other servers resume from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import swarm
from swarm.cli.commands import swarm as command
from tests.wire.served import READY_S, serving

GRID = """
experts = "ffn.[0:3]"
members = "open"
hidden_dim = 16
average_s = 0.0
[optimizer]
name = "adam"
learning_rate = 0.01
"""


pytestmark = pytest.mark.usefixtures("home")


def export(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(command, ["export", *arguments, "--json"])
    assert not done.exit_code, (done.output, done.exception)
    return json.loads(done.output.splitlines()[-1])  # type: ignore[no-any-return]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def test_a_trained_grid_is_exported_and_continues_on_other_servers(tmp_path: Path) -> None:
    file = tmp_path / "ffn.toml"
    file.write_text(GRID)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    with serving(str(file)) as first:
        address = first.hear("listening")["addresses"][0]
        first.hear("serving")
        with swarm.Node(bootstrap=[address], listen=None) as node:
            layer = swarm.RemoteMixtureOfExperts(
                node, 16, grid="ffn.[0:3]", k_best=3, k_min=3, forward_timeout_s=READY_S
            )
            for _ in range(3):
                layer(x).square().mean().backward()
            wanted = [swarm.RemoteExpert(node, f"ffn.{place}")(x).detach() for place in range(3)]
            local = layer.to_local()  # its servers say what class the experts are
            torch.testing.assert_close(local(x), layer(x))
        output = str(tmp_path / "out" / "ffn.safetensors")
        told = export("grid.ffn", "-o", output, "--from", address)
        assert (told["experts"], told["missing"], told["doubtful"]) == (
            ["ffn.0", "ffn.1", "ffn.2"],
            [],
            [],
        )
        export("grid.ffn", "--checkpoint", str(tmp_path / "grid"))  # its server is on this machine

    tensors = load_file(output)
    for place, outputs in enumerate(wanted):
        prefix = f"ffn.{place}."
        module = plain()
        module.load_state_dict(
            {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        )
        torch.testing.assert_close(module(x), outputs)
    with safe_open(output, framework="pt") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["versions"]) == dict.fromkeys(told["experts"], 3)
    assert json.loads(metadata["specification"])["hidden_dim"] == 16

    with serving(str(file), "--checkpoint", str(tmp_path / "grid")) as other:  # the first one is gone
        address = other.hear("listening")["addresses"][0]
        assert other.hear("serving")["resumed"] == ["ffn.0", "ffn.1", "ffn.2"]
        with swarm.Node(bootstrap=[address], listen=None) as node:
            for place, outputs in enumerate(wanted):
                remote = swarm.RemoteExpert(node, f"ffn.{place}", forward_timeout_s=READY_S)
                torch.testing.assert_close(remote(x).detach(), outputs)
            assert {one.version for one in swarm.find_experts(node)} == {3}
        again = export("ffn", "-o", str(tmp_path / "again.safetensors"), "--from", address)
        assert again["digest"] == told["digest"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["grid.ffn"], "no place to write to was given"),
        (["grid.ffn", "--checkpoint", "x"], "--from"),
    ],
)
def test_a_missing_option_is_named(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(command, ["export", *arguments], standalone_mode=False)
    assert said in str(done.exception)
