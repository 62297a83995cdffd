"""`swarm.find_experts` and `swarm experts` over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

import swarm
from moe.server.logic.placement import BusyMeter
from swarm.cli.commands import swarm as command
from swarm.core.errors import UsageError
from tests.wire.expert_pair import Pair, expert, pair, sgd


@pytest.fixture
def two() -> Iterator[Pair]:
    experts = {"ffn.0.1": expert(optimizer=sgd), "ffn.1.0": expert(), "other.3": expert()}
    with pair(experts, max_batch_size=128) as one:
        yield one


def test_experts_are_found_with_versions_replicas_and_limits(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BusyMeter, "fraction", lambda self, busy_s, now_s: 0.75)
    two.remote("ffn.0.1")(torch.ones(2, 16)).sum().backward()
    with (
        swarm.Node(bootstrap=two.host.addresses, listen="127.0.0.1:0") as other,
        swarm.ExpertServer(other, {"ffn.1.0": expert()}, 64),
    ):
        found = swarm.find_experts(two.guest)
        assert [one.name for one in found] == ["ffn.0.1", "ffn.1.0", "other.3"]
        learned, shared, _ = found
        assert (learned.version, shared.version) == (1, 0)
        assert [one.peer_id for one in learned.replicas] == [two.host.peer_id]
        assert {(one.peer_id, one.batch_size_max) for one in shared.replicas} == {
            (two.host.peer_id, 128),
            (other.peer_id, 64),
        }
        assert {one.peer_id: one.busy for one in shared.replicas}[other.peer_id] == 0.75
        assert learned.replicas[0].schema == "(float32(batch, 16)) -> float32(batch, 16)"
        assert not learned.replicas[0].frozen
        assert all(one.frozen for one in shared.replicas)
        for pattern, names in {
            "ffn.*": ["ffn.0.1", "ffn.1.0"],
            "ffn.[1:9].*": ["ffn.1.0"],
            "ffn.*.1": ["ffn.0.1"],
            "other.3": ["other.3"],
            "none.*": [],
        }.items():
            assert [one.name for one in swarm.find_experts(two.guest, pattern)] == names


def test_a_server_that_is_gone_is_listed_with_the_reason(two: Pair) -> None:
    with swarm.Node(bootstrap=two.host.addresses, listen="127.0.0.1:0") as other:
        server = swarm.ExpertServer(other, {"ffn.1.0": expert()})

        async def vanish() -> None:
            other.handlers.remove("/swarm.Expert/Describe")

        other.network.run(vanish(), 5.0)
        replicas = swarm.find_experts(two.guest, "ffn.1.0")[0].replicas
        failures = {one.peer_id: one.failure for one in replicas}
        assert failures[two.host.peer_id] == ""
        assert "does not serve" in failures[other.peer_id]
        assert {one.peer_id: one.version for one in replicas} == {two.host.peer_id: 0, other.peer_id: None}
        server.close()


def test_wrong_arguments_raise(two: Pair) -> None:
    with pytest.raises(UsageError):
        swarm.find_experts(two.guest, "ffn")
    with pytest.raises(UsageError, match="timeout_s"):
        swarm.find_experts(two.guest, timeout_s=0.0)


def test_the_command_lists_experts_as_a_table_and_as_json(two: Pair) -> None:
    address = two.host.addresses[0]
    table = CliRunner().invoke(command, ["experts", address])
    assert table.exit_code == 0, table.output
    lines = [line.split() for line in table.output.splitlines()]
    assert lines[0][:5] == ["expert", "replicas", "version", "wait", "busy"]
    assert [line[:3] for line in lines[1:]] == [
        ["ffn.0.1", "1", "0"],
        ["ffn.1.0", "1", "0"],
        ["other.3", "1", "0"],
    ]
    found = CliRunner().invoke(command, ["experts", address, "--experts", "ffn.*", "--json"])
    experts = json.loads(found.output)["experts"]
    assert [one["name"] for one in experts] == ["ffn.0.1", "ffn.1.0"]
    assert experts[0]["replicas"][0]["batch_size_max"] == 128
    assert 0.0 <= experts[0]["replicas"][0]["busy"] <= 1.0
    assert experts[0]["replicas"][0]["peer_id"] == str(two.host.peer_id)
    nothing = CliRunner().invoke(command, ["experts", address, "--experts", "none.*"])
    assert nothing.output == "no expert exists that none.* stands for\n"
