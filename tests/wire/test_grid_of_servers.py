"""`swarm serve` creates a grid, and other servers join it without copying options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import swarm
from swarm.core.errors import NotInvited
from tests.wire.served import OPTIONS, READY_S, serving

GRID = """
experts = "ffn.[0:2]"
hidden_dim = 16
average_s = 0.0
[optimizer]
name = "sgd"
learning_rate = 0.5
"""


pytestmark = pytest.mark.usefixtures("home")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarm.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )


def refusal(*arguments: str) -> str:
    """Return what a server that does not start says."""
    done = command("serve", *arguments, *OPTIONS)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_server_of_an_invited_grid_needs_its_invite_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "ffn.toml"
    file.write_text(GRID)
    with serving(str(file)) as first:
        listening = first.hear("listening")
        invite, address = listening["invite"], listening["addresses"][0]
        created = first.hear("serving")
        with serving(invite) as second:
            joined = second.hear("serving")
        with serving(str(file), invite) as second:  # Regression: "these invites are to several runs"
            assert second.hear("serving")["grid"] == created["grid"]
        with serving(created["grid"]) as again:  # by its name: this server cannot invite others
            named = again.hear("serving")
        assert named["address"].startswith("/ip4/127.0.0.1/tcp/")
        assert f'bootstrap=["{named["address"]}"]' in named["snippet"]
        assert (created["created"], joined["created"]) == (True, False)
        assert joined["grid"] == created["grid"]
        assert joined["experts"] == created["experts"] == ["ffn.0", "ffn.1"]
        assert joined["schema"] == created["schema"] == "(float32(batch, 16)) -> float32(batch, 16)"

        wrong = refusal(invite, "--lr", "0.25")
        assert f"has the grid {created['grid']}, and its optimizer.learning_rate is 0.5, not 0.25" in wrong

        with swarm.Node(bootstrap=[invite], listen=None) as node:
            remote = swarm.RemoteExpert(node, "ffn.1", forward_timeout_s=READY_S)
            assert remote(torch.zeros(3, 16)).shape == (3, 16)

        second_invite = command("invite", created["grid"], "--uses", "3", "--from", address).stdout.strip()
        with serving(second_invite) as second:
            second.hear("serving")
        revoked = command("change", "ffn", "--revoke", second_invite, "--from", address)
        assert "1 invite or peer is revoked" in revoked.stdout, revoked.stderr
        assert first.hear("changed")["changes"] == ["1 invite or peer is revoked"]
        late = command("serve", second_invite, *OPTIONS)
        assert late.returncode == 1
        assert "revoked" in late.stderr

        with serving(invite) as second:
            second.hear("serving")
            done = command("change", created["grid"], "--end", "--from", address)
            # one was killed: it is asked, too, until its declaration expires
            assert re.search("the run is over. 2 of [23] members", done.stdout), done.stderr
            for served in (first, second):
                assert served.hear("changed")["changes"] == ["the run is over"]
                assert served.process.wait(READY_S) == 0


def test_an_open_grid_is_founded_by_options_and_hosted_in_part() -> None:
    with serving("--experts", "ffn.[0:4]", "--hidden-dim", "16", "--optimizer", "none", "--open") as first:
        address = first.hear("listening")["addresses"][0]
        created = first.hear("serving")
        with serving(address, "--experts", "ffn.[1:3]") as second:
            joined = second.hear("serving")
        assert joined["grid"] == created["grid"]
        assert joined["experts"] == ["ffn.1", "ffn.2"]
        assert "it has no experts ffn.4" in refusal(address, "--experts", "ffn.4")


def test_a_grid_of_options_is_called_by_anybody_and_trained_and_hosted_by_invited_peers() -> None:
    options = ("--experts", "ffn.[0:2]", "--hidden-dim", "16")
    x = torch.ones(3, 16)
    with serving(*options) as first:
        listening = first.hear("listening")
        address, invite = listening["addresses"][0], listening["invite"]
        first.hear("serving")
        with swarm.Node(bootstrap=[address], listen=None) as guest:
            y = swarm.RemoteExpert(guest, "ffn.1", forward_timeout_s=READY_S)(x)
            with pytest.raises(NotInvited, match="trained by invited peers only"):
                y.sum().backward()
        with swarm.Node(bootstrap=[invite], listen=None) as member:
            swarm.RemoteExpert(member, "ffn.1", forward_timeout_s=READY_S)(x).sum().backward()
            assert [one.version for one in swarm.find_experts(member)] == [0, 1]
        assert "invited peers only" in refusal(address)
