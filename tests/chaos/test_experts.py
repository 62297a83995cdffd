"""`swarm serve` in a process that is called, interrupted or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import swarm
from moe.protocol.declarations import Directory
from moe.protocol.names import ExpertUid
from swarm.core.errors import NetworkError, NotEnoughPeers, PeerError
from tests.wire.served import READY_S, Served, serving

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("home")]

MOVED_S = 180.0  # until a server has moved; 85 s on a quiet machine


def test_ctrl_c_saves_withdraws_and_ends_and_the_next_start_resumes(tmp_path: Path) -> None:
    options = (
        "--experts",
        "ffn.[0:3].[0:3]",
        "--num-experts",
        "2",
        "--optimizer",
        "sgd",
        "--hidden-dim",
        "16",
        "--open",
    )
    checkpoint = ("--checkpoint", str(tmp_path / "experts"))
    with swarm.Node(listen="127.0.0.1:0") as node:
        with serving(node.addresses[0], *options, *checkpoint) as served:
            first = served.hear("serving")
            assert len(first["experts"]) == 2
            remote = swarm.RemoteExpert(node, first["experts"][0])
            remote(torch.randn(4, 16)).sum().backward()
            served.process.send_signal(signal.SIGINT)
            assert served.process.wait(10.0) == 0, served.process.communicate()[1]
        with pytest.raises((NotEnoughPeers, PeerError, NetworkError)):
            swarm.RemoteExpert(node, first["experts"][0], forward_timeout_s=3.0)(torch.zeros(1, 16))

        async def found() -> Any:
            return await Directory(node.dht.service).branches([ExpertUid.parse_prefix("ffn")], timeout_s=5.0)

        assert not next(iter(node.network.run(found(), 6.0).values())).coordinates
        with serving(node.addresses[0], *options, *checkpoint) as served:
            second = served.hear("serving")
            assert second["experts"] == first["experts"] == second["resumed"]


def test_the_printed_snippet_calls_an_expert_of_the_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def doubling(settings):\n"
        "    class Double(torch.nn.Module):\n"
        "        def forward(self, x):\n"
        "            return 2 * x + 1\n"
        "    return Double(), (torch.zeros(1, settings.hidden_dim),)\n"
    )
    options = ("--experts", "mine.0", "--hidden-dim", "16")
    with serving(*options, "--module", str(file), "--expert-class", "doubling") as served:
        snippet = served.hear("serving")["snippet"]
        done = subprocess.run(
            [sys.executable, "-c", snippet + "\nprint(y.unique().tolist())\nnode.close()"],
            capture_output=True,
            text=True,
            timeout=READY_S,
            check=False,
        )
        assert done.stdout.strip() == "[1.0]", done.stderr


def test_calls_continue_at_the_replica_when_a_server_is_killed() -> None:
    with swarm.Node(listen="127.0.0.1:0") as node:
        start = (
            *(node.addresses[0], "--experts", "ffn.0", "--hidden-dim", "16"),
            *("--optimizer", "sgd", "--average-s", "0", "--open"),
        )
        with serving(*start) as one, serving(*start) as other:
            for served in (one, other):
                served.hear("serving")
            remote = swarm.RemoteExpert(node, "ffn.0", forward_timeout_s=10.0)
            lost = 0
            for step in range(40):
                x = torch.randn(4, 16, requires_grad=True)
                if step == 10:
                    os.kill(one.process.pid, signal.SIGKILL)
                begun_s = time.monotonic()
                y = remote(x)
                assert time.monotonic() - begun_s < 5.0
                try:
                    y.sum().backward()
                    assert x.grad is not None
                except (NetworkError, PeerError):
                    lost += 1  # the backward pass of a forward pass that the killed server answered
            assert lost <= 1


def test_a_server_moves_to_the_stage_whose_only_server_was_killed() -> None:
    """The declaration of the killed server expires after 45 s, and the plan must stand for 20 s."""
    grid = ("--experts", "block.[0:2]", "--hidden-dim", "16", "--optimizer", "none", "--open")
    with (
        swarm.Node(listen="127.0.0.1:0") as node,
        contextlib.ExitStack() as stack,
    ):
        servers: dict[str, list[Served]] = {"block.0": [], "block.1": []}
        for number in range(3):
            options = grid if not number else ()
            served = stack.enter_context(serving(node.addresses[0], *options, "--num-experts", "1"))
            servers[served.hear("serving")["experts"][0]].append(served)
        lost, spared = sorted(servers, key=lambda name: len(servers[name]))
        assert [len(servers[name]) for name in (lost, spared)] == [1, 2]
        os.kill(servers[lost][0].process.pid, signal.SIGKILL)
        remote = swarm.RemoteExpert(node, lost, forward_timeout_s=5.0)
        deadline_s = time.monotonic() + MOVED_S
        while True:
            try:
                assert remote(torch.zeros(2, 16)).shape == (2, 16)
                break
            except (NetworkError, NotEnoughPeers, PeerError):
                assert time.monotonic() < deadline_s, "no server has moved"
        still = swarm.RemoteExpert(node, spared, forward_timeout_s=READY_S)
        assert still(torch.zeros(2, 16)).shape == (2, 16)
